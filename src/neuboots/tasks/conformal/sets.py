"""Sets of classes that hold the true one at least as often as they say.

    threshold     s(x, y) = 1 − p_y
    adaptive      s(x, y) = Σ_{c before y} p_c + u p_y,   classes in the order of falling p, u uniform on (0, 1)
    regularised   the same + λ max(0, rank of y − k_reg)

Classes whose probabilities differ by rounding alone have the order of their numbers, in every batch.

Sadinle, Lei and Wasserman, Least ambiguous set-valued classifiers with bounded error levels, JASA 2019 (threshold);
Romano, Sesia and Candès, Classification with valid and adaptive coverage, NeurIPS 2020 (adaptive); Angelopoulos, Bates,
Malik and Jordan, Uncertainty sets for image classifiers using conformal prediction, ICLR 2021 (regularised).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from neuboots.keys import draw_keys, uniforms
from neuboots.prediction import Predictor
from neuboots.tasks.common import Rows, batches_of, labels_for, table
from neuboots.tasks.conformal.quantile import (
    check_calibration_rows,
    check_options,
    config_of,
    per_row,
    quantile,
    restored,
    rounding,
)
from neuboots.tasks.inputs import Inputs, answers_to, row_names

SetKind = Literal["threshold", "adaptive", "regularised"]


class _Scores(NamedTuple):
    """s(x, c) for every class, (N, C, *), in float64; `slack` is how far another batch may move one below 1."""

    values: Tensor
    slack: float

    def of(self, labels: Tensor, void: int | None) -> tuple[Tensor, Tensor]:
        """The scores of the true classes, (rows,), raised by what rounding may move them; and which count, (N, *)."""
        counted = _counted(labels, void)
        mine = self.values.gather(1, labels.where(counted, 0)[:, None])[:, 0][counted]
        return mine + self.slack * (1 + mine.abs()), counted


@dataclass(frozen=True, eq=False)
class Sets:
    """The classes that may be true, for each input: `mask` (N, C, *) is True for those in the set.

    >>> sets = Sets(torch.tensor([[True, False, True], [False, False, False]]))
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
class SetsReport:
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
        return "\n\n".join([f"N = {self.count:,}\n{table(figures)}", table(sizes), table(classes)])


