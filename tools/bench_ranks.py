#!/usr/bin/env python3
"""Time per update of a run on 1, 2, ... ranks, the time it waits for messages, and whether every result equals the first, bit for bit.

Needs: an isobit built with `cargo build --release --features mpi`, and mpirun (Open MPI) on the PATH.
Example: tools/bench_ranks.py --isobit target/release/isobit --config run.toml --ranks 1,2,4 --threads 8 --updates 6
Runs `isobit train CONFIG` into folders under --into, with --threads threads in every rank and gradient_groups of at least the largest number of ranks; the first
update of each is not counted. --devices '["cuda:0","cpu"]' adds a run with devices_by_rank. Prints a Markdown table.
"""
import argparse, json, os, statistics, subprocess, sys

p = argparse.ArgumentParser()
p.add_argument("--isobit", default="target/release/isobit")
p.add_argument("--config", required=True)
p.add_argument("--into", default="bench-ranks")
p.add_argument("--ranks", default="1,2,4")
p.add_argument("--threads", type=int, default=1)
p.add_argument("--updates", type=int, default=6)
p.add_argument("--mpirun", default="mpirun --oversubscribe --bind-to none")
p.add_argument("--devices", action="append", default=[], help="a value of devices_by_rank, one rank for each of its devices")
a = p.parse_args()
ranks = [int(n) for n in a.ranks.split(",")]
runs = [(n, None) for n in ranks] + [(len(json.loads(d)), d) for d in a.devices]
groups = max(n for n, _ in runs)
if a.updates < 2 or min(ranks) < 1:
    p.error("at least 2 updates, and ranks from 1 on")
os.makedirs(a.into, exist_ok=True)


def train(number, count, devices):
    folder = os.path.join(a.into, f"run-{number}-of-{count}")
    command = [*a.mpirun.split(), "-n", str(count)] if count > 1 else []
    command += [a.isobit, "train", a.config, "--threads", str(a.threads), "--no-plan", "-q"]
    settings = {"output_dir": folder, "training.max_steps": a.updates, "training.gradient_groups": groups, "training.logging_steps": 1}
    if devices:
        settings["devices_by_rank"] = devices
    command += [f"--set={key}={value}" for key, value in settings.items()]
    ended = subprocess.run(command)
    if ended.returncode:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}")
    lines = [json.loads(line) for line in open(os.path.join(folder, "metrics.jsonl"))]
    timing = [line["timing"] for line in lines if "seconds" in line.get("timing", {})][1:]
    return folder, [t["seconds"] for t in timing], [t.get("communication_s", 0.0) for t in timing]


print("| ranks | devices | seconds an update, best (median) | waiting for messages, median | speed against the first | bits |\n|---|---|---|---|---|---|")
first = None
for number, (count, devices) in enumerate(runs):
    folder, seconds, waiting = train(number, count, devices)
    first = first or (folder, min(seconds))
    same = subprocess.run([a.isobit, "diff", first[0], folder], stdout=subprocess.DEVNULL).returncode == 0
    print(f"| {count} | {devices or 'of the config'} | {min(seconds):.3f} ({statistics.median(seconds):.3f}) | {statistics.median(waiting):.3f} | "
          f"{first[1] / min(seconds):.2f} | {'the same' if same else 'DIFFERENT'} |", flush=True)
