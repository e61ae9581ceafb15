"""Where is the uncertainty: on the pixels that are wrong, and at the borders between labels?

    ratio = mean H over wrong pixels / mean H over right ones,   AUROC = P(H_wrong > H_right) + ½ P(H_wrong = H_right)

Sums and counts alone are kept. For the AUROC, pixels are counted by the first 9 binary digits of their uncertainty,
which tells values apart that differ by 0.4 %; those that it does not count as equal.

What `evaluate_segmentation` finds: the figures of labels and of uncertainty over a data set, beside those of a constant.

    majority: guess the most frequent class everywhere;   frequencies: p_c = share of the pixels of class c everywhere

Both are known from the counts of labels alone. Their labels are the same; probabilities are those of the frequencies,
whose confidence is by its making as often right as it says.

How good are the labels and the uncertainty of a predictor over labelled images, and how long does it take?

    relative time = min_r seconds of B replicates / min_r seconds of a plain pass of the net

as in the paper's table 4.2 (section 4.4): mean IoU, ECE and prediction time relative to the baseline. The ratio is
taken at one window of the first image, in turn and best of several, since times on a busy machine vary.

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from neuboots._validation import check_int
from neuboots.evaluation._batching import (
    LabeledData,
    align_labels,
    check_batch_size,
    check_predictor,
    format_table,
    iter_batches,
)
from neuboots.evaluation.segmentation.predict import SegmentationMaps, Window, clip_window, predict_segmentation
from neuboots.head import call_net, cast_inputs, copy_net, eval_mode
from neuboots.metrics import ConfusionMatrix, MetricState, SegmentationMetrics
from neuboots.prediction import Predictor

UNCERTAINTY_MEASURES = ("entropy", "mutual_information", "std")
_DROPPED = 15  # bits of a positive float32, whose order is that of its bits as a whole number
_LEVELS = 1 << (31 - _DROPPED)


@dataclass(frozen=True, eq=False)
class UncertaintySums(MetricState):
    """Sums of the three uncertainties over right and wrong pixels, inside and at borders; images in parts add.

    >>> values = torch.tensor([[0.25, 0.75, 2.0]])
    >>> found = UncertaintySums.of(
    ...     values.expand(3, 3), torch.tensor([False, False, True]), torch.tensor([False, True, True])
    ... )
    >>> found.mean("entropy", wrong=True) / found.mean("entropy", wrong=False), found.auroc("entropy")
    (4.0, 1.0)
    """

    totals: Tensor  # (3, 2, 2): uncertainty, right or wrong, inside or border
    counts: Tensor  # (2, 2)
    levels: Tensor  # (3, 2, K): pixels, right or wrong, at each level of an uncertainty

    @classmethod
    def of(cls, values: Tensor, wrong: Tensor, border: Tensor) -> Self:
        """Of the three uncertainties (3, P) of P pixels, of whether they are wrong (P,) and at a border (P,)."""
        group = 2 * wrong.long() + border.long()  # (P,)
        level = (values.float().clamp_min(0) + 0.0).view(torch.int32).long() >> _DROPPED  # (3, P); −0 + 0 = 0
        sums = [torch.bincount(group, value.double(), minlength=4).double() for value in values]
        counted = [torch.bincount(_LEVELS * wrong.long() + one, minlength=2 * _LEVELS) for one in level]
        return cls(
            torch.stack(sums).view(len(values), 2, 2),
            torch.bincount(group, minlength=4).view(2, 2),
            torch.stack(counted).view(len(values), 2, _LEVELS),
        )

    def count(self, *, wrong: bool | None = None, border: bool | None = None) -> int:
        """Pixels of one kind; None stands for both."""
        return int(self.counts[_which(wrong), _which(border)].sum())

    def mean(self, measure: str, *, wrong: bool | None = None, border: bool | None = None) -> float | None:
        """The mean uncertainty over pixels of one kind; None if there are none."""
        total = self.totals[UNCERTAINTY_MEASURES.index(measure), _which(wrong), _which(border)].sum()
        count = self.count(wrong=wrong, border=border)
        return float(total) / count if count else None

    def auroc(self, measure: str) -> float | None:
        """The chance that a wrong pixel is less certain than a right one; None where one kind is missing."""
        right, wrong = self.levels[UNCERTAINTY_MEASURES.index(measure)].double()  # (K,), (K,)
        pairs = float(right.sum() * wrong.sum())
        return float((wrong * (right.cumsum(0) - right / 2)).sum()) / pairs if pairs else None


def _which(kind: bool | None) -> slice:
    return slice(None) if kind is None else slice(int(kind), int(kind) + 1)


def divide(above: float | None, below: float | None) -> float | None:
    """above / below; None where either is missing or nothing is below."""
    return above / below if above is not None and below else None


def stack_uncertainties(maps: SegmentationMaps, image: int) -> Tensor:
    """The three of MEASURES, of one image: (3, *)."""
    return torch.stack([getattr(maps, name)[image] for name in UNCERTAINTY_MEASURES])


def find_boundaries(labels: Tensor, *, ignore_index: int) -> Tensor:
    """Whether the 3 × 3 (× 3) pixels around one hold two labels or more besides void: (N, *) → (N, *).

    >>> find_boundaries(torch.tensor([[0, 0, 0, 1, 255, 0]]), ignore_index=255).int()
    tensor([[0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    labels, unknown = labels.int(), labels == ignore_index
    least = labels.masked_fill(unknown, torch.iinfo(torch.int32).max)
    most = labels.masked_fill(unknown, torch.iinfo(torch.int32).min)
    for axis in range(1, labels.ndim):
        least, most = _widened(least, axis, torch.minimum), _widened(most, axis, torch.maximum)
    return (least < most) & ~unknown


def _widened(values: Tensor, axis: int, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Each value joined with those before and after it along an axis."""
    wide, count = values.clone(), values.shape[axis] - 1
    for ours, theirs in ((0, 1), (1, 0)):
        side = wide.narrow(axis, ours, count)
        side.copy_(join(side, values.narrow(axis, theirs, count)))
    return wide


_TOGETHER = 1 << 18  # pixels whose figures are computed at once: what is needed on the way stays small beside the maps


@dataclass(frozen=True, eq=False)
class PredictionTimes(MetricState):
    """Seconds of prediction; and of one window predicted, beside the plain net on the same, where there is a net."""

    seconds: Tensor  # ()
    images: Tensor  # ()
    predicted: Tensor  # ()
    plain: Tensor  # ()

    @classmethod
    def of(cls, images: int, seconds: float = 0.0, predicted: float = 0.0, plain: float = 0.0) -> Self:
        """Of some images that took so many seconds, and of a window and a plain pass over it."""
        total, window, net = torch.tensor([seconds, predicted, plain], dtype=torch.float64)
        return cls(total, torch.tensor(images), window, net)


@dataclass(frozen=True, eq=False)
class SegmentationReport(MetricState):
    """Figures over labelled images; parts of a data set add. Pixels without a label (void) count nowhere.

    >>> maps = SegmentationMaps(torch.tensor([[[[0.9, 0.2]], [[0.1, 0.8]]]]), *3 * [torch.tensor([[[0.3, 0.5]]])], 5, 0)
    >>> found = SegmentationReport.of(maps, torch.tensor([[[0, 0]]]))
    >>> found.count, found.error, found.majority["error"], round(found.entropy_ratio, 3)
    (2, 0.5, 0.0, 1.667)
    """

    pixels: SegmentationMetrics
    spread: UncertaintySums
    times: PredictionTimes
    num_samples: int
    seed: int

    @classmethod
    def of(
        cls,
        maps: SegmentationMaps,
        labels: Tensor,
        *,
        ignore_index: int | None = 255,
        num_bins: int = 15,
        times: PredictionTimes | None = None,
    ) -> Self:
        """The figures of the maps of N images and their labels (N, *); `ignore_index` is None where every pixel has one."""
        ignore_index = None if ignore_index is None else check_int("void", ignore_index)
        labels = align_labels(maps.probs, labels, ignore_index=ignore_index)
        ignore_index = -1 if ignore_index is None else ignore_index  # −1 is no label now
        border = find_boundaries(labels, ignore_index=ignore_index)
        pixels: SegmentationMetrics | int = 0
        spread: UncertaintySums | int = 0
        for i, truth in enumerate(labels.flatten(1)):
            parts = (maps.probs[i].flatten(1), stack_uncertainties(maps, i).flatten(1), truth, border[i].flatten())
            for probs, values, y, edge in zip(*(part.split(_TOGETHER, -1) for part in parts), strict=True):
                pixels = pixels + SegmentationMetrics.of(
                    probs[None], y[None], ignore_index=ignore_index, num_bins=num_bins
                )
                counted = y != ignore_index
                wrong = (probs.argmax(0) != y)[counted]
                spread = spread + UncertaintySums.of(values[:, counted], wrong, edge[counted])
        assert isinstance(pixels, SegmentationMetrics), "maps are of at least one image"
        assert isinstance(spread, UncertaintySums), "maps are of at least one image"
        return cls(pixels, spread, times or PredictionTimes.of(len(labels)), maps.num_samples, maps.seed)

    # -- labels

    @property
    def count(self) -> int:
        """Pixels that have a label."""
        return self.pixels.count

    @property
    def num_images(self) -> int:
        return int(self.times.images)

    @property
    def mean_iou(self) -> float:
        """Over the classes that occur as a label or as a guess."""
        return float(self.pixels.mean_iou)

    @property
    def mean_dice(self) -> float:
        """Over the same classes."""
        return _mean_dice(self.pixels.confusion)

    @property
    def iou(self) -> Tensor:
        """Of each class, 0 where it occurs nowhere: (C,)."""
        return self.pixels.iou

    @property
    def dice(self) -> Tensor:
        """Of each class, 0 where it occurs nowhere: (C,)."""
        return self.pixels.dice

    @property
    def error(self) -> float:
        """The share of pixels with a wrong label."""
        return float(self.pixels.error)

    @property
    def ece(self) -> float:
        return float(self.pixels.ece)

    @property
    def majority(self) -> dict[str, float]:
        """What the constant predictors get on the same pixels: labels of the majority, probabilities of frequencies."""
        counts = self.pixels.confusion_matrix.sum(1)  # (C,)
        matrix = torch.zeros_like(self.pixels.confusion_matrix)
        matrix[:, counts.argmax()] = counts
        constant, shares = ConfusionMatrix(matrix), counts.double() / counts.sum()
        return {
            "mean_iou": float(constant.mean_iou),
            "mean_dice": _mean_dice(constant),
            "error": 1 - float(shares.max()),
            "ece": 0.0,
            "nll": float(-torch.xlogy(shares, shares).sum()),
            "brier": 1 - float(shares.square().sum()),
        }

    # -- uncertainty

    @property
    def entropy_ratio(self) -> float | None:
        """Mean entropy on wrong pixels / on right ones; None where there are none of one kind."""
        return self._ratio("entropy")

    def _ratio(self, measure: str) -> float | None:
        return divide(self.spread.mean(measure, wrong=True), self.spread.mean(measure, wrong=False))

    def _error_at(self, border: bool) -> float | None:
        count = self.spread.count(border=border)
        return self.spread.count(wrong=True, border=border) / count if count else None

    # -- time

    @property
    def seconds(self) -> float:
        """Of predicting one image, in the mean."""
        return float(self.times.seconds / self.times.images)

    @property
    def relative_time(self) -> float | None:
        """Seconds of B replicates / of a plain pass of the net, at one window; None where that was not measured."""
        return divide(float(self.times.predicted), float(self.times.plain))

    # -- all of them

    @property
    def figures(self) -> dict[str, Any]:
        """Every figure by name, as JSON takes it: None where there is nothing to divide by, or where a class occurs
        neither as a label nor as a guess. Uncertainties are means over pixels."""
        names = ("mean_iou", "error", "ece", "mce", "nll", "brier")
        found: dict[str, Any] = {name: float(getattr(self.pixels, name)) for name in names}
        found["mean_dice"] = self.mean_dice
        for name in UNCERTAINTY_MEASURES:
            mean = self.spread.mean
            border, inside = (mean(name, border=kind) for kind in (True, False))
            found |= {
                name: mean(name),
                f"{name}_right": mean(name, wrong=False),
                f"{name}_wrong": mean(name, wrong=True),
                f"{name}_ratio": self._ratio(name),
                f"{name}_auroc": self.spread.auroc(name),
                f"{name}_border": border,
                f"{name}_inside": inside,
                f"{name}_border_ratio": divide(border, inside),
            }
        found |= {"error_border": self._error_at(True), "error_inside": self._error_at(False)}
        found |= {"border_share": self.spread.count(border=True) / self.count}
        found |= {"seconds": self.seconds, "relative_time": self.relative_time}
        occurs = self.pixels.confusion.occurs.tolist()
        for name in ("iou", "dice"):
            values = getattr(self.pixels, name).tolist()
            found[name] = [value if there else None for value, there in zip(values, occurs, strict=True)]
        return found

    def __str__(self) -> str:
        figures, constant = self.figures, self.majority
        labels = [{"figure": name, "value": figures[name], "majority": constant[name]} for name in constant]
        columns = ("right", "wrong", "ratio", "auroc", "inside", "border", "border_ratio")
        spread = [{"uncertainty": name} | {c: figures[f"{name}_{c}"] for c in columns} for name in UNCERTAINTY_MEASURES]
        spread.append({"uncertainty": "error", "inside": figures["error_inside"], "border": figures["error_border"]})
        head = f"N = {self.num_images:,} images, {self.count:,} pixels, B = {self.num_samples}, seed = {self.seed}"
        time = f"{self.seconds:.3g} s an image"
        if self.relative_time is not None:
            time += f", {self.relative_time:.3g} × a plain pass of the net"
        return "\n".join([head, format_table(labels), "", format_table(spread), "", time])


def _mean_dice(confusion: ConfusionMatrix) -> float:
    return float(confusion.f1[confusion.occurs].mean())


_ROUNDS = 3  # of the relative time
_ENOUGH = 10.0  # seconds; after them no further round begins


def evaluate_segmentation(
    predictor: Predictor,
    data: LabeledData,
    *,
    num_samples: int = 100,
    seed: int = 0,
    ignore_index: int | None = 255,
    window: Window = None,
    overlap: float = 0.25,
    batch_size: int = 1,
    num_bins: int = 15,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = True,
) -> SegmentationReport:
    """mIoU, Dice, ECE, time, and the uncertainty on right and on wrong pixels, over rows (x, y) or batches of them.

    Images may be of several sizes; masks are (H, W), (1, H, W), or the same for volumes, with `ignore_index` where a pixel has
    no label (None: each has one). `batch_size` images of one size, if they come one after the other, or windows of one
    image, go through the net together. `clock` gives the time in seconds.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import DeterministicPredictor
    >>> x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> net = torch.nn.Conv2d(2, 2, 1)
    >>> _ = net.load_state_dict({"weight": 9 * torch.eye(2).view(2, 2, 1, 1), "bias": torch.zeros(2)})
    >>> found = evaluate_segmentation(
    ...     DeterministicPredictor(net), TensorDataset(x, x.argmax(1)), num_samples=1, progress=False
    ... )
    >>> found.mean_iou, found.count, round(found.majority["mean_iou"], 2)
    (1.0, 256, 0.25)
    """
    check_predictor(predictor)
    check_batch_size(batch_size)
    total: SegmentationReport | int = 0
    for x, y in _images(data, batch_size, window, overlap, progress):
        began = clock()
        maps = predict_segmentation(
            predictor, x, num_samples, seed=seed, window=window, overlap=overlap, batch_size=batch_size
        )  # on the CPU: a GPU has finished
        seconds = clock() - began
        relative = (0.0, 0.0)
        if total == 0:
            relative = _beside_plain(predictor, _corner(x, window, overlap), num_samples, seed, clock)
        times = PredictionTimes.of(len(x), seconds, *relative)
        total = total + SegmentationReport.of(maps, y, ignore_index=ignore_index, num_bins=num_bins, times=times)
    assert isinstance(total, SegmentationReport), "batches_of gives at least one batch"
    if total.count == 0:
        raise ValueError(f"got data whose pixels are all void ({ignore_index}); expected some that have a label")
    return total


# -- images --------------------------------------------------------------------------------------------


def _images(
    data: LabeledData, batch_size: int, window: Window, overlap: float, progress: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images (N, C, *) of one size and their masks (N, *), as many together as the net is to see at once."""
    held: list[tuple[Tensor, Tensor]] = []
    for x, y in iter_batches(data, 1, title="segmentation", progress=progress):
        for row in zip(*_as_images(x, y), strict=True):
            shape = row[0].shape
            at_once = batch_size if _fits(shape[1:], window, overlap) else 1  # the maps of large images are large
            if held and (held[0][0].shape != shape or len(held) >= at_once):
                yield _stacked(held)
                held = []
            held.append(row)
    yield _stacked(held)


def _stacked(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def _fits(size: tuple[int, ...], window: Window, overlap: float) -> bool:
    return window is None or clip_window(size, window, overlap=overlap) == tuple(size)


def _as_images(x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """A batch, or a single row as a batch of one, with masks (N, *), or a sentence."""
    if not isinstance(x, Tensor):
        raise ValueError(f"got inputs of type {type(x).__name__}; expected images as a tensor (N, C, *)")
    for images, masks in ((x, y), (x[None], y[None])):
        size = images.shape[2:]
        if len(size) not in (2, 3):
            continue
        if masks.shape == (len(images), *size):
            return images, masks
        if masks.shape == (len(images), 1, *size):
            return images, masks[:, 0]
    raise ValueError(
        f"got images of shape {tuple(x.shape)} and masks of shape {tuple(y.shape)}; expected (N, C, *) and (N, *), a "
        "label for each pixel: bring both to one size"
    )


# -- time ----------------------------------------------------------------------------------------------


def _corner(x: Tensor, window: Window, overlap: float) -> Tensor:
    """What the net sees first: (1, C, *)."""
    if window is None:
        return x[:1]
    sizes = clip_window(x.shape[2:], window, overlap=overlap)
    return x[(slice(1), slice(None), *map(slice, sizes))]


def _beside_plain(
    predictor: Predictor, x: Tensor, num_samples: int, seed: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """The least seconds of B replicates at x and of a plain pass, in turn; (0, 0) for a predictor without a net."""
    net = make_timing_net(predictor)
    if net is None:
        return 0.0, 0.0

    def passed() -> None:
        with eval_mode(net), torch.no_grad():
            call_net(net, cast_inputs(net, x))

    works = [lambda: predictor.summarize(x, num_samples, seed=seed), passed]
    best, began = [float("inf")] * 2, clock()
    passed()  # the predictor is warm already
    for _ in range(_ROUNDS):
        for k, work in enumerate(works):
            start = clock()
            work()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            best[k] = min(best[k], clock() - start)
        if clock() - began > _ENOUGH:
            break
    return best[0], best[1]


def make_timing_net(predictor: Predictor) -> nn.Module | None:
    """The net to run for its time: its numbers, which some methods do not keep, do not matter."""
    net = predictor.net
    if net is None or not any(tensor.is_meta for tensor in [*net.parameters(), *net.buffers()]):
        return net
    device = next((tensor.device for tensor in predictor.state_dict().values()), torch.device("cpu"))
    net = copy_net(net).to_empty(device=device)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.zero_()  # whatever lay in the memory may be numbers that take long to multiply
    return net
