#!/usr/bin/env python3
"""Writes the fixtures of crates/models/tests: tiny random models with what transformers and peft make of them.

Needs torch, transformers and peft, in a virtual environment outside the repository; README.md has the versions and the layout.
Example: python tools/reference/make_fixtures.py            (all cases)
         python tools/reference/make_fixtures.py qwen2-base  (only the cases named)
         python tools/reference/make_fixtures.py --list      (the table of the cases on disk)
"""
import sys

sys.dont_write_bytecode = True
import writing  # first: it keeps the libraries off the network

import dense
import families  # its cases join those of `sparse`
import listing
import quantized
import sparse
import torch
import transformers
import vectors


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    wanted = sys.argv[1:]
    if "--list" in wanted:
        return listing.show()
    for table, make in (*dense.TABLES, *sparse.TABLES, *quantized.TABLES):
        for name in table:
            if not wanted or name in wanted:
                make(name)
    writing.write_json(writing.FIXTURES / "optimizer.json", vectors.optimizer())
    writing.write_json(writing.FIXTURES / "schedules.json", vectors.schedules())


if __name__ == "__main__":
    main()
