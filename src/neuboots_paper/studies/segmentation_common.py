"""Table 4.2: common parts of the studies of images and volumes.

    mIoU, ECE   of   p(y | x) = 1/B Σ_b softmax f_b(x),     relative time = seconds of B replicates / of the plain net

Two nets, five methods, B = K = 5. Scores come from `evaluate_segmentation`, times from `benchmark_methods` with
untrained nets.
"""

import base64
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, avg_pool3d

from neuboots.data import CropFlip, DatasetBundle, LazyDataset, Standardizer
from neuboots.data.dataset import Augmentation, to_unit_range
from neuboots.evaluation.benchmark import benchmark_methods
from neuboots.evaluation.segmentation import evaluate_segmentation, predict_segmentation
from neuboots.evaluation.segmentation.io import class_colors, colorize_labels, to_uint8
from neuboots.losses import BrierLoss
from neuboots.prediction import Method, Predictor
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import OptimizerFactory, TrainingConfig
from neuboots_paper._common import make_method, neuboots_variants, reliability_plots
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, PaperValues, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IGNORE_INDEX = 255
METHODS = ("deterministic", "mc-dropout", "adversarial-deep-ensemble", "deep-ensemble", "neuboots", "neuboots-paper")
MakeNet = Callable[[int, int], nn.Module]  # of channels and classes

_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": partial(torch.optim.AdamW, weight_decay=1e-2),
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4),
}
_COLUMNS = (
    MetricColumn("mean_iou", "mIoU, %", 100, better="higher"),
    MetricColumn("ece", "ECE, %", 100, better="lower"),
    MetricColumn("relative_time", "relative prediction time", digits=1),
    MetricColumn("nll", "NLL", digits=3, better="lower"),
    MetricColumn("entropy_ratio", "entropy, wrong / right", digits=1),
)
_TIMED = 8  # copies of an image in a batch
_MAPS = ("input", "truth", "prediction", "entropy")


