"""Split conformal prediction: sets of classes and intervals with a guaranteed coverage.

    C(x) = {y : s(x, y) ≤ q},   P(Y ∈ C(X)) ≥ level
    q the k-th smallest of s(X₁, Y₁), …, s(X_n, Y_n),   k = ⌈level · (n + 1)⌉,   P(Y ∈ C(X)) ≥ k / (n + 1) ≥ level

for every predictor and every distribution of the data, if the calibration examples and the new one are exchangeable and
the predictor was not trained on them. Without ties the coverage given the calibration data is a draw from
Beta(k, n + 1 − k). Scores of classification, with p in falling order and u uniform on (0, 1):

    threshold     s(x, y) = 1 − p_y
    adaptive      s(x, y) = Σ_{c before y} p_c + u p_y
    regularised   the same + λ max(0, rank of y − k_reg)

and of regression, with m and s² the mean and variance over replicates (and the noise of a Gaussian head):

    absolute      s(x, y) = |y − m(x)|
    normalised    s(x, y) = |y − m(x)| / s(x)
    quantile      s(x, y) = max(l(x) − y, y − h(x)),   l and h the (1 ± level)/2 quantiles of the replicates

Pixels. Pixels of an image are not exchangeable with each other, images are: q is then the smallest number at which the
fractions of covered pixels, summed over the n images, reach level · (n + 1), and the expected fraction of a new image's
pixels that are covered is at least `level` (conformal risk control). Every image counts the same, however many of its
pixels have a label; with P pixels in each that is rank ⌈level · (n + 1) · P⌉ among all scores.

Rounding. In another batch a net rounds the same input differently, and where scores have ties, all those at q would
drop out together. With e(x, y) the most that a score may move, s(x, y) + e(x, y) is as good a score: calibration takes
its quantile, by raising every score by 2 e, and the guarantee then holds in batches of any size. 2 e is 64 eps of the
outputs' dtype (at most 2⁻⁷), relative to their magnitude. That is an allowance and no bound: a very deep net, or TF32,
may move its outputs by more. Where scores have ties, use such a net with the batch size of the calibration. Classes
whose probabilities differ by rounding alone are ordered by their numbers, in every batch.

Vovk, Gammerman and Shafer, Algorithmic learning in a random world, Springer 2005 (split conformal); Angelopoulos,
Bates, Fisch, Lei and Schuster, Conformal risk control, ICLR 2024 (pixels); Sadinle, Lei and Wasserman, Least ambiguous
set-valued classifiers with bounded error levels, JASA 2019 (threshold); Romano, Sesia and Candès, Classification with
valid and adaptive coverage, NeurIPS 2020 (adaptive); Angelopoulos, Bates, Malik and Jordan, Uncertainty sets for image
classifiers using conformal prediction, ICLR 2021 (regularised); Lei, G'Sell, Rinaldo, Tibshirani and Wasserman,
Distribution-free predictive inference for regression, JASA 2018 (absolute, normalised); Romano, Patterson and Candès,
Conformalized quantile regression, NeurIPS 2019 (quantile).
"""

import math
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import ArgumentError, check_choice, check_fraction, check_int
from neuboots.evaluation._batching import (
    InputData,
    LabeledData,
    align_labels,
    align_targets,
    check_any_counted,
    check_predictor,
    format_columns,
    format_metrics,
    hash_rows,
    is_counted,
    iter_batches,
    predict_batches,
)
from neuboots.evaluation.regression import has_gaussian_head
from neuboots.metrics import IntervalMetrics
from neuboots.prediction import Predictor, class_logits, conformal_quantile, split_gaussian

ClassScore = Literal["threshold", "adaptive", "regularised"]
RegressionScore = Literal["absolute", "normalised", "quantile"]

# -- scores ----------------------------------------------------------------------------


def _rounding_tolerance(dtype: torch.dtype) -> float:
    """2 e for outputs of magnitude 1.

    Half precision is capped: its nets add in float32, and only what they store is rounded.
    """
    return min(64 * torch.finfo(dtype).eps, 2.0**-7)


