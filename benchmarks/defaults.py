"""Comparison of options of NeuBoots, on which its defaults are based.

    python -m benchmarks.defaults --data-root FOLDER [--sets digits:1000 energy] [--seeds 0 1 2]
                                  [--variants NAME …]

Trains every variant on every set and seed, appends a row for each to benchmarks/defaults.jsonl (rows that are
there are not run again), and writes the tables into docs/decisions/0002-defaults.md.
"""

import argparse
import csv
import itertools
import json
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import Deterministic, Method, NeuBoots, TrainingConfig
from neuboots.metrics import brier, ece, error, nll
from neuboots.nets import MLP, SmallCNN
from neuboots.weights import Dirichlet

ROWS = Path(__file__).with_name("defaults.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "decisions" / "0002-defaults.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->"
EPOCHS, TEST, B = 16, 2500, 100  # enough epochs that the plain net fits its training set
REGRESSION_EPOCHS = 100
REGRESSION_SETS = ["concrete", "energy", "yacht"]  # UCI; seed k is the k-th of the standard test splits
UNDERFIT = "fashion_mnist:6000:underfit"  # a smaller net for fewer epochs: it does not fit its training set
SETS = ["digits:1000", "fashion_mnist:3000", "cifar10:3000", "fashion_mnist:10000", UNDERFIT]  # name:training images

VARIANTS = {
    "plain": Deterministic(),
    "paper: identity, c = 1, epoch": NeuBoots.paper(),
    "identity, c = 1, step": NeuBoots(weight_distribution=Dirichlet(), resample="step"),
    "identity, c = 1, sample": NeuBoots(weight_distribution=Dirichlet(), resample="sample"),
    "identity, c = 2, sample": NeuBoots(weight_distribution=Dirichlet(2.0), resample="sample"),
    "identity, c = 5, sample": NeuBoots(),
    "identity, c = 10, sample": NeuBoots(weight_distribution=Dirichlet(10.0), resample="sample"),
    "identity, c = 5, step": NeuBoots(weight_distribution=Dirichlet(5.0), resample="step"),
    "identity, c = 5, step, warm-up half": NeuBoots(
        weight_distribution=Dirichlet(5.0), resample="step", warmup=EPOCHS // 2
    ),
    "identity, c = 5, sample, warm-up half": NeuBoots(
        weight_distribution=Dirichlet(5.0), resample="sample", warmup=EPOCHS // 2
    ),
    "exp, c = 1, step": NeuBoots(weight_distribution=Dirichlet(), link="exp", resample="step"),
    "exp, c = 1, sample": NeuBoots(weight_distribution=Dirichlet(), link="exp", resample="sample"),
}

REGRESSION = {
    "plain": Deterministic(loss=nn.MSELoss()),
    "paper: identity, c = 1, epoch": NeuBoots.paper(nn.MSELoss()),
    **{
        f"identity, c = {c}, sample": NeuBoots(loss=nn.MSELoss(), weight_distribution=Dirichlet(float(c)))
        for c in (1, 5, 20, 100)
    },
}


def load_set(name: str, root: Path) -> tuple[TensorDataset, Tensor, Tensor]:
    """Train part, test inputs, test labels; pixels standardised by the train part."""
    name, train = name.split(":")[:2]
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x = torch.tensor(bunch.images, dtype=torch.float32)[:, None]
        y = torch.tensor(bunch.target)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x_train, y_train, x_test, y_test = (
            x[order[: int(train)]],
            y[order[: int(train)]],
            x[order[int(train) :]],
            y[order[int(train) :]],
        )
    else:
        (x_train, y_train), (x_test, y_test) = (
            read_images(root / name / "data" / f"{part}-00000-of-00001.parquet", count)
            for part, count in (("train", int(train)), ("test", TEST))
        )
    mean, std = x_train.mean((0, 2, 3), keepdim=True), x_train.std((0, 2, 3), keepdim=True)
    return TensorDataset((x_train - mean) / std, y_train), (x_test - mean) / std, y_test


def read_images(path: Path, count: int) -> tuple[Tensor, Tensor]:
    import io

    import numpy as np
    import pyarrow.parquet as pq
    from PIL import Image

    table = pq.read_table(path).to_pydict()
    images = next(column for column in table.values() if isinstance(column[0], dict))
    labels = torch.tensor(next(column for column in table.values() if isinstance(column[0], int)))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:count]
    pixels = [np.asarray(Image.open(io.BytesIO(images[i]["bytes"]))) for i in order.tolist()]
    x = torch.tensor(np.stack(pixels), dtype=torch.float32)
    return (x[:, None] if x.ndim == 3 else x.movedim(-1, 1)) / 255, labels[order]


def run(name: str, variant: str, seed: int, root: Path) -> dict[str, object]:
    began = time.perf_counter()
    if name in REGRESSION_SETS:
        figures = run_regression(name, REGRESSION[variant], seed, root)
    else:
        figures = run_classification(name, VARIANTS[variant], seed, root)
    seconds = round(time.perf_counter() - began, 1)
    return {"set": name, "variant": variant, "seed": seed, "seconds": seconds, **figures}