@dataclass(frozen=True)
class ConformalSets:
    """A predictor that answers with sets; `conformal_sets` makes one. But for the predictor it is a few numbers.

    `config()` gives them for a JSON file, `restore(config, predictor)` takes them back.
    """

    predictor: Predictor
    quantiles: tuple[float, ...]  # q, or one for each class
    level: float
    kind: SetKind
    by_class: bool
    allow_empty: bool
    penalty: float
    k_reg: int
    num_samples: int
    seed: int
    count: int  # calibration rows

    def predict(self, x: Inputs, *, batch_size: int = 256, progress: bool = True) -> Sets:
        """{c : s(x, c) ≤ q} for each of the inputs: a tensor (a tuple or dict of them), a data set, or a loader.

        The set of an input does not depend on those around it, but for a class whose score is within rounding of q:
        the net itself may round otherwise in another batch. The guarantee holds in batches of any size.
        """
        return Sets(torch.cat(answers_to(self._mask, x, batch_size, title="sets", progress=progress)))

    def evaluate(
        self, data: Rows, *, void: int | None = None, batch_size: int = 256, progress: bool = True
    ) -> SetsReport:
        """Coverage and size over labelled rows that were not used for calibration; `void` labels are passed over."""
        by_class: Tensor | int = 0  # (2, C): rows, and rows whose set holds their class
        by_size: Tensor | int = 0  # (2, C + 1)
        images, covered = 0, 0.0
        for x, y in batches_of(data, batch_size, title="evaluating sets", progress=progress):
            mask = self._mask(x)
            labels = labels_for(mask, y, void=void)
            counted = _counted(labels, void)
            inside = mask.gather(1, labels.where(counted, 0)[:, None])[:, 0] & counted  # (N, *)
            pixels = per_row(counted)
            covered += float((per_row(inside)[pixels > 0].double() / pixels[pixels > 0]).sum())
            images += int((pixels > 0).sum())
            held, classes = inside[counted], mask.shape[1]
            by_class = by_class + _counts(labels[counted], held, classes)
            by_size = by_size + _counts(mask.sum(1)[counted], held, classes + 1)
        assert isinstance(by_class, Tensor), "batches_of gives at least one batch"
        assert isinstance(by_size, Tensor)
        if images == 0:
            raise ValueError(f"got data whose labels are all void ({void}); expected some that count")
        rows = int(by_size[0].sum())
        sizes = torch.arange(by_size.shape[1], dtype=torch.float64)
        return SetsReport(
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
        return config_of(self)

    @classmethod
    def restore(cls, config: dict[str, Any], predictor: Predictor) -> "ConformalSets":
        """The sets that `config` describes, around their predictor."""
        return cls(predictor, **restored(config))

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
        probs, slack = summary.probs.double(), rounding(summary.probs.dtype)
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
        return f"{header}\n{table(lines)}{note}"


def conformal_sets(
    predictor: Predictor,
    calibration: Rows,
    *,
    level: float = 0.9,
    kind: SetKind = "adaptive",
    by_class: bool = False,
    allow_empty: bool = True,
    penalty: float = 0.01,
    k_reg: int = 5,
    void: int | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> ConformalSets:
    """Sets of classes that hold the true one with probability ≥ `level`, from labelled rows that were not trained on.

    `threshold` gives the smallest sets on average; `adaptive` ones are larger where the predictor is unsure, and cover
    easy and hard inputs more evenly; `regularised` ones are adaptive with a `penalty` on each class beyond the first
    `k_reg`, which keeps a long tail of improbable classes out. The uniform u of an input is named by the seed and the
    numbers in x: its set is the same in any batch. Where the predictor is right more often than `level`, some sets are
    empty; with `allow_empty=False` they hold the likeliest class, and the coverage is above the level.

    With `by_class` each class has a quantile of its own, and the guarantee holds among the inputs of each true class; a
    class with too few calibration rows is then in every set. Pixels (labels (N, *)) are covered as a share of an image:
    every image counts the same, whatever its size and however many of its labels are `void`, which are passed over;
    images that are all void do not count.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> rng = torch.Generator().manual_seed(0)
    >>> logits = 2 * torch.randn(2000, 5, generator=rng)
    >>> labels = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
    >>> net = PlainPredictor(torch.nn.Identity())  # a net whose probabilities are right
    >>> rows = TensorDataset(logits[:1000], labels[:1000])
    >>> rule = conformal_sets(net, rows, level=0.9, num_samples=1, progress=False)
    >>> sure, torn = [4.0, 0, 0, 0, 0], [3.0, 3.0, 0, 0, 0]
    >>> rule.predict(torch.tensor([sure, torn]), progress=False).labels
    [[0], [0, 1]]
    >>> fresh = TensorDataset(logits[1000:], labels[1000:])
    >>> abs(rule.evaluate(fresh, progress=False).coverage - 0.9) < 0.03
    True
    """
    check_options(predictor, level, kind, get_args(SetKind))
    if not (isinstance(penalty, float | int) and 0 <= penalty < math.inf and isinstance(k_reg, int) and k_reg >= 0):
        raise ValueError(
            f"got penalty={penalty!r} and k_reg={k_reg!r}; expected a finite number and a whole number, both ≥ 0"
        )
    rule = ConformalSets(predictor, (), level, kind, by_class, allow_empty, penalty, k_reg, num_samples, seed, 0)
    kept: list[Tensor] = []  # scores of the true classes
    truths: list[Tensor] = []  # and, where each has a quantile of its own, which they are
    counts: list[Tensor] = []
    classes = 0
    for x, y in batches_of(calibration, batch_size, title="calibrating sets", progress=progress):
        scores = rule._scores(x)
        labels = labels_for(scores.values, y, void=void)
        if by_class and labels[:1].numel() > 1:
            raise ValueError("got by_class=True for pixels; expected one label for each input: use by_class=False")
        mine, counted = scores.of(labels, void)
        kept.append(mine.cpu())
        counts.append(per_row(counted))
        truths.extend([labels[counted].cpu()] if by_class else [])
        classes = scores.values.shape[1]
    values, pixels = torch.cat(kept), torch.cat(counts)
    rule = replace(rule, count=int((pixels > 0).sum()))
    if not by_class:
        check_calibration_rows(level, rule.count)
        return replace(rule, quantiles=(quantile(values, pixels, level),))
    each = [values[torch.cat(truths) == c] for c in range(classes)]
    return replace(rule, quantiles=tuple(quantile(mine, torch.ones(len(mine)), level) for mine in each))


def _counted(labels: Tensor, void: int | None) -> Tensor:
    """Which labels are not void: (N, *)."""
    return torch.ones_like(labels, dtype=torch.bool) if void is None else labels != void


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
    names = [int.from_bytes(name, "little", signed=True) for name in row_names(x)]
    keys = draw_keys(torch.tensor(names, dtype=torch.int64), seed, "conformal")  # (N,)
    pixels = torch.arange(like[:1].numel() if len(like) else 1)
    return uniforms(keys[:, None], pixels).reshape(like.shape).to(like)
