"""Split conformal prediction: sets of classes and intervals that hold the truth at least as often as they say.

    C(x) = {y : s(x, y) ≤ q},   P(Y ∈ C(X)) ≥ level

whatever the predictor and the law of the data, if the calibration rows and the new one are exchangeable and the
predictor has not seen them.

The one number that calibration finds: the quantile of the scores, and how many rows it takes.

    q the k-th smallest of s(X₁, Y₁), …, s(X_n, Y_n),   k = ⌈level · (n + 1)⌉,   P(Y ∈ C(X)) ≥ k / (n + 1) ≥ level

Where scores have no ties, the coverage given the calibration rows is itself a draw from Beta(k, n + 1 − k). Pixels of
an image are not exchangeable with each other, images are: q is then the least number at which the shares of covered
pixels, added over the n images, reach level · (n + 1), and the expected share of a new image's pixels that are covered
is at least `level` (conformal risk control). Every image counts the same, however many of its pixels have a label; with
P pixels in each that is rank ⌈level · (n + 1) · P⌉ among all scores, and P = 1 is the case above.

Rounding. In another batch a net rounds the same input otherwise, and where scores have ties, all those at q would drop
out together. With e(x, y) the most that a score may move, s(x, y) + e(x, y) is as good a score: calibration takes its
quantile, by raising every score that it sees by 2 e, and the guarantee then holds in batches of any size. 2 e is 64 eps
of the outputs' type (at most 2⁻⁷), relative to their size. That is an allowance and no bound: a very deep net, or TF32,
may move its outputs by more. Where scores have ties, ask such a net in batches as large as in calibration.

Vovk, Gammerman and Shafer, Algorithmic learning in a random world, Springer 2005 (split conformal); Angelopoulos,
Bates, Fisch, Lei and Schuster, Conformal risk control, ICLR 2024 (pixels).

Sets of classes that hold the true one at least as often as they say.

    threshold     s(x, y) = 1 − p_y
    adaptive      s(x, y) = Σ_{c before y} p_c + u p_y,   classes in the order of falling p, u uniform on (0, 1)
    regularised   the same + λ max(0, rank of y − k_reg)

Classes whose probabilities differ by rounding alone have the order of their numbers, in every batch.

Sadinle, Lei and Wasserman, Least ambiguous set-valued classifiers with bounded error levels, JASA 2019 (threshold);
Romano, Sesia and Candès, Classification with valid and adaptive coverage, NeurIPS 2020 (adaptive); Angelopoulos, Bates,
Malik and Jordan, Uncertainty sets for image classifiers using conformal prediction, ICLR 2021 (regularised).

Intervals that hold a new y at least as often as they say.

    absolute      s(x, y) = |y − m(x)|
    normalised    s(x, y) = |y − m(x)| / s(x),   s² the variance over replicates (and the noise of a Gaussian head)
    quantile      s(x, y) = max(l(x) − y, y − h(x)),   l and h the (1 ± level)/2 quantiles of the replicates

Lei, G'Sell, Rinaldo, Tibshirani and Wasserman, Distribution-free predictive inference for regression, JASA 2018
(absolute, normalised); Romano, Patterson and Candès, Conformalized quantile regression, NeurIPS 2019 (quantile).
"""

import math
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from neuboots._prng import derive_keys, draw_uniform
from neuboots.evaluation._batching import (
    InputData,
    LabeledData,
    align_labels,
    align_targets,
    check_predictor,
    format_table,
    hash_rows,
    iter_batches,
    map_batches,
)
from neuboots.evaluation.regression import has_gaussian_head
from neuboots.metrics import IntervalMetrics
from neuboots.prediction import Predictor, split_gaussian


def _rounding_tolerance(dtype: torch.dtype) -> float:
    """2 e for outputs of size 1: how far apart two batches may put the same input.

    Half precision is capped: its nets add in float32, and only what they store is rounded.
    """
    return min(64 * torch.finfo(dtype).eps, 2.0**-7)


def _rank(level: float, rows: int, pixels: int) -> int:
    """⌈level · (n + 1) · P⌉, with the level as it was typed: 0.07 · 100 is 7, not 7.000000000000001."""
    return math.ceil(Fraction(str(float(level))) * (rows + 1) * pixels)


