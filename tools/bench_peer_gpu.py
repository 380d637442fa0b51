#!/usr/bin/env python3
"""Slice products of Isobit on an NVIDIA GPU beside PyTorch bfloat16, TF32 and float32, alternating in one process tree.

Needs PyTorch with CUDA and a release build of isobit. Example: tools/bench_peer_gpu.py --isobit target/release/isobit
Each sample is the mean of ten products enqueued together; best and median of the samples. Rates are 2mnk over the time, in
TFLOP/s. "x2" is the product alone, weight and activations already sliced; "with slicing" slices the activations too.
"""
import argparse, json, statistics, subprocess
import torch

p = argparse.ArgumentParser()
p.add_argument("--isobit", default="target/release/isobit")
p.add_argument("--device", default="cuda:0")
p.add_argument("--samples", type=int, default=15)
a = p.parse_args()

SHAPES = [(8192, 8960, 1536), (8192, 1536, 8960), (4096, 4096, 4096), (8192, 8192, 8192)]
BATCH = 10


def theirs(kind, m, n, k):
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    x, w = (torch.randn(r, k, device="cuda").to(dtype) for r in (m, n))

    def sample():
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(BATCH):
            torch.nn.functional.linear(x, w)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / BATCH
    return sample


def ours(op, m, n, k, profile="x2"):
    child = subprocess.Popen([a.isobit, "bench", "kernels", "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def sample():
        child.stdin.write(f"{op} {m}x{n}x{k} {profile} {a.device} 1\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"isobit stopped with code {child.wait()}")
        return json.loads(line)["ms"]
    sample.close = child.stdin.close
    return sample


columns = {
    "x2": lambda *s: ours("product_forward_sliced", *s),
    "x2 with slicing": lambda *s: ours("product_forward", *s),
    "x2 input gradient": lambda *s: ours("product_grad_input", *s),
    "PyTorch bf16": lambda *s: theirs("bf16", *s),
    "PyTorch TF32": lambda *s: theirs("tf32", *s),
    "PyTorch float32": lambda *s: theirs("float32", *s),
}
print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {a.samples} samples; TFLOP/s best (median)\n")
print("| shape | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
for shape in SHAPES:
    samplers = {name: make(*shape) for name, make in columns.items()}
    times = {name: [] for name in columns}
    for sampler in samplers.values():
        sampler()
    for _ in range(a.samples):
        for name, sampler in samplers.items():
            times[name].append(sampler())
    for sampler in samplers.values():
        getattr(sampler, "close", lambda: None)()
    flops = 2 * shape[0] * shape[1] * shape[2] / 1e9
    rates = [f"{flops / min(t):.0f} ({flops / statistics.median(t):.0f})" for t in times.values()]
    print("| " + "x".join(map(str, shape)) + " | " + " | ".join(rates) + " |", flush=True)
    torch.cuda.empty_cache()
