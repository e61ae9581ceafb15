"""Write the golden outputs: `python tests/golden/make.py`, with `src` on PYTHONPATH.

Run it only to add entries: existing values are those of the code before its redesign. Entries that are stored already
stay as they are, unless `--all` is given.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from entries import COMMANDS, GROUPS, one_thread, save_predictor  # noqa: E402


def compact(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays as they are stored: float32, except numbers that are compared bit for bit."""
    return {name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in values.items()}


def main() -> None:
    everything = "--all" in sys.argv
    for group, entries in GROUPS.items():
        path = HERE / f"{group}.npz"
        stored = dict(np.load(path)) if path.exists() and not everything else {}
        done = {name.split("::")[0] for name in stored}
        for name, compute in entries.items():
            if name not in done:
                values = compute()
                values = values if group == "draws" else compact(values)
                stored |= {f"{name}::{key}": value for key, value in values.items()}
        np.savez_compressed(path, **stored)
    path = HERE / "commands.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not everything else {}
    found |= {name: compute() for name, compute in COMMANDS.items() if name not in found}
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(re.sub(r"[^\s\"]*/golden\w+/", "", text), encoding="utf-8")  # paths of temporary files
    folder = HERE / "predictor"
    if everything or not folder.exists():
        with tempfile.TemporaryDirectory() as aside:
            save_predictor(Path(aside) / "model")
            folder.mkdir(exist_ok=True)
            for file in (Path(aside) / "model").iterdir():
                (folder / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    with one_thread():
        main()