def conformal_quantile(scores: Tensor, counts: Tensor, level: float) -> float:
    """The score that a new row stays below with this probability; ∞ where the rows are too few to tell.

    `counts` (n,) says how many of the scores, one row after another, belong to each: rows without any do not count.

    >>> conformal_quantile(torch.tensor([3.0, 1.0, 2.0]), torch.ones(3), 0.5)
    2.0
    """
    counts = counts[counts > 0].long()
    rows = len(counts)
    if not has_enough_calibration_rows(level, rows):
        return math.inf
    unit, wanted = math.lcm(*set(counts.tolist())), 0.0
    if unit * rows < 1 << 62:  # shares in whole numbers
        shares, wanted = unit // counts, _rank(level, rows, unit)
    else:
        shares, wanted = 1 / counts.double(), level * (rows + 1) * (1 + 1e-9)  # outwards, by more than sums are off
    ordered, order = scores.sort()
    reached = shares.repeat_interleave(counts)[order].cumsum(0)
    return float(ordered[min(int((reached < wanted).sum()), len(ordered) - 1)])


def has_enough_calibration_rows(level: float, rows: int) -> bool:
    """Is there a rank for this level? level · (n + 1) ≤ n."""
    return _rank(level, rows, 1) <= rows


def _check_calibration_rows(level: float, rows: int) -> None:
    if not has_enough_calibration_rows(level, rows):
        share = Fraction(str(float(level)))
        raise ValueError(
            f"got {rows} calibration rows; expected at least {math.ceil(share / (1 - share))} for level {level:g}, or "
            "every set would have to hold everything: give more rows, or a lower level"
        )


def _check_options(predictor: Any, level: float, kind: str, kinds: tuple[str, ...]) -> None:
    check_predictor(predictor)
    if not (isinstance(level, float | int) and 0.0 < level < 1.0):
        raise ValueError(f"got level {level!r}; expected a number between 0 and 1, such as 0.9")
    if kind not in kinds:
        raise ValueError(f"got kind={kind!r}; expected one of {', '.join(map(repr, kinds))}")


def _count_per_row(counted: Tensor) -> Tensor:
    """How many pixels of each row count: (N, *) → (N,)."""
    return counted.reshape(len(counted), -1).sum(1).cpu()


def _plain(value: Any) -> Any:
    """JSON has neither tuples nor ∞."""
    return [None if math.isinf(q) else q for q in value] if isinstance(value, tuple) else value


def _to_config(rule: Any) -> dict[str, Any]:
    return {part.name: _plain(getattr(rule, part.name)) for part in fields(rule) if part.name != "predictor"}


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    """Lists are tuples again, and nulls ∞."""
    return {
        name: tuple(math.inf if q is None else q for q in value) if isinstance(value, list) else value
        for name, value in config.items()
    }


ClassScore = Literal["threshold", "adaptive", "regularised"]


