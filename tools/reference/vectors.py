"""AdamW, gradient clipping and learning-rate schedules step by step, from torch's and transformers' own functions."""
import struct

import torch
import transformers

# Beside ordinary values: exactly zero, below the epsilon, alternating sign, and one whose size changes from step to step.
START = [0.5, -1.25, 0.0, 3.0, -0.0078125]
GRADIENTS = [[0.1 * (step + 1), 0.0, 1e-12, 0.75 * (-1) ** step, 10.0 ** (1 - step)] for step in range(10)]


def floats(tensor):
    """float32 values as decimals and as bits."""
    values = tensor.detach().flatten()
    return {"value": values.tolist(), "bits": [f"{bits & 0xFFFFFFFF:08x}" for bits in values.view(torch.int32).tolist()]}


def adamw(weight_decay):
    settings = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": weight_decay}
    parameter = torch.nn.Parameter(torch.tensor(START))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, foreach=False, fused=False)
    result = settings | {"start": floats(parameter), "steps": []}
    for gradient in GRADIENTS:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        state = optimizer.state[parameter]
        result["steps"].append({"gradient": floats(parameter.grad), "parameter": floats(parameter),
                                "first_moment": floats(state["exp_avg"]), "second_moment": floats(state["exp_avg_sq"])})
    return result


def clip(scale, max_norm):
    """Norms 3, 4 and 12 times the scale: 13 in all."""
    parts = [torch.tensor([3.0]), torch.tensor([0.0, -4.0]), torch.tensor([[4.0, -8.0], [8.0, 0.0]])]
    parameters = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
    for parameter, part in zip(parameters, parts):
        parameter.grad = part * scale
    before = [floats(parameter.grad) for parameter in parameters]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=False)
    return {"max_norm": max_norm, "norm": floats(norm.reshape(1)), "gradients": before,
            "clipped": [floats(parameter.grad) for parameter in parameters]}


def optimizer():
    return {"adamw": [adamw(0.1), adamw(0.0)], "clip": [clip(0.05, 1.0), clip(1.0, 13.0), clip(1.0, 1.0), clip(0.0, 1.0)]}


def table(kind, warmup, total):
    """The multiplier of the update after `s` completed ones, s = 0 to `total`; the base rate is 1, so nothing else is in it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    values = []
    for _ in range(total + 1):
        values.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    bits = [struct.pack(">d", value).hex() for value in values]
    return {"schedule": kind, "warmup_steps": warmup, "total_steps": total, "value": values, "bits": bits}


def schedules():
    kinds = ("constant", "constant_with_warmup", "linear", "cosine")
    return {"tables": [table(kind, warmup, 20) for kind in kinds for warmup in (0, 5)]}