@dataclass(frozen=True)
class SegmentationStudy(Study):
    """One half of table 4.2; a subclass defines its nets and the nets of the paper that they correspond to."""

    paper: ClassVar[PaperValues]  # by net of the paper and method
    paper_data: ClassVar[str]
    makes: ClassVar[Mapping[str, MakeNet]]
    calibrated: ClassVar[tuple[str, ...]]  # nets with which the ECE of NeuBoots is the lowest in the paper

    data: str
    nets: tuple[str, str]
    epochs: tuple[int, int]  # for each net
    learning_rates: tuple[float, float]  # for each net
    optimizer: str = "adamw"
    batch_size: int = 8
    n: int | None = None  # training images; None: all
    n_test: int | None = None
    shrink: int = 1  # factor of downsampling
    replicates: int = 5  # B, and K of the ensembles
    time_repeats: int = 3
    methods: tuple[str, ...] = METHODS

    @property
    def paper_nets(self) -> dict[str, str]:
        """Net of the paper that corresponds to each of ours."""
        return dict(zip(self.nets, dict.fromkeys(net for net, _ in self.paper), strict=True))

    def jobs(self) -> list[Job]:
        return self.job_grid(net=self.nets, method=self.methods) + self.job_grid(net=self.nets)

    def is_timing_job(self, job: Job) -> bool:
        return "method" not in job

    # -- measuring

    def measure(self, job: Job, context: RunContext) -> Rows:
        data = context.load_data(self.data, seed=job["seed"])
        if self.is_timing_job(job):
            return {"times": self._times(job, data)}
        net, seed = job["net"], job["seed"]
        place, test = self.nets.index(net), self._test(data)
        rate: OptimizerFactory = partial(_OPTIMIZERS[self.optimizer], lr=self.learning_rates[place])
        config = context.config(epochs=self.epochs[place], batch_size=self.batch_size, optimizer=rate, seed=seed)
        train = downsample(data.augmented_train, self.shrink, limit=self.n, seed=seed)
        predictor = self._method(job["method"], self.replicates).fit(self._net_factory(net, data), train, config)
        rows = pixel_scores(predictor, test, num_samples=self.replicates, batch_size=self.batch_size)
        if (net, job["method"]) == (self.nets[0], "neuboots"):  # another image for each seed
            rows["pictures"] = [self._picture(predictor, data, test, seed)]
        return rows

    def _test(self, data: DatasetBundle) -> LazyDataset:
        return downsample(data.test, self.shrink, limit=self.n_test)

    def _net_factory(self, net: str, data: DatasetBundle) -> Callable[[], nn.Module]:
        return partial(self.makes[net], data.channels, data.num_classes)

    def _method(self, name: str, members: int) -> Method:
        loss = (BrierLoss if name == "adversarial-deep-ensemble" else nn.CrossEntropyLoss)(ignore_index=IGNORE_INDEX)
        return make_method(name, members=members, loss=loss)

    def _times(self, job: Job, data: DatasetBundle) -> list[dict[str, Any]]:
        """Times of barely trained nets, which predict copies of a test image."""
        x, _ = self._test(data)[0]
        names = [name for name in self.methods if name != "neuboots-paper"]  # which predicts like neuboots
        found = benchmark_methods(
            {name: partial(self._method, name) for name in names},
            self._net_factory(job["net"], data),
            downsample(data.augmented_train, self.shrink, limit=2, seed=job["seed"]),
            x.expand(_TIMED, *x.shape).contiguous(),
            TrainingConfig(epochs=1, batch_size=2, seed=job["seed"], progress=False),  # nothing to resume
            baseline="deterministic",
            num_members=(self.replicates,),
            repeats=self.time_repeats,
            memory=False,
            # CPU time does not depend on other processes
            clock=time.perf_counter if torch.cuda.is_available() else time.process_time,
            progress=False,
        )
        return [{"method": row.method, "relative_time": round(row.predict_ratio, 4)} for row in found.rows]

    def _picture(self, predictor: Predictor, data: DatasetBundle, test: LazyDataset, seed: int) -> dict[str, Any]:
        number = int(torch.randint(len(test), (), generator=torch.Generator().manual_seed(seed)))
        x, truth = test[number]
        maps = predict_segmentation(predictor, x[None], self.replicates)
        normalisation = data.standardizer if isinstance(data.standardizer, Standardizer) else None
        planes = {
            "input": to_uint8(x, normalisation).movedim(0, -1),
            "truth": truth,
            "prediction": maps.labels[0],
            "entropy": maps.entropy[0] / np.log(data.num_classes) * 255,
        }
        if truth.ndim == 3:
            where = fullest_slice(truth)
            planes = {name: plane[where] for name, plane in planes.items()}
        return {"image": number, "classes": list(data.classes), **{name: encode_png(planes[name]) for name in _MAPS}}

    # -- tables, checks and plots

    def tables(self, rows: Rows) -> list[Table]:
        paper = {
            (net, method): self.paper[name, method]
            for net, name in self.paper_nets.items()
            for method in self.methods
            if (name, method) in self.paper
        }
        constant = max(row["constant_iou"] for row in rows["scores"])
        table = tabulate(
            f"{self.data}, B = K = {self.replicates}, mean ± standard deviation over {len(self.seeds)} seeds; the "
            f"paper's values are of {self.paper_data} with "
            + ", ".join(f"{name} ({net} here)" for net, name in self.paper_nets.items())
            + ".",
            [*rows["scores"], *rows["times"]],
            by=("net", "method"),
            columns=_COLUMNS,
            paper=paper,
            link="reliability-{net}-{method}",
            note=f"Predicting the majority class everywhere has an mIoU of {100 * constant:.2f} %.",
        )
        return [table]

    def checks(self, rows: Rows) -> list[Check]:
        scores, times, both = rows["scores"], rows["times"], self.nets
        best = [net for net in both if self.paper_nets[net] in self.calibrated]
        ours = neuboots_variants(self.methods)
        others = [name for name in self.methods if name not in ours]
        rivals = [name for name in others if name != "deterministic"]
        claims: tuple[tuple[str, str, Sequence[str], Sequence[str]], ...] = (
            ("a higher mIoU than the plain net", "mean_iou", both, ["deterministic"]),
            ("a lower ECE than the plain net", "ece", both, ["deterministic"]),
            ("the highest mIoU of all methods", "mean_iou", both, others),
            ("the lowest ECE of all methods", "ece", best, others),
        )
        faster = "NeuBoots predicts faster than MC dropout and the ensembles"
        return [
            *(
                _check_better(f"{title} has {claim}", scores, key, nets, rest, ours=name)
                for name, title in ours.items()
                for claim, key, nets, rest in claims
            ),
            _check_better(faster, times, "relative_time", both, rivals),
        ]

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        maps = {"maps": plot_maps(rows["pictures"])} if rows.get("pictures") else {}
        return {**maps, **reliability_plots(rows["bins"], ("net", "method"))}

    @property
    def training(self) -> str:
        """Description of training and timing."""
        size = (
            "all training images but a validation split of a tenth" if self.n is None else f"{self.n} training images"
        )
        side = "" if self.shrink == 1 else f" at 1/{self.shrink} of the side"
        epochs = ", ".join(f"{epochs} epochs of {net}" for net, epochs in zip(self.nets, self.epochs, strict=True))
        return (
            f"{epochs}, from random weights, on {size} of {self.data}{side}. Relative prediction times are those of "
            f"{self.replicates} replicates for {_TIMED} inputs; without a GPU, of the CPU's seconds."
        )


