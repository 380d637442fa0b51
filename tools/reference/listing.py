"""The table of the cases on disk: what each weighs and how near its closest routing decision is to a tie."""
import json

import writing


def show():
    total = 0
    print("| folder | mode | steps | targets | loss | margin | seed | kB |\n|---|---|---|---|---|---|---|---|")
    for path in sorted(writing.FIXTURES.glob("*/case.json")):
        case = json.loads(path.read_text())
        size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
        total += size
        margin = f"{case['routing_margin']:.1e}" if "routing_margin" in case else "-"
        print(f"| `{path.parent.name}` | {case['mode']} | {len(case.get('steps', [0]))} | {case['targets']} | {case['loss']['value']:.6f} "
              f"| {margin} | {case.get('seed', '-')} | {size / 1000:.0f} |")
    print(f"total {total / 1e6:.2f} MB")
