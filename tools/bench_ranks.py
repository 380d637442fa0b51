#!/usr/bin/env python3
"""Time per update of a run on 1, 2, ... ranks, the time it waits for messages, and whether every result
equals the first, bit for bit; exits with 1 if one does not.

Needs: an isobit built with `cargo build --release --features mpi`, and mpirun (Open MPI) on the PATH.
Example: tools/bench_ranks.py --isobit target/release/isobit --config run.toml --ranks 1,2,4 --threads 8
Runs `isobit train CONFIG` into folders under --into, with --threads threads in every rank and --groups
groups (as many as the largest number of ranks, if not given); the first update of each is not counted.
--devices '["cuda:0","cpu"]' adds a run with devices_by_rank, --device cuda:0,cpu one process with that
device or list. --cores 8 binds every rank to so many cores of its own. Prints a Markdown table.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--isobit", default="target/release/isobit")
parser.add_argument("--config", required=True)
parser.add_argument("--into", default="bench-ranks")
parser.add_argument("--ranks", default="1,2,4")
parser.add_argument("--groups", type=int)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--cores", type=int, help="cores of each rank; all of them may use all if not given")
parser.add_argument("--updates", type=int, default=6)
parser.add_argument("--mpirun", default="mpirun --oversubscribe --bind-to none")
parser.add_argument("--devices", action="append", default=[], help="a value of devices_by_rank")
parser.add_argument("--device", action="append", default=[], help="a device or list for one process")
options = parser.parse_args()
ranks = [int(count) for count in options.ranks.split(",")]
runs = [(count, {}) for count in ranks]
runs += [(len(json.loads(names)), {"devices_by_rank": names}) for names in options.devices]
runs += [(1, {"device": names}) for names in options.device]
groups = options.groups or max(count for count, _ in runs)
if options.updates < 2 or min(ranks) < 1 or groups < max(count for count, _ in runs):
    parser.error("at least 2 updates, ranks from 1 on, and as many groups as ranks")
os.makedirs(options.into, exist_ok=True)
# A rank's cores follow from its number on the machine.
BOUND = 'k=${OMPI_COMM_WORLD_LOCAL_RANK:-0}; exec taskset -c $((%d*k))-$((%d*k+%d)) "$@"'


def train(number, count, settings):
    folder = os.path.join(options.into, f"run-{number}-of-{count}")
    command = [*options.mpirun.split(), "-n", str(count)] if count > 1 else []
    if options.cores:
        command += ["bash", "-c", BOUND % (options.cores, options.cores, options.cores - 1), "bound"]
    command += [options.isobit, "train", options.config, "--threads", str(options.threads), "--no-plan", "-q"]
    settings = {
        "output_dir": folder,
        "training.max_steps": options.updates,
        "training.gradient_groups": groups,
        "training.logging_steps": 1,
    } | settings
    command += [f"--set={key}={value}" for key, value in settings.items()]
    ended = subprocess.run(command)
    if ended.returncode:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}")
    lines = [json.loads(line) for line in open(os.path.join(folder, "metrics.jsonl"))]
    timing = [line["timing"] for line in lines if "seconds" in line.get("timing", {})][1:]
    return folder, [t["seconds"] for t in timing], [t.get("communication_s", 0.0) for t in timing]


print("| ranks | devices | seconds an update, best (median) | waiting for messages | speed against the first | bits |")
print("|---|---|---|---|---|---|")
first, differs = None, False
for number, (count, settings) in enumerate(runs):
    folder, seconds, waiting = train(number, count, settings)
    first = first or (folder, min(seconds))
    diff = subprocess.run([options.isobit, "diff", first[0], folder], stdout=subprocess.DEVNULL)
    differs |= diff.returncode != 0
    devices = next(iter(settings.values()), "of the config")
    print(
        f"| {count} | {devices} | {min(seconds):.3f} ({statistics.median(seconds):.3f}) "
        f"| {statistics.median(waiting):.3f} | {first[1] / min(seconds):.2f} "
        f"| {'the same' if diff.returncode == 0 else 'DIFFERENT'} |",
        flush=True,
    )
sys.exit(1 if differs else 0)
