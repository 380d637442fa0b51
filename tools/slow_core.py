#!/usr/bin/env python3
"""Takes a core away for 0.1 ms of every 0.17 until it is stopped: threads of unequal speed, for measuring beside it.

Needs root (it runs ahead of everything else on that core). Example: tools/slow_core.py 1 & isobit bench step --model tiny --batch 8 --seq 256 --threads 2
"""
import os, sys, time

os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
while True:
    end = time.perf_counter_ns() + 100_000
    while time.perf_counter_ns() < end:
        pass
    time.sleep(70e-6)
