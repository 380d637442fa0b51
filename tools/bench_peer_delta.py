#!/usr/bin/env python3
"""The gated delta rule, forward and backward, beside transformers' own PyTorch path with autograd, alternating run by run.

Needs: pip install torch transformers   (in a virtual environment of its own), and `cargo build --release`.
Example: tools/bench_peer_delta.py --isobit target/release/isobit --runs 10 --threads 2
Prints a Markdown table: best against best, medians beside. On a shared machine wall time depends on the neighbours, so
the processor time of all threads of both, best run, stands there too.
"""
import argparse, glob, json, os, statistics, subprocess, time

# Idle OpenMP threads would otherwise spin on the cores while it is the other program's turn.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")
import torch, transformers
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

p = argparse.ArgumentParser()
p.add_argument("--isobit", default="target/release/isobit")
p.add_argument("--runs", type=int, default=10)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--path", default="best", help="scalar, avx2, avx512, amx or best")
p.add_argument("--shape", default="1024x16x32x128", help="tokens x key heads x value heads x width")
a = p.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)

tokens, key_heads, value_heads, width = map(int, a.shape.split("x"))
unit = lambda: torch.nn.functional.normalize(torch.randn(1, tokens, key_heads, width), dim=-1).requires_grad_()
q, k = unit(), unit()
v, d_o = torch.randn(1, tokens, value_heads, width, requires_grad=True), torch.randn(1, tokens, value_heads, width)
g = (-torch.rand(1, tokens, value_heads)).requires_grad_()
beta = torch.rand(1, tokens, value_heads, requires_grad=True)


def peer(backward):
    group = value_heads // key_heads
    with torch.set_grad_enabled(backward):
        wide = [x.repeat_interleave(group, 2) for x in (q, k)]
        o, _ = torch_chunk_gated_delta_rule(*wide, v, g, beta, use_qk_l2norm_in_kernel=False)
    if backward:
        torch.autograd.grad(o, (q, k, v, g, beta), d_o)


def processor_ms(process):
    """Milliseconds that all threads of a process have used."""
    return sum(int(open(path).read().split()[0]) for path in glob.glob(f"/proc/{process}/task/*/schedstat")) / 1e6


child = subprocess.Popen([a.isobit, "bench", "kernels", "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ours(op):
    child.stdin.write(f"{op} {a.shape} x2 {a.path} {a.threads}\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"isobit stopped with code {child.wait()}")
    return json.loads(line)


print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}, {a.threads} threads, {a.runs} alternating runs\n")
print("| op | shape | path | isobit best (median) ms | GFLOP/s | peer best (median) ms | ratio best (median) | processor ms, isobit | peer | ratio |")
print("|---|---|---|---|---|---|---|---|---|---|")
for op, backward in (("delta_rule_forward", False), ("delta_rule", True)):
    ours(op), peer(backward)
    own, other, spent, lines = [], [], ([], []), []
    for _ in range(a.runs):
        before = processor_ms(child.pid)
        lines.append(ours(op))
        own.append(lines[-1]["ms"])
        spent[0].append(processor_ms(child.pid) - before)
        before, start = processor_ms("self"), time.perf_counter()
        peer(backward)
        other.append((time.perf_counter() - start) * 1e3)
        spent[1].append(processor_ms("self") - before)
    line = min(lines, key=lambda line: line["ms"])
    medians = statistics.median(own), statistics.median(other)
    print(f"| {op} | {a.shape} | {line['path']} | {min(own):.1f} ({medians[0]:.1f}) | {line['gflops']:.0f} | {min(other):.1f} ({medians[1]:.1f})"
          f" | {min(other) / min(own):.1f} ({medians[1] / medians[0]:.1f}) | {min(spent[0]):.0f} | {min(spent[1]):.0f} | {min(spent[1]) / min(spent[0]):.1f} |", flush=True)
child.stdin.close()