class _Scores(NamedTuple):
    """s(x, c) for every class, (N, C, *), in float64; `slack` is how far another batch may move one below 1."""

    values: Tensor
    slack: float

    def of(self, labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
        """The scores of the true classes, (rows,), raised by what rounding may move them; and which count, (N, *)."""
        counted = _counted(labels, ignore_index)
        mine = self.values.gather(1, labels.where(counted, 0)[:, None])[:, 0][counted]
        return mine + self.slack * (1 + mine.abs()), counted


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """The classes that may be true, for each input: `mask` (N, C, *) is True for those in the set.

    >>> sets = PredictionSets(torch.tensor([[True, False, True], [False, False, False]]))
    >>> sets.labels, sets.size.tolist()
    ([[0, 2], []], [2, 0])
    """

    mask: Tensor

    @property
    def size(self) -> Tensor:
        """How many classes each set holds: (N, *)."""
        return self.mask.sum(1)

    @property
    def labels(self) -> list[list[int]]:
        """The numbers of the classes in each set."""
        if self.mask.ndim > 2:
            raise ValueError("got sets of pixels; expected one set for each input: use mask, (N, C, *)")
        return [row.nonzero().flatten().tolist() for row in self.mask]


@dataclass(frozen=True, eq=False)
class PredictionSetReport:
    """How sets did on labelled data. Sets with few rows have coverages that say little: see the counts.

    `class_coverage` (C,) is over the inputs (or pixels) of each true class, `size_coverage` (C + 1,) over those whose
    set has 0, 1, …, C classes: NaN where there are none.
    """

    level: float
    count: int  # inputs, or pixels
    coverage: float  # of pixels: the mean over images of the share of their pixels that are covered
    mean_size: float
    empty: float  # share of sets without a class
    singleton: float  # share of sets with one class
    class_coverage: Tensor
    class_count: Tensor
    size_coverage: Tensor
    size_count: Tensor

    def __str__(self) -> str:
        names = ("level", "coverage", "mean_size", "empty", "singleton")
        figures = [{"figure": name, "value": getattr(self, name)} for name in names]
        sizes = [
            {"size": k, "coverage": float(share), "N": int(rows)}
            for k, (share, rows) in enumerate(zip(self.size_coverage, self.size_count, strict=True))
            if rows
        ]
        classes = [
            {"class": k, "coverage": float(share), "N": int(rows)}
            for k, (share, rows) in enumerate(zip(self.class_coverage, self.class_count, strict=True))
            if rows
        ]
        return "\n\n".join([f"N = {self.count:,}\n{format_table(figures)}", format_table(sizes), format_table(classes)])


@dataclass(frozen=True)
class ConformalClassifier:
    """A predictor that answers with sets; `fit_conformal_classifier` makes one. But for the predictor it is a few numbers.

    `config()` gives them for a JSON file, `restore(config, predictor)` takes them back.
    """

    predictor: Predictor
    quantiles: tuple[float, ...]  # q, or one for each class
    level: float
    kind: ClassScore
    by_class: bool
    allow_empty: bool
    penalty: float
    k_reg: int
    num_samples: int
    seed: int
    count: int  # calibration rows

    def predict(self, x: InputData, *, batch_size: int = 256, progress: bool = True) -> PredictionSets:
        """{c : s(x, c) ≤ q} for each of the inputs: a tensor (a tuple or dict of them), a data set, or a loader.

        The set of an input does not depend on those around it, but for a class whose score is within rounding of q:
        the net itself may round otherwise in another batch. The guarantee holds in batches of any size.
        """
        return PredictionSets(torch.cat(map_batches(self._mask, x, batch_size, title="sets", progress=progress)))

    def evaluate(
        self, data: LabeledData, *, ignore_index: int | None = None, batch_size: int = 256, progress: bool = True
    ) -> PredictionSetReport:
        """Coverage and size over labelled rows that were not used for calibration; `ignore_index` labels are passed over."""
        by_class: Tensor | int = 0  # (2, C): rows, and rows whose set holds their class
        by_size: Tensor | int = 0  # (2, C + 1)
        images, covered = 0, 0.0
        for x, y in iter_batches(data, batch_size, title="evaluating sets", progress=progress):
            mask = self._mask(x)
            labels = align_labels(mask, y, ignore_index=ignore_index)
            counted = _counted(labels, ignore_index)
            inside = mask.gather(1, labels.where(counted, 0)[:, None])[:, 0] & counted  # (N, *)
            pixels = _count_per_row(counted)
            covered += float((_count_per_row(inside)[pixels > 0].double() / pixels[pixels > 0]).sum())
            images += int((pixels > 0).sum())
            held, classes = inside[counted], mask.shape[1]
            by_class = by_class + _counts(labels[counted], held, classes)
            by_size = by_size + _counts(mask.sum(1)[counted], held, classes + 1)
        assert isinstance(by_class, Tensor), "batches_of gives at least one batch"
        assert isinstance(by_size, Tensor)
        if images == 0:
            raise ValueError(f"got data whose labels are all void ({ignore_index}); expected some that count")
        rows = int(by_size[0].sum())
        sizes = torch.arange(by_size.shape[1], dtype=torch.float64)
        return PredictionSetReport(
            level=self.level,
            count=rows,
            coverage=covered / images,
            mean_size=float((by_size[0] * sizes).sum() / rows),
            empty=float(by_size[0, 0] / rows),
            singleton=float(by_size[0, 1] / rows),
            class_coverage=by_class[1] / by_class[0],
            class_count=by_class[0].long(),
            size_coverage=by_size[1] / by_size[0],
            size_count=by_size[0].long(),
        )

    def config(self) -> dict[str, Any]:
        """Everything but the predictor, as JSON; an infinite quantile is null."""
        return _to_config(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], predictor: Predictor) -> "ConformalClassifier":
        """The sets that `config` describes, around their predictor."""
        return cls(predictor, **_from_config(config))

    def _mask(self, x: Any) -> Tensor:
        scores = self._scores(x).values  # (N, C, *)
        limits = torch.tensor(self.quantiles, dtype=scores.dtype, device=scores.device)
        if self.by_class and len(limits) != scores.shape[1]:
            raise ValueError(f"got {scores.shape[1]} classes; expected {len(limits)}, as in calibration")
        mask = scores <= limits.view(1, -1, *[1] * (scores.ndim - 2))
        if self.allow_empty:
            return mask
        likeliest = scores.argmin(1, keepdim=True)  # (N, 1, *)
        return mask.scatter(1, likeliest, mask.gather(1, likeliest) | ~mask.any(1, keepdim=True))

    def _scores(self, x: Any) -> _Scores:
        summary = self.predictor.summarize(x, self.num_samples, seed=self.seed)
        probs, slack = summary.probs.double(), _rounding_tolerance(summary.probs.dtype)
        if bool(probs.isnan().any()):
            raise ValueError("the predictor gives NaN probabilities; expected numbers: check the net's outputs")
        if self.kind == "threshold":
            return _Scores(1 - probs, slack)
        order = _falling(probs, summary.mean.double(), slack)
        falling = probs.gather(1, order)
        before = falling.cumsum(1) - falling
        chance = _row_uniforms(x, probs[:, 0], self.seed)[:, None]  # (N, 1, *)
        scores = before + chance * falling
        if self.kind == "regularised":
            ranks = torch.arange(1, probs.shape[1] + 1, device=probs.device)
            extra = self.penalty * (ranks - self.k_reg).clamp_min(0).to(scores)
            scores = scores + extra.view(-1, *[1] * (probs.ndim - 2))
        return _Scores(torch.empty_like(scores).scatter_(1, order, scores), slack)

    def __str__(self) -> str:
        header = (
            f"{self.kind} sets at level {self.level:g} from {self.count:,} calibration rows, B = {self.num_samples}, "
            f"seed {self.seed}"
        )
        names = range(len(self.quantiles)) if self.by_class else ["all"]
        lines = [{"class": name, "quantile": q} for name, q in zip(names, self.quantiles, strict=True)]
        always = [name for name, q in zip(names, self.quantiles, strict=True) if math.isinf(q)]
        note = f"\nin every set, for want of calibration rows: {', '.join(map(str, always))}" if always else ""
        return f"{header}\n{format_table(lines)}{note}"


