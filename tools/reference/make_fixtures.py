#!/usr/bin/env python3
"""Writes the fixtures of crates/models/tests: tiny random models with what transformers and peft make of them.

Needs torch, transformers and peft, in a virtual environment outside the repository; README.md has the versions and the layout.
Example: python tools/reference/make_fixtures.py            (all cases)
         python tools/reference/make_fixtures.py qwen2-base  (only the cases named)
Seeds are fixed and keys sorted: on one machine the files come out the same every time.
"""
import copy
import json
import os
import pathlib
import re
import shutil
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import peft
import torch
import transformers
from safetensors.torch import save_file

sys.dont_write_bytecode = True
import judge
import vectors

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "crates" / "models" / "tests" / "fixtures"
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Relative errors of a product tried beside float32: about that of profile x2, and two that bracket x3.
NOISE, NOISE_SEEDS = (1e-4, 1e-6, 1e-7), (1, 2, 3)

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": False,
         "bos_token_id": 1, "eos_token_id": 2}


def rope(theta, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


def qwen2(**more):
    return transformers.Qwen2Config(**SMALL | rope(1e6) | more)


def qwen3(**more):
    return transformers.Qwen3Config(**SMALL | rope(1e6) | {"head_dim": 16} | more)


def llama(**more):
    return transformers.LlamaConfig(**SMALL | rope(1e4) | {"rms_norm_eps": 1e-5} | more)


# Folder: the config of its model, and whether five updates are stored beside the gradients.
MODELS = {
    "qwen2-base": (lambda: qwen2(), True),
    "qwen2-tied": (lambda: qwen2(tie_word_embeddings=True, intermediate_size=47), True),
    "qwen2-window": (lambda: qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3), False),
    # Channels 0 to 3 of RoPE: as they were, half and half, divided by the factor, divided by the factor.
    "qwen2-yarn": (lambda: qwen2(**rope(1e2, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)), False),
    "qwen2-bf16": (lambda: qwen2(), False),
    "qwen3-base": (lambda: qwen3(), True),
    "qwen3-bias": (lambda: qwen3(attention_bias=True, hidden_size=31), False),
    # Wavelengths 6.3, 13.7, 29.7, 64.6, ...: below 8 they stay, above 32 they are divided by the factor, between is between.
    "llama3-rope": (lambda: llama(head_dim=16, **rope(5e2, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                      original_max_position_embeddings=32)), False),
    "llama-bias": (lambda: llama(attention_bias=True, mlp_bias=True, intermediate_size=47), True),
}
BFLOAT16 = {"qwen2-bf16"}
SHARDED = {"qwen2-base"}
# Also with the config as files of transformers 4 spell it.
OLD_CONFIG = {"qwen2-yarn": "type", "llama3-rope": "rope_type"}

# Folder: the model it adapts, and the settings of LoRA that differ from r 4, alpha 8 on all seven projections.
ONE_MODULE = "layers.1.mlp.down_proj"
ADAPTERS = {
    "qwen2-base-lora": ("qwen2-base", {}),
    "qwen2-base-rslora": ("qwen2-base", {"use_rslora": True}),
    "qwen2-base-pattern": ("qwen2-base", {"rank_pattern": {ONE_MODULE: 3}, "alpha_pattern": {ONE_MODULE: 5}}),
    "qwen2-base-layers": ("qwen2-base", {"layers_to_transform": [1]}),
    "qwen3-base-lora": ("qwen3-base", {}),
}
MERGED = {"qwen2-base-lora"}

# Folder: the model it runs, and its rows.
ROWS = {
    "qwen2-packed": ("qwen2-base", lambda: [row(tokens(15, 13), [1, 7, 8], [5, 1, 9])]),
    "qwen2-unpacked": ("qwen2-base", lambda: [row(tokens(15, 13)[:5], [1]), row(tokens(15, 13)[5:6], []), row(tokens(15, 13)[6:], [1, 2])]),
    "qwen2-window-packed": ("qwen2-window", lambda: [row(tokens(21, 14), [1, 2], [9, 12]), row(tokens(7, 15), [])]),
}


