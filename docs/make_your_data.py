"""Update the command outputs in docs/your-data.md: `make your-data` (one minute).

Data of scikit-learn are written to CSV files in a temporary folder. Each `sh` block of the page runs there, and the
`text` block after it is replaced by what the commands print.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

PAGE = Path(__file__).resolve().parent / "your-data.md"
BLOCKS = re.compile(r"^```sh\n((?:(?!```).*\n)+)```\n\n```text\n(?:(?!```).*\n)*```", re.MULTILINE)


def write_files(folder: Path) -> None:
    """Write the tables and images of the page."""
    from PIL import Image
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

    rng = np.random.default_rng(0)
    data = load_breast_cancer(as_frame=True)
    frame = data.data.assign(diagnosis=data.target_names[data.target]).sample(frac=1, random_state=0)
    frame.loc[rng.random(len(frame)) < 0.04, "mean texture"] = np.nan
    unlabeled = frame.drop(columns="diagnosis")
    frame[:369].to_csv(folder / "patients.csv", index=False)
    frame[369:].to_csv(folder / "followed-up.csv", index=False)
    unlabeled[369:].to_csv(folder / "new.csv", index=False)
    wrong_units = unlabeled[369:].assign(**{"mean radius": 10 * unlabeled["mean radius"][369:]})
    wrong_units.to_csv(folder / "wrong-units.csv", index=False)
    diabetes = load_diabetes(as_frame=True, scaled=False).frame.rename(columns={"target": "progression"})
    diabetes = diabetes.sample(frac=1, random_state=0)
    diabetes[:-100].to_csv(folder / "diabetes.csv", index=False)
    diabetes[-100:].drop(columns="progression").to_csv(folder / "new-diabetes.csv", index=False)
    digits = load_digits()
    for k, (pixels, digit) in enumerate(zip(digits.images[:700], digits.target[:700], strict=True)):
        place = folder / "digits" / str(digit) if k < 600 else folder / "new-digits"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((15 * pixels).astype(np.uint8)).save(place / f"{k:04}.png")


def run_block(block: str, folder: Path) -> str:
    """Run the commands of a block in the folder and return what they print."""
    from neuboots.cli import main

    output = io.StringIO()
    for line in block.splitlines():
        print(line, file=sys.stderr)
        name, *arguments = shlex.split(line)
        if name == "head":
            print(pd.read_csv(folder / arguments[-1]).head(int(arguments[1])).to_string(index=False), file=output)
            continue
        with contextlib.chdir(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            if main(arguments):
                raise SystemExit(f"{line}: {output.getvalue()}")
    return output.getvalue().strip("\n")


def update(page: str, folder: Path) -> str:
    """Return the page with new outputs."""

    def replace(match: re.Match[str]) -> str:
        lines = [text.rstrip() for text in run_block(match[1], folder).splitlines()]
        return "```sh\n" + match[1] + "```\n\n```text\n" + "\n".join(lines) + "\n```"

    return BLOCKS.sub(replace, page)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "110"
    with tempfile.TemporaryDirectory() as scratch:
        write_files(Path(scratch))
        PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), Path(scratch)), encoding="utf-8")
