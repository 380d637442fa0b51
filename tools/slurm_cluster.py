#!/usr/bin/env python3
"""A Slurm cluster on this machine, for as long as a command runs.

Every node is a host of its own as far as its processes can tell: namespaces for network, host name,
processes, shared memory and mounts, joined by virtual cables. Nodes share the disk. Daemons, nodes
and cables are gone when this program ends, however it ends; it leaves no files.

Needs: root, and Debian's packages: apt install slurmctld slurmd slurm-client munge iproute2
Example: tools/slurm_cluster.py --nodes 2 --cpus 2 -- srun -N 2 -n 4 --mpi=pmix isobit train run.toml
The command, or else a shell, runs on a host `head`, where slurmctld is; the nodes are node1, node2
and so on. Inside, `kill -9 $(cat /run/cluster/node2.pid)` cuts the power of node2, and logs are in
/run/cluster; if the cluster does not start, their ends are printed. The exit code is that of the
command, or 1. With --cpus 4 Slurm takes a machine with two cores for one with four; --bind needs
real ones.
"""
import argparse
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=2)
parser.add_argument("--cpus", type=int, default=len(os.sched_getaffinity(0)), help="of each node")
parser.add_argument("--bind", action="store_true", help="task/affinity: tasks are bound to their cores")
parser.add_argument("--conf", action="append", default=[], help="a line for slurm.conf, e.g. KillWait=5")
parser.add_argument("--link", help="what a cable carries, as tc says it, e.g. 1gbit")
parser.add_argument("command", nargs="*", default=[os.environ.get("SHELL", "/bin/sh")])
options = parser.parse_args()
if not 1 <= options.nodes <= 100 or options.cpus < 1:
    parser.error("1 to 100 nodes of at least one CPU")
needed = ["slurmctld", "slurmd", "srun", "munged", "ip", "unshare", "setpriv", options.command[0]]
missing = [name for name in needed if not shutil.which(name)]
if missing or os.geteuid():
    parser.error(f"not found: {', '.join(missing)}" if missing else "only root may make hosts")

# Ctrl-C is for the command; a handler, unlike a signal that is ignored, is not inherited.
signal.signal(signal.SIGINT, lambda *_: None)
HOST = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
if os.environ.pop("SLURM_CLUSTER_HEAD", None) is None or os.getpid() != 1:
    # This program starts itself again as the first process of the head. When that ends, the kernel
    # ends all others; when this one ends, `unshare` is killed, and kills that one.
    again = ["setpriv", "--pdeathsig=KILL", *HOST, "--net", sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    head = subprocess.Popen(again, env={**os.environ, "SLURM_CLUSTER_HEAD": "1"})
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda *_: head.kill())
    code = head.wait()
    sys.exit(code if code >= 0 else 128 - code)

CLUSTER = pathlib.Path("/run/cluster")
NODES = [f"node{number}" for number in range(1, options.nodes + 1)]
ADDRESSES = {name: f"10.77.0.{number}" for number, name in enumerate(["head", *NODES], 1)}


def run(line):
    subprocess.run(line.split(), check=True)


def start(name, command):
    with open(CLUSTER / f"{name}.log", "w") as log:
        null = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=null, stdout=log, stderr=log, start_new_session=True)


def configuration():
    task = "task/affinity" if options.bind else "task/none"
    cores = f"CPUs={options.cpus} CoresPerSocket={options.cpus}"
    nodes = [f"NodeName={name} NodeAddr={ADDRESSES[name]} {cores}" for name in NODES]
    return "\n".join([
        "ClusterName=here", f"SlurmctldHost=head({ADDRESSES['head']})", "SlurmUser=root", "SlurmdUser=root",
        "AuthType=auth/munge", "MpiDefault=none", "ReturnToService=2",
        "StateSaveLocation=/run/cluster/state", "SlurmdSpoolDir=/run/local/spool", "TmpFS=/run/local",
        "SlurmctldPidFile=/run/cluster/slurmctld.pid", "SlurmdPidFile=/run/local/slurmd.pid",
        "SlurmdLogFile=/run/cluster/%n.log",
        # Control groups belong to the machine, not to a host of ours.
        "ProctrackType=proctrack/linuxproc", f"TaskPlugin={task}", "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU", "SlurmdParameters=config_overrides",
        *nodes, f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
        *options.conf, ""])


def begin():
    """The hosts, their cables and the daemons, until every node is idle."""
    # Of this host alone: mounts made here are not seen outside.
    for folder in ("/run", "/dev/shm", "/etc/slurm"):
        run(f"mount -t tmpfs tmpfs {folder}")
    for folder in ("/run/cluster/state", "/run/local", "/run/lock", "/run/munge"):
        os.makedirs(folder)
    hosts = CLUSTER / "hosts"
    names = {"localhost": "127.0.0.1", **ADDRESSES}
    hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    run(f"mount --bind {hosts} /etc/hosts")
    pathlib.Path("/etc/slurm/slurm.conf").write_text(configuration())
    # slurmd looks for a version of control groups even if it uses none.
    pathlib.Path("/etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = CLUSTER / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)

    run("hostname head")
    run("ip link set lo up")
    run("ip link add switch type bridge")
    run("ip link set switch up")
    run(f"ip address add {ADDRESSES['head']}/24 dev switch")
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", "--seed-file=/run/munge/seed"]
    daemons = [start("munged", munged)]
    daemons.append(start("slurmctld", ["slurmctld", "-D", "-i"]))
    for name in NODES:
        run(f"ip netns add {name}")
        run(f"ip link add to-{name} type veth peer name eth0 netns {name}")
        run(f"ip link set to-{name} master switch up")
        run(f"ip -n {name} address add {ADDRESSES[name]}/24 dev eth0")
        run(f"ip -n {name} link set eth0 up")
        run(f"ip -n {name} link set lo up")
        if options.link:
            for place, cable in (("", f"to-{name}"), (f"-n {name}", "eth0")):
                run(f"tc {place} qdisc add dev {cable} root tbf rate {options.link} burst 256kb latency 50ms")
        own = "for folder in /dev/shm /run/local; do mount -t tmpfs tmpfs $folder; done"
        boot = f"hostname {name}; {own}; slurmd -D -N {name} & wait"
        node = start(name, ["ip", "netns", "exec", name, *HOST, "sh", "-c", boot])
        daemons.append(node)
        (CLUSTER / f"{name}.pid").write_text(f"{node.pid}\n")
    deadline = time.monotonic() + 60
    state = ["sinfo", "--noheader", "--Node", "--format=%T"]
    while subprocess.run(state, capture_output=True, text=True).stdout.split() != ["idle"] * len(NODES):
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if ended:
            raise ChildProcessError(f"{' '.join(ended[0])} has ended")
        if time.monotonic() > deadline:
            raise TimeoutError("the nodes are not ready after a minute")
        time.sleep(0.2)


try:
    begin()
except (OSError, subprocess.CalledProcessError) as error:
    print(f"the cluster does not start: {error}", file=sys.stderr)
    for log in sorted(CLUSTER.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
    sys.exit(1)
code = subprocess.run(options.command).returncode
sys.exit(code if code >= 0 else 128 - code)
