"""What the library claims of speed and memory, measured as ratios inside one run.

    python -m benchmarks [--only resnet mlp memory pixels data training members drawing dropout influence
                                 fit predict import]
                         [--repeats 9] [--out FILE] [--quick]

Prints a table, writes the same as JSON and ends with exit code 1 if a bound does not hold.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.row import SEED, Row, Scale
from benchmarks.rows import TOPICS

RESULTS = Path(__file__).with_name("results.json")


def table(rows: Sequence[Row]) -> str:
    """Plain text: name, measured ratio, bound, whether it holds; the ratio of whole runs and a note."""
    verdicts = {True: "yes", False: "NO", None: ""}
    lines = [("", "ratio", "bound", "holds", "whole runs", "")]
    for row in rows:
        whole = "" if row.whole_runs is None else f"{row.whole_runs:.3f}"
        lines.append((row.name, f"{row.ratio:.3f}", row.bound, verdicts[row.holds], whole, row.note))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(padded)


def write(path: Path, content: dict[str, Any]) -> None:
    """Aside first, then renamed: a run cut short leaves the old file as it was."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    aside.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TOPICS, default=list(TOPICS), metavar="NAME")
    parser.add_argument("--repeats", type=int, help="interleaved runs of each, of which the best counts (9)")
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
    if args.quick:  # what tiny sizes show is no verdict
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
    write(args.out, about | {"rows": [asdict(row) | {"holds": row.holds} for row in rows]})
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
