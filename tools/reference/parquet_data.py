#!/usr/bin/env python3
"""Writes the Parquet files that the tests of crates/training read, each with its rows as JSONL.

Needs pyarrow (written with 26.0.1) in a virtual environment outside the repository.
Example: python tools/reference/parquet_data.py
"""
import datetime
import json
import pathlib
import sys

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "crates/training/tests/fixtures/parquet"
CODECS = ["none", "snappy", "gzip", "brotli", "zstd", "lz4"]


def write(name, table, rows=None, **options):
    """One file; `rows` names the JSONL that holds the same rows, if it is not called like the file."""
    pq.write_table(table, FOLDER / f"{name}.parquet", **options)
    lines = [json.dumps(row, ensure_ascii=index % 2 == 0) for index, row in enumerate(table.to_pylist())]
    (FOLDER / f"{rows or name}.jsonl").write_text("\n".join(lines) + "\n")


def messages():
    """Conversations as data sets hold them, in every compression."""
    def turn(role, content, **more):
        return {"role": role, "content": content, "tool_calls": None, **more}

    call = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": None, "exact": True}}}]
    rows = [
        {"messages": [turn("user", "Grüße? 👍"), turn("assistant", "Ja.")], "tools": None, "id": 1},
        {"messages": [turn("system", "Be \"brief\".\n"), turn("user", "1+1?"), turn("assistant", "2 " * 40)], "tools": [], "id": None},
        {"messages": [turn("user", "add"), turn("assistant", None, tool_calls=call), turn("tool", "3")], "tools": None, "id": 3},
    ]
    table = pa.Table.from_pylist(rows * 3)
    for codec in CODECS:
        write(f"messages-{codec}", table, "messages", compression=codec)
    write("messages-groups", table, "messages", row_group_size=2, data_page_version="2.0", compression="zstd")
    write("messages-pages", table, "messages", data_page_size=1, write_batch_size=1, use_dictionary=False, write_page_checksum=True)


def pairs():
    """Texts in every encoding, beside columns that are of no use and have no form in JSON."""
    rows = [{"prompt": f"{i % 3}: what is {i}?", "completion": f" The number {i * i}."} for i in range(40)]
    table = pa.Table.from_pylist(rows)
    plain = {"use_dictionary": False, "compression": "snappy"}
    write("pairs-dictionary", table.set_column(0, "prompt", table["prompt"].dictionary_encode()), "pairs")
    write("pairs-lengths", table, "pairs", column_encoding="DELTA_LENGTH_BYTE_ARRAY", **plain)
    write("pairs-prefixes", table, "pairs", column_encoding="DELTA_BYTE_ARRAY", data_page_version="2.0", **plain)
    write("pairs-large", table.cast(pa.schema([("prompt", pa.large_string()), ("completion", pa.large_string())])), "pairs")
    more = table.append_column("when", pa.array([datetime.datetime(2025, 1, 1)] * 40))
    more = more.append_column("image", pa.array([b"\xff\x00"] * 40))
    pq.write_table(more, FOLDER / "pairs-beside.parquet")


def tokens():
    """Lists of numbers of several types, empty and null ones among them."""
    ids = [[1, 2, 3, 4], [5, 6], [], [7, 8, 9]]
    labels = [[-100, 2, 3, 4], None, [], [-100, -100, 9]]
    def table(width, label):
        return pa.table({"input_ids": pa.array(ids, pa.list_(width)), "labels": pa.array(labels, pa.list_(label))})
    write("tokens-32", table(pa.int32(), pa.int64()), "tokens")
    write("tokens-64", table(pa.int64(), pa.int16()), "tokens", use_dictionary=False, data_page_version="2.0",
          column_encoding="DELTA_BINARY_PACKED")
    write("tokens-unsigned", table(pa.uint32(), pa.int8()), "tokens", compression="none", use_compliant_nested_type=False)
    fixed = pa.array([[i, i + 1] for i in range(300)], pa.list_(pa.uint64(), 2))
    write("tokens-fixed", pa.table({"input_ids": fixed}), compression="zstd", data_page_size=64, write_batch_size=8)


def values():
    """Every kind of number."""
    kinds = {
        "float": pa.array([0.1, -0.0, None, 3.4e38], pa.float32()),
        "double": pa.array([0.1, 1e300, 5e-324, None], pa.float64()),
        "half": pa.array([1.5, None, 65504.0, -6e-8], pa.float16()),
        "large": pa.array([2**64 - 1, 0, None, 2**63], pa.uint64()),
        "small": pa.array([-128, 127, 0, None], pa.int8()),
        "yes": pa.array([True, None, False, True]),
        "nothing": pa.nulls(4),
    }
    table = pa.table({"text": ["a", "\0", "", "\u2028"], "chat_template_kwargs": pa.StructArray.from_arrays(list(kinds.values()), list(kinds))})
    write("values", table, use_dictionary=False)
    write("values-split", table, "values", use_dictionary=False, data_page_version="2.0", version="2.6", compression="lz4",
          column_encoding={f"chat_template_kwargs.{name}": "BYTE_STREAM_SPLIT" for name in ("float", "double", "half", "large", "small")})
    for name, column in {
        "timestamps": pa.array([datetime.datetime(2025, 1, 1)]),
        "bytes": pa.array([b"abc"]),
        "decimals": pa.array([1], pa.decimal128(5)),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "infinite": pa.array([float("inf")]),
    }.items():
        pq.write_table(pa.table({"text": column}), FOLDER / f"refused-{name}.parquet")


def hostile():
    """A file of 1 kB that stands for a terabyte, and one that is nested too deeply."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * (1 << 20), pa.int32()), pa.array(["x" * (1 << 20)]))
    pq.write_table(pa.table({"text": text}), FOLDER / "refused-growth.parquet", compression="zstd", row_group_size=1 << 20,
                   write_statistics=False, store_schema=False)
    kind = pa.int32()
    for _ in range(60):
        kind = pa.list_(kind)
    pq.write_table(pa.table({"messages": pa.array([None], kind)}), FOLDER / "refused-depth.parquet", store_schema=False)
    for path in FOLDER.glob("*.parquet"):
        assert path.stat().st_size < 12_000, f"{path} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    FOLDER.mkdir(parents=True, exist_ok=True)
    for make in (messages, pairs, tokens, values, hostile):
        make()