def run_classification(name: str, method: Method, seed: int, root: Path) -> dict[str, float]:
    data, x, y = load_set(name, root)
    channels = data.tensors[0].shape[1]
    lr, epochs, widths = (0.1, 12, (16, 32, 128)) if name == UNDERFIT else (0.05, EPOCHS, (16, 32, 64, 128, 128))
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.9, weight_decay=5e-4)
    config = TrainingConfig(epochs=epochs, batch_size=128, optimizer=optimizer, seed=seed, progress=False)
    model = partial(SmallCNN, channels, int(y.max()) + 1, widths=widths)
    predictor = method.fit(model, data, config)
    probs = torch.cat([predictor.summarize(part, B).probs for part in x.split(500)])
    return {f.__name__: float(f(probs, y)) for f in (error, ece, nll, brier)}


def run_regression(name: str, method: Method, seed: int, root: Path) -> dict[str, float]:
    """Root mean squared error and mean std of the band, in the target's units."""
    with (root / "uci" / f"{name}.csv").open() as file:
        names, *lines = csv.reader(file)
    values = torch.tensor([[float(cell) for cell in line] for line in lines])
    test = torch.zeros(len(values), dtype=torch.bool)
    test[json.loads((root / "uci" / f"{name}.test_splits.json").read_text())[str(seed)]] = True
    mean, std = values[~test].mean(0), values[~test].std(0).clamp_min(1e-8)
    target = names.index("y")
    inputs = [i for i in range(len(names)) if i != target]
    scaled = (values - mean) / std
    data = TensorDataset(scaled[~test][:, inputs], scaled[~test][:, target])
    config = TrainingConfig(
        epochs=REGRESSION_EPOCHS,
        batch_size=64,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        seed=seed,
        progress=False,
    )
    predictor = method.fit(partial(MLP, len(inputs), 1, widths=(100, 100)), data, config)
    prediction = predictor.predict(scaled[test][:, inputs], B)
    errors = prediction.mean[:, 0] - scaled[test][:, target]
    scale = float(std[target])
    return {"rmse": scale * float(errors.square().mean().sqrt()), "band": scale * float(prediction.std.mean())}


def regression_table(rows: list[dict[str, object]]) -> str:
    lines = ["| set | variant | seeds | RMSE | mean std of the band |", "| --- | --- | --- | --- | --- |"]
    for name, variant in itertools.product(REGRESSION_SETS, REGRESSION):
        mine = [row for row in rows if row["set"] == name and row["variant"] == variant]
        if mine:
            cells = [spread([float(row[key]) for row in mine], 3) for key in ("rmse", "band")]
            lines.append(f"| {name} | {variant} | {len(mine)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, object]]) -> str:
    """Mean ± standard error over seeds; differences from the plain net are paired by seed."""
    lines = []
    for name in [name for name in SETS if any(row["set"] == name for row in rows)]:
        title, images, *further = name.split(":")
        lines += [f"**{', '.join([title, f'{int(images):,} training images', *further])}**", ""]
        lines += ["| variant | seeds | error % | ECE % | NLL | Brier % | Δ error % (paired) | Δ NLL (paired) |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        plain = {row["seed"]: row for row in rows if row["set"] == name and row["variant"] == "plain"}
        for variant in VARIANTS:
            mine = [row for row in rows if row["set"] == name and row["variant"] == variant]
            if not mine:
                continue
            cells = [
                spread([factor * float(row[key]) for row in mine], digits)
                for key, factor, digits in (
                    ("error", 100, 2),
                    ("ece", 100, 2),
                    ("nll", 1, 3),
                    ("brier", 100, 1),
                )
            ]
            paired = [row for row in mine if row["seed"] in plain]
            for key, factor, digits in (("error", 100, 2), ("nll", 1, 3)):
                gaps = [factor * (float(row[key]) - float(plain[row["seed"]][key])) for row in paired]
                cells.append(spread(gaps, digits) if variant != "plain" and gaps else "–")
            lines.append(f"| {variant} | {len(mine)} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def spread(values: list[float], digits: int) -> str:
    tensor = torch.tensor(values, dtype=torch.float64)
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{float(tensor.mean()):.{digits}f} ± {float(tensor.std()) / len(values) ** 0.5:.{digits}f}"


def page_with(text: str, rows: list[dict[str, object]]) -> str:
    """The page with its tables made anew from the rows."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table(rows) + "\n" + regression_table(rows) + "\n" + END + after


def read_rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("."))
    parser.add_argument("--sets", nargs="*", default=SETS + REGRESSION_SETS)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    rows = read_rows()
    done = {(row["set"], row["variant"], row["seed"]) for row in rows}
    jobs = [
        (seed, name, variant)
        for seed, name in itertools.product(args.seeds, args.sets)
        for variant in (REGRESSION if name in REGRESSION_SETS else args.variants)
    ]
    for seed, name, variant in jobs:
        if (name, variant, seed) not in done:
            rows.append(run(name, variant, seed, args.data_root))
            with ROWS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    print(table(rows) + regression_table(rows))
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