def tokens(length, seed):
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def row(ids, masked, lengths=None):
    """A row of documents; labels are the tokens themselves, -100 where `masked` and at every start of a document."""
    lengths = lengths or [len(ids)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    hidden = set(masked) | set(starts)
    return {"input_ids": ids, "labels": [-100 if t in hidden else token for t, token in enumerate(ids)],
            "position_ids": [t for length in lengths for t in range(length)], "document_starts": starts}


def two_rows():
    """Different lengths, a prompt in each, a masked span in the first: 10 and 7 targets."""
    return [row(tokens(17, 11), [0, 1, 2, 3, 9, 10, 11]), row(tokens(11, 12), [0, 1, 2, 3])]


def randomize_constants(model, seed):
    """Norms start as ones, biases and LoRA's B as zeros: that would hide whole paths, so they get values of their own."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            continue  # the base of an adapter has its values already
        if name.endswith("norm.weight"):
            mean, deviation = 1.0, 0.1
        elif name.endswith(".bias"):
            mean, deviation = 0.0, 0.1
        elif ".lora_B." in name:
            mean, deviation = 0.0, 0.05
        else:
            continue
        with torch.no_grad():
            parameter.copy_(mean + deviation * torch.randn(parameter.shape, generator=generator))


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize_constants(model, 1)
    # The maths is float32 in every case. A model kept in fewer bits loses them here (but not its RoPE frequencies).
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def adapt(model, name, settings):
    torch.manual_seed(2)
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": SEVEN, "task_type": "CAUSAL_LM"} | settings
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    adapted.peft_config["default"].base_model_name_or_path = name
    randomize_constants(adapted, 3)
    return adapted


def write_json(path, value):
    """Sorted, one entry a line, but lists of numbers on one."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
    path.write_text(text + "\n")


def write_tensors(path, tensors):
    save_file({name: tensor.detach().contiguous() for name, tensor in sorted(tensors.items())}, path, metadata={"format": "pt"})


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


def write_case(folder, model, rows, mode, base, train):
    exact = judge.run_float64(model, rows, train)
    noise = {f"{size:.0e}": largest([judge.deviation(judge.run_float64(model, rows, train, (size, seed)), exact)
                                     for seed in NOISE_SEEDS]) for size in NOISE}
    result = judge.run(model, rows, train)
    losses = [number(a, b) for a, b in zip(result["losses"], exact["losses"])]
    norms = [number(a, b) for a, b in zip(result["norms"], exact["norms"])]
    case = {
        "mode": mode, "model": base, "rows": rows, "targets": judge.count_targets(rows), "logits_row": 0,
        "loss": losses[0], "gradient_norm": norms[0],
        "float32_error": largest([judge.deviation(result, exact)]),
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
    readable(folder)
    show(folder.name, case)


def show(name, case):
    print(f"{name}: loss {case['loss']['value']:.6f}, norm {case['gradient_norm']['value']:.4f}, targets {case['targets']}")
    for label, errors in [("float32", case["float32_error"]), *case["product_noise_error"].items()]:
        worst = {key: max(value.values()) if isinstance(value, dict) else value for key, value in errors.items()}
        print(f"    {label:8}", *(f"{key} {value:.1e}" for key, value in worst.items()))


def fresh(name):
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def readable(folder):
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def save_model(model, folder, **more):
    """As transformers saves it, less the file for generation; the config names no place."""
    model.save_pretrained(folder, **more)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_adapter(model, folder):
    """As peft saves it, but with the set of targets in a fixed order and without the model card."""
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].sort()
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
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    other = dict(loaded.named_parameters())
    assert all(torch.equal(parameter, other[name]) for name, parameter in model.named_parameters())


def base_model(name):
    return build(MODELS[name][0](), torch.bfloat16 if name in BFLOAT16 else torch.float32)


def make_model(name):
    model, folder = base_model(name), fresh(name)
    trainer_rule = set(transformers.Trainer.get_decay_parameter_names(None, model))
    assert all((key in trainer_rule) is judge.decayed(key) for key in judge.trainable(model))
    save_model(copy.deepcopy(model).to(torch.bfloat16) if name in BFLOAT16 else model, folder)
    assert_loads(folder, model)
    if name in OLD_CONFIG:
        old_config(folder, OLD_CONFIG[name])
    if name in SHARDED:
        save_model(model, folder / "sharded", max_shard_size=60_000)
        assert len(list((folder / "sharded").glob("*.safetensors"))) == 2
        assert_loads(folder / "sharded", model)
    write_case(folder, model, two_rows(), "full", name, MODELS[name][1])


def make_rows(name):
    base, rows = ROWS[name]
    write_case(fresh(name), base_model(base), rows(), "full", base, False)


def make_adapter(name):
    base, settings = ADAPTERS[name]
    model, folder = adapt(base_model(base), base, settings), fresh(name)
    save_adapter(model, folder / "adapter")
    logits = judge.forward(model, two_rows()[0]).logits
    loaded = peft.PeftModel.from_pretrained(base_model(base), folder / "adapter").eval()
    assert torch.equal(judge.forward(loaded, two_rows()[0]).logits, logits)
    if name in MERGED:
        plain, merged = dict(base_model(base).named_parameters()), loaded.merge_and_unload()
        changed = {key: value for key, value in merged.named_parameters() if not torch.equal(value, plain[key])}
        write_tensors(folder / "merged.safetensors", changed)
    write_case(folder, model, two_rows(), "lora", base, True)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    wanted = sys.argv[1:]
    for table, make in ((MODELS, make_model), (ROWS, make_rows), (ADAPTERS, make_adapter)):
        for name in table:
            if not wanted or name in wanted:
                make(name)
    write_json(FIXTURES / "optimizer.json", vectors.optimizer())
    write_json(FIXTURES / "schedules.json", vectors.schedules())


if __name__ == "__main__":
    main()