def _split_groups(*values: Tensor, counted: Tensor) -> list[list[Tensor]]:
    """Split values (N, G, *) into G groups: those that count, (S,) each, and their number in each example, (N,)."""
    groups = []
    for g in range(counted.shape[1]):
        valid = counted[:, g]
        groups.append([*(value[:, g][valid].cpu() for value in values), valid.reshape(len(valid), -1).sum(1).cpu()])
    return groups


def _join_batches(batches: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """Concatenate what `_split_groups` returns for each batch."""
    return [[torch.cat(parts) for parts in zip(*group, strict=True)] for group in zip(*batches, strict=True)]


def _sum_over_examples(inside: Tensor, counts: Tensor) -> Tensor:
    """Sum over examples of the fraction of their values that are inside, and the number of examples: (2,)."""
    return torch.stack([(inside.double() / counts.repeat_interleave(counts)).sum(), (counts > 0).sum().double()])


def _mean_by_group(values: Tensor, group: Tensor, size: int) -> Tensor:
    """Mean of the values in each of the groups 0 … size − 1, NaN for one without any: (size,)."""
    return torch.bincount(group, values.double(), size) / torch.bincount(group, minlength=size)


@dataclass(frozen=True, kw_only=True)
class _ConformalPredictor:
    """What both predictors share: quantiles, one for each group (class or output), and saving as JSON."""

    _group: ClassVar[str]

    predictor: Predictor
    level: float
    score: str
    num_samples: int
    seed: int
    quantiles: tuple[float, ...] = ()
    count: int = 0

    def _calibrate(self, batches: list[list[list[Tensor]]], *, allow_infinite: bool = False) -> Self:
        """Set the quantiles from scores, how far rounding moves them per magnitude, and magnitudes of the outputs.

        A score is raised by what rounding moves an output of the mean magnitude: a small output may be the difference
        of large numbers.
        """
        groups = _join_batches(batches)
        counted = torch.stack([counts for *_, counts in groups]) > 0  # (G, N)
        quantiles = [
            conformal_quantile(s + slack * size.mean(), counts, self.level) for s, slack, size, counts in groups
        ]
        if math.inf in quantiles and not allow_infinite:
            exact = Fraction(str(float(self.level)))
            expected = f"at least {math.ceil(exact / (1 - exact))} for level {self.level:g}"
            raise ArgumentError("calibration_data", f"{int(counted.sum(1).min())} examples", expected)
        return replace(self, quantiles=tuple(quantiles), count=int(counted.any(0).sum()))

    def __str__(self) -> str:
        header = (
            f"{self.score} score at level {self.level:g} from {self.count:,} calibration examples, "
            f"B = {self.num_samples}, seed {self.seed}"
        )
        names = range(len(self.quantiles)) if len(self.quantiles) > 1 else ["all"]
        always = [str(g) for g, q in enumerate(self.quantiles) if q == math.inf]
        note = f"\nin every set, as there are too few calibration examples: {', '.join(always)}" if always else ""
        return f"{header}\n{format_columns({self._group: names, 'quantile': self.quantiles})}{note}"

    def config(self) -> dict[str, Any]:
        """Return everything but the predictor as JSON values; an infinite quantile is null."""
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "predictor"}
        return {k: [None if math.isinf(q) else q for q in v] if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any], predictor: Predictor) -> Self:
        """Return the conformal predictor that `config()` describes.

        Args:
            config: What `config()` returned.
            predictor: The predictor that was calibrated.
        """
        values: dict[str, Any] = {}
        for name, value in config.items():
            values[name] = tuple(math.inf if q is None else q for q in value) if isinstance(value, list) else value
        return cls(predictor=predictor, **values)


