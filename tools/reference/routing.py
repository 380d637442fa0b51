"""What the routers of a model decide: recorded during a run, and how near each decision is to going the other way.

A choice that is nearly a tie may fall differently in another program without either being wrong, and from there on nothing is
comparable. So a case is kept only if its closest choice, over all steps, has a relative margin of `LEAST_MARGIN`, and if no
choice changes in float32 or under noise on products.
"""
import re

import torch

LEAST_MARGIN = 1e-3


class Unsteady(Exception):
    """This seed is of no use."""


def routers(model):
    """Layer number and router, by layer."""
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
    return sorted((int(re.search(r"layers\.(\d+)\.", name)[1]), module) for name, module in found)


def relative_gap(high, low):
    return (high - low) / torch.maximum(high.abs(), low.abs())


def softmax_margin(router, logits):
    """Of the probabilities, the last one chosen against the first one left out."""
    scores = logits.softmax(-1).sort(-1, descending=True)[0]
    return relative_gap(scores[:, router.top_k - 1], scores[:, router.top_k])


def grouped_margin(router, logits):
    """The smaller of two: of the groups kept against those dropped, and of the experts chosen within the groups kept."""
    scores = logits.sigmoid() + router.e_score_correction_bias.double()
    groups = scores.view(len(scores), router.num_group, -1)
    strength, order = groups.topk(2)[0].sum(-1).sort(-1, descending=True)
    margin = torch.full((len(scores),), torch.inf, dtype=torch.float64)
    if router.topk_group < router.num_group:
        margin = relative_gap(strength[:, router.topk_group - 1], strength[:, router.topk_group])
    kept = order[:, : router.topk_group, None].expand(-1, -1, groups.shape[-1])
    allowed = groups.gather(1, kept).flatten(1).sort(-1, descending=True)[0]
    if allowed.shape[1] > router.top_k:
        margin = torch.minimum(margin, relative_gap(allowed[:, router.top_k - 1], allowed[:, router.top_k]))
    return margin


class Recorder:
    """Keeps, layer by layer, what the routers were asked and what they chose, until `take`."""

    def __init__(self, model):
        self.calls = []
        self.hooks = [module.register_forward_hook(self.keep(layer)) for layer, module in routers(model)]

    def keep(self, layer):
        def hook(router, inputs, output):
            logits, weights, experts = (tensor.detach() for tensor in output)
            order = weights.argsort(dim=-1, descending=True, stable=True)
            grouped = hasattr(router, "e_score_correction_bias")
            margin = (grouped_margin if grouped else softmax_margin)(router, logits.double())
            self.calls.append((layer, {"logits": logits, "experts": experts.gather(1, order), "margin": margin}))
        return hook

    def take(self):
        """By layer, over the tokens of everything that ran since the last call (one row, perhaps document by document)."""
        layers = {}
        for layer, call in self.calls:
            layers.setdefault(layer, []).append(call)
        self.calls = []
        return {layer: {key: torch.cat([call[key] for call in calls]) for key in calls[0]} for layer, calls in layers.items()}

    def close(self):
        for hook in self.hooks:
            hook.remove()


def closest(steps):
    """The smallest margin of all steps, and where it is. None without routers."""
    places = [(float(margin), {"step": step, "row": row, "layer": layer, "token": token})
              for step, rows in enumerate(steps) for row, layers in enumerate(rows)
              for layer, call in layers.items() for token, margin in enumerate(call["margin"])]
    return min(places, key=lambda place: place[0]) if places else None


def check_margin(rows):
    place = closest([rows])
    if place and place[0] < LEAST_MARGIN:
        raise Unsteady(f"margin {place[0]:.1e}")


def check_same(steps, exact):
    """The same experts for every token as in the exact run; their order does not matter."""
    for step, (rows, others) in enumerate(zip(steps, exact)):
        for layers, other in zip(rows, others):
            for layer, call in layers.items():
                if not torch.equal(call["experts"].sort(-1)[0], other[layer]["experts"].sort(-1)[0]):
                    raise Unsteady(f"a choice in layer {layer} changes in step {step}")


def idle(steps, experts):
    """By layer, the experts that no token of any step goes to."""
    layers = sorted(steps[0][0])
    used = {layer: {expert for rows in steps for row in rows for expert in row[layer]["experts"].flatten().tolist()}
            for layer in layers}
    return {str(layer): [expert for expert in range(experts) if expert not in used[layer]] for layer in layers}


def table(steps):
    """What routing.json holds: logits of the first step, experts of all steps, strongest first; token by token in flat lists."""
    margin, place = closest(steps)
    rows = []
    for row in range(len(steps[0])):
        layers = {}
        for layer, call in sorted(steps[0][row].items()):
            layers[str(layer)] = {
                "logits": [float(f"{value:.9g}") for value in call["logits"].double().flatten().tolist()],
                "experts": [step[row][layer]["experts"].flatten().tolist() for step in steps],
                "margins": [float(f"{float(step[row][layer]['margin'].min()):.3e}") for step in steps],
            }
        rows.append(layers)
    first = next(iter(steps[0][0].values()))
    experts = first["logits"].shape[1]
    return {"margin": float(f"{margin:.3e}"), "closest": place, "experts": experts, "experts_per_token": first["experts"].shape[1],
            "idle": idle(steps, experts), "rows": rows}
