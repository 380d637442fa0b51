"""Compares a folder of `isobit export merge --dtype f32` with transformers and peft: `merge_and_unload` in float32.

    check_merge.py FOLDER ADAPTER BASE

Every number must be within the bound of docs/numerics.md, "Merge". transformers loads both folders, and their logits on a few tokens
are compared too; that difference is printed, not judged.
"""
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def main(folder, adapter, base):
    with_adapter = PeftModel.from_pretrained(load(base), adapter)
    sums = {}
    for name, module in with_adapter.named_modules():
        if hasattr(module, "lora_A") and "default" in getattr(module, "lora_A", {}):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            scale, rank = module.scaling["default"], a.shape[0]
            sums[name.removeprefix("base_model.model.") + ".weight"] = (rank + 2) * abs(scale) * (b.abs().double() @ a.abs().double())
    theirs = {name: value.clone() for name, value in with_adapter.merge_and_unload().state_dict().items()}
    model = load(folder)
    ours = model.state_dict()
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    worst = 0.0
    for name, value in ours.items():
        bound = 2.0 ** -23 * (value.abs().double() + sums[name]) if name in sums else torch.zeros_like(value, dtype=torch.float64)
        difference = (value.double() - theirs[name].double()).abs()
        assert (difference <= bound).all(), (name, difference.max())
        if name in sums:
            worst = max(worst, (difference / bound.clamp_min(1e-300)).max().item())
    ids = torch.arange(3, 11).unsqueeze(0)
    with torch.no_grad():
        merged = model(ids).logits
        apart = PeftModel.from_pretrained(load(base), adapter)(ids).logits
    print(f"{folder}: {len(sums)} matrices merged, the worst difference is {worst:.3f} of the bound; "
          f"logits beside base and adapter differ by {(merged - apart).abs().max().item():.2e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
