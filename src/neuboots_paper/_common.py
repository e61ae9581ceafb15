"""Helpers that several studies share: nets and methods by name, rows in memory, scores, and plots over sizes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.utils.data import DataLoader, Subset, TensorDataset

from neuboots.data import DatasetBundle, LazyDataset
from neuboots.data.dataset import TensorSource
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.methods import NeuBoots, create_method, find_method
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
from neuboots.report.checks import Check
from neuboots_paper import baselines  # noqa: F401 -- registers its methods
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import Rows, RunContext
from neuboots_paper.tables import MetricColumn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

_TITLES = {"neuboots": "NeuBoots", "neuboots-paper": "NeuBoots by Algorithm 1"}


def neuboots_variants(methods: Sequence[str]) -> dict[str, str]:
    """Titles of the two variants of NeuBoots among the methods: the library's defaults, and the paper's Algorithm 1.

    Example:
        >>> neuboots_variants(("deterministic", "neuboots"))
        {'neuboots': 'NeuBoots'}
    """
    return {name: title for name, title in _TITLES.items() if name in methods}


PAPER_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
"""Optimizer of section 4.1; the paper also has cosine annealing, which is the default, and batches of 128."""

NUM_BINS = 15  # of reliability diagrams and ECE

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
    """Factory of the net of this name for a dataset; "mlp-200-200" has two hidden layers of 200 units."""
    if name.startswith("mlp"):
        size, widths = data.train[0][0].numel(), tuple(map(int, name.split("-")[1:]))
        return lambda: nn.Sequential(nn.Flatten(), MLP(size, data.num_classes, widths=widths))
    return partial(_NETS[name], data.num_classes, data.channels)


@lru_cache(maxsize=4)  # shared by the jobs of one process
def load_rows(split: Any, limit: int | None = None, seed: int = 0) -> Any:
    """Load a split, or `limit` random rows of it, into memory, so that images are decoded once and not every epoch.

    A split with an augmentation keeps it; any other becomes a TensorDataset.
    """
    size = len(split) if limit is None else min(limit, len(split))
    rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    if isinstance(split, LazyDataset) and split.augment is not None:
        read = split.source.read(split.take(rows).rows or ())
        return LazyDataset(TensorSource(*map(torch.stack, read)), split.transform, split.augment)
    return TensorDataset(*map(torch.cat, zip(*DataLoader(Subset(split, rows), batch_size=256), strict=True)))


def make_method(name: str, *, members: int | None = None, **options: Any) -> Method:
    """Create a method by name, with K = `members` if it has members; "neuboots-paper" is the paper's Algorithm 1."""
    if name == "neuboots-paper":
        return NeuBoots.paper(**options)
    if members is not None and hasattr(find_method(name).make, "num_members"):
        options["num_members"] = members
    return create_method(name, **options)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that sums and their rounding do not depend on the number of cores or workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def class_scores(predictor: Predictor, test: Any, *, num_samples: int, seed: int = 0, batch_size: int = 256) -> Rows:
    """Rows of metrics ("scores") and of the bins of the reliability diagram ("bins")."""
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
    return {"scores": [found.metrics], "bins": bins}


