#!/usr/bin/env python3
"""A LoRA training step of Isobit beside the peer (PyTorch + transformers + peft), alternating in one run.

Needs: pip install torch transformers peft (in a virtual environment of its own), and `cargo build --release`.
Example: tools/bench_peer_step.py --isobit target/release/isobit --rounds 3
Prints a Markdown table: tokens per second of every round (median over the steps of a round), best against best, and resident memory; each round as it
ends on standard error. With --quiet-cores it
first tries every core and keeps to the fastest ones.
"""
import argparse, json, os, subprocess, sys

p = argparse.ArgumentParser()
p.add_argument("--isobit", default="target/release/isobit")
p.add_argument("--rounds", type=int, default=3)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--model", choices=["tiny", "0.5B", "moe-small"], help="only this shape")
p.add_argument("--quiet-cores", action="store_true")
a = p.parse_args()
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer_lora_step.py")


def last_line(command, cores=None):
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    out = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=pin)
    return json.loads(out.stdout.strip().splitlines()[-1])


if a.quiet_cores:
    probe = [a.isobit, "bench", "kernels", "--op", "product_forward", "--shape", "512x4864x896", "--profile", "x2", "--threads", "1",
             "--runs", "5", "--json"]
    times = {core: last_line(probe, {core})["ms_median"] for core in sorted(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, set(sorted(times, key=times.get)[:a.threads]))
print("| shape, checkpointing | isobit tokens/s | peer tokens/s | ratio | isobit resident | peer resident |\n|---|---|---|---|---|---|")
for model, batch, seq, keeps in [("tiny", 8, 256, False), ("tiny", 8, 256, True), ("0.5B", 1, 512, False),
                                  ("moe-small", 4, 256, False)]:
    if a.model not in (None, model):
        continue
    shape = ["--model", model, "--batch", str(batch), "--seq", str(seq), "--rank", "8", "--threads", str(a.threads)]
    ours, theirs = [], []
    for _ in range(a.rounds):
        ours.append(last_line([a.isobit, "bench", "step", *shape, "--checkpointing", "none" if keeps else "full", "--json"]))
        theirs.append(last_line([sys.executable, PEER, *shape, *(["--no-checkpointing"] if keeps else [])]))
        print(f"{model}: {ours[-1]['tokens_per_s']:.0f} against {theirs[-1]['tokens_per_s']:.0f}", file=sys.stderr, flush=True)
    rates = [", ".join(f"{line['tokens_per_s']:.0f}" for line in lines) for lines in (ours, theirs)]
    best = max(line["tokens_per_s"] for line in ours) / max(line["tokens_per_s"] for line in theirs)
    ratios = f"best {best:.1f}; " + ", ".join(f"{own['tokens_per_s'] / other['tokens_per_s']:.1f}" for own, other in zip(ours, theirs))
    memory = [max(line["peak_bytes"] for line in lines) / 1e9 for lines in (ours, theirs)]
    print(f"| {model}, {batch}x{seq}, {'none' if keeps else 'full'} | {rates[0]} | {rates[1]} | {ratios} | {memory[0]:.2f} GB | {memory[1]:.2f} GB |", flush=True)
