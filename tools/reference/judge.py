"""Loss, gradients and training steps of one case, as transformers and peft compute them.

Every row is its own forward pass (batch 1, no padding); the losses of the rows, each already divided by the number of
targets of the whole step, are added before the one backward pass. The files with cases decide what is run; this file how.
"""
import contextlib
import copy
import types

import routing
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPTIMIZER = {"name": "adamw", "learning_rate": 1e-2, "schedule": "constant", "beta1": 0.9, "beta2": 0.999,
             "epsilon": 1e-8, "weight_decay": 0.1, "max_gradient_norm": 1.0, "steps": 5}


class Float64(TorchFunctionMode):
    """The models ask for float32 by name in norms, softmax, RoPE and loss. Here they get float64, so nothing is rounded early."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*args, **kwargs)


class ProductNoise(TorchDispatchMode):
    """Adds seeded noise to every matrix product, forward and backward: `size` times |row| |column| / sqrt(length).

    That is `size` times the usual value of such a product, and the shape of the error when rows are rounded to a grid of their own.
    Zeros are on every grid: where each term of a sum is exactly zero there is no error. (The last token of a row has such gradients.)
    A triangular solve (in the delta rule) is a chain of such products: its noise is relative to the usual value of a column.
    """

    PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}

    def __init__(self, size, seed):
        super().__init__()
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        if name == "linalg_solve_triangular":
            scale = result.detach().pow(2).mean(-2, keepdim=True).sqrt() * (result.detach() != 0)
            return result + self.size * scale * torch.randn(result.shape, generator=self.generator, dtype=result.dtype)
        operands = self.PRODUCTS.get(name)
        if operands is None:
            return result
        left, right = args[operands[0]].detach(), args[operands[1]].detach()
        scale = left.norm(dim=-1, keepdim=True) * right.norm(dim=-2, keepdim=True) / left.shape[-1] ** 0.5
        noise = torch.randn(result.shape, generator=self.generator, dtype=result.dtype)
        return result + self.size * scale * noise * ((left.abs() @ right.abs()) > 0)


def saved_name(name):
    """The name of a parameter in a file: peft drops the name of the adapter, and that of the copy of a whole module."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def trainable(model):
    return {saved_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def decayed(name):
    """Weight decay as in transformers' Trainer: not for biases and not for norms."""
    parts = name.lower().split(".")
    norm = any(part == "norm" or part.endswith("_norm") for part in parts)
    return not (norm or "bias" in name.lower() or "layernorm" in name.lower() or "rmsnorm" in name.lower())


def count_targets(rows):
    """Labels are those of transformers: label t is predicted from token t-1, so that of position 0 never counts."""
    return sum(label != -100 for row in rows for label in row["labels"][1:])


def forgets_boundaries(model):
    """Layers with a recurrent state: transformers' torch code carries it across documents of a row."""
    return "linear_attention" in (getattr(model.config, "layer_types", None) or [])


def documents(row):
    """The documents of a row as rows of their own."""
    ends = row["document_starts"][1:] + [len(row["input_ids"])]
    lists = ("input_ids", "labels", "position_ids")
    return [{key: row[key][start:end] for key in lists if key in row} | {"document_starts": [0]}
            for start, end in zip(row["document_starts"], ends)]


def forward(model, row, targets=None):
    if len(row["document_starts"]) > 1 and forgets_boundaries(model):
        parts = [forward(model, part, targets) for part in documents(row)]
        loss = None if targets is None else sum(part.loss for part in parts)
        return types.SimpleNamespace(logits=torch.cat([part.logits for part in parts], dim=1), loss=loss)
    inputs = {"input_ids": torch.tensor([row["input_ids"]])}
    if len(row["document_starts"]) > 1:
        inputs["position_ids"] = torch.tensor([row["position_ids"]])
    if targets is not None:
        inputs.update(labels=torch.tensor([row["labels"]]), num_items_in_batch=targets)
    return model(**inputs, use_cache=False)


def step_loss(model, rows, recorder=None):
    """The loss of a step; with a recorder, also what the routers did in each row."""
    targets, losses, routed = count_targets(rows), [], []
    for row in rows:
        losses.append(forward(model, row, targets).loss)
        routed.append(recorder.take() if recorder else {})
    return (sum(losses), routed) if recorder else sum(losses)


def run(model, rows, train, strict=False):
    """Logits of the first row, loss and gradients of the step; if `train`, also five updates on the same rows.

    If `strict`, the run ends in `routing.Unsteady` where a router comes near to choosing otherwise.
    """
    parameters = trainable(model)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    result = {"logits": forward(model, rows[0]).logits[0].detach().clone()}
    groups = [{"params": [p for name, p in parameters.items() if decayed(name) is decay],
               "weight_decay": OPTIMIZER["weight_decay"] if decay else 0.0} for decay in (True, False)]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=OPTIMIZER["learning_rate"],
                                  betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]), eps=OPTIMIZER["epsilon"],
                                  foreach=False, fused=False)
    recorder = routing.Recorder(model)
    losses, norms, routed = [], [], []

    def loss_and_choices():
        loss, choices = step_loss(model, rows, recorder)
        if strict:
            routing.check_margin(choices)
        losses.append(loss.detach())
        routed.append(choices)
        return loss

    for step in range(OPTIMIZER["steps"] if train else 1):
        optimizer.zero_grad()
        loss_and_choices().backward()
        if step == 0:
            result["gradients"] = {name: parameter.grad.detach().clone() for name, parameter in parameters.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER["max_gradient_norm"], foreach=False).detach())
        if train:
            optimizer.step()
    if train:
        result["after"] = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        result["updates"] = {name: tensor - before[name] for name, tensor in result["after"].items()}
        with torch.no_grad():
            loss_and_choices()
    recorder.close()
    return result | {"losses": losses, "norms": norms, "routing": routed}


