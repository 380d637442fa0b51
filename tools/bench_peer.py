#!/usr/bin/env python3
"""Kernels of Isobit beside PyTorch float32, alternating run by run in one process tree.

Needs: pip install torch   (in a virtual environment of its own), and `cargo build --release`.
Example: tools/bench_peer.py --isobit target/release/isobit --runs 20 --threads 2
Prints a Markdown table: best against best, medians beside. With --quiet-cores it first tries every core and keeps to the
fastest ones: on a shared machine a neighbour on the same core slows int8 tiles by a factor of four.
"""
import argparse, json, os, resource, statistics, subprocess, time

# Idle OpenMP threads would otherwise spin on the cores while it is the other program's turn.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("KMP_BLOCKTIME", "0")
import torch
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--isobit", default="target/release/isobit")
p.add_argument("--runs", type=int, default=20)
p.add_argument("--threads", type=int, default=2)
p.add_argument("--path", action="append", help="scalar, avx2, avx512, amx or best; may be repeated")
p.add_argument("--profile", action="append", help="x2 or x3; may be repeated")
p.add_argument("--only", help="only cases whose name contains this")
p.add_argument("--quiet-cores", action="store_true")
a = p.parse_args()


def keep_to_quiet_cores():
    def rate(core):
        command = [a.isobit, "bench", "kernels", "--op", "product_forward", "--shape", "512x4864x896", "--profile", "x2",
                   "--threads", "1", "--runs", "5", "--json"]
        out = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        return 1 / json.loads(out.stdout)["ms_median"]
    rates = {core: rate(core) for core in sorted(os.sched_getaffinity(0))}
    best = sorted(rates, key=rates.get, reverse=True)[:a.threads]
    os.sched_setaffinity(0, set(best))
    return best


if a.quiet_cores:
    print(f"cores {keep_to_quiet_cores()}\n")
torch.set_num_threads(a.threads)
torch.manual_seed(0)

PRODUCTS = [(512, 4864, 896), (512, 896, 4864), (1024, 8960, 1536), (2048, 2048, 2048)]


def linear(m, n, k):
    x, w = torch.randn(m, k), torch.randn(n, k)
    return lambda: F.linear(x, w)


def grad_input(m, n, k):
    dy, w = torch.randn(m, n), torch.randn(n, k)
    return lambda: dy @ w


def grad_weight(m, n, k):
    dy, x, dw = torch.randn(m, n), torch.randn(m, k), torch.zeros(n, k)
    return lambda: dw.addmm_(dy.T, x)


def attention(tokens, heads, kv_heads, width):
    def tensor(h): return torch.randn(1, h, tokens, width, requires_grad=True)
    q, k, v, d_o = tensor(heads), tensor(kv_heads), tensor(kv_heads), torch.randn(1, heads, tokens, width)
    group = heads // kv_heads

    def run():
        o = F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True)
        torch.autograd.grad(o, (q, k, v), d_o)
    return run


def head_loss(tokens, hidden, vocabulary):
    h, w = torch.randn(tokens, hidden, requires_grad=True), torch.randn(vocabulary, hidden).mul_(0.02)
    labels = torch.randint(0, vocabulary, (tokens,))

    def run():
        torch.autograd.grad(F.cross_entropy(F.linear(h, w), labels), h)
    return run


CASES = [("roof", "400000", None)]
CASES += [("product_forward", s, linear) for s in PRODUCTS]
CASES += [("product_grad_input", s, grad_input) for s in PRODUCTS]
CASES += [("product_grad_weight", s, grad_weight) for s in PRODUCTS]
CASES += [("attention", (1024, 14, 2, 64), attention), ("head_loss", (512, 896, 151936), head_loss)]


def ours(child, op, shape, profile, path):
    child.stdin.write(f"{op} {shape} {profile} {path} {a.threads}\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"isobit stopped with code {child.wait()}")
    return json.loads(line)


child = subprocess.Popen([a.isobit, "bench", "kernels", "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print("| op | shape | profile | path | isobit best (median) ms | GFLOP/s | PyTorch best (median) ms | GFLOP/s | ratio best (median) | of the roof |")
print("|---|---|---|---|---|---|---|---|---|---|")
roofs = {}
for path in a.path or ["best"]:
    for profile in a.profile or ["x2", "x3"]:
        for op, axes, peer in CASES:
            shape = axes if isinstance(axes, str) else "x".join(map(str, axes))
            if a.only and a.only not in op and op != "roof":
                continue
            run = peer(*axes) if peer else None
            own, other, line = [], [], None
            if run:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                run()
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            for _ in range(a.runs):
                line = ours(child, op, shape, profile, path)
                own.append((line["ms"], line["gflops"]))
                if run:
                    start = time.perf_counter()
                    run()
                    other.append((time.perf_counter() - start) * 1e3)
            best, median = min(own)[0], statistics.median(ms for ms, _ in own)
            flops = min(own)[1] * min(own)[0]  # GFLOP/s times ms
            if not run:
                roofs[path, profile] = min(own)[1]
                print(f"| {op} | | {profile} | {line['path']} | {best:.2f} ({median:.2f}) | {min(own)[1]:.0f} | | | | |", flush=True)
                continue
            if op == "head_loss":
                memory = f"workspace {line['workspace_bytes'] / 1e6:.1f} MB; PyTorch's peak grew by {grown / 1e3:.0f} MB"
                print(f"<!-- {op}: {memory} -->", flush=True)
            roof = roofs.get((path, profile), 0)
            share = f"{flops / best / roof:.0%}" if roof and op.startswith("product") else ""
            print(f"| {op} | {shape} | {profile} | {line['path']} | {best:.2f} ({median:.2f}) | {flops / best:.0f} | {min(other):.2f} ({statistics.median(other):.2f})"
                  f" | {flops / min(other):.0f} | {min(other) / best:.2f} ({statistics.median(other) / median:.2f}) | {share} |", flush=True)
child.stdin.close()
