#!/usr/bin/env python3
"""A LoRA training step of Isobit beside the peer (PyTorch + transformers + peft), alternating step by step on the same cores.

Needs: pip install torch transformers peft (in a virtual environment of its own), and `cargo build --release`.
Example: tools/bench_peer_step.py --isobit target/release/isobit --steps 20 [--model tiny] [--quiet-cores]
Both programs stay alive and take turns, one step each; the first of both is not counted. Prints a Markdown table: tokens per second of the best step and of
the median one, best against best, medians beside, and resident memory. With --quiet-cores it tries every core now and then and moves both programs to the
fastest ones: on a shared machine a neighbour on the same core slows int8 tiles by a factor of four, and comes and goes.
"""
import argparse, json, os, statistics, subprocess, sys

p = argparse.ArgumentParser()
p.add_argument("--isobit", default="target/release/isobit")
p.add_argument("--steps", type=int, default=20)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--model", choices=["tiny", "0.5B", "moe-small"], help="only this shape")
p.add_argument("--checkpointing", choices=["full", "none"], help="only this policy, of both")
p.add_argument("--quiet-cores", action="store_true")
a = p.parse_args()
# Idle OpenMP threads would otherwise spin on the cores while it is the other program's turn.
for name, value in [("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0"), ("KMP_BLOCKTIME", "0")]:
    os.environ.setdefault(name, value)
PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer_lora_step.py")
CORES = sorted(os.sched_getaffinity(0))
BETWEEN_TRIALS = 10


class Program:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines = []
        self.step()

    def step(self):
        print(file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def count(self):
        self.lines.append(self.step())
        return self.lines[-1]["tokens_per_s"]

    def keep_to(self, cores):
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            os.sched_setaffinity(int(thread), cores)

    def rates(self):
        return [line["tokens_per_s"] for line in self.lines]

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def quiet_cores():
    probe = [a.isobit, "bench", "kernels", "--op", "product_forward", "--shape", "512x4864x896", "--profile", "x2", "--threads", "1", "--runs", "3", "--json"]
    def time(core):
        out = subprocess.run(probe, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        return json.loads(out.stdout)["ms_median"]
    times = {core: time(core) for core in CORES}
    return set(sorted(times, key=times.get)[:a.threads])


print("| shape, checkpointing | isobit tokens/s, best (median) | peer | ratio, best (median) | isobit resident | peer resident |\n|---|---|---|---|---|---|")
for model, batch, seq, policy in [("tiny", 8, 256, "full"), ("tiny", 8, 256, "none"), ("0.5B", 1, 512, "full"), ("moe-small", 4, 256, "full")]:
    if a.model not in (None, model) or a.checkpointing not in (None, policy):
        continue
    shape = ["--model", model, "--batch", str(batch), "--seq", str(seq), "--rank", "8", "--threads", str(a.threads), "--serve"]
    ours = Program([a.isobit, "bench", "step", *shape, "--checkpointing", policy])
    theirs = Program([sys.executable, PEER, *shape, *(["--no-checkpointing"] if policy == "none" else [])])
    for step in range(a.steps):
        if a.quiet_cores and step % BETWEEN_TRIALS == 0:
            cores = quiet_cores()
            ours.keep_to(cores), theirs.keep_to(cores)
        print(f"{model}: {ours.count():.0f} against {theirs.count():.0f}", file=sys.stderr, flush=True)
    ours.end(), theirs.end()
    (own, own_median), (other, other_median) = [(max(rates), statistics.median(rates)) for rates in (ours.rates(), theirs.rates())]
    memory = [max(line["peak_bytes"] for line in program.lines) / 1e9 for program in (ours, theirs)]
    print(f"| {model}, {batch}x{seq}, {policy} | {own:.0f} ({own_median:.0f}) | {other:.0f} ({other_median:.0f}) | {own / other:.1f} ({own_median / other_median:.1f}) "
          f"| {memory[0]:.2f} GB | {memory[1]:.2f} GB |", flush=True)
