"""llama.cpp beside Isobit on one model: greedy tokens, and the log-probability of each.

    NODE_MODULES=.../node_modules check_llama_cpp.py FILE.gguf FOLDER "PROMPT" [COUNT] [--adapter FOLDER LORA.gguf]

FILE is an f32 file of the model in FOLDER. Both programs compute in float32 (Isobit with `--profile x3`). The judge of both is
transformers in float64, and the scale is transformers in float32: e = max |log p in float32 - log p in float64| over the tokens. Each
program may be off by 8 e (its own order of sums and its own exponential), so the two may differ by 16 e; a token may differ only
where the margin between the first two is below that.

llama.cpp takes GELU from a table: argument and result are float16. For models with GELU, transformers in float64 runs with that table
too, and d is how far this moves log p. The two may then differ by 16 e + 2 d (an argument near the middle of two float16 numbers may
be rounded to either), and llama.cpp must be nearer to the model with the table than to the one without.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
ISOBIT = os.environ.get("ISOBIT", os.path.join(HERE, "../../target/release/isobit"))


def run(*command):
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(command)}: exit {ran.returncode}: {ran.stderr}")
    return ran.stdout


def ours_at(model, tokens, at):
    """-log p of token `at` given those before it: the loss of a row with one target."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        labels = [-100] * at + [tokens[at]]
        file.write(json.dumps({"input_ids": tokens[:at + 1], "labels": labels}) + "\n")
        file.flush()
        return -json.loads(run(ISOBIT, "eval", *model, "--profile", "x3", "--data", file.name, "--json", "--quiet"))["loss"]


class Table(torch.nn.Module):
    """GELU as llama.cpp's CPU code has it."""

    def forward(self, x):
        rounded = x.to(torch.float16).to(torch.float32)
        found = torch.nn.functional.gelu(rounded, approximate="tanh").to(torch.float16).to(x.dtype)
        return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, found))


def reference(folder, adapter, tokens, dtype, table=False):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter).to(dtype)
    functions = [module for module in model.modules() if "gelu" in type(getattr(module, "act_fn", None)).__name__.lower()]
    if table and not functions:
        return None
    for module in functions if table else []:
        module.act_fn = Table()
    if dtype is torch.float64:
        sys.path.insert(0, HERE)
        from judge import Float64
        with Float64(), torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
    else:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), -1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("folder")
    parser.add_argument("prompt")
    parser.add_argument("count", nargs="?", type=int, default=50)
    parser.add_argument("--adapter", nargs=2)
    arguments = parser.parse_args()
    adapter, lora = arguments.adapter or (None, None)
    theirs = json.loads(run("node", f"{HERE}/llama_cpp.mjs", arguments.file, arguments.prompt, str(arguments.count), *([lora] if lora else [])))
    model = ["--model", arguments.folder, *(["--adapter", adapter] if adapter else [])]
    ours = json.loads(run(ISOBIT, "generate", *model, "--profile", "x3", "--prompt", arguments.prompt, "--max-tokens",
                          str(arguments.count), "--json", "--quiet"))
    tokens = theirs["prompt"] + [step["token"] for step in theirs["steps"]]
    start = len(theirs["prompt"])
    exact, single = (reference(arguments.folder, adapter, tokens, dtype) for dtype in (torch.float64, torch.float32))
    places = [(at - 1, tokens[at]) for at in range(start, len(tokens))]
    e = max(abs((exact[at, token] - single[at, token]).item()) for at, token in places)
    bound = 16 * e
    with_table = reference(arguments.folder, adapter, tokens, torch.float64, table=True)
    if with_table is not None:
        d = max(abs((exact[at, token] - with_table[at, token]).item()) for at, token in places)
        bound += 2 * d
        near = max(abs(step["logprob"] - with_table[at, token].item()) for step, (at, token) in zip(theirs["steps"], places))
        print(f"its table of GELU moves log p by {d:.2e}; beside the model with that table llama.cpp is off by {near:.2e}")
        assert near < d
    equal = [a == b for a, b in zip(ours["text_tokens"], [step["token"] for step in theirs["steps"]])]
    if not all(equal):
        first = equal.index(False)
        assert theirs["steps"][first]["margin"] < bound, (first, theirs["steps"][first])
    margins = [step["margin"] for step in theirs["steps"]]
    worst, worst_ours, worst_theirs = 0.0, 0.0, 0.0
    for index, step in enumerate(theirs["steps"]):
        mine, judge = ours_at(model, tokens, start + index), exact[start + index - 1, step["token"]].item()
        worst = max(worst, abs(mine - step["logprob"]))
        worst_ours, worst_theirs = max(worst_ours, abs(mine - judge)), max(worst_theirs, abs(step["logprob"] - judge))
    print(f"{sum(equal)} of {len(margins)} greedy tokens equal ({len(ours['text_tokens'])} of ours); smallest margin {min(margins):.3g}")
    print(f"log p: float32 of transformers is off by {e:.2e}, Isobit by {worst_ours:.2e}, llama.cpp by {worst_theirs:.2e}; "
          f"the two differ by {worst:.2e}, bound {bound:.2e}")
    print(repr(theirs["text"]))
    assert worst <= bound


if __name__ == "__main__":
    main()