# -- classification ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PredictionSets:
    """Sets of classes.

    Args:
        mask: True for the classes in the set of each input, (N, C, *).

    Example:
        >>> sets = PredictionSets(torch.tensor([[True, False, True], [False, False, False]]))
        >>> sets.labels, sets.size.tolist()
        ([[0, 2], []], [2, 0])
    """

    mask: Tensor

    @property
    def size(self) -> Tensor:
        """Number of classes in each set: (N, *)."""
        return self.mask.sum(1)

    @property
    def labels(self) -> list[list[int]]:
        """The classes of each set; raises ArgumentError for pixels."""
        if self.mask.ndim > 2:
            raise ArgumentError("mask", "sets of pixels", "one set per input", hint="use mask, (N, C, *)")
        return [row.nonzero().flatten().tolist() for row in self.mask]


@dataclass(frozen=True, eq=False)
class PredictionSetReport:
    """Coverage and size of prediction sets on labeled data. Coverages of few inputs are imprecise: see the counts.

    Args:
        level: Nominal coverage.
        count: Number of inputs (or pixels).
        coverage: Fraction of sets with the true class; for pixels the mean over images of the fraction of pixels.
        mean_size: Mean number of classes.
        empty: Fraction of sets without a class.
        singleton: Fraction of sets with one class.
        class_coverage: Coverage by true class, (C,); NaN for a class without inputs.
        class_count: Number of inputs by true class, (C,).
        size_coverage: Coverage by size 0, 1, …, C of the set, (C + 1,); NaN for a size without inputs.
        size_count: Number of inputs by size, (C + 1,).
    """

    level: float
    count: int
    coverage: float
    mean_size: float
    empty: float
    singleton: float
    class_coverage: Tensor
    class_count: Tensor
    size_coverage: Tensor
    size_count: Tensor

    def __str__(self) -> str:
        metrics = {name: getattr(self, name) for name in ("level", "coverage", "mean_size", "empty", "singleton")}
        tables = [f"N = {self.count:,}\n{format_metrics(metrics)}"]
        for name in ("size", "class"):
            coverage, count = getattr(self, f"{name}_coverage"), getattr(self, f"{name}_count")
            (kept,) = count.nonzero(as_tuple=True)
            tables.append(format_columns({name: kept, "coverage": coverage[kept], "N": count[kept]}))
        return "\n\n".join(tables)


