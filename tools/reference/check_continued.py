#!/usr/bin/env python3
"""Trains an adapter with isobit, continues it with isobit, and asks peft what it is.

Needs torch, transformers and peft, as make_fixtures.py does, and a built isobit.
Usage: python tools/reference/check_continued.py ISOBIT [BASE_FOLDER CASE.json]

Rows are those of a case of the fixtures (default: qwen2-base, and qwen2-tied for whole modules). For every set of settings: a run, a run
that starts from it (`adapter.resume_from`), and a run that starts from that one without a learning rate, which must not change a byte.
peft loads all of them; the loss it computes in float32 must be that of `isobit eval --profile x3` within 5e-6 (about 16 times the error of float32 sums of this size), and differ from run to run.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import check_adapter
import judge
import torch

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "crates/models/tests/fixtures"
TOLERANCE = 5e-6
ADAPTERS = {
    "all-linear": 'lora_r = 4\n',
    "rsLoRA, patterns": 'lora_r = 4\nuse_rslora = true\nrank_pattern = { "layers.1.mlp.down_proj" = 3 }\nlora_target_modules = ["q_proj", "down_proj"]\n',
    "head and table": 'lora_r = 4\nmodules_to_save = ["lm_head", "embed_tokens"]\n',
    "head alone": 'lora_r = 4\nmodules_to_save = ["lm_head"]\nlora_target_modules = ["q_proj", "v_proj"]\n',
}


def config(folder, base, adapter, output, start, rate):
    start = f'resume_from = "{start}"\n' if start else ""
    path = folder / f"{output}.toml"
    path.write_text(f'base_model = "{base}"\noutput_dir = "{folder / output}"\nprofile = "x3"\nthreads = 1\n'
                    f'[[datasets]]\npath = "{folder}/rows.jsonl"\n'
                    f"[training]\nmax_seq_length = 32\nmicro_batch_size = 2\nmax_steps = 3\nlearning_rate = {rate}\n"
                    f'lr_scheduler_type = "constant"\n[adapter]\n{adapter}{start}')
    return path


def run(*arguments):
    ran = subprocess.run(arguments, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(map(str, arguments))}: {ran.stderr}")
    return ran.stdout


def check(isobit, base, case, name, adapter, folder):
    rows = json.loads(pathlib.Path(case).read_text())["rows"]
    plain = [{key: row[key] for key in ("input_ids", "labels")} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    losses, wrong = [], False
    for output, start, rate in (("first", None, 1e-2), ("second", "first", 1e-2), ("third", "second", 1e-30)):
        run(isobit, "train", config(folder, base, adapter, output, start and folder / start, rate), "--quiet")
        final = folder / output / "final"
        model, tensors = check_adapter.load(final, base)
        with torch.no_grad():
            theirs = judge.step_loss(model, rows).item()
        ours = json.loads(run(isobit, "eval", "--model", base, "--adapter", final, "--data", folder / "rows.jsonl", "--profile", "x3", "--json"))["loss"]
        print(f"{name}, {output}: {tensors} tensors, loss {ours:.7f}, peft {theirs:.7f}, apart {abs(ours - theirs):.1e}")
        wrong |= abs(ours - theirs) > TOLERANCE
        losses.append(ours)
    same = (folder / "second/final/adapter_model.safetensors").read_bytes() == (folder / "third/final/adapter_model.safetensors").read_bytes()
    return wrong or not same or losses[0] == losses[1]


def main():
    torch.set_num_threads(1)
    isobit, wrong = pathlib.Path(sys.argv[1]).resolve(), False
    for name, adapter in ADAPTERS.items():
        bases = [sys.argv[2:4]] if len(sys.argv) > 3 else [[FIXTURES / of, FIXTURES / of / "case.json"] for of in ("qwen2-base", "qwen2-tied")]
        for base, case in bases:
            with tempfile.TemporaryDirectory() as folder:
                wrong |= check(isobit, pathlib.Path(base).resolve(), case, f"{pathlib.Path(base).name}, {name}", adapter, pathlib.Path(folder))
    sys.exit("the losses are too far apart, or an adapter changed that should not have" if wrong else 0)


if __name__ == "__main__":
    main()
