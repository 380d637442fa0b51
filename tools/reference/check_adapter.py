#!/usr/bin/env python3
"""Loads an adapter written by any program into peft and prints the logits it gives.

Needs torch, transformers and peft, as make_fixtures.py does. The base is any model folder that transformers reads, dense, with experts
(one by one or stacked) or a hybrid, or one of the quantised fixtures, which is unpacked here.
Usage: python tools/reference/check_adapter.py ADAPTER_FOLDER BASE_FOLDER IDS.json [--output FILE] [--compare FILE] [--tolerance X]

IDS.json is a list of token ids, a list of such lists, or a case.json of the fixtures (its labels then give a loss as well).
--output writes the logits as safetensors (`logits.0`, `logits.1`, ... one per row) instead of printing them.
--compare prints the largest deviation from such a file. A file whose only tensor is `logits` stands for row 0.
--tolerance is the largest deviation that still counts as equal.
Exit status 1: a tensor of the adapter is not one that peft asks for, or the other way round, or has another shape; a target of the
config reaches nothing; the adapter changes no logit; or the deviation is above the tolerance.
"""
import argparse
import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.dont_write_bytecode = True
import judge
import quantized


def read_rows(path):
    """Rows in the form of case.json, whatever form the file has."""
    value = json.loads(pathlib.Path(path).read_text())
    if isinstance(value, dict):
        return value["rows"]
    lists = value if isinstance(value[0], list) else [value]
    return [{"input_ids": ids, "document_starts": [0]} for ids in lists]


def load_base(folder):
    """The base in float32, every path of it plain torch."""
    settings = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    if "quantization_config" in json.loads((pathlib.Path(folder) / "config.json").read_text()):
        return quantized.load(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)


def unreached(model, config):
    """Targets of the config that no tensor of the adapter belongs to: peft is content if one of them is found."""
    names = [name for name, _ in model.named_modules() if hasattr(model.get_submodule(name), "lora_A")]
    parameters = {module.parameter_name for _, module in model.named_modules() if hasattr(module, "parameter_name")}
    modules = config.target_modules if isinstance(config.target_modules, (list, set)) else []
    lost = [target for target in sorted(modules) if not any(("." + name).endswith("." + target) for name in names)]
    return lost + [target for target in config.target_parameters or [] if target.rsplit(".", 1)[-1] not in parameters]


def load(adapter, base):
    """The adapted model in float32. peft ignores keys it does not know, so both sets of names are compared here."""
    # The file may call its base by a name that means nothing here; the folder given is the base.
    model = peft.PeftModel.from_pretrained(load_base(base), adapter).eval()
    file = load_file(pathlib.Path(adapter) / "adapter_model.safetensors")
    asked = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    wrong = [f"not in the file: {name}" for name in sorted(asked.keys() - file.keys())]
    wrong += [f"unknown to peft: {name}" for name in sorted(file.keys() - asked.keys())]
    for name in sorted(asked.keys() & file.keys()):
        if asked[name].shape != file[name].shape:
            wrong.append(f"shape of {name}: {tuple(file[name].shape)}, peft has {tuple(asked[name].shape)}")
        elif not torch.equal(asked[name].float(), file[name].float()):
            wrong.append(f"not loaded as it is: {name}")
    wrong += [f"target that reaches nothing: {target}" for target in unreached(model, model.peft_config["default"])]
    if wrong:
        sys.exit("\n".join(wrong))
    return model, len(file)


def compare(logits, path):
    other = load_file(path)
    if set(other) == {"logits"}:
        other = {"logits.0": other["logits"]}
    return {name: (logits[name] - tensor.float()).abs().max().item() for name, tensor in sorted(other.items())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter")
    parser.add_argument("base")
    parser.add_argument("ids")
    parser.add_argument("--output")
    parser.add_argument("--compare")
    parser.add_argument("--tolerance", type=float)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    model, count = load(arguments.adapter, arguments.base)
    rows = read_rows(arguments.ids)
    report = {"tensors": count}
    with torch.no_grad():
        logits = {f"logits.{index}": judge.forward(model, row).logits[0].contiguous() for index, row in enumerate(rows)}
        with model.disable_adapter():
            report["effect"] = (judge.forward(model, rows[0]).logits[0] - logits["logits.0"]).abs().max().item()
        if all("labels" in row for row in rows):
            report["loss"] = judge.step_loss(model, rows).item()
    if arguments.compare:
        report["largest_deviation"] = compare(logits, arguments.compare)
    if arguments.output:
        save_file(logits, arguments.output, metadata={"format": "pt"})
    elif not arguments.compare:
        report |= {name: tensor.tolist() for name, tensor in logits.items()}
    print(json.dumps(report, sort_keys=True))
    if report["effect"] == 0:
        sys.exit("the adapter changes nothing")
    if arguments.tolerance is not None and max(report.get("largest_deviation", {"": 0.0}).values()) > arguments.tolerance:
        sys.exit("the logits deviate by more than the tolerance")


if __name__ == "__main__":
    main()
