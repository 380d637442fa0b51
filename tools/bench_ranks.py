#!/usr/bin/env python3
"""Time per update of a run on 1, 2, ... ranks, the time it waits for messages, and whether every result
equals the first, bit for bit; exits with 1 if one does not.

Needs: an isobit built with `cargo build --release --features mpi`, and mpirun (Open MPI) on the PATH.
Example: tools/bench_ranks.py --isobit target/release/isobit --config run.toml --ranks 1,2,4 --threads 8
Runs `isobit train CONFIG` into folders under --into, with --threads threads in every rank and --groups
groups (as many as the largest number of ranks, if not given); the first update of each is not counted.
--devices-by-rank '["cuda:0","cpu"]' adds a run with that, --device cuda:0,cpu one process with that
device or list. --cores 8 binds every rank to so many cores of its own. --unrelated 2 adds so many
processes that do the whole work at the same time, each on its own cores: what the machine gives
without messages. --rounds 3 takes turns and keeps the best. Prints a Markdown table.
"""
import argparse
import collections
import json
import os
import shutil
import statistics
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--isobit", default=shutil.which("isobit") or "target/release/isobit")
parser.add_argument("--config", required=True)
parser.add_argument("--into", default="bench-ranks")
parser.add_argument("--ranks", default="1,2,4")
parser.add_argument("--groups", type=int)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--cores", type=int, help="cores of each rank; all of them may use all if not given")
parser.add_argument("--updates", type=int, default=6)
parser.add_argument("--mpirun", default="mpirun --oversubscribe --bind-to none")
parser.add_argument("--devices-by-rank", action="append", default=[], help="a value of devices_by_rank")
parser.add_argument("--device", action="append", default=[], help="a device or list for one process")
parser.add_argument("--unrelated", type=int, default=0, help="processes that compute at the same time without messages")
parser.add_argument("--rounds", type=int, default=1, help="how often every run takes its turn")
options = parser.parse_args()
ranks = [int(count) for count in options.ranks.split(",")]
# `copies` of a run compute at the same time.
Run = collections.namedtuple("Run", "ranks settings copies", defaults=({}, 1))
runs = [Run(count) for count in ranks]
runs += [Run(len(json.loads(names)), {"devices_by_rank": names}) for names in options.devices_by_rank]
runs += [Run(1, {"device": names}) for names in options.device]
if options.unrelated:
    runs.append(Run(1, copies=options.unrelated))
most = max(run.ranks for run in runs)
groups = options.groups or most
if options.updates < 2 or min(ranks) < 1 or groups < most:
    parser.error("at least 2 updates, ranks from 1 on, and as many groups as ranks")
os.makedirs(options.into, exist_ok=True)
# The cores of a process follow from its place, or as a rank from its number on the machine, as Open
# MPI, MPICH or Slurm say it: without one all ranks would share the same cores.
BOUND = """
k=${2:-${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-$SLURM_LOCALID}}}
[ "$k" ] || { echo "--cores: the launcher does not say which rank of this machine a process is" >&2; exit 2; }
first=$(($1 * k)) last=$(($1 * k + $1 - 1))
shift 2
exec taskset -c $first-$last "$@"
"""


def start(folder, count, settings, place):
    command = [*options.mpirun.split(), "-n", str(count)] if count > 1 else []
    if options.cores:
        command += ["bash", "-c", BOUND, "bound", str(options.cores), str(place) if count == 1 else ""]
    command += [options.isobit, "train", options.config, "--threads", str(options.threads), "--no-plan", "-q"]
    settings = {
        "output_dir": folder,
        "training.max_steps": options.updates,
        "training.gradient_groups": groups,
        "training.logging_steps": 1,
        "eval.eval_strategy": "no",
    } | settings
    command += [f"--set={key}={value}" for key, value in settings.items()]
    return subprocess.Popen(command)


def train(number, run):
    """Folders, and seconds and waiting seconds of the updates of the slowest copy."""
    folders = [os.path.join(options.into, f"run-{number}-of-{run.ranks}-{copy}") for copy in range(run.copies)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    processes = [start(folder, run.ranks, run.settings, place) for place, folder in enumerate(folders)]
    if any([process.wait() for process in processes]):
        sys.exit(f"{processes[0].args} ended with {[process.returncode for process in processes]}")
    results = []
    for folder in folders:
        lines = [json.loads(line) for line in open(os.path.join(folder, "metrics.jsonl"))]
        # Lines of evaluations have a time too.
        timing = [line["timing"] for line in lines if "loss" in line and "seconds" in line.get("timing", {})][1:]
        results.append(([t["seconds"] for t in timing], [t.get("communication_s", 0.0) for t in timing]))
    return folders, *max(results, key=lambda result: statistics.median(result[0]))


first, differs = None, False
measured = [([], []) for _ in runs]
for _ in range(options.rounds):
    for number, run in enumerate(runs):
        folders, seconds, waiting = train(number, run)
        measured[number][0].extend(seconds)
        measured[number][1].extend(waiting)
        first = first or folders[0]
        diffs = [subprocess.run([options.isobit, "diff", first, folder], stdout=subprocess.DEVNULL) for folder in folders]
        is_same = all(diff.returncode == 0 for diff in diffs)
        differs |= not is_same
        shown = [round(s, 3) for s in seconds]
        print(f"{run}: {shown}, {'same bits' if is_same else 'DIFFERENT bits'}", file=sys.stderr, flush=True)
print("| ranks | devices | seconds an update, best (median) | waiting for messages | speed against the first, best (median) |")
print("|---|---|---|---|---|")
base = measured[0][0]
for run, (seconds, waiting) in zip(runs, measured):
    devices = f"{run.copies} unrelated processes" if run.copies > 1 else next(iter(run.settings.values()), "of the config")
    best, median = run.copies * min(base) / min(seconds), run.copies * statistics.median(base) / statistics.median(seconds)
    print(
        f"| {run.ranks} | {devices} | {min(seconds):.3f} ({statistics.median(seconds):.3f}) "
        f"| {statistics.median(waiting):.3f} | {best:.2f} ({median:.2f}) |"
    )
print("DIFFERENT bits" if differs else "All results are the same, bit for bit.")
sys.exit(1 if differs else 0)
