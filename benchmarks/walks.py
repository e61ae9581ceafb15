"""Files of neuboots that run when a user calls the library: `python -m benchmarks.walks`.

Prints, in order of first use, every source file in which at least one function runs during

1. `NeuBoots().fit(net, data)` and `predictor.predict(x)`;
2. `neuboots fit` and `neuboots predict` on CSV files: a small and a larger classification, and a regression;

and the number of modules that `neuboots predict` imports. Code that runs on import does not count as a call.
"""

import io
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import neuboots
from neuboots import NeuBoots, TrainingConfig

ROOT = Path(neuboots.__file__).parents[1]


def record_files(function: Callable[[], object]) -> list[str]:
    """Source files of neuboots in which a function ran during `function()`, in order of first use.

    Args:
        function: The calls to follow.

    Returns:
        Paths relative to the source folder.
    """
    files: dict[str, None] = {}
    importing = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if event not in ("call", "return"):
            return
        if code.co_name == "<module>":
            importing += 1 if event == "call" else -1
        is_function = bool(code.co_flags & CO_OPTIMIZED)  # not a module or a class body
        if event == "call" and not importing and is_function and code.co_filename.startswith(str(ROOT)):
            files.setdefault(str(Path(code.co_filename).relative_to(ROOT)))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return list(files)


def fit_and_predict() -> None:
    """Fit a small classifier with NeuBoots and predict."""
    import torch
    from torch import nn

    x = torch.randn(64, 2)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    config = TrainingConfig(epochs=2, progress=False)
    NeuBoots().fit(net, (x, (x[:, 0] > 0).long()), config).predict(x)


def fit_and_predict_table(folder: Path, load: Callable[..., Any]) -> None:
    """Run `neuboots fit` and `neuboots predict` on a table that scikit-learn ships."""
    from neuboots.cli import main

    frame = load(as_frame=True).frame
    frame.to_csv(folder / "table.csv", index=False)
    frame.drop(columns="target").to_csv(folder / "new.csv", index=False)
    fit = ["fit", str(folder / "table.csv"), "--target", "target", "--out", str(folder / "model"), "--epochs", "2"]
    predict = ["predict", str(folder / "model"), str(folder / "new.csv"), "--out", str(folder / "predictions.csv")]
    with redirect_stdout(io.StringIO()):
        assert main(fit) == 0
        assert main(predict) == 0


def count_imports(folder: Path) -> list[str]:
    """Modules of neuboots that a process of `neuboots predict` imports."""
    command = [sys.executable, "-X", "importtime", "-m", "neuboots", "predict", str(folder / "model")]
    command += [str(folder / "new.csv"), "--out", str(folder / "again.csv")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = (line.rsplit("|", 1)[-1].strip() for line in run.stderr.splitlines() if line.startswith("import time:"))
    return sorted({name for name in modules if name.split(".")[0] in ("neuboots", "neuboots_paper")})


def main() -> None:
    """Print the walks and the imports of `neuboots predict`."""
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

    walks = {"NeuBoots().fit(net, data) → predict(x)": record_files(fit_and_predict)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for load in (load_breast_cancer, load_diabetes, load_wine):
            title = f"neuboots fit {load.__name__.removeprefix('load_')}.csv → neuboots predict"
            walks[title] = record_files(partial(fit_and_predict_table, folder, load))
        modules = count_imports(folder)
    for title, files in walks.items():
        print(f"{title}: {len(files)} files")
        print("".join(f"  {file}\n" for file in files))
    print(f"neuboots predict imports {len(modules)} modules of neuboots")
    print("".join(f"  {module}\n" for module in modules))


if __name__ == "__main__":
    main()
