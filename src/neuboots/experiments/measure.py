"""What studies of classes share: rows in memory, nets and methods by name, scores and reliability."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from neuboots.data import DataSet, Part
from neuboots.data.parts import Tensors
from neuboots.experiments.study import Rows
from neuboots.methods import METHODS, NeuBoots
from neuboots.metrics import ReliabilityCurve
from neuboots.nets import (
    MLP,
    SmallCNN,
    densenet22,
    densenet40,
    densenet100,
    resnet8,
    resnet18,
    resnet20,
    resnet34,
    resnet110,
)
from neuboots.prediction import Method, Predictor
from neuboots.report.tables import Column
from neuboots.tasks.calibration import calibration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
"""Section 4.1; with cosine annealing, which is a Recipe's default, and batches of 128."""

NUM_BINS = 15  # of reliability diagrams and of ECE

CLASS_COLUMNS = (
    Column("error", "error, %", 100, better="lower"),
    Column("ece", "ECE, %", 100, better="lower"),
    Column("nll", "NLL", digits=3, better="lower"),
    Column("brier", "Brier", digits=3, better="lower"),
)

_NETS: dict[str, Callable[[int, int], nn.Module]] = {  # of classes and channels
    "resnet-8": resnet8,
    "resnet-18": resnet18,
    "resnet-20": resnet20,
    "resnet-34": resnet34,
    "resnet-110": resnet110,
    "densenet-22": densenet22,
    "densenet-40": densenet40,
    "densenet-100": densenet100,
    "small-cnn": lambda classes, channels: SmallCNN(channels, classes, widths=(16, 32, 64)),
}


def classifier(name: str, data: DataSet) -> Callable[[], nn.Module]:
    """What makes the net of this name for a data set: `classifier("resnet-20", data)()`."""
    if name.startswith("mlp"):  # "mlp-200-200": the widths of the hidden layers
        size, widths = data.train[0][0].numel(), tuple(map(int, name.split("-")[1:]))
        return lambda: nn.Sequential(nn.Flatten(), MLP(size, data.num_classes, widths=widths))
    return partial(_NETS[name], data.num_classes, data.channels)


@lru_cache(maxsize=4)  # the units of one process share what they hold
def held(part: Any, limit: int | None = None, seed: int = 0) -> Any:
    """A part's rows in memory, or so many drawn by the seed: read and decoded once, not at every epoch.

    A part with an augmentation keeps it; any other becomes a TensorDataset, which batches are cut from fastest.
    """
    size = len(part) if limit is None else min(limit, len(part))
    rows = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    if isinstance(part, Part) and part.augment is not None:
        read = part.source.read(part.take(rows).rows or ())
        return Part(Tensors(*map(torch.stack, read)), part.normalise, part.augment)
    return TensorDataset(*map(torch.cat, zip(*DataLoader(Subset(part, rows), batch_size=256), strict=True)))


def make_method(name: str, **options: Any) -> Method:
    """The method of this name; "neuboots-paper" is Algorithm 1 with the paper's law, redrawn at each epoch."""
    if name == "neuboots-paper":
        return NeuBoots.paper(**options)
    return METHODS[name].make(**options)


def class_scores(predictor: Predictor, test: Any, *, num_samples: int, seed: int = 0, batch_size: int = 256) -> Rows:
    """A row of figures ("scores") and a row for each bin of the reliability diagram ("bins")."""
    found = calibration(
        predictor, test, num_samples=num_samples, seed=seed, num_bins=NUM_BINS, batch_size=batch_size, progress=False
    )
    curve = found.reliability_curve
    bins = [
        {"bin": k, "confidence": confidence, "accuracy": accuracy, "count": count}
        for k, (confidence, accuracy, count) in enumerate(
            zip(curve.confidence.tolist(), curve.accuracy.tolist(), curve.count.tolist(), strict=True)
        )
        if count
    ]
    return {"scores": [found.figures], "bins": bins}


def reliability_figures(
    bins: Sequence[Mapping[str, Any]], by: Sequence[str], *, name: str = "reliability"
) -> "dict[str, Figure]":
    """A reliability diagram for each group of bins that agree in `by`, all seeds together: "reliability-plain", …

    The names are those that a table's `link="reliability-{method}"` gives.
    """
    from matplotlib.figure import Figure

    from neuboots.report.figures import draw_reliability

    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in bins:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    figures = {}
    for key, rows in groups.items():
        figure = Figure(figsize=(4.2, 3.8), layout="constrained")
        draw_reliability(figure.subplots(), {" ".join(map(str, key)): pooled(rows)})
        figures["-".join([name, *map(str, key)])] = figure
    return figures


def pooled(bins: Sequence[Mapping[str, Any]]) -> ReliabilityCurve:
    """The bins of several seeds as those of one diagram: means weighted by the inputs that fell into them."""
    count, confidence, accuracy = (torch.zeros(NUM_BINS, dtype=torch.float64) for _ in range(3))
    for row in bins:
        k = row["bin"]
        count[k] += row["count"]
        confidence[k] += row["count"] * row["confidence"]
        accuracy[k] += row["count"] * row["accuracy"]
    held = count.clamp(min=1)
    return ReliabilityCurve(confidence / held, accuracy / held, count.long())