@dataclass(frozen=True, kw_only=True)
class ConformalClassifier(_ConformalPredictor):
    """A classifier that predicts sets of classes; made by `fit_conformal_classifier`.

    Args:
        predictor: The calibrated predictor.
        quantiles: The quantile q, or one for each class.
        level: Coverage of the sets.
        score: Conformity score.
        num_samples: Number of replicates B.
        seed: Seed of the replicates and of u.
        count: Number of calibration examples.
        class_conditional: Whether each class has a quantile of its own.
        allow_empty: Whether sets may be empty.
        penalty: λ of the regularised score.
        k_reg: Number of classes without a penalty.
    """

    _group = "class"

    class_conditional: bool
    allow_empty: bool
    penalty: float
    k_reg: int

    def predict(self, x: InputData, *, batch_size: int = 256, progress: bool = True) -> PredictionSets:
        """Predict {c : s(x, c) ≤ q} for each input.

        The set of an input does not depend on the batch, except for a class whose score is within rounding of q.

        Args:
            x: A tensor of inputs (or a tuple or dict of them), a data set, or a loader.
            batch_size: Number of inputs at a time.
            progress: Whether to show a progress bar.

        Returns:
            The sets.
        """
        (mask,) = predict_batches(lambda batch: (self._mask(batch),), x, batch_size, title="sets", progress=progress)
        return PredictionSets(mask)

    def evaluate(
        self, data: LabeledData, *, ignore_index: int | None = -100, batch_size: int = 256, progress: bool = True
    ) -> PredictionSetReport:
        """Measure coverage and size on labeled data that were not used for calibration.

        Args:
            data: Data set of examples (x, y), or a loader of batches.
            ignore_index: Label of inputs that do not count; None if all do.
            batch_size: Number of inputs at a time, for a data set.
            progress: Whether to show a progress bar.

        Returns:
            The report, which prints as tables.
        """
        by_class: Any = 0  # (2, C): inputs, and inputs whose set holds their class
        by_size: Any = 0  # (2, C + 1)
        covered: Any = 0
        for x, y in iter_batches(data, batch_size, title="evaluating sets", progress=progress):
            mask = self._mask(x)
            labels = align_labels(mask, y, ignore_index=ignore_index)[:, None]  # (N, 1, *)
            counted = is_counted(labels, ignore_index)
            inside, sizes = mask.gather(1, labels.where(counted, 0)), mask.sum(1, keepdim=True)
            ((inside, labels, sizes, counts),) = _split_groups(inside, labels, sizes, counted=counted)
            by_class += torch.stack([torch.bincount(y, minlength=mask.shape[1]) for y in (labels, labels[inside])])
            by_size += torch.stack([torch.bincount(k, minlength=mask.shape[1] + 1) for k in (sizes, sizes[inside])])
            covered += _sum_over_examples(inside, counts)
        count = int(by_size[0].sum())
        check_any_counted(count, ignore_index)
        return PredictionSetReport(
            level=self.level,
            count=count,
            coverage=float(covered[0] / covered[1]),
            mean_size=int((by_size[0] * torch.arange(by_size.shape[1])).sum()) / count,
            empty=int(by_size[0, 0]) / count,
            singleton=int(by_size[0, 1]) / count,
            class_coverage=by_class[1].double() / by_class[0],
            class_count=by_class[0],
            size_coverage=by_size[1].double() / by_size[0],
            size_count=by_size[0],
        )

    def _mask(self, x: Any) -> Tensor:
        scores, _ = self._scores(x)  # (N, C, *)
        limits = torch.tensor(self.quantiles, dtype=scores.dtype, device=scores.device)
        mask = scores <= limits.view(1, -1, *[1] * (scores.ndim - 2))
        if self.allow_empty:
            return mask
        most_probable = scores.argmin(1, keepdim=True)  # (N, 1, *)
        return mask.scatter(1, most_probable, mask.gather(1, most_probable) | ~mask.any(1, keepdim=True))

    def _scores(self, x: Any) -> tuple[Tensor, float]:
        """s(x, c) for every class, (N, C, *) in float64, and how far another batch may move a score below 1."""
        summary = self.predictor.summarize(x, self.num_samples, seed=self.seed)
        probs, slack = summary.class_probs.double(), _rounding_tolerance(summary.probs.dtype)
        if bool(probs.isnan().any()):
            raise ArgumentError("predictor", "NaN probabilities", "numbers", hint="check the outputs of the net")
        if self.score == "threshold":
            return 1 - probs, slack
        logits = class_logits(summary.mean.double(), 1, independent=summary.independent)
        order = _falling_order(probs, logits, slack)
        falling = probs.gather(1, order)
        before = falling.cumsum(1) - falling
        u = _row_uniforms(x, probs[:, :1], self.seed)  # (N, 1, *)
        scores = before + u * falling
        if self.score == "regularised":
            ranks = torch.arange(1, probs.shape[1] + 1, device=probs.device)
            extra = self.penalty * (ranks - self.k_reg).clamp_min(0)
            scores = scores + extra.view(-1, *[1] * (probs.ndim - 2))
        return torch.empty_like(scores).scatter_(1, order, scores), slack


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
    ignore_index: int | None = -100,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> ConformalClassifier:
    """Calibrate sets of classes that contain the true one with probability ≥ `level`.

    For pixels (labels (N, *)) the guarantee is about the fraction of an image's pixels that are covered; every image
    counts the same, and images whose labels are all `ignore_index` do not count.

    Args:
        predictor: Predictor of a classifier.
        calibration_data: Held-out examples (x, y).
        level: Coverage of the sets.
        score: "threshold" gives the smallest sets on average; "adaptive" sets are larger where the predictor is
            uncertain, and cover easy and hard inputs more evenly; "regularised" adds a `penalty` for each class beyond
            the first `k_reg`, which excludes a long tail of improbable classes. u is a function of the seed and of the
            values in x, so the set of an input is the same in any batch.
        class_conditional: Guarantee the coverage among the inputs of each true class by a quantile of its own; a class
            with too few calibration examples is then in every set.
        allow_empty: If the predictor is correct more often than `level`, some sets are empty. False: they hold the most
            probable class, and the coverage is above the level.
        penalty: λ of the regularised score.
        k_reg: Number of classes without a penalty.
        ignore_index: Label of inputs that do not count; None if all do.
        num_samples: Number of replicates B.
        seed: Seed of the replicates and of u.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The classifier.

    Raises:
        ArgumentError: If an option is invalid, or there are too few calibration examples.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> rng = torch.Generator().manual_seed(0)
        >>> logits = 2 * torch.randn(2000, 5, generator=rng)
        >>> labels = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
        >>> predictor = DeterministicPredictor(torch.nn.Identity())  # its probabilities are calibrated
        >>> calibration_data = TensorDataset(logits[:1000], labels[:1000])
        >>> classifier = fit_conformal_classifier(predictor, calibration_data, num_samples=1, progress=False)
        >>> certain, uncertain = [4.0, 0, 0, 0, 0], [3.0, 3.0, 0, 0, 0]
        >>> classifier.predict(torch.tensor([certain, uncertain]), progress=False).labels
        [[0], [0, 1]]
        >>> report = classifier.evaluate(TensorDataset(logits[1000:], labels[1000:]), progress=False)
        >>> abs(report.coverage - 0.9) < 0.03
        True
    """
    check_predictor(predictor)
    check_choice("score", score, get_args(ClassScore))
    if not (isinstance(penalty, float | int) and 0 <= penalty < math.inf):
        raise ArgumentError("penalty", penalty, "a finite number ≥ 0")
    classifier = ConformalClassifier(
        predictor=predictor,
        level=check_fraction("level", level),
        score=score,
        num_samples=num_samples,
        seed=seed,
        class_conditional=class_conditional,
        allow_empty=allow_empty,
        penalty=penalty,
        k_reg=check_int("k_reg", k_reg, minimum=0),
    )
    batches = []
    for x, y in iter_batches(calibration_data, batch_size, title="calibrating sets", progress=progress):
        scores, slack = classifier._scores(x)  # (N, C, *)
        labels = align_labels(scores, y, ignore_index=ignore_index)[:, None]  # (N, 1, *)
        counted = is_counted(labels, ignore_index)
        if class_conditional and labels[:1].numel() > 1:
            raise ArgumentError("class_conditional", True, "False for pixels")
        if class_conditional:
            counted = counted & (labels == torch.arange(scores.shape[1], device=labels.device))  # (N, C)
        else:
            scores = scores.gather(1, labels.where(counted, 0))
        raised = scores * (1 + slack) + slack  # a score is at least 0, and the magnitude of probabilities is 1
        zeros = torch.zeros_like(raised)
        batches.append(_split_groups(raised, zeros, zeros, counted=counted))
    return classifier._calibrate(batches, allow_infinite=class_conditional)


