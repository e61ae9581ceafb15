"""The two forms of NeuBoots: the library's defaults, and the paper's Algorithm 1. What is claimed is asked of both.

What studies of classes share: rows in memory, nets and methods by name, scores and reliability.

What studies of images share: images made smaller, so that many nets can be trained on a CPU, and nets to match.

What studies of figures against a size share: as many steps at each size, small rows, lines, claims for every size.

epochs(n) = ⌈steps / ⌈n / batch⌉⌉
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.utils.data import DataLoader, Subset, TensorDataset

from neuboots.data import DatasetBundle, LazyDataset
from neuboots.data.dataset import TensorSource
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.methods import NeuBoots, create_method
from neuboots.metrics import ReliabilityCurve
from neuboots.nets import (
    MLP,
    DenseNet,
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
from neuboots.report.checks import Check, combine_checks, compare_groups
from neuboots.report.tables import MetricColumn
from neuboots_paper.study import Rows, RunContext

_TITLES = {"neuboots": "NeuBoots", "neuboots-paper": "NeuBoots by Algorithm 1"}


def neuboots_variants(methods: Sequence[str]) -> dict[str, str]:
    """Those among the methods, with a title for sentences.

    >>> neuboots_variants(("plain", "neuboots"))
    {'neuboots': 'NeuBoots'}
    """
    return {name: title for name, title in _TITLES.items() if name in methods}


if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
"""Section 4.1; with cosine annealing, which is a Recipe's default, and batches of 128."""

NUM_BINS = 15  # of reliability diagrams and of ECE