def _check_better(
    claim: str,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    nets: Sequence[str],
    others: Sequence[str],
    *,
    ours: str = "neuboots",
) -> Check:
    """Check NeuBoots against the best of some other methods, with each net."""
    column = next(column for column in _COLUMNS if column.key == key)
    expect: Literal["higher", "lower"] = "higher" if column.better == "higher" else "lower"
    sign = 1 if expect == "higher" else -1
    parts = []
    for net in nets:
        values: dict[str, list[float]] = {}
        for row in rows:
            if row["net"] == net and row["method"] in others:
                values.setdefault(row["method"], []).append(sign * row[key])
        rival = max(values, key=lambda other: fmean(values[other]), default=others[0])
        first, second = ({"method": method, "net": net} for method in (ours, rival))
        parts.append(
            compare_groups("", rows, key, first, second, expect=expect, scale=column.scale, digits=column.digits)
        )
    return combine_checks(f"{claim}, with {' and '.join(nets)}", parts)


# -- data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ListSource:
    """In-memory source whose rows may differ in size."""

    xs: list[Tensor]
    ys: list[Tensor]

    def __len__(self) -> int:
        return len(self.xs)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        return [self.xs[row] for row in rows], self.read_targets(rows)

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return [self.ys[row] for row in rows]


def downsample(part: Any, factor: int, *, limit: int | None = None, seed: int = 0) -> LazyDataset:
    """Rows of a split, or `limit` random ones, downsampled by a factor: means of pixels, labels of central pixels.

    Downsampled rows are stored in memory, and crops of the augmentation shrink with them; factor 1 reads nothing.
    """
    size = len(part) if limit is None else min(limit, len(part))
    rows = sorted(torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))[:size].tolist())
    some: LazyDataset = part.take(rows)
    if factor == 1:
        return some
    source: Any = some.source
    return LazyDataset(
        _downsample(source, some.rows or (), factor), some.transform, _downsample_crop(some.augment, factor)
    )


@cache  # shared by the jobs of one process
def _downsample(source: Any, rows: tuple[int, ...], factor: int) -> ListSource:
    pairs = [_downsample_row(x, y, factor) for x, y in zip(*source.read(rows), strict=True)]
    return ListSource([x for x, _ in pairs], [y for _, y in pairs])


