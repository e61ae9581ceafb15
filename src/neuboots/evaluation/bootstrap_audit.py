"""Audit: comparison of a predictor's replicates with those of a true bootstrap on the same data.

A few nets are trained on re-weighted data, which is what a bootstrap does, and compared with the predictor at the same
inputs: size of the standard deviation, agreement over inputs, shape and mean; see `_audit_stats`. A defect is reported
if it is statistically significant and larger than a practical margin.

For classification the logits are compared, minus their mean over classes: softmax is invariant to a shift of all
logits, and probabilities near 0 and 1 have no spread to compare. Bootstrap replicates differ in their initial weights
and order of examples as well as in their bootstrap weights. To compare the weights alone, start all of them from one
net: `model=lambda: copy.deepcopy(net)`.

Newton and Raftery, Approximate Bayesian inference with the weighted likelihood bootstrap, JRSS B 1994.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, derive_seed, draw_uniform
from neuboots._validation import ArgumentError, check_int, check_memory
from neuboots.evaluation._audit_stats import (
    MAX_SUBSETS,
    MIN_STD_FRACTION,
    NUM_LOCATIONS,
    STD_RATIO_TOLERANCE,
    LogStdSums,
    PermutationNull,
    ReplicateSubsets,
    StdAgreement,
    StdRatio,
    ks_and_wasserstein,
    standardize,
)
from neuboots.evaluation._batching import check_predictor, format_table, iter_batches, iter_inputs
from neuboots.evaluation._parallel import check_repeated_fit
from neuboots.evaluation.active_learning import RowSelector
from neuboots.head import copy_net, count_rows, take_rows, unwrap_model
from neuboots.loading import FitData, as_dataset, check_length, preserve_rng_state
from neuboots.losses import Loss, as_loss
from neuboots.methods._base import count_net_bytes
from neuboots.methods.ensembles import EnsemblePredictor, fit_members
from neuboots.prediction import Method, Predictor, draw_member_order
from neuboots.training import BaseMethod, TrainingConfig

AuditFinding = Literal["faithful", "no spread", "narrow", "wide", "misplaced", "shifted", "shape", "inconclusive"]

# Practical margins, besides STD_RATIO_TOLERANCE. "faithful" needs intervals short enough to have found a defect.
MAX_FACTOR = 1.5  # for one output or a typical input, and for the end of an interval
MIN_CORRELATION = 0.5
MAX_SHIFT = 2.0  # standard deviations between the means: a band of ± 2 standard deviations misses the other mean
MAX_FRACTION = 0.05  # of the locations with a defect

_MAX_VALUES = 1 << 21  # replicates × outputs held at a time
_OUTLIER_FRACTION = 0.5  # of the variance, on average over locations, that is due to one replicate
_MIN_FOR_OUTLIERS = 8  # replicates; among fewer, one may dominate by chance


@dataclass(frozen=True, eq=False)
class BootstrapAudit:
    """Result of `audit_bootstrap` and `compare_with_bootstrap`; `verdict` states it, `print` shows all statistics.

    A location is an output at an input, or at a pixel of it.

    Attributes:
        std_ratio: Ratio of standard deviations; NaN where the predictor's replicates are constant, as are `ks`,
            `wasserstein` and `null`.
        std_ratios: The same for each output.
        agreement: Agreement of the standard deviations over inputs.
        ks: Mean Kolmogorov–Smirnov distance of standardized replicates.
        wasserstein: Mean Wasserstein-1 distance of standardized replicates.
        shift: Median distance of the means, in standard deviations of the bootstrap.
        shifted: Fraction of locations where it is more than MAX_SHIFT.
        null: Expectations and limits of these statistics if both have one distribution.
        constant: Fraction of locations where the predictor's replicates are constant and the bootstrap's are not.
        bootstrap_outliers: Numbers of bootstrap replicates that cause most of the spread.
        outliers: Numbers of the predictor's replicates that do.
        std: Standard deviation of the predictor's replicates: (N, C, *).
        bootstrap_std: Standard deviation of the bootstrap replicates: (N, C, *).
        ks_map: Kolmogorov–Smirnov distances: (N, C, *).
        wasserstein_map: Wasserstein-1 distances: (N, C, *).
        num_bootstrap: Number of bootstrap replicates K.
        num_samples: Number of the predictor's distinct replicates B.
        logits: Whether outputs are logits of classes.
        seed: Seed.
    """

    std_ratio: StdRatio
    std_ratios: tuple[StdRatio, ...]
    agreement: StdAgreement
    ks: float
    wasserstein: float
    shift: float
    shifted: float
    null: PermutationNull
    constant: float
    bootstrap_outliers: tuple[int, ...]
    outliers: tuple[int, ...]
    std: Tensor
    bootstrap_std: Tensor
    ks_map: Tensor
    wasserstein_map: Tensor
    num_bootstrap: int
    num_samples: int
    logits: bool
    seed: int

    @property
    def ratio(self) -> float:
        """Geometric mean of the ratio of standard deviations; 1 is right, 0 no spread at all."""
        return 0.0 if math.isnan(self.std_ratio.value) else self.std_ratio.value

    @property
    def correlation(self) -> float | None:
        """Correlation of log standard deviations over inputs, corrected for few replicates; see `agreement.reason`."""
        return self.agreement.correlation

    @property
    def faithful(self) -> bool:
        """Whether no defect was found, by intervals that are short enough to find one."""
        return self.finding == "faithful"

    @property
    def finding(self) -> AuditFinding:
        """The first significant defect; "inconclusive" if the power was too low, "faithful" if none was found."""
        return self._defects[0][0] if self._defects else "inconclusive" if self._is_inconclusive else "faithful"

    @property
    def _defects(self) -> list[tuple[AuditFinding, str]]:
        """Significant defects, each with a description."""
        agreement = self.agreement
        correlation = 1.0 if agreement.correlation is None else agreement.correlation + (agreement.error or 0.0)
        is_misplaced = agreement.factor_low > MAX_FACTOR or correlation < MIN_CORRELATION
        is_shifted = self.shifted > MAX_FRACTION and not self.shifted <= self.null.shifted_limit
        apart = f"means more than {MAX_SHIFT:g} standard deviations apart at {self.shifted:.0%} of the locations"
        shape = f"Wasserstein distance {self.wasserstein:.2f}, expected {self.null.wasserstein:.2f}"
        checks: list[tuple[bool, AuditFinding, str]] = [
            (self.constant > MAX_FRACTION, "no spread", f"no spread at {self.constant:.0%} of the locations"),
            *((True, kind, text) for kind, text in self._size_defects),
            (is_misplaced, "misplaced", f"misplaced over inputs ({self._agreement_text})"),
            (is_shifted, "shifted", apart),
            (self.wasserstein > self.null.wasserstein_limit, "shape", f"another shape ({shape})"),
        ]
        return [(finding, text) for is_found, finding, text in checks if is_found]

    @property
    def _size_defects(self) -> list[tuple[AuditFinding, str]]:
        """Too wide or too narrow over all outputs, or else in the worst of them; the larger defect first."""
        worst: dict[AuditFinding, tuple[float, str]] = {}
        overall = _size_finding(self.std_ratio)
        for where, ratio in [("", self.std_ratio), *((f" in output {c}", r) for c, r in enumerate(self.std_ratios))]:
            if (kind := _size_finding(ratio)) is None:
                continue
            factor = max(ratio.value, 1 / ratio.value)
            text = f"too {kind} by a factor {factor:.1f} ({_ratio_text(ratio)}){where}"
            if kind not in worst or (kind != overall and factor > worst[kind][0]):
                worst[kind] = factor, text
        return [(kind, text) for kind, (_, text) in sorted(worst.items(), key=lambda item: -item[1][0])]

    @property
    def _is_inconclusive(self) -> bool:
        """Whether something is neither significantly wrong nor shown to be right."""
        agreement = self.agreement
        outputs = self.std_ratios if len(self.std_ratios) > 1 else ()
        off = any(abs(math.log(ratio.value)) > math.log(MAX_FACTOR) for ratio in outputs)
        known = agreement.factor_high <= MAX_FACTOR if self.correlation is None else self.correlation >= MIN_CORRELATION
        return not self._has_right_size or off or not known or agreement.factor > MAX_FACTOR

    @property
    def _has_right_size(self) -> bool:
        """Whether the ratio is acceptable, and its interval short enough to say so."""
        ratio = self.std_ratio
        is_known = ratio.high / ratio.value <= MAX_FACTOR
        return is_known and 1 / STD_RATIO_TOLERANCE <= ratio.value <= STD_RATIO_TOLERANCE

    @property
    def verdict(self) -> str:
        """The finding with its numbers, in one line."""
        if math.isnan(self.std_ratio.value):
            return f"no spread at all: {self.num_bootstrap} bootstrap replicates differ, the predictor's do not"
        size = _ratio_text(self.std_ratio)
        if self._defects:
            prefix = f"right size on average ({size}), but " if self._has_right_size else ""
            text = prefix + "; ".join(text for _, text in self._defects)
        elif self._is_inconclusive:
            scarce = "bootstrap" if self.std_ratio.bootstrap_fraction >= 0.5 else "predictor"
            text = f"inconclusive ({size}; {self._agreement_text}): use more replicates of the {scarce}"
        else:
            text = f"faithful: right size ({size}), {self._agreement_text}"
        for name, numbers in (("bootstrap", self.bootstrap_outliers), ("the predictor's", self.outliers)):
            if numbers:
                text += f"; {name} replicate {', '.join(map(str, numbers))} causes most of the spread"
        return text

    @property
    def _agreement_text(self) -> str:
        agreement = self.agreement
        text = agreement.reason if agreement.correlation is None else f"correlation {agreement.correlation:.2f}"
        return f"{text}, off by a factor {agreement.factor:.1f} at a typical input"

    def __str__(self) -> str:
        kind = "logits minus their mean over classes" if self.logits else "outputs"
        header = (
            f"{len(self.std):,} inputs, {kind}; K = {self.num_bootstrap} bootstrap replicates, B = {self.num_samples} "
            f"of the predictor, seed {self.seed}"
        )
        statistics: list[tuple[str, float | None, float | None]] = [
            ("ratio of standard deviations", self.ratio, 1.0),
            ("  95 % interval, low", self.std_ratio.low, None),
            ("  95 % interval, high", self.std_ratio.high, None),
            ("  typical factor at an input", self.agreement.factor, 1.0),
            ("correlation over inputs", self.correlation, 1.0),
            ("  uncorrected", self.agreement.raw_correlation, None),
            ("  reliability", self.agreement.reliability, None),
            ("KS distance", self.ks, self.null.ks),
            ("Wasserstein distance", self.wasserstein, self.null.wasserstein),
            ("shift of the mean", self.shift, 0.0),
            ("  fraction of shifted locations", self.shifted, 0.0),
            ("fraction of constant locations", self.constant, 0.0),
        ]
        rows = [{"statistic": name, "value": value, "expected": expected} for name, value, expected in statistics]
        return f"{self.verdict}\n{header}\n{format_table(rows)}"


def _size_finding(ratio: StdRatio) -> AuditFinding | None:
    """Whether a ratio is outside the tolerance, and significantly above or below 1."""
    if ratio.value > STD_RATIO_TOLERANCE and ratio.low > 1:
        return "wide"
    return "narrow" if ratio.value < 1 / STD_RATIO_TOLERANCE and ratio.high < 1 else None


def _ratio_text(ratio: StdRatio) -> str:
    if ratio.high / ratio.value > 10:
        return f"ratio {ratio.value:.2g}, interval wider than a factor 10"
    return f"ratio {ratio.value:.2g}, interval {ratio.low:.2g} to {ratio.high:.2g}"


def audit_bootstrap(
    predictor: Predictor,
    method: Method,
    model: Callable[[], nn.Module] | nn.Module,
    data: Dataset[Any],
    config: TrainingConfig,
    x: Any,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    logits: bool | None = None,
    progress: bool = True,
) -> BootstrapAudit:
    """Train bootstrap replicates on the predictor's training data, and compare the predictor with them.

    Args:
        predictor: Predictor to audit.
        method: Method whose replicates are K nets on re-weighted or resampled data, such as
            `BayesianBootstrap(num_members=20)`.
        model: Net, or function that makes one.
        data: Training data of the predictor.
        config: Training options, without a folder; the seed is changed, so that other nets are trained than those
            that the predictor may consist of.
        x: Inputs: a tensor (a tuple or dict of them), a data set, or a loader.
        num_samples: Number of the predictor's replicates B.
        seed: Seed.
        logits: Whether outputs are logits of classes; by default inferred from the targets.
        progress: Whether to show a progress bar.

    Returns:
        The comparison with its verdict.

    Raises:
        ArgumentError: If the config has a folder, where the predictor's training may be stored.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots import BayesianBootstrap, Deterministic
        >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        >>> data, config = TensorDataset(x, (x.sum(1) > 0).long()), TrainingConfig(epochs=1, progress=False)
        >>> single = Deterministic().fit(lambda: nn.Linear(2, 2), data, config)
        >>> bootstrap = BayesianBootstrap(num_members=8)
        >>> audit_bootstrap(single, bootstrap, lambda: nn.Linear(2, 2), data, config, x[:20], progress=False).verdict
        "no spread at all: 8 bootstrap replicates differ, the predictor's do not"
    """
    check_predictor(predictor)
    check_length(data)
    check_repeated_fit(config, None)
    fit_seed = derive_seed(config.seed, seed, "audit")
    with preserve_rng_state():
        config = replace(config, seed=fit_seed, progress=config.progress and progress)
        bootstrap = method.fit(model, data, config)
    logits = _has_logits(bootstrap, data) if logits is None else logits
    return compare_with_bootstrap(
        predictor, bootstrap, x, num_samples=num_samples, seed=seed, logits=logits, progress=progress
    )


def _has_logits(predictor: Predictor, data: Dataset[Any]) -> bool:
    """Whether there is one integer target for each input or pixel, of a net with several outputs."""
    inputs, y = next(iter_batches(data, 1, title="", progress=False))
    outputs = predictor.predict(inputs, 1).samples[0]  # (1, C, *)
    return not y.is_floating_point() and outputs.shape[1] > 1 and y.numel() == outputs[:, 0].numel()


def compare_with_bootstrap(
    predictor: Predictor,
    bootstrap: Predictor,
    x: Any,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    logits: bool = False,
    progress: bool = True,
) -> BootstrapAudit:
    """Compare a predictor's replicates with the members of a bootstrap.

    Memory is bounded by the B replicates at one input and by the maps, one value for each input and output.

    Args:
        predictor: Predictor to audit.
        bootstrap: Predictor with K ≥ 4 members on re-weighted or resampled data.
        x: Inputs: a tensor (a tuple or dict of them), a data set, or a loader.
        num_samples: Number of the predictor's replicates B.
        seed: Seed.
        logits: Whether outputs are logits of classes.
        progress: Whether to show a progress bar.

    Returns:
        The comparison with its verdict.

    Raises:
        ArgumentError: If there are fewer than 4 members, the outputs differ in shape or are not finite, or the
            members do not differ.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots import BayesianBootstrap
        >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> data = TensorDataset(x, x.sum(1) + torch.randn(60, generator=torch.Generator().manual_seed(1)))
        >>> method = BayesianBootstrap(nn.MSELoss(), num_members=20)
        >>> one, other = (
        ...     method.fit(lambda: nn.Linear(3, 1), data, TrainingConfig(epochs=5, seed=s, progress=False))
        ...     for s in (1, 2)
        ... )
        >>> compare_with_bootstrap(one, other, x, progress=False).faithful
        True
    """
    check_predictor(predictor)
    check_predictor(bootstrap)
    num_bootstrap = bootstrap.num_distinct
    if num_bootstrap is None or num_bootstrap < 4:
        raise ArgumentError("bootstrap", num_bootstrap, "a predictor with at least 4 members, better 20")
    check_int("num_samples", num_samples, minimum=2)
    num_samples = num_samples if predictor.num_distinct is None else min(num_samples, predictor.num_distinct)
    check_memory("num_samples", num_samples, 64 * num_samples, hint="use fewer replicates")
    t_subsets, s_subsets = (ReplicateSubsets.make(count, seed=seed) for count in (num_bootstrap, num_samples))
    t_sums: Any = 0
    s_sums: Any = 0
    t_influence, s_influence = torch.zeros(num_bootstrap).double(), torch.zeros(num_samples).double()
    sample = RowSelector(NUM_LOCATIONS)
    parts: list[_LocationStatistics] = []
    pixels: tuple[int, ...] = ()
    start = 0
    for batch in _iter_small_batches(x, bootstrap, num_bootstrap + num_samples, seed=seed, progress=progress):
        true = bootstrap.predict(batch, num_bootstrap, seed=seed).samples
        generated = predictor.predict(batch, num_samples, seed=seed).samples
        if generated.shape[1:] != true.shape[1:]:
            expected = f"outputs {tuple(true.shape[1:])}, as of the bootstrap"
            raise ArgumentError("predictor", tuple(generated.shape[1:]), expected)
        pixels = tuple(true.shape[3:])
        for t, s in _iter_locations(true, generated, logits):
            parts.append(part := _LocationStatistics.compute(t, s))
            t_logs, s_logs = t_subsets.log_std(t), s_subsets.log_std(s)
            t_sums = t_sums + LogStdSums.from_logs(t_logs, s_logs, t_subsets, part.counted)
            s_sums = s_sums + LogStdSums.from_logs(s_logs, t_logs, s_subsets, part.counted)
            t_influence += _replicate_influence(t, part.differs)
            s_influence += _replicate_influence(s, part.differs)
            number = torch.arange(start, start + t.shape[2]) * t.shape[1] + torch.arange(t.shape[1])[:, None]  # (C, L)
            keys = draw_uniform(derive_keys(torch.tensor(0), seed, "places"), number)  # however batches are cut
            columns = {name: values[:, part.counted].T.numpy() for name, values in (("t", t), ("s", s))}
            sample.add(-keys[part.counted], columns=columns)
            start += t.shape[2]
    joined = (torch.cat(maps, 1) for maps in zip(*parts, strict=True))  # (C, N·P)
    found = _LocationStatistics(*(maps.view(len(maps), -1, *pixels).movedim(0, 1) for maps in joined))  # (N, C, *)
    if not bool(found.differs.any()):
        raise ArgumentError("bootstrap", f"{num_bootstrap} equal members", "members that differ at these inputs")
    t, s = (torch.from_numpy(sample.select()[2][name]).T for name in ("t", "s"))
    null = PermutationNull.permute(t, s, max_shift=MAX_SHIFT, seed=seed)
    std_ratio = partial(StdRatio.from_sums, t_sums, s_sums, bias=null.log_ratio)
    return BootstrapAudit(
        std_ratio=std_ratio(),
        std_ratios=tuple(std_ratio(output=c) for c in range(len(t_sums.count))),
        agreement=StdAgreement.from_sums(t_sums, s_sums),
        ks=float(found.ks[found.counted].mean()),
        wasserstein=float(found.wasserstein[found.counted].mean()),
        shift=float(found.shift[found.differs].median()),
        shifted=float((found.shift[found.differs] > MAX_SHIFT).double().mean()),
        null=null,
        constant=1 - float(found.counted.sum() / found.differs.sum()),
        bootstrap_outliers=_find_outliers(t_influence / found.differs.sum()),
        outliers=_find_outliers(s_influence / found.differs.sum()),
        std=found.std,
        bootstrap_std=found.bootstrap_std,
        ks_map=found.ks,
        wasserstein_map=found.wasserstein,
        num_bootstrap=num_bootstrap,
        num_samples=num_samples,
        logits=logits,
        seed=seed,
    )


# -- the same weights ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightAudit:
    """Result of `audit_weights`: how far replicates are refits of the net under the same weights of the rows.

    Attributes:
        correlation: Correlation of the deviations of replicates and refits from their means, over replicates, inputs
            and outputs; 1 for a bootstrap, 0 for replicates that have nothing to do with the weights.
        error: Its standard error, by the jackknife over replicates.
        ratio: Ratio of the root mean squares of the deviations; 1 for a bootstrap.
        num_samples: Number of replicates B.

    Example:
        >>> refits = torch.randn(20, 50, 1, generator=torch.Generator().manual_seed(0))
        >>> audit = WeightAudit.from_samples(3.0 * refits, refits)
        >>> round(audit.correlation, 6), round(audit.ratio, 6)
        (1.0, 3.0)
    """

    correlation: float
    error: float
    ratio: float
    num_samples: int

    @classmethod
    def from_samples(cls, samples: Tensor, refits: Tensor) -> "WeightAudit":
        """Compare outputs of B replicates with those of refits under the weights of each, in the same order.

        Args:
            samples: Outputs of replicates, (B, N, C, *).
            refits: Outputs of refitted nets, of the same shape.

        Returns:
            The comparison.

        Raises:
            ArgumentError: If there are fewer than 3 replicates, the shapes differ, outputs are not finite, or refits do
                not differ.
        """
        if samples.shape != refits.shape or len(samples) < 3:
            raise ArgumentError("samples", tuple(samples.shape), f"at least 3 replicates, as {tuple(refits.shape)}")
        if not all(bool(torch.isfinite(values).all()) for values in (samples, refits)):
            raise ArgumentError("samples", "NaN or infinite outputs", "finite outputs", hint="check the training")
        moved, refitted = ((v.double() - v.double().mean(0)).flatten(1) for v in (samples, refits))  # (B, M)
        sizes = [float(values.abs().max()) for values in (moved, refitted)]
        if sizes[1] <= 1e-6 * float(refits.double().abs().max()):  # rounding of float32 outputs
            raise ArgumentError("refits", "equal outputs of all refits", "refits that differ", hint="train them longer")
        moved, refitted = moved / max(sizes[0], torch.finfo(torch.float64).tiny), refitted / sizes[1]
        product, left, right = (moved * refitted).sum(1), moved.square().sum(1), refitted.square().sum(1)

        def correlate(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
            return product / (left * right).sqrt().clamp_min(torch.finfo(torch.float64).tiny)

        others = correlate(product.sum() - product, left.sum() - left, right.sum() - right)  # without each replicate
        count = len(samples)
        return cls(
            float(correlate(product.sum(), left.sum(), right.sum())),
            float(((count - 1) / count * (others - others.mean()).square().sum()).sqrt()),
            float((left.sum() / right.sum()).sqrt()) * sizes[0] / sizes[1],
            count,
        )

    def __str__(self) -> str:
        return (
            f"correlation {self.correlation:.2f} ± {self.error:.2f} with refits under the same weights, "
            f"{self.ratio:.2g} × their spread ({self.num_samples} replicates)"
        )


def audit_weights(
    predictor: Predictor,
    method: BaseMethod[Any],
    net: nn.Module,
    data: FitData,
    config: TrainingConfig,
    x: Any,
    *,
    num_samples: int = 20,
    seed: int = 0,
    logits: bool | None = None,
    progress: bool = True,
) -> WeightAudit:
    """Train a net further under the weights of each replicate, and compare the replicates with these refits.

        corr over b and x:   g(x, α_b) − mean_b   with   f_{w_b}(x) − mean_b,   w_bi = α_b of the block of row i

    A bootstrap replicate is the net that its weights would give, not any function of the right spread.

    Args:
        predictor: Predictor to audit.
        method: Method that made it.
        net: Trained net from which the refits start; it is not changed.
        data: Training data of the predictor.
        config: Training options of the refits, without a folder. The seed is that of the predictor's training.
        x: Inputs: a tensor (a tuple or dict of them), a data set, or a loader.
        num_samples: Number of replicates B that are compared, at least 3.
        seed: Seed of the replicates.
        logits: Whether outputs are logits of classes, which are compared minus their mean over classes; by default
            inferred from the targets.
        progress: Whether to show a progress bar.

    Returns:
        The comparison.

    Raises:
        ArgumentError: If replicates of this method stand for no weights of the rows, or the config has a folder.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots import InfluenceBootstrap
        >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        >>> data = TensorDataset(x, x.sum(1) + torch.randn(40, generator=torch.Generator().manual_seed(1)))
        >>> config = TrainingConfig(epochs=100, optimizer=partial(torch.optim.Adam, lr=0.1), progress=False)
        >>> method = InfluenceBootstrap(nn.MSELoss())
        >>> predictor = method.fit(lambda: nn.Linear(2, 1), data, config)
        >>> audit_weights(predictor, method, predictor.net, data, config, x, progress=False).correlation > 0.9
        True
    """
    check_predictor(predictor)
    check_int("num_samples", num_samples, minimum=3)
    check_repeated_fit(config, None)
    count = num_samples if predictor.num_distinct is None else min(num_samples, predictor.num_distinct)
    weights = method.row_weights(predictor, data, count, seed=seed, fit_seed=config.seed)
    if weights is None:
        raise ArgumentError("method", method.info.name, "a method whose replicates stand for weights of the rows")
    config = replace(config, progress=config.progress and progress)
    run_refits = refit_with_weights(net, data, config, weights, loss=method.loss)
    logits = _has_logits(predictor, as_dataset(data)) if logits is None else logits
    parts = []
    for batch in iter_inputs(x, title="audit", progress=progress):
        samples = predictor.predict(batch, count, seed=seed).samples
        refits = run_refits(batch)
        if logits:
            samples, refits = (values - values.mean(2, keepdim=True) for values in (samples, refits))
        parts.append((samples.cpu(), refits.cpu()))
    return WeightAudit.from_samples(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))


def refit_with_weights(
    net: nn.Module, data: FitData, config: TrainingConfig, weights: Tensor, *, loss: Loss
) -> Callable[[Any], Tensor]:
    """Train copies of a net further, each under other weights of the rows.

    Args:
        net: The net; it is not changed.
        data: Training data.
        config: Training options; all copies take the rows in the order of its seed.
        weights: Weights of the rows for each copy, (B, n); negative ones count as zero.
        loss: Loss per example.

    Returns:
        A function of inputs that returns the outputs of all copies, (B, N, C, *).

    Example:
        >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        >>> refits = refit_with_weights(
        ...     nn.Linear(2, 1),
        ...     (x, x[:, :1]),
        ...     TrainingConfig(epochs=1, progress=False),
        ...     torch.ones(3, 40),
        ...     loss=nn.MSELoss(),
        ... )
        >>> refits(x).shape
        torch.Size([3, 40, 1])
    """
    count = len(weights)
    check_memory("weights", count, count * count_net_bytes(net), hint="use fewer replicates")
    with preserve_rng_state():
        members = fit_members(
            [copy_net(unwrap_model(net)) for _ in range(count)],
            as_dataset(data),
            config,
            loss=as_loss(loss),
            seeds=[config.seed] * count,
            weights=weights.clamp_min(0.0).float(),
            identity=None,
        )
    predictor, order = EnsemblePredictor(members.eval(), "bayesian-bootstrap"), draw_member_order(count, count, seed=0)

    def run(x: Any) -> Tensor:
        samples = predictor.predict(x, count).samples
        return samples[order.argsort().to(samples.device)]

    return run


# -- locations -----------------------------------------------------------------------------------------


def _iter_small_batches(x: Any, bootstrap: Predictor, replicates: int, *, seed: int, progress: bool) -> Iterator[Any]:
    """Batches whose replicates have at most _MAX_VALUES values, or one input."""
    size = 0
    for batch in iter_inputs(x, title="audit", progress=progress):
        if not size:
            one = bootstrap.predict(take_rows(batch, slice(0, 1)), 1, seed=seed).samples  # (1, 1, C, *)
            size = max(1, _MAX_VALUES // (replicates * one.numel()))
        for start in range(0, count_rows(batch), size):
            yield take_rows(batch, slice(start, start + size))


def _iter_locations(true: Tensor, generated: Tensor, logits: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs as they are compared, inputs and pixels on one axis, some at a time: (B, N, C, *) → (B, C, L)."""
    if not all(bool(torch.isfinite(samples).all()) for samples in (true, generated)):
        raise ArgumentError("predictor", "NaN or infinite outputs", "finite outputs", hint="check the training")
    pair = [samples.detach().movedim(2, 1).flatten(2) for samples in (true, generated)]
    size = max(1, _MAX_VALUES // (max(len(true) + len(generated), 2 * MAX_SUBSETS) * pair[0].shape[1]))
    for t, s in zip(*(torch.split(samples, size, 2) for samples in pair), strict=True):
        t, s = t.cpu().double(), s.cpu().double()
        if logits and t.shape[1] > 1:
            t, s = t - t.mean(1, keepdim=True), s - s.mean(1, keepdim=True)
        yield t, s


class _LocationStatistics(NamedTuple):
    """Statistics of each output at each location: (C, L)."""

    std: Tensor
    bootstrap_std: Tensor
    ks: Tensor
    wasserstein: Tensor
    shift: Tensor
    differs: Tensor  # whether the bootstrap replicates do
    counted: Tensor  # and the predictor's do

    @classmethod
    def compute(cls, t: Tensor, s: Tensor) -> "_LocationStatistics":
        """Of replicates (K, C, L) and (B, C, L)."""
        std = s.std(0) if len(s) > 1 else torch.zeros_like(s[0])
        bootstrap_std = t.std(0)
        differs = bootstrap_std > 1e-6 * t.square().mean(0).sqrt()  # rounding of float32 outputs
        ks, wasserstein = ks_and_wasserstein(standardize(t.flatten(1)), standardize(s.flatten(1)))
        shift = (s.mean(0) - t.mean(0)).abs() / bootstrap_std
        counted = differs & (std >= MIN_STD_FRACTION * bootstrap_std)
        return cls(std, bootstrap_std, ks.view_as(std), wasserstein.view_as(std), shift, differs, counted)


def _replicate_influence(samples: Tensor, differs: Tensor) -> Tensor:
    """Fraction of the variance that is due to each replicate, summed over locations: (B, C, L) → (B,)."""
    squares = (samples - samples.mean(0)).square()
    total = squares.sum(0) * (1 - 1 / len(samples))
    fraction = squares / total.clamp_min(torch.finfo(torch.float64).tiny)
    return fraction.where(differs, 0.0).sum((1, 2))


def _find_outliers(fraction: Tensor) -> tuple[int, ...]:
    """Replicates that cause most of the spread."""
    enough = len(fraction) >= _MIN_FOR_OUTLIERS
    return tuple((fraction > _OUTLIER_FRACTION).nonzero()[:, 0].tolist()) if enough else ()