CLASS_COLUMNS = (
    MetricColumn("error", "error, %", 100, better="lower"),
    MetricColumn("ece", "ECE, %", 100, better="lower"),
    MetricColumn("nll", "NLL", digits=3, better="lower"),
    MetricColumn("brier", "Brier", digits=3, better="lower"),
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


def classifier(name: str, data: DatasetBundle) -> Callable[[], nn.Module]:
    """What makes the net of this name for a data set: `classifier("resnet-20", data)()`."""
    if name.startswith("mlp"):  # "mlp-200-200": the widths of the hidden layers
        size, widths = data.train[0][0].numel(), tuple(map(int, name.split("-")[1:]))
        return lambda: nn.Sequential(nn.Flatten(), MLP(size, data.num_classes, widths=widths))
    return partial(_NETS[name], data.num_classes, data.channels)


@lru_cache(maxsize=4)  # the units of one process share what they hold
def load_rows(part: Any, limit: int | None = None, seed: int = 0) -> Any:
    """A part's rows in memory, or so many drawn by the seed: read and decoded once, not at every epoch.

    A part with an augmentation keeps it; any other becomes a TensorDataset, which batches are cut from fastest.
    """
    size = len(part) if limit is None else min(limit, len(part))
    rows = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    if isinstance(part, LazyDataset) and part.augment is not None:
        read = part.source.read(part.take(rows).rows or ())
        return LazyDataset(TensorSource(*map(torch.stack, read)), part.transform, part.augment)
    return TensorDataset(*map(torch.cat, zip(*DataLoader(Subset(part, rows), batch_size=256), strict=True)))


# names of methods in the committed results, and their names in the registry
RENAMED = {"plain": "deterministic", "deep-ensemble-original": "adversarial-deep-ensemble"}


def make_method(name: str, **options: Any) -> Method:
    """The method of this name; "neuboots-paper" is Algorithm 1 with the paper's law, redrawn at each epoch."""
    if name == "neuboots-paper":
        return NeuBoots.paper(**options)
    return create_method(RENAMED.get(name, name), **options)


def class_scores(predictor: Predictor, test: Any, *, num_samples: int, seed: int = 0, batch_size: int = 256) -> Rows:
    """A row of figures ("scores") and a row for each bin of the reliability diagram ("bins")."""
    found = evaluate_calibration(
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


def reliability_plots(
    bins: Sequence[Mapping[str, Any]], by: Sequence[str], *, name: str = "reliability"
) -> "dict[str, Figure]":
    """A reliability diagram for each group of bins that agree in `by`, all seeds together: "reliability-plain", …

    The names are those that a table's `link="reliability-{method}"` gives.
    """
    from matplotlib.figure import Figure

    from neuboots.report.plots import plot_reliability

    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in bins:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    figures = {}
    for key, rows in groups.items():
        figure = Figure(figsize=(4.2, 3.8), layout="constrained")
        plot_reliability(figure.subplots(), {" ".join(map(str, key)): pool_bins(rows)})
        figures["-".join([name, *map(str, key)])] = figure
    return figures


def pool_bins(bins: Sequence[Mapping[str, Any]]) -> ReliabilityCurve:
    """The bins of several seeds as those of one diagram: means weighted by the inputs that fell into them."""
    count, confidence, accuracy = (torch.zeros(NUM_BINS, dtype=torch.float64) for _ in range(3))
    for row in bins:
        k = row["bin"]
        count[k] += row["count"]
        confidence[k] += row["count"] * row["confidence"]
        accuracy[k] += row["count"] * row["accuracy"]
    held = count.clamp(min=1)
    return ReliabilityCurve(confidence / held, accuracy / held, count.long())


def image_net(name: str, data: DatasetBundle) -> Callable[[], nn.Module]:
    """What makes the net of this name; "small-cnn/2" is a small-cnn that is given means over 2 × 2 pixels.

    "densenet-10" has no bottlenecks (Huang et al. 2017, k = 12, L = 10).
    """
    net, _, factor = name.partition("/")
    make: Callable[[], nn.Module] = classifier(net, data) if net != "densenet-10" else partial(_densenet10, data)
    return make if not factor else lambda: nn.Sequential(nn.AvgPool2d(int(factor)), make())


def _densenet10(data: DatasetBundle) -> nn.Module:
    return DenseNet(data.num_classes, data.channels, growth=12, blocks=(2, 2, 2), bottleneck=False, compression=1.0)


def net_title(name: str) -> str:
    """A net's name in words.

    >>> net_title("small-cnn/2"), net_title("resnet-18")
    ('small-cnn on images of 1/2 their side', 'resnet-18')
    """
    net, _, factor = name.partition("/")
    return f"{net} on images of 1/{factor} their side" if factor else net


def load_with_rows(bench: RunContext, name: str, n: int) -> DatasetBundle:
    """The set; where n asks for more rows to train on than are left, none are kept apart for validation."""
    data = bench.data(name)
    return data if n <= len(data.train) else bench.data(name, val_fraction=0.0)  # type: ignore[arg-type]


def prepare_split(
    data: DatasetBundle, part: str, *, like: DatasetBundle | None = None, shrink: int = 1, augment: bool = False
) -> LazyDataset:
    """A part as a net is given it: each pixel the mean of shrink × shrink, in the units of the set `like`, if any.

    A net that was trained on another set knows that set's normalisation alone.
    """
    own: LazyDataset = getattr(data, part)
    undo, again = data.standardizer, (like or data).standardizer

    def prepare(x: Tensor) -> Tensor:
        x = own.transform(x)
        x = x if undo == again else again(undo.inverse(x))  # type: ignore[misc, union-attr]
        return avg_pool2d(x, shrink) if shrink > 1 else x

    return replace(own, transform=prepare, augment=data.augmentation if augment else None)


@cache  # the units of one process share what they hold
def load_images(data: DatasetBundle, part: str, n: int | None = None, seed: int = 0, **options: Any) -> Any:
    """So many rows of `given(data, part, …)` in memory, drawn by the seed; all rows if there are fewer."""
    return load_rows(prepare_split(data, part, **options), n, seed)


if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]


def epochs_for(steps: int, n: int, batch_size: int) -> int:
    """The epochs that make at least so many steps: few points are gone through more often.

    >>> epochs_for(400, 100, 128), epochs_for(400, 3_000, 128)
    (400, 17)
    """
    return -(-steps // -(-n // batch_size))


def round_rows(rows: Rows, digits: int = 6) -> Rows:
    """Rows that take little room: numbers to so many digits after the point."""
    return {
        name: [
            {key: round(each, digits) if isinstance(each, float) else each for key, each in row.items()}
            for row in table
        ]
        for name, table in rows.items()
    }


def compare_everywhere(
    claim: str, rows: Sequence[Row], key: str, first: Row, second: Row, places: Sequence[Row], **options: Any
) -> Check:
    """Does the comparison hold at each of these places, such as {"n": 100}? `options` are those of `compare_with_bootstrap`."""
    return combine_checks(
        claim,
        [compare_groups(claim, rows, key, {**first, **place}, {**second, **place}, **options) for place in places],
    )


def plot_curves(
    ax: "Axes",
    rows: Sequence[Row],
    x: str,
    key: str,
    *,
    xlabel: str,
    label: str,
    scale: float = 1.0,
    by: str = "method",
) -> None:
    """scale × key against x, on a logarithmic axis: a line for each method, the mean and its interval over seeds."""
    from neuboots.report.plots import plot_learning_curves

    sizes, seeds = (sorted({row[name] for row in rows}) for name in (x, "seed"))
    found = {(row[by], row["seed"], row[x]): scale * row[key] for row in rows}
    names = dict.fromkeys(row[by] for row in rows)
    curves = {
        name: (sizes, torch.tensor([[found[name, seed, size] for size in sizes] for seed in seeds])) for name in names
    }
    plot_learning_curves(ax, curves, label=label)
    ax.set_xscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.set_xlabel(xlabel)
    if ax.get_ylim()[0] < 0:  # an interval over few seeds, of a figure that cannot be negative
        ax.set_ylim(bottom=0)