def _downsample_row(x: Tensor, y: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    pool = avg_pool2d if y.ndim == 2 else avg_pool3d
    x = pool(to_unit_range(x)[None], factor)[0]
    return x, y[tuple(slice(factor // 2, factor * size, factor) for size in x.shape[1:])].contiguous()


def _downsample_crop(augment: Augmentation | None, factor: int) -> Augmentation | None:
    """Crop with smaller sides, rounded up to multiples of 4, which nets need not pad.

    >>> _downsample_crop(CropFlip((32, 48, 32)), 3).size
    (12, 16, 12)
    """
    if not isinstance(augment, CropFlip):
        return augment
    return replace(augment, size=tuple(4 * math.ceil(side / factor / 4) for side in augment.size))


# -- scores and pictures -------------------------------------------------------------------------------


def pixel_scores(predictor: Predictor, test: LazyDataset, *, num_samples: int, batch_size: int) -> Rows:
    """Rows of metrics ("scores") and of the bins of the reliability diagram ("bins")."""
    found = evaluate_segmentation(
        predictor, test, num_samples=num_samples, ignore_index=IGNORE_INDEX, batch_size=batch_size, progress=False
    )
    metrics, curve = found.metrics, found.pixels.reliability_curve
    names = ("mean_iou", "ece", "error", "nll", "brier", "entropy_ratio", "entropy_auroc")
    scores = {name: metrics[name] for name in names} | {"constant_iou": found.majority["mean_iou"]}
    columns = (curve.confidence.tolist(), curve.accuracy.tolist(), curve.count.tolist())
    bins = [
        {"bin": k, "confidence": round(confidence, 5), "accuracy": round(accuracy, 5), "count": count}
        for k, (confidence, accuracy, count) in enumerate(zip(*columns, strict=True))
        if count
    ]
    return {"scores": [scores], "bins": bins}


def fullest_slice(labels: Tensor) -> tuple[slice, slice, int]:
    """Slice across the last axis with the most labels other than 0 and ignored ones.

    >>> fullest_slice(torch.tensor([[[0, 1, 255]], [[0, 1, 255]]]))[-1]
    1
    """
    counted = ((labels > 0) & (labels != IGNORE_INDEX)).sum((0, 1))
    return slice(None), slice(None), int(counted.argmax())


def encode_png(plane: Tensor) -> str:
    """Encode values 0 … 255, grey (H, W) or colour (H, W, 3), as the base64 text of a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(plane.round().to(torch.uint8).contiguous().numpy()).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def decode_png(text: str) -> Tensor:
    """Decode the result of `encode_png`.

    >>> decode_png(encode_png(torch.tensor([[0, 7], [255, 1]]))).tolist()
    [[0, 7], [255, 1]]
    """
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(text)))))


def plot_maps(pictures: Sequence[Mapping[str, Any]]) -> "Figure":
    """Plot one row per image: the image, its labels, and the labels and entropy of NeuBoots."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    classes = pictures[0]["classes"]
    planes = [{name: decode_png(row[name]) for name in _MAPS} for row in pictures]
    height, width = planes[0]["truth"].shape
    figure = Figure(figsize=(8.4, 0.7 + len(pictures) * min(2.6, 1.9 * height / width)), layout="constrained")
    grid = figure.subplots(len(pictures), len(_MAPS), squeeze=False)
    drawn: Any = None
    for line, found, row in zip(grid, planes, pictures, strict=True):
        line[0].imshow(found["input"].numpy(), interpolation="nearest")
        for ax, name in zip(line[1:3], _MAPS[1:3], strict=True):
            ax.imshow(
                colorize_labels(found[name].long(), len(classes), ignore_index=IGNORE_INDEX), interpolation="nearest"
            )
        nats = found["entropy"].numpy() / 255 * np.log(len(classes))
        drawn = line[3].imshow(nats, vmin=0, vmax=float(np.log(len(classes))), interpolation="nearest")
        line[0].set_ylabel(f"test image {row['image']}", fontsize=9)
        for ax in line:
            ax.set(xticks=[], yticks=[])
    for ax, name in zip(grid[0], _MAPS, strict=True):
        ax.set_title(name, fontsize=10)
    figure.colorbar(drawn, ax=grid[:, 3].tolist(), label="entropy / nats", shrink=0.8)
    colours = [tuple(colour / 255) for colour in class_colors(len(classes))]
    patches = [Patch(fc=colour, ec="grey", label=name) for colour, name in zip(colours, classes, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(6, len(classes)), fontsize=9, frameon=False)
    return figure
