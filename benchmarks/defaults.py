"""Which options should NeuBoots have by default? Measured, not guessed.

    python -m benchmarks.defaults --data-root FOLDER [--sets digits fashion_mnist:3000] [--seeds 0 1 2]
                                  [--variants NAME …]

Trains every variant on every set and seed, appends a row for each to benchmarks/defaults.jsonl (rows that are
there are not run again), and prints the table that docs/decisions/0002-defaults.md shows.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots import Dirichlet, NeuBoots, Plain, Recipe
from neuboots.metrics import brier, ece, error, nll
from neuboots.nets import SmallCNN

ROWS = Path(__file__).with_name("defaults.jsonl")
EPOCHS, TEST, B = 16, 2500, 100  # enough epochs that the plain net fits its training set
SETS = ["digits:1000", "fashion_mnist:3000", "cifar10:3000", "fashion_mnist:10000"]  # name:training images

VARIANTS = {
    "plain": Plain(),
    "paper: identity, c = 1, epoch": NeuBoots.paper(),
    "identity, c = 1, step": NeuBoots(law=Dirichlet(), redraw="step"),
    "identity, c = 1, sample": NeuBoots(law=Dirichlet(), redraw="sample"),
    "identity, c = 2, sample": NeuBoots(law=Dirichlet(2.0), redraw="sample"),
    "identity, c = 5, sample": NeuBoots(law=Dirichlet(5.0), redraw="sample"),
    "identity, c = 10, sample": NeuBoots(law=Dirichlet(10.0), redraw="sample"),
    "identity, c = 5, step": NeuBoots(law=Dirichlet(5.0), redraw="step"),
    "identity, c = 5, step, warm-up half": NeuBoots(law=Dirichlet(5.0), redraw="step", warmup=EPOCHS // 2),
    "identity, c = 5, sample, warm-up half": NeuBoots(law=Dirichlet(5.0), redraw="sample", warmup=EPOCHS // 2),
    "exp, c = 1, step": NeuBoots(law=Dirichlet(), link="exp", redraw="step"),
    "exp, c = 1, sample": NeuBoots(law=Dirichlet(), link="exp", redraw="sample"),
}


def load_set(name: str, root: Path) -> tuple[TensorDataset, Tensor, Tensor]:
    """Train part, test inputs, test labels; pixels standardised by the train part."""
    name, train = name.split(":")
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
    data, x, y = load_set(name, root)
    channels = data.tensors[0].shape[1]
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
    recipe = Recipe(epochs=EPOCHS, batch_size=128, optimizer=optimizer, seed=seed, progress=False)
    began = time.perf_counter()
    make_net = partial(SmallCNN, channels, int(y.max()) + 1, widths=(16, 32, 64, 128, 128))
    predictor = VARIANTS[variant].fit(make_net, data, recipe)
    seconds = time.perf_counter() - began
    probs = torch.cat([predictor.summarize(part, B).probs for part in x.split(500)])
    figures = {f.__name__: float(f(probs, y)) for f in (error, ece, nll, brier)}
    return {"set": name, "variant": variant, "seed": seed, "seconds": round(seconds, 1), **figures}


def table(rows: list[dict[str, object]]) -> str:
    """Mean ± standard error over seeds; differences from the plain net are paired by seed."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        lines += [f"**{name}**", ""]
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
    error_of_mean = float(tensor.std() / len(values) ** 0.5) if len(values) > 1 else float("nan")
    return f"{float(tensor.mean()):.{digits}f} ± {error_of_mean:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("."))
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    done = {(row["set"], row["variant"], row["seed"]) for row in rows}
    for seed in args.seeds:
        for name in args.sets:
            for variant in args.variants:
                if (name, variant, seed) not in done:
                    rows.append(run(name, variant, seed, args.data_root))
                    with ROWS.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print(rows[-1], flush=True)
    print(f"command: python -m benchmarks.defaults; {EPOCHS} epochs, {TEST} test images (digits: 797), B = {B}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
