#!/usr/bin/env python3
"""A training step of Isobit beside the peer (PyTorch + transformers + peft) on one NVIDIA GPU, alternating step by step.

Needs: pip install torch transformers peft (with CUDA, in a virtual environment of its own), and `cargo build --release`.
Example: tools/bench_peer_step_gpu.py --isobit target/release/isobit --model 1.5B --batch 8 --seq 1024 --steps 20
For LoRA and for a full fine-tune, with full checkpointing and without, three programs stay alive and take turns, one step each: Isobit, the peer as it is,
and the peer under torch.compile. The first steps of each are not counted: the peer compiles in them. Prints a Markdown table: tokens per second of the best
step and of the median one, and peak device memory. A full fine-tune of the peer computes in bf16 (autocast) with float32 weights and AdamW state. All three hold their memory at once: take a smaller batch where the card is too small for that.
--device cpu --model tiny --batch 1 --seq 32 --steps 1 --skip-compile tries the script without a card.
"""
import argparse, json, os, statistics, subprocess, sys

p = argparse.ArgumentParser()
p.add_argument("--isobit", default="target/release/isobit")
p.add_argument("--model", default="1.5B", choices=["tiny", "0.5B", "1.5B", "moe-small"])
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--rank", type=int, default=8)
p.add_argument("--steps", type=int, default=20)
p.add_argument("--warmup", type=int, default=3)
p.add_argument("--dtype", default="bfloat16", help="the peer's; Isobit has its own arithmetic")
p.add_argument("--device", default="cuda:0", help="cuda:N, or cpu to try the script")
p.add_argument("--method", choices=["lora", "full"], help="only this one")
p.add_argument("--checkpointing", choices=["full", "none"], help="only this policy, of all programs")
p.add_argument("--skip-compile", action="store_true", help="leave the peer under torch.compile out")
a = p.parse_args()
PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer_lora_step.py")


class Program:
    """A program that runs one step for every line of its standard input."""

    def __init__(self, name, command):
        self.name, self.lines = name, []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(a.warmup):
            self.step()

    def step(self):
        print(file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self.process.wait()}: see its message above")
        return json.loads(line)

    def count(self):
        self.lines.append(self.step())
        return self.lines[-1]["tokens_per_s"]

    def rates(self):
        rates = [line["tokens_per_s"] for line in self.lines]
        return max(rates), statistics.median(rates)

    def memory(self):
        return max(line.get("device_peak_bytes") or line["peak_bytes"] for line in self.lines) / 2**30

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def programs(method, policy):
    shape = ["--model", a.model, "--batch", str(a.batch), "--seq", str(a.seq), "--rank", str(a.rank), "--device", a.device, "--method", method, "--serve"]
    plain = ["--no-checkpointing"] if policy == "none" else []
    peer = [sys.executable, PEER, *shape, *plain, "--dtype", a.dtype]
    yield Program("isobit", [a.isobit, "bench", "step", *shape, "--checkpointing", policy])
    yield Program("peer", peer)
    if not a.skip_compile:
        yield Program("peer, compiled", [*peer, "--compile"])


if a.steps < 1 or a.warmup < 1:
    p.error("--steps and --warmup are at least 1")
print("| shape, method, checkpointing | program | tokens/s, best (median) | isobit against it, best (median) | device memory |\n|---|---|---|---|---|")
for method in ["lora", "full"]:
    for policy in ["full", "none"]:
        if a.method not in (None, method) or a.checkpointing not in (None, policy):
            continue
        running = list(programs(method, policy))
        for _ in range(a.steps):
            print(", ".join(f"{program.name} {program.count():.0f}" for program in running), file=sys.stderr, flush=True)
        own, own_median = running[0].rates()
        for program in running:
            program.end()
            best, median = program.rates()
            ratio = f"{own / best:.2f} ({own_median / median:.2f})" if program is not running[0] else ""
            print(f"| {a.model}, {a.batch}x{a.seq}, {method}, {policy} | {program.name} | {best:.0f} ({median:.0f}) | {ratio} | {program.memory():.1f} GiB |", flush=True)
