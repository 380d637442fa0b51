"""How a case gets its values and its files: random constants, adapters, what the judge measured, JSON and safetensors.

Seeds are fixed, keys sorted: on one machine the files come out the same every time.
"""
import copy
import json
import os
import pathlib
import re
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"
import judge
import peft
import routing
import torch
import transformers
from safetensors.torch import save_file

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "crates" / "models" / "tests" / "fixtures"
# Relative errors of a product tried beside float32: about that of profile x2, and two that bracket x3.
NOISE, NOISE_SEEDS = (1e-4, 1e-6, 1e-7), (1, 2, 3)


def row(ids, masked, lengths=None):
    """A row of documents; labels are the tokens themselves, -100 where `masked` and at every start of a document."""
    lengths = lengths or [len(ids)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    hidden = set(masked) | set(starts)
    return {"input_ids": ids, "labels": [-100 if t in hidden else token for t, token in enumerate(ids)],
            "position_ids": [t for length in lengths for t in range(length)], "document_starts": starts}


def constant(name, zero_centred):
    """Mean and deviation for a tensor that starts as a constant, or whose usual start is too tame; None for the others."""
    if name.endswith("norm.weight"):
        return (0.0 if zero_centred and not name.endswith("linear_attn.norm.weight") else 1.0), 0.1
    if name.endswith("dt_bias"):
        return 0.0, 0.5
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.2
    if name.endswith((".bias", "_proj_bias")):
        return 0.0, 0.1
    if name.endswith(".sinks"):
        return 0.0, 1.0
    if name.endswith(("mlp.gate.weight", "router.weight", "conv1d.weight")):
        return 0.0, 0.5
    if ".lora_B." in name:
        return 0.0, 0.05
    return None


def randomize_constants(model, seed):
    """Norms start as ones, biases and LoRA's B as zeros: that would hide whole paths, so they get values of their own."""
    generator = torch.Generator().manual_seed(seed)
    zero_centred = model.config.model_type.startswith(("qwen3_5", "qwen3_next", "gemma"))
    adapted = any(".lora_A." in name for name, _ in model.named_parameters())
    buffers = [] if adapted else [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    for name, tensor in sorted([*model.named_parameters(), *buffers]):
        if adapted and not tensor.requires_grad:
            continue  # the base of an adapter has its values already
        with torch.no_grad():
            if name.endswith("A_log"):  # exp of it is 0.02 to 2.7: heads that remember and heads that forget
                tensor.copy_(torch.empty(tensor.shape).uniform_(-4.0, 1.0, generator=generator))
            elif values := constant(name, zero_centred):
                tensor.copy_(values[0] + values[1] * torch.randn(tensor.shape, generator=generator))


def adapt(model, name, settings, seed=2):
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"} | settings
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    adapted.peft_config["default"].base_model_name_or_path = name
    randomize_constants(adapted, seed + 1)
    return adapted


def write_json(path, value):
    """Sorted, one entry a line, but lists of numbers on one."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
    path.write_text(text + "\n")


def write_tensors(path, tensors):
    save_file({name: tensor.detach().contiguous() for name, tensor in sorted(tensors.items())}, path, metadata={"format": "pt"})
    path.chmod(0o644)


def bits(tensor):
    return f"{tensor.detach().to(torch.float32).view(torch.int32).item() & 0xFFFFFFFF:08x}"


def number(tensor, exact):
    """A float32 as decimal and as bits, and what float64 says."""
    return {"value": tensor.item(), "bits": bits(tensor), "float64": exact.item()}


def largest(errors):
    """The largest of several deviations, quantity by quantity."""
    if isinstance(errors[0], dict):
        return {key: largest([error[key] for error in errors]) for key in errors[0]}
    return float(f"{max(errors):.3e}")


def measure(model, rows, train, sizes=NOISE):
    """Everything the judge finds out about a case. `routing.Unsteady` if a router's choice is not beyond doubt."""
    exact = judge.run_float64(model, rows, train, strict=True)
    result = judge.run(copy.deepcopy(model), rows, train)
    routing.check_same(result["routing"], exact["routing"])
    noise = {}
    for size in sizes:
        errors = []
        for seed in NOISE_SEEDS:
            noisy = judge.run_float64(model, rows, train, (size, seed))
            routing.check_same(noisy["routing"], exact["routing"])
            errors.append(judge.deviation(noisy, exact))
        noise[f"{size:.0e}"] = largest(errors)
    return result, exact, largest([judge.deviation(result, exact)]), noise


def write_case(folder, measured, rows, mode, base, train, **more):
    result, exact, float32_error, noise = measured
    losses = [number(a, b) for a, b in zip(result["losses"], exact["losses"])]
    norms = [number(a, b) for a, b in zip(result["norms"], exact["norms"])]
    case = more | {
        "mode": mode, "model": base, "rows": rows, "targets": judge.count_targets(rows), "logits_row": 0,
        "loss": losses[0], "gradient_norm": norms[0],
        "float32_error": float32_error,
        "product_noise_error": noise,
        "versions": {"peft": peft.__version__, "torch": torch.__version__.split("+")[0], "transformers": transformers.__version__},
    }
    write_tensors(folder / "logits.safetensors", {"logits": result["logits"]})
    write_tensors(folder / "gradients.safetensors", result["gradients"])
    if train:
        case["steps"] = [{"loss": loss, "gradient_norm": norm} for loss, norm in zip(losses, norms)]
        case["loss_after"] = losses[-1]
        case["optimizer"] = judge.OPTIMIZER
        case["decayed"] = sorted(name for name in result["after"] if judge.decayed(name))
        write_tensors(folder / "after.safetensors", result["after"])
    write_json(folder / "case.json", case)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)
    show(folder.name, case)


def show(name, case):
    print(f"{name}: loss {case['loss']['value']:.6f}, norm {case['gradient_norm']['value']:.4f}, targets {case['targets']}")
    for label, errors in [("float32", case["float32_error"]), *case["product_noise_error"].items()]:
        worst = {key: max(value.values()) if isinstance(value, dict) else value for key, value in errors.items()}
        print(f"    {label:8}", *(f"{key} {value:.1e}" for key, value in worst.items()), flush=True)


def fresh(name):
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def save_model(model, folder, **more):
    """As transformers saves it, less the file for generation; the config names no place."""
    model.save_pretrained(folder, **more)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_config(folder, json.loads((folder / "config.json").read_text()))


def write_config(folder, config):
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_adapter(model, folder):
    """As peft saves it, but with the sets of targets in a fixed order and without the model card."""
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].sort()
    config["target_parameters"] = sorted(config["target_parameters"] or []) or None
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def old_config(folder, kind):
    """The same config in the old spelling: `rope_theta` and `rope_scaling` on top, `torch_dtype`, no `layer_types`."""
    config = json.loads((folder / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {kind if key == "rope_type" else key: value for key, value in scaling.items()}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.46.0"
    config.pop("layer_types", None)
    path = folder / "config-old.json"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    read = dict(transformers.AutoConfig.from_pretrained(path).rope_parameters)
    read.pop("type", None)
    assert read == transformers.AutoConfig.from_pretrained(folder).rope_parameters, read


def assert_loads(folder, model):
    """What was written gives back the tensors it was written from."""
    loaded = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    other = loaded.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())


def assert_decay_rule(model):
    """The judge decays what transformers' Trainer would."""
    trainer_rule = set(transformers.Trainer.get_decay_parameter_names(None, model))
    assert all((key in trainer_rule) is judge.decayed(key) for key in judge.trainable(model))
