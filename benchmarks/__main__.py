"""Benchmarks of speed and memory as ratios within one run, with bounds.

    python -m benchmarks [--only resnet mlp memory pixels data training members drawing dropout influence
                                 fit predict import]
                         [--repeats 9] [--out FILE] [--quick]

Prints a table, writes the same as JSON and ends with exit code 1 if a bound does not hold.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.measure import SEED, Row, Scale
from benchmarks.topics import TOPICS
from neuboots.serialization import write_text

RESULTS = Path(__file__).with_name("results.json")


def table(rows: Sequence[Row]) -> str:
    """Format the rows as plain text."""
    outcomes = {True: "yes", False: "NO", None: ""}
    lines = [("", "ratio", "bound", "holds", "whole runs", "")]
    for row in rows:
        whole = "" if row.whole_runs is None else f"{row.whole_runs:.3f}"
        lines.append((row.name, f"{row.ratio:.3f}", row.bound, outcomes[row.holds], whole, row.note))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(padded)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TOPICS, default=list(TOPICS), metavar="NAME")
    parser.add_argument("--repeats", type=int, help="interleaved runs of each, of which the minimum counts (9)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; no bounds")
    args = parser.parse_args(argv)
    if args.repeats is not None and args.repeats < 1:
        parser.error(f"got --repeats {args.repeats}; expected at least 1")
    scale = Scale(args.repeats or (1 if args.quick else 9), args.quick)
    rows: list[Row] = []
    for name in args.only:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        torch.manual_seed(SEED)
        rows += TOPICS[name](scale)
    if args.quick:  # bounds do not apply to tiny sizes
        rows = [replace(row, at_most=None, at_least=None) for row in rows]
    print(table(rows))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *argv]),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seed": SEED,
        **asdict(scale),
    }
    content = about | {"rows": [asdict(row) | {"holds": row.holds} for row in rows]}
    write_text(args.out, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