def _falling_order(probs: Tensor, logits: Tensor, slack: float) -> Tensor:
    """Classes by falling probability, those of a run of equals by their numbers: (N, C, *).

    Equal is what rounding may make of equals: where z moves by slack · |z|, log p moves by as much.
    """
    values, order = probs.sort(dim=1, descending=True)
    magnitude = logits.abs().expand_as(probs).gather(1, order)
    tolerance = slack * (1 + torch.minimum(magnitude[:, 1:], magnitude[:, :-1]))
    lower = values[:, 1:] < values[:, :-1] * (-tolerance).exp()
    run = torch.cat([torch.zeros_like(order[:, :1]), lower.cumsum(1)], 1)
    return torch.empty_like(order).scatter_(1, order, run).argsort(dim=1, stable=True)


def _row_uniforms(x: Any, reference: Tensor, seed: int) -> Tensor:
    """u for each input (and pixel), a function of the seed and of the input's values: (N, 1, *), like `reference`.

    The outputs would not do as a key: in another batch they may be rounded differently.
    """
    names = [int.from_bytes(name, "little", signed=True) for name in hash_rows(x)]
    keys = derive_keys(torch.tensor(names), seed, "conformal")  # (N,)
    pixels = torch.arange(math.prod(reference.shape[1:]))
    return draw_uniform(keys[:, None], pixels).reshape(reference.shape).to(device=reference.device)