def fit_conformal_classifier(
    predictor: Predictor,
    calibration_data: LabeledData,
    *,
    level: float = 0.9,
    score: ClassScore = "adaptive",
    class_conditional: bool = False,
    allow_empty: bool = True,
    penalty: float = 0.01,
    k_reg: int = 5,
    ignore_index: int | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> ConformalClassifier:
    """Sets of classes that hold the true one with probability ≥ `level`, from labelled rows that were not trained on.

    `threshold` gives the smallest sets on average; `adaptive` ones are larger where the predictor is unsure, and cover
    easy and hard inputs more evenly; `regularised` ones are adaptive with a `penalty` on each class beyond the first
    `k_reg`, which keeps a long tail of improbable classes out. The uniform u of an input is named by the seed and the
    numbers in x: its set is the same in any batch. Where the predictor is right more often than `level`, some sets are
    empty; with `allow_empty=False` they hold the likeliest class, and the coverage is above the level.

    With `by_class` each class has a quantile of its own, and the guarantee holds among the inputs of each true class; a
    class with too few calibration rows is then in every set. Pixels (labels (N, *)) are covered as a share of an image:
    every image counts the same, whatever its size and however many of its labels are `ignore_index`, which are passed over;
    images that are all void do not count.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots.methods import DeterministicPredictor
    >>> rng = torch.Generator().manual_seed(0)
    >>> logits = 2 * torch.randn(2000, 5, generator=rng)
    >>> labels = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
    >>> net = DeterministicPredictor(torch.nn.Identity())  # a net whose probabilities are right
    >>> rows = TensorDataset(logits[:1000], labels[:1000])
    >>> rule = fit_conformal_classifier(net, rows, level=0.9, num_samples=1, progress=False)
    >>> sure, torn = [4.0, 0, 0, 0, 0], [3.0, 3.0, 0, 0, 0]
    >>> rule.predict(torch.tensor([sure, torn]), progress=False).labels
    [[0], [0, 1]]
    >>> fresh = TensorDataset(logits[1000:], labels[1000:])
    >>> abs(rule.evaluate(fresh, progress=False).coverage - 0.9) < 0.03
    True
    """
    _check_options(predictor, level, score, get_args(ClassScore))
    if not (isinstance(penalty, float | int) and 0 <= penalty < math.inf and isinstance(k_reg, int) and k_reg >= 0):
        raise ValueError(
            f"got penalty={penalty!r} and k_reg={k_reg!r}; expected a finite number and a whole number, both ≥ 0"
        )
    rule = ConformalClassifier(
        predictor, (), level, score, class_conditional, allow_empty, penalty, k_reg, num_samples, seed, 0
    )
    kept: list[Tensor] = []  # scores of the true classes
    truths: list[Tensor] = []  # and, where each has a quantile of its own, which they are
    counts: list[Tensor] = []
    classes = 0
    for x, y in iter_batches(calibration_data, batch_size, title="calibrating sets", progress=progress):
        scores = rule._scores(x)
        labels = align_labels(scores.values, y, ignore_index=ignore_index)
        if class_conditional and labels[:1].numel() > 1:
            raise ValueError("got by_class=True for pixels; expected one label for each input: use by_class=False")
        mine, counted = scores.of(labels, ignore_index)
        kept.append(mine.cpu())
        counts.append(_count_per_row(counted))
        truths.extend([labels[counted].cpu()] if class_conditional else [])
        classes = scores.values.shape[1]
    values, pixels = torch.cat(kept), torch.cat(counts)
    rule = replace(rule, count=int((pixels > 0).sum()))
    if not class_conditional:
        _check_calibration_rows(level, rule.count)
        return replace(rule, quantiles=(conformal_quantile(values, pixels, level),))
    each = [values[torch.cat(truths) == c] for c in range(classes)]
    return replace(rule, quantiles=tuple(conformal_quantile(mine, torch.ones(len(mine)), level) for mine in each))


def _counted(labels: Tensor, ignore_index: int | None) -> Tensor:
    """Which labels are not void: (N, *)."""
    return torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index


def _falling(probs: Tensor, logits: Tensor, slack: float) -> Tensor:
    """The classes from the likeliest down, those of a run of equals by their numbers: (N, C, *).

    Equal is what rounding may make of equals: where z moves by slack · |z|, log p moves by as much.
    """
    values, order = probs.sort(dim=1, descending=True)
    size = logits.abs().expand_as(probs).gather(1, order)
    close = slack * (1 + torch.minimum(size[:, 1:], size[:, :-1]))
    lower = values[:, 1:] < values[:, :-1] * (-close).exp()
    run = torch.cat([torch.zeros_like(order[:, :1]), lower.cumsum(1)], 1)
    return torch.empty_like(order).scatter_(1, order, run).argsort(dim=1, stable=True)


def _counts(group: Tensor, held: Tensor, size: int) -> Tensor:
    """Rows in each group, and those of them whose set holds the truth: (2, size)."""
    counts = [torch.bincount(part, minlength=size).double().cpu() for part in (group, group[held])]
    return torch.stack(counts)


def _row_uniforms(x: Any, like: Tensor, seed: int) -> Tensor:
    """u for each input (and pixel), a function of the seed and of the input's own numbers: (N, *), like `like`.

    The outputs would not do for a name: in another batch they may be rounded otherwise.
    """
    names = [int.from_bytes(name, "little", signed=True) for name in hash_rows(x)]
    keys = derive_keys(torch.tensor(names, dtype=torch.int64), seed, "conformal")  # (N,)
    pixels = torch.arange(like[:1].numel() if len(like) else 1)
    return draw_uniform(keys[:, None], pixels).reshape(like.shape).to(like)


RegressionScore = Literal["absolute", "normalised", "quantile"]


class _Base(NamedTuple):
    """A band before calibration: [low − q · scale, high + q · scale] is the one after it; (N, C, *) each, float64."""

    low: Tensor
    high: Tensor
    scale: Tensor
    spread: Tensor  # the predicted standard deviation, whatever the kind
    normalised: bool
    slack: float  # how far another batch may move outputs of size 1

    def scores(self, y: Tensor) -> Tensor:
        """The q at which the band begins to hold y."""
        return torch.maximum(self.low - y, y - self.high) / self.scale

    @property
    def size(self) -> Tensor:
        """Of the outputs that the band is made of."""
        return torch.maximum(self.low.abs(), self.high.abs()) + self.spread

    def moved(self, scores: Tensor) -> Tensor:
        """How far scores move where outputs of size 1 do: ends move by the slack, and so does a scale of replicates."""
        return self.slack * (1 + scores.abs() * self.normalised) / self.scale

    def widened(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The band at q. Rounding goes outwards: a y whose score is q itself stays inside."""
        reach = q * self.scale
        slack = 4 * torch.finfo(reach.dtype).eps
        low = self.low - reach - slack * (self.low.abs() + reach.abs())
        high = self.high + reach + slack * (self.high.abs() + reach.abs())
        middle = (low + high) / 2  # a negative q may empty the band: its middle remains
        return torch.minimum(low, middle), torch.maximum(high, middle)


class _Truth(NamedTuple):
    """Targets, and which of them count: (N, C, *) each."""

    y: Tensor
    counted: Tensor

    @classmethod
    def of(cls, like: Tensor, y: Tensor, ignore_index: float | None) -> "_Truth":
        target = align_targets(like, y)
        counted = torch.ones_like(target, dtype=torch.bool)
        if ignore_index is not None and math.isnan(ignore_index):
            counted = ~target.isnan()
        elif ignore_index is not None:
            counted = target != torch.tensor(ignore_index, dtype=y.dtype).to(target)  # as y's type rounds it
        if not bool(torch.isfinite(target[counted]).all()):
            raise ValueError(
                "got NaN or infinite targets; expected finite numbers: drop those rows, or name them (void)"
            )
        return cls(target.where(counted, 0.0), counted)

    def column(self, c: int, values: Tensor) -> Tensor:
        """What counts of (N, C, *) for output c, one row after another: (rows,)."""
        return values[:, c][self.counted[:, c]]


@dataclass(frozen=True, eq=False)
class PredictionIntervalReport:
    """How intervals did on labelled data, for each of the C outputs, in the units of y.

    Bins hold about equally many rows, from the least to the largest predicted standard deviation; rows of the same one
    share a bin, and a bin may be empty (NaN).
    """

    level: float
    count: int
    coverage: Tensor  # (C,), of pixels the mean over images of the share of their pixels that are covered
    mean_width: Tensor  # (C,)
    interval_score: Tensor  # (C,)
    bin_std: Tensor  # (C, num_bins), the mean predicted standard deviation
    bin_coverage: Tensor  # (C, num_bins)
    bin_count: Tensor  # (C, num_bins)

    def __str__(self) -> str:
        names = ("coverage", "mean_width", "interval_score")
        figures = [
            {"output": c} | {name: float(getattr(self, name)[c]) for name in names} for c in range(len(self.coverage))
        ]
        bins = [
            {"output": c, "predicted std": float(std), "coverage": float(share), "N": int(rows)}
            for c, columns in enumerate(zip(self.bin_std, self.bin_coverage, self.bin_count, strict=True))
            for std, share, rows in zip(*columns, strict=True)
            if rows
        ]
        return f"N = {self.count:,}, level {self.level:g}\n{format_table(figures)}\n\n{format_table(bins)}"


@dataclass(frozen=True)
class ConformalRegressor:
    """A predictor that answers with intervals; `fit_conformal_regressor` makes one. But for the predictor, a few numbers.

    `config()` gives them for a JSON file, `restore(config, predictor)` takes them back.
    """

    predictor: Predictor
    quantiles: tuple[float, ...]  # one for each output
    level: float
    kind: RegressionScore
    noise_std: tuple[float, ...]  # σ, or one for each output
    gaussian: bool  # the net's outputs are k means, then k values of log σ²
    num_samples: int
    seed: int
    count: int  # calibration rows

    def predict(self, x: InputData, *, batch_size: int = 256, progress: bool = True) -> tuple[Tensor, Tensor]:
        """(low, high), (N, C, *) each, in float64 and in the units of y.

        Inputs are a tensor (a tuple or dict of them), a data set, or a loader. An interval depends on the inputs around
        its own as far as the net rounds otherwise in another batch. The guarantee holds in batches of any size.
        """
        bands = map_batches(self._band_at, x, batch_size, title="intervals", progress=progress)
        lows, highs = zip(*bands, strict=True)
        return torch.cat(lows), torch.cat(highs)

    def evaluate(
        self,
        data: LabeledData,
        *,
        num_bins: int = 5,
        ignore_index: float | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> PredictionIntervalReport:
        """Coverage, width and interval score over labelled rows that were not used for calibration.

        Targets that are `ignore_index` are passed over.
        """
        if num_bins < 1:
            raise ValueError(f"got num_bins={num_bins}; expected at least 1")
        tested = [_Tested(self.level) for _ in self.quantiles]
        rows = 0
        for x, y in iter_batches(data, batch_size, title="evaluating intervals", progress=progress):
            base = self._base(x)
            truth = _Truth.of(base.low, y, ignore_index)
            low, high = self._band(base)
            for c, part in enumerate(tested):
                columns = [truth.column(c, values) for values in (low, high, truth.y, base.spread)]
                part.add(*columns, counts=_count_per_row(truth.counted[:, c]))
            rows += int((_count_per_row(truth.counted) > 0).sum())
        if not all(part.images for part in tested):
            raise ValueError(f"got an output whose targets are all void ({ignore_index}); expected some that count")
        bins = [part.bins(num_bins) for part in tested]
        bin_std, bin_coverage, bin_count = (torch.stack(parts) for parts in zip(*bins, strict=True))
        figures = [part.intervals for part in tested]
        return PredictionIntervalReport(
            level=self.level,
            count=rows,
            coverage=torch.tensor([part.covered / part.images for part in tested], dtype=torch.float64),
            mean_width=torch.stack([tally.mean_width for tally in figures]).cpu(),
            interval_score=torch.stack([tally.interval_score for tally in figures]).cpu(),
            bin_std=bin_std,
            bin_coverage=bin_coverage,
            bin_count=bin_count,
        )

    def config(self) -> dict[str, Any]:
        """Everything but the predictor, as JSON."""
        return _to_config(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], predictor: Predictor) -> "ConformalRegressor":
        """The intervals that `config` describes, around their predictor."""
        return cls(predictor, **_from_config(config))

    def _base(self, x: Any) -> _Base:
        mean, spread, low, high = self._figures(x)
        if not bool(torch.isfinite(mean).all() & torch.isfinite(spread).all()):
            raise ValueError("the predictor gives NaN or infinite outputs; expected finite numbers: check the net")
        normalised, slack = self.kind == "normalised", _rounding_tolerance(mean.dtype)
        low, high, spread = low.double(), high.double(), spread.double()
        if normalised and not bool((spread > 0).all()):
            raise ValueError(
                "the replicates are all the same at some inputs, and nothing can be divided by a spread of none; "
                "expected a method whose replicates differ: give noise_std, or use kind='absolute'"
            )
        return _Base(low, high, spread if normalised else torch.ones_like(low), spread, normalised, slack)

    def _figures(self, x: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, predicted standard deviation, and both ends before calibration, as the net rounds them."""
        sigma = torch.tensor(self.noise_std)
        if self.gaussian:  # the mean of exp(log σ²) over replicates is not among the figures of a Summary
            band, noise = split_gaussian(self.predictor.predict(x, self.num_samples, seed=self.seed))
            return band.mean, torch.hypot(band.predictive_std(sigma), noise), band.mean, band.mean
        ends = ((1 - self.level) / 2, (1 + self.level) / 2) if self.kind == "quantile" else ()
        summary = self.predictor.summarize(x, self.num_samples, seed=self.seed, quantiles=ends)
        low, high = [summary.quantile(q) for q in ends] if ends else [summary.mean, summary.mean]
        return summary.mean, summary.predictive_std(sigma), low, high

    def _band_at(self, x: Any) -> tuple[Tensor, Tensor]:
        return self._band(self._base(x))

    def _band(self, base: _Base) -> tuple[Tensor, Tensor]:
        q = torch.tensor(self.quantiles, dtype=torch.float64, device=base.low.device)
        if len(q) != base.low.shape[1]:
            raise ValueError(f"got {base.low.shape[1]} outputs; expected {len(q)}, as in calibration")
        return base.widened(q.view(-1, *[1] * (base.low.ndim - 2)))

    def __str__(self) -> str:
        lines = [{"output": c, "quantile": q} for c, q in enumerate(self.quantiles)]
        header = (
            f"{self.kind} intervals at level {self.level:g} from {self.count:,} calibration rows, "
            f"B = {self.num_samples}, seed {self.seed}"
        )
        return f"{header}\n{format_table(lines)}"


def fit_conformal_regressor(
    predictor: Predictor,
    calibration_data: LabeledData,
    *,
    level: float = 0.9,
    score: RegressionScore = "absolute",
    noise_std: Tensor | float = 0.0,
    ignore_index: float | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> ConformalRegressor:
    """Intervals that hold a new y with probability ≥ `level`, from labelled rows that were not trained on.

    `absolute` intervals have one width everywhere. `normalised` ones are as wide as the predicted standard deviation
    says, times one factor: √(s² + σ²), with s that of the replicates and σ the noise, from a Gaussian head (twice as
    many outputs as targets) or given as `noise_std`, one number or one for each output; estimate it on other rows than
    these. Without any σ they are far too wide where the replicates differ most. `conformal_quantile` ones are the percentile band
    of the replicates, moved out (or in) by one number.

    Targets are (N,) or (N, C); each of several outputs has a quantile, and a guarantee, of its own. Pixels (N, C, *)
    are covered as a share of an image: every image counts the same, whatever its size and however many of its targets
    are `ignore_index` (a number, or NaN), which are passed over; images that are all void do not count.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots.methods import DeterministicPredictor
    >>> rng = torch.Generator().manual_seed(0)
    >>> x = torch.randn(2000, 1, generator=rng)
    >>> y = x + 0.5 * torch.randn(2000, 1, generator=rng)
    >>> net = DeterministicPredictor(torch.nn.Identity())  # the regression function itself, without replicates
    >>> rows = TensorDataset(x[:1000], y[:1000])
    >>> rule = fit_conformal_regressor(net, rows, level=0.9, score="absolute", num_samples=1, progress=False)
    >>> low, high = rule.predict(torch.zeros(1, 1), progress=False)
    >>> round(low.item(), 1), round(high.item(), 1)  # 0.5 · 1.645 on either side
    (-0.8, 0.8)
    >>> abs(rule.evaluate(TensorDataset(x[1000:], y[1000:]), progress=False).coverage.item() - 0.9) < 0.03
    True
    """
    _check_options(predictor, level, score, get_args(RegressionScore))
    sigma = torch.as_tensor(noise_std, dtype=torch.float64).flatten()
    if not bool(((sigma >= 0) & (sigma < math.inf)).all()):
        raise ValueError(f"got noise_std={noise_std}; expected standard deviations ≥ 0, in the units of y")
    rule = ConformalRegressor(predictor, (), level, score, tuple(sigma.tolist()), False, num_samples, seed, 0)
    outputs: list[_Calibrated] = []
    rows = 0
    for x, y in iter_batches(calibration_data, batch_size, title="calibrating intervals", progress=progress):
        if not outputs:
            rule = replace(rule, gaussian=_is_gaussian(predictor, x, y, score, seed))
        base = rule._base(x)
        truth = _Truth.of(base.low, y, ignore_index)
        scores = base.scores(truth.y)
        outputs = outputs or [_Calibrated() for _ in range(scores.shape[1])]
        for c, output in enumerate(outputs):
            columns = [truth.column(c, values) for values in (scores, base.moved(scores), base.size)]
            output.add(*columns, counts=_count_per_row(truth.counted[:, c]))
        rows += int((_count_per_row(truth.counted) > 0).sum())
    return replace(rule, quantiles=tuple(output.quantile(level) for output in outputs), count=rows)


def _is_gaussian(predictor: Predictor, x: Any, y: Tensor, kind: RegressionScore, seed: int) -> bool:
    if not has_gaussian_head(predictor, x, y, seed=seed):
        return False
    if kind == "quantile":
        raise ValueError(
            "got kind='quantile' for a net with a Gaussian head; expected replicates of y's own units alone: use "
            "kind='normalised', which takes the head's noise in"
        )
    return True


@dataclass
class _Calibrated:
    """The scores of one output, batch by batch."""

    scores: list[Tensor] = field(default_factory=list)  # raised by what rounding moves an output of its own size
    moved: list[Tensor] = field(default_factory=list)  # and what it moves one of size 1
    counts: list[Tensor] = field(default_factory=list)
    size: float = 0.0
    number: int = 0

    def add(self, scores: Tensor, moved: Tensor, size: Tensor, *, counts: Tensor) -> None:
        self.scores.append((scores + moved * size).cpu())
        self.moved.append(moved.cpu())
        self.counts.append(counts)
        self.size, self.number = self.size + float(size.sum()), self.number + len(size)

    def quantile(self, level: float) -> float:
        """Of scores that are raised for the usual size too: a small output may be the difference of large numbers."""
        counts = torch.cat(self.counts)
        _check_calibration_rows(level, int((counts > 0).sum()))
        return conformal_quantile(
            torch.cat(self.scores) + torch.cat(self.moved) * (self.size / self.number), counts, level
        )


@dataclass
class _Tested:
    """How the intervals of one output do, batch by batch."""

    level: float
    tallies: list[IntervalMetrics] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # (2, rows) each: the predicted spread, and is y inside?
    images: int = 0
    covered: float = 0.0  # Σ of the share of each image that is covered

    def add(self, low: Tensor, high: Tensor, y: Tensor, spread: Tensor, *, counts: Tensor) -> None:
        if len(y) == 0:
            return
        inside = ((low <= y) & (y <= high)).double()
        self.tallies.append(IntervalMetrics.from_batch(low, high, y, level=self.level))
        self.kept.append(torch.stack([spread, inside]).cpu())
        self.images += int((counts > 0).sum())
        self.covered += float((inside.cpu() / counts.repeat_interleave(counts)).sum())

    @property
    def intervals(self) -> IntervalMetrics:
        return sum(self.tallies[1:], self.tallies[0])

    def bins(self, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
        spread, inside = torch.cat(self.kept, 1)
        return _binned(spread, inside, num_bins)


def _binned(spread: Tensor, inside: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean spread, coverage and rows in bins of about equally many rows: (num_bins,) each."""
    ranks = [math.ceil(len(spread) * k / num_bins) - 1 for k in range(1, num_bins)]
    edges = spread.sort().values[torch.tensor(ranks, dtype=torch.int64).clamp_min(0)]
    bins = torch.bucketize(spread, edges)  # ties share the first bin that takes them
    count = torch.bincount(bins, minlength=num_bins)
    sums = [torch.bincount(bins, weights=part, minlength=num_bins) for part in (spread, inside)]
    return sums[0] / count, sums[1] / count, count