def run_float64(model, rows, train, noise=None, strict=False):
    """The same run with every intermediate in float64, RoPE frequencies included, perhaps with noise (size, seed) on products."""
    model = copy.deepcopy(model).double()
    inner = model.base_model.model.model if hasattr(model, "peft_config") else model.model
    with Float64():
        inner.rotary_emb = type(inner.rotary_emb)(inner.config)
        with ProductNoise(*noise) if noise else contextlib.nullcontext():
            return run(model, rows, train, strict)


def generation(model, row, count=8):
    """Tokens that transformers adds greedily to the start of a row: the start whose choices are the clearest.

    A margin is how far the logit of a token is above the next one.
    """
    settings = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    model.generation_config.eos_token_id = None
    found = []
    for length in range(3, len(row["input_ids"])):
        prompt = row["input_ids"][:length]
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[0].tolist()
        with torch.no_grad():
            best = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, length - 1:-1].topk(2)
        assert best.indices[:, 0].tolist() == text[length:]
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        found.append((min(margins), {"prompt": prompt, "tokens": text[length:], "margin": float(f"{min(margins):.3e}")}))
    return max(found, key=lambda one: one[0])[1]


def deviation(run, exact):
    """How far a run is from the exact one, per quantity (and per tensor where there are several).

    AdamW's first updates are hardly more than signs: where a gradient is near zero the smallest error moves a weight by up to
    twice the sum of the learning rates. `after` (largest element) sees that, `updates` (norm over norm) averages it away.
    """
    def largest(a, b):
        return (a.double() - b).abs().max().item()

    error = {
        "losses": max(largest(a, b) for a, b in zip(run["losses"], exact["losses"])),
        "gradient_norms": max(largest(a, b) / b.item() for a, b in zip(run["norms"], exact["norms"])),
        "logits": largest(run["logits"], exact["logits"]),
        "gradients": {name: largest(run["gradients"][name], tensor) / tensor.abs().max().item()
                      for name, tensor in exact["gradients"].items()},
    }
    if "after" in exact:
        error["after"] = {name: largest(run["after"][name], tensor) for name, tensor in exact["after"].items()}
        error["updates"] = {name: ((run["after"][name].double() - exact["after"][name]).norm() / tensor.norm()).item()
                            for name, tensor in exact["updates"].items()}
    return error
