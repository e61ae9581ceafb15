"""Estimators against scikit-learn's MLPs, and `neuboots predict` on a file of a million rows.

    python -m benchmarks.tabular MODEL FILE OUT

answers the rows of FILE with the model as the command does, and prints the bytes by which the process grew at its peak
beyond what it held with torch alone.
"""

import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import measure
from benchmarks.measure import SEED, Row, Scale, Watch, interleave
from benchmarks.memory import resident

COLUMNS, B = 20, 100
ROUNDS = 3  # over a file of a million rows each


def fit(scale: Scale) -> list[Row]:
    """Whole fits of the same net for as many epochs; ours hold rows out, and calibrate on them."""
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    from neuboots.estimators import NeuBootsClassifier, NeuBootsRegressor

    n, epochs, widths = (200, 2, (8, 8)) if scale.quick else (10_000, 30, (100, 100))
    x, numbers = _made(n, SEED)
    classes = np.digitize(numbers, np.quantile(numbers, [1 / 3, 2 / 3]))
    ours = {"epochs": epochs, "patience": epochs, "widths": widths, "random_state": SEED}
    theirs = {
        "max_iter": epochs, "n_iter_no_change": epochs, "hidden_layer_sizes": widths, "random_state": SEED,
    }  # fmt: skip
    makers: dict[str, tuple[Callable[[], object], np.ndarray]] = {
        "NeuBootsRegressor": (partial(NeuBootsRegressor, **ours), numbers),
        "MLPRegressor": (partial(MLPRegressor, **theirs), numbers),
        "NeuBootsClassifier": (partial(NeuBootsClassifier, **ours), classes),
        "MLPClassifier": (partial(MLPClassifier, **theirs), classes),
    }

    def run(name: str) -> None:
        make, y = makers[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Maximum iterations", category=UserWarning)
            fitted = make().fit(x, y)  # type: ignore[attr-defined]
        assert len(fitted.loss_curve_) == epochs, "nobody stops early"

    watch = Watch()
    series = interleave({name: watch.timed(partial(run, name)) for name in makers}, scale.repeats)
    title = f"fit, {n:,} × {COLUMNS}, MLP {' × '.join(map(str, widths))}, {epochs} epochs"
    return [
        Row(f"{title}: {mine} / {other}", series.ratio(mine, other), at_most=2.0)
        for mine, other in (("NeuBootsRegressor", "MLPRegressor"), ("NeuBootsClassifier", "MLPClassifier"))
    ]


def predict(scale: Scale) -> list[Row]:
    """The command over a file, with B replicates and with one net; and a loop that reads, passes and writes alone."""
    n = 500 if scale.quick else 1_000_000
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        big, small = home / "big.csv", home / "small.csv"
        write_table(big, n, SEED, labelled=False)
        write_table(small, 400 if scale.quick else 4_000, SEED + 1, labelled=True)
        for task in ("regression", "classification"):
            rows += _of_task(task, small, big, home, scale, f"predict, {n:,} × {COLUMNS}, {task}")
    return rows


def _of_task(task: str, small: Path, big: Path, home: Path, scale: Scale, title: str) -> list[Row]:
    from neuboots.app import load_model
    from neuboots.app.tabular import fit_table

    target = "number" if task == "regression" else "class"
    ignore = ["class" if task == "regression" else "number"]
    folders = {}
    for method in ("neuboots", "deterministic"):
        folders[method] = home / f"{task}-{method}"
        fit_table(
            small, target, ignore=ignore, method=method, epochs=2 if scale.quick else 10, progress=False
        ).save(folders[method])  # fmt: skip
    out = home / "out.csv"
    runs: dict[str, Callable[[], object]] = {
        "replicates": partial(answer, folders["neuboots"], big, out),
        "plain": partial(answer, folders["deterministic"], big, out),
        "bare": partial(pass_alone, load_model(folders["deterministic"]), big, out),
    }
    watch = Watch()
    series = interleave({name: watch.timed(run) for name, run in runs.items()}, min(ROUNDS, scale.repeats))
    seconds = min(part.whole for part in series.runs["replicates"])
    grown = measure.run_python("-m", "benchmarks.tabular", str(folders["neuboots"]), str(big), str(out))[0]
    return [
        Row(
            f"{title}, B = {B}: the command / the same with the plain net", series.ratio("replicates", "plain"),
            at_most=3.0, note=f"{seconds:.1f} s",
        ),
        Row(
            f"{title}, B = {B}: the command / read, plain net in single precision, write",
            series.ratio("replicates", "bare"),
        ),
        Row(f"{title}, B = {B}: peak memory in GiB", grown / 2**30, at_most=1.0),
    ]  # fmt: skip


def answer(model: Path, file: Path, out: Path) -> None:
    """As `neuboots predict MODEL FILE --out OUT` does."""
    from neuboots.cli.models import Predict

    with redirect_stdout(io.StringIO()):
        Predict(str(model), str(file), out=str(out), num_samples=B, json=True).run()


@torch.no_grad()
def pass_alone(model: object, file: Path, out: Path) -> None:
    """The plain net's pass with nothing around it: the same reader and writer, one column of predictions."""
    from neuboots.app.model import open_writer
    from neuboots.app.tabular import TabularModel
    from neuboots.data.tabular import TableFile

    assert isinstance(model, TabularModel)
    net, schema = model.predictor.module.float().eval(), model.schema
    with open_writer(str(out), "csv") as write:
        for frame in TableFile.open(file).frames(schema.columns):
            z = net(schema.encode(frame))
            write({"row": frame.index.to_numpy(), "prediction": (z.argmax(1) if model.classes else z[:, 0]).numpy()})


def _made(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """x (n, 20) and a number that depends on some of its columns, with noise (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, COLUMNS))
    return x, x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) + 0.3 * rng.normal(size=n)


def write_table(file: Path, n: int, seed: int, *, labelled: bool) -> None:
    """n rows of made-up numbers to four digits as CSV, with a number and a class to learn if it is labelled."""
    import pyarrow
    import pyarrow.csv

    x, y = _made(n, seed)
    columns: dict[str, np.ndarray] = {f"x{k}": x[:, k].round(4) for k in range(COLUMNS)}
    if labelled:
        columns |= {"number": y.round(4), "class": np.array(["low", "middle", "high"])[np.digitize(y, [-0.5, 0.5])]}
    pyarrow.csv.write_csv(pyarrow.table(columns), file)


def main() -> None:
    before = resident("VmRSS")
    answer(*map(Path, sys.argv[1:]))
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main()