# -- regression ----------------------------------------------------------------------------------------


class _Band(NamedTuple):
    """A band before calibration, [low, high]; after it, [low − q · scale, high + q · scale]: (N, C, *), float64."""

    low: Tensor
    high: Tensor
    scale: Tensor
    std: Tensor  # the predicted standard deviation, for every score
    normalised: bool
    slack: float  # how far another batch may move outputs of magnitude 1

    def scores(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The q at which the band begins to contain y, how far it moves where outputs do, and their magnitude.

        Where outputs of magnitude 1 move by the slack, so do the ends of the band, and a scale that is not 1.
        """
        scores = torch.maximum(self.low - y, y - self.high) / self.scale
        slack = self.slack * (1 + scores * self.normalised) / self.scale  # a normalised score is at least 0
        magnitude = torch.maximum(-self.low, self.high) + self.std  # low ≤ high: the larger of |low| and |high|
        return scores + slack * magnitude, slack, magnitude

    def widen(self, quantiles: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """The band at q.

        A y whose score is q itself stays inside: q is raised for the rounding of the outputs, the reach for its own.
        """
        if len(quantiles) != self.low.shape[1]:
            raise ArgumentError("x", f"{self.low.shape[1]} outputs", f"{len(quantiles)}, as in calibration")
        reach = self.low.new_tensor(quantiles).view(-1, *[1] * (self.low.ndim - 2)) * self.scale
        reach = reach * (1 + 4 * torch.finfo(reach.dtype).eps)
        low, high = self.low - reach, self.high + reach
        middle = (low + high) / 2  # a negative q may empty the band: its middle remains
        return torch.minimum(low, middle), torch.maximum(high, middle)


def _mask_targets(reference: Tensor, y: Tensor, ignore_index: float | None) -> tuple[Tensor, Tensor]:
    """Targets like the outputs, and which of them count: (N, C, *) each."""
    targets = align_targets(reference, y)
    counted = torch.ones_like(targets, dtype=torch.bool)
    if ignore_index is not None and math.isnan(ignore_index):
        counted = ~targets.isnan()
    elif ignore_index is not None:
        counted = targets != torch.tensor(ignore_index, dtype=y.dtype)  # as y's dtype rounds it
    if not bool(torch.isfinite(targets[counted]).all()):
        raise ArgumentError("data", "NaN or infinite targets", "finite numbers", hint="drop them, or pass ignore_index")
    return targets.where(counted, 0.0), counted


def _bin_by_std(std: Tensor, num_bins: int) -> Tensor:
    """Bin of each input, from the smallest std to the largest; ties are in the first bin that takes them: (N,)."""
    ranks = [math.ceil(len(std) * k / num_bins) - 1 for k in range(1, num_bins)]
    edges = std.sort().values[torch.tensor(ranks, dtype=torch.int64)]
    return torch.bucketize(std, edges)


@dataclass(frozen=True, eq=False)
class PredictionIntervalReport:
    """Coverage and width of prediction intervals on labeled data, for each of the C outputs, in the units of y.

    Bins hold about equally many inputs, from the smallest to the largest predicted standard deviation; inputs of the
    same one are in one bin, and a bin may be empty (NaN).

    Args:
        level: Nominal coverage.
        count: Number of inputs.
        coverage: Fraction of covered targets, (C,); for pixels the mean over images of the fraction of pixels.
        mean_width: Mean width, (C,).
        interval_score: Interval score, (C,).
        bin_std: Mean predicted standard deviation by bin, (C, num_bins).
        bin_coverage: Coverage by bin, (C, num_bins).
        bin_count: Number of targets by bin, (C, num_bins).
    """

    level: float
    count: int
    coverage: Tensor
    mean_width: Tensor
    interval_score: Tensor
    bin_std: Tensor
    bin_coverage: Tensor
    bin_count: Tensor

    def __str__(self) -> str:
        names = ("coverage", "mean_width", "interval_score")
        metrics = {"output": range(len(self.coverage)), **{name: getattr(self, name) for name in names}}
        c, k = self.bin_count.nonzero(as_tuple=True)
        bins = {"output": c, "predicted std": self.bin_std[c, k], "coverage": self.bin_coverage[c, k]}
        bins["N"] = self.bin_count[c, k]
        return f"N = {self.count:,}, level {self.level:g}\n{format_columns(metrics)}\n\n{format_columns(bins)}"


@dataclass(frozen=True, kw_only=True)
class ConformalRegressor(_ConformalPredictor):
    """A regressor that predicts intervals; made by `fit_conformal_regressor`.

    Args:
        predictor: The calibrated predictor.
        quantiles: The quantile q of each output.
        level: Coverage of the intervals.
        score: Conformity score.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        count: Number of calibration examples.
        noise_std: Standard deviation σ of the noise, one number or one per output.
        gaussian: Whether the outputs are k means and k values of log σ².
    """

    _group = "output"

    noise_std: tuple[float, ...]
    gaussian: bool

    def predict(self, x: InputData, *, batch_size: int = 256, progress: bool = True) -> tuple[Tensor, Tensor]:
        """Predict intervals.

        An interval depends on the batch only as far as the net rounds differently in another batch.

        Args:
            x: A tensor of inputs (or a tuple or dict of them), a data set, or a loader.
            batch_size: Number of inputs at a time.
            progress: Whether to show a progress bar.

        Returns:
            Lower and upper ends, (N, C, *) each, in float64 and in the units of y.
        """
        low, high = predict_batches(
            lambda batch: self._band(batch).widen(self.quantiles), x, batch_size, title="intervals", progress=progress
        )
        return low, high

    def evaluate(
        self,
        data: LabeledData,
        *,
        num_bins: int = 5,
        ignore_index: float | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> PredictionIntervalReport:
        """Measure coverage, width and interval score on labeled data that were not used for calibration.

        Args:
            data: Data set of examples (x, y), or a loader of batches.
            num_bins: Number of bins of the predicted standard deviation.
            ignore_index: Value of targets that do not count, possibly NaN.
            batch_size: Number of inputs at a time, for a data set.
            progress: Whether to show a progress bar.

        Returns:
            The report, which prints as tables.
        """
        num_bins = check_int("num_bins", num_bins, minimum=1)
        batches = []
        for x, y in iter_batches(data, batch_size, title="evaluating intervals", progress=progress):
            band = self._band(x)
            targets, counted = _mask_targets(band.low, y, ignore_index)
            batches.append(_split_groups(*band.widen(self.quantiles), targets, band.std, counted=counted))
        columns, examples = [], []
        for low, high, target, std, counts in _join_batches(batches):
            check_any_counted(len(target), ignore_index)
            state = IntervalMetrics.from_batch(low, high, target, level=self.level)
            inside, bins = (low <= target) & (target <= high), _bin_by_std(std, num_bins)
            by_bin = [_mean_by_group(std, bins, num_bins), _mean_by_group(inside, bins, num_bins)]
            covered, images = _sum_over_examples(inside, counts)
            metrics = [covered / images, state.mean_width, state.interval_score]
            columns.append([*metrics, *by_bin, torch.bincount(bins, minlength=num_bins)])
            examples.append(counts > 0)
        count = int(torch.stack(examples).any(0).sum())
        stacked = (torch.stack(parts) for parts in zip(*columns, strict=True))
        return PredictionIntervalReport(self.level, count, *stacked)

    def _band(self, x: Any) -> _Band:
        """The band before calibration."""
        sigma = torch.tensor(self.noise_std)
        if self.gaussian:  # a Summary has no mean of exp(log σ²) over replicates
            prediction, noise = split_gaussian(self.predictor.predict(x, self.num_samples, seed=self.seed))
            mean, std = prediction.mean, torch.hypot(prediction.predictive_std(sigma), noise)
            low = high = mean
        else:
            ends = ((1 - self.level) / 2, (1 + self.level) / 2) if self.score == "quantile" else ()
            summary = self.predictor.summarize(x, self.num_samples, seed=self.seed, quantiles=ends)
            mean, std = summary.mean, summary.predictive_std(sigma)
            low, high = [summary.quantile(q) for q in ends] if ends else [mean, mean]
        if not bool(torch.isfinite(torch.cat([mean, std])).all()):
            raise ArgumentError("predictor", "NaN or infinite outputs", "finite numbers", hint="check the net")
        normalised, slack = self.score == "normalised", _rounding_tolerance(mean.dtype)
        low, high, std = low.double(), high.double(), std.double()
        if normalised and not bool((std > 0).all()):
            raise ArgumentError("predictor", "a predictive std of zero", "replicates that differ, or pass noise_std")
        return _Band(low, high, std if normalised else torch.ones_like(low), std, normalised, slack)


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
    """Calibrate intervals that contain a new y with probability ≥ `level`.

    Each of several outputs has a quantile, and a guarantee, of its own. For pixels (N, C, *) the guarantee is about the
    fraction of an image's pixels that are covered; every image counts the same, and images whose targets are all
    `ignore_index` do not count.

    Args:
        predictor: Predictor of a regression.
        calibration_data: Held-out examples (x, y) with targets (N,) or (N, C, *).
        level: Coverage of the intervals.
        score: "absolute" intervals have one width everywhere; "normalised" ones are proportional to the predicted
            standard deviation √(s² + σ²); "quantile" ones are the percentile band of the replicates, moved out (or in)
            by one number.
        noise_std: σ of the normalised score, one number or one per output, estimated on other data; a Gaussian head
            (twice as many outputs as targets) predicts its own. Without any σ the intervals are far too wide where the
            replicates differ most.
        ignore_index: Value of targets that do not count, possibly NaN.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The regressor.

    Raises:
        ArgumentError: If an option is invalid, or there are too few calibration examples.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> rng = torch.Generator().manual_seed(0)
        >>> x = torch.randn(2000, 1, generator=rng)
        >>> y = x + 0.5 * torch.randn(2000, 1, generator=rng)
        >>> predictor = DeterministicPredictor(torch.nn.Identity())  # the regression function itself
        >>> calibration_data = TensorDataset(x[:1000], y[:1000])
        >>> regressor = fit_conformal_regressor(predictor, calibration_data, num_samples=1, progress=False)
        >>> low, high = regressor.predict(torch.zeros(1, 1), progress=False)
        >>> round(low.item(), 1), round(high.item(), 1)  # 0.5 · 1.645 on either side
        (-0.8, 0.8)
        >>> report = regressor.evaluate(TensorDataset(x[1000:], y[1000:]), progress=False)
        >>> abs(report.coverage.item() - 0.9) < 0.03
        True
    """
    check_predictor(predictor)
    check_choice("score", score, get_args(RegressionScore))
    sigma = torch.as_tensor(noise_std, dtype=torch.float64).flatten()
    if not bool(((sigma >= 0) & (sigma < math.inf)).all()):
        raise ArgumentError("noise_std", noise_std, "standard deviations ≥ 0, in the units of y")
    regressor = ConformalRegressor(
        predictor=predictor,
        level=check_fraction("level", level),
        score=score,
        num_samples=num_samples,
        seed=seed,
        noise_std=tuple(sigma.tolist()),
        gaussian=False,
    )
    batches: list[list[list[Tensor]]] = []
    for x, y in iter_batches(calibration_data, batch_size, title="calibrating intervals", progress=progress):
        if not batches:
            regressor = replace(regressor, gaussian=has_gaussian_head(predictor, x, y))
            if regressor.gaussian and score == "quantile":
                raise ArgumentError("score", score, "'absolute' or 'normalised' for a net with a Gaussian head")
        band = regressor._band(x)
        targets, counted = _mask_targets(band.low, y, ignore_index)
        batches.append(_split_groups(*band.scores(targets), counted=counted))
    return regressor._calibrate(batches)