def reliability_plots(
    bins: Sequence[Mapping[str, Any]], by: Sequence[str], *, name: str = "reliability"
) -> "dict[str, Figure]":
    """Reliability diagrams over all seeds, one for each group of bins that agree in `by`.

    Their names match the links of a table with `link="reliability-{method}"`.
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
    """Pool the reliability bins of several seeds: means weighted by the number of inputs."""
    count, confidence, accuracy = (torch.zeros(NUM_BINS, dtype=torch.float64) for _ in range(3))
    for row in bins:
        k = row["bin"]
        count[k] += row["count"]
        confidence[k] += row["count"] * row["confidence"]
        accuracy[k] += row["count"] * row["accuracy"]
    total = count.clamp(min=1)
    return ReliabilityCurve(confidence / total, accuracy / total, count.long())


def image_net(name: str, data: DatasetBundle) -> Callable[[], nn.Module]:
    """Factory of the net of this name; "small-cnn/2" averages its input over 2 × 2 pixels first.

    "densenet-10" has no bottlenecks (Huang et al. 2017, k = 12, L = 10).
    """
    net, _, factor = name.partition("/")
    make: Callable[[], nn.Module] = classifier(net, data) if net != "densenet-10" else partial(_densenet10, data)
    return make if not factor else lambda: nn.Sequential(nn.AvgPool2d(int(factor)), make())


def _densenet10(data: DatasetBundle) -> nn.Module:
    return DenseNet(data.num_classes, data.channels, growth=12, blocks=(2, 2, 2), bottleneck=False, compression=1.0)


def net_title(name: str) -> str:
    """Title of a net of `image_net`.

    Example:
        >>> net_title("small-cnn/2"), net_title("resnet-18")
        ('small-cnn on images of 1/2 their side', 'resnet-18')
    """
    net, _, factor = name.partition("/")
    return f"{net} on images of 1/{factor} their side" if factor else net


def load_with_rows(context: RunContext, name: str, n: int) -> DatasetBundle:
    """Load a dataset, without a validation split if n training rows are more than the training split has."""
    data = context.load_data(name)
    return data if n <= len(data.train) else context.load_data(name, val_fraction=0.0)  # type: ignore[arg-type]


def prepare_split(
    data: DatasetBundle, split: str, *, reference: DatasetBundle | None = None, shrink: int = 1, augment: bool = False
) -> LazyDataset:
    """A split whose images are averaged over shrink × shrink pixels and standardized as those of `reference`."""
    own: LazyDataset = getattr(data, split)
    undo, again = data.standardizer, (reference or data).standardizer

    def prepare(x: Tensor) -> Tensor:
        x = own.transform(x)
        x = x if undo == again else again(undo.inverse(x))  # type: ignore[misc, union-attr]
        return avg_pool2d(x, shrink) if shrink > 1 else x

    return replace(own, transform=prepare, augment=data.augmentation if augment else None)


@cache  # shared by the jobs of one process
def load_images(data: DatasetBundle, split: str, n: int | None = None, seed: int = 0, **options: Any) -> Any:
    """Load n random rows of `prepare_split(data, split, …)` into memory; all rows if there are fewer."""
    return load_rows(prepare_split(data, split, **options), n, seed)


def epochs_for(steps: int, n: int, batch_size: int) -> int:
    """Number of epochs with at least `steps` steps: ⌈steps / ⌈n / batch size⌉⌉.

    Example:
        >>> epochs_for(400, 100, 128), epochs_for(400, 3_000, 128)
        (400, 17)
    """
    return -(-steps // -(-n // batch_size))


def round_rows(rows: Rows, digits: int = 6) -> Rows:
    """Round all floats of the rows, which keeps the files small."""
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
    """Check that a comparison holds at each place, such as {"n": 100}; options are those of `compare_groups`."""
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
    """Plot scale × key against x on a logarithmic axis: mean and interval over seeds, of the mean of their rows."""
    from neuboots.report.plots import plot_learning_curves

    sizes, seeds = (sorted({row[name] for row in rows}) for name in (x, "seed"))
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        found.setdefault((row[by], row["seed"], row[x]), []).append(scale * row[key])
    names = dict.fromkeys(row[by] for row in rows)
    curves = {
        name: (sizes, torch.tensor([[fmean(found[name, seed, size]) for size in sizes] for seed in seeds]))
        for name in names
    }
    plot_learning_curves(ax, curves, label=label)
    ax.set_xscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.set_xlabel(xlabel)
    if ax.get_ylim()[0] < 0:  # the interval of a non-negative metric over few seeds
        ax.set_ylim(bottom=0)
