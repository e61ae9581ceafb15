"""The Python API: calls with valid arguments, which have plain NumPy answers, and with one or two odd ones.

An odd argument gives an error of the library, or the answer of the formula for it; a NaN that goes in does not vanish.
"""

import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import neuboots
from neuboots import (
    DeepEnsemble,
    Deterministic,
    InfluenceBootstrap,
    Laplace,
    MCDropout,
    NeuBoots,
    Prediction,
    TrainingConfig,
    metrics,
    weights,
)
from neuboots._prng import derive_keys
from neuboots.evaluation.active_learning import greedy_diverse_selection, select_for_labeling
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.evaluation.conformal import fit_conformal_classifier, fit_conformal_regressor
from neuboots.evaluation.diversity import evaluate_diversity
from neuboots.evaluation.regression import evaluate_regression
from neuboots.evaluation.selective import evaluate_selective_prediction, fit_risk_controlled_threshold
from neuboots.loading import as_dataset
from neuboots.losses import as_loss
from neuboots.nets import MLP
from neuboots.posthoc import StdScaling, TemperatureScaling

from .driver import CORRECT, FLAGGED, Area, Failure, Workspace

Array = np.ndarray[Any, Any]


# -- arguments -----------------------------------------------------------------------------------------


def make_argument(kind: str, rng: torch.Generator, n: int, c: int) -> Any:
    """A valid argument of a kind."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    makers: dict[str, Callable[[], Any]] = {
        "probs": lambda: normal(n, c).double().softmax(1),
        "samples probs": lambda: normal(3, n, c).double().softmax(2),
        "logits": lambda: normal(n, c),
        "labels": lambda: torch.randint(c, (n,), generator=rng),
        "preds": lambda: torch.randint(c, (3, n), generator=rng),
        "one preds": lambda: torch.randint(c, (n,), generator=rng),
        "reals": lambda: normal(n).double(),
        "low": lambda: normal(n).double() - 4,
        "high": lambda: normal(n).double() + 4,
        "positives": lambda: normal(n).abs().double() + 0.1,
        "samples": lambda: normal(4, n).double(),
        "outputs": lambda: normal(4, n, c),
        "mask": lambda: torch.arange(n) % 2 == 0,
        "fraction": lambda: 0.1 + 0.8 * float(torch.rand((), generator=rng)),
        "bins": lambda: 1 + int(torch.randint(20, (), generator=rng)),
        "keys": lambda: derive_keys(torch.arange(n), 0, "fuzz"),
        "size": lambda: c,
        "rows": lambda: normal(n, 4),
        "count": lambda: 1 + c,
        "seed": lambda: int(torch.randint(1000, (), generator=rng)),
        "index": lambda: torch.randint(100, (n,), generator=rng),
    }
    return makers[kind]()


def _with(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    if changed.is_floating_point() and changed.numel():
        changed.view(-1)[0] = value
    elif changed.numel():
        changed.view(-1)[0] = int(value) if math.isfinite(value) and changed.dtype != torch.bool else 1
    return changed


def make_odd(value: Any, k: int) -> Any:
    """An odd variant of an argument."""
    if isinstance(value, Tensor):
        t = value
        options: list[Callable[[], Any]] = [
            lambda: None, lambda: "text", lambda: t.tolist(), lambda: t.numpy(), lambda: 3.5, lambda: t.sum(),
            lambda: t[:0], lambda: t[None], lambda: t[..., None], lambda: t[1:], lambda: torch.cat([t, t]),
            lambda: t.double(), lambda: t.half(), lambda: t.bfloat16(), lambda: t.long(), lambda: t.to(torch.uint8),
            lambda: t.to(torch.int8), lambda: t.bool(), lambda: t.to(torch.complex64), lambda: _with(t, math.nan),
            lambda: _with(t, math.inf),
            lambda: _with(t, -math.inf), lambda: _with(t, -1), lambda: _with(t, 1e30), lambda: _with(t, 2**40),
            lambda: t.detach().clone().requires_grad_() if t.is_floating_point() else t.clone(),
            lambda: t.flip(0).flip(0), lambda: torch.stack([t, t], -1)[..., 0], lambda: t.to("meta"),
            lambda: t.to_sparse(), lambda: torch.zeros_like(t), lambda: torch.empty(0), lambda: (t, t),
            lambda: {"x": t},
            lambda: object(), lambda: _with(t, math.nan).fill_(math.nan) if t.is_floating_point() else t, lambda: t[:1],
        ]  # fmt: skip
        return options[k % len(options)]()
    numbers: tuple[Any, ...] = (
        None, -1, 0, 1, 2, 2.5, "3", True, 10**9, 10**20, -(10**20), math.nan, math.inf, -math.inf,
        np.int64(3), np.float32(0.5), torch.tensor(3), torch.tensor(0.5),
        [1], (), {}, 1e-300, 1.0, 0.0, 1 + 1e-9, object(), b"1",
        2**31, 2**63, np.bool_(True), 1j,
    )  # fmt: skip
    return numbers[k % len(numbers)]


# -- plain formulas ------------------------------------------------------------------------------------


def _bins(p: Array, k: int) -> Array:
    """Bins ((j − 1)/k, j/k] of confidences, with edges rounded as they are."""
    edges = (np.arange(1, k) / k).astype(p.dtype)
    return np.searchsorted(edges, p, side="left")


def np_ece(probs: Array, labels: Array, num_bins: int, worst: bool = False) -> float:
    confidence, right = probs.max(1), probs.argmax(1) == labels
    place, gaps = _bins(confidence, num_bins), []
    for j in range(num_bins):
        inside = place == j
        if inside.any():
            gap = abs(right[inside].mean() - confidence[inside].astype(float).mean())
            gaps.append(gap if worst else gap * inside.mean())
    return max(gaps) if worst else sum(gaps)


def np_confusion(probs: Array, labels: Array) -> Array:
    table = np.zeros((probs.shape[1],) * 2)
    np.add.at(table, (labels, probs.argmax(1)), 1)
    return table


def np_ratio(a: Array, b: Array) -> Array:
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def np_gaussian_crps(mean: Array, std: Array, y: Array) -> float:
    z = (y - mean) / std
    return float((std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))).mean())


def np_interval_score(low: Array, high: Array, y: Array, level: float) -> float:
    a = 2 / (1 - level)
    return float((high - low + a * np.maximum(low - y, 0) + a * np.maximum(y - high, 0)).mean())


def np_log_softmax(z: Array) -> Array:
    z = z.astype(float) - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def np_crps_samples(samples: Array, y: Array) -> float:
    pairs = np.abs(samples[:, None] - samples[None]).mean((0, 1))
    return float((np.abs(samples - y).mean(0) - pairs / 2).mean())


def np_pairwise_kl(p: Array) -> float:
    b = len(p)
    values = [(p[i] * np.log(p[i] / p[j])).sum(-1).mean() for i in range(b) for j in range(b) if i != j]
    return float(np.mean(values))


def np_disagreement(preds: Array, labels: Array) -> float:
    b = len(preds)
    return float(np.mean([(preds[i] != preds[j]).mean() for i in range(b) for j in range(i)]))


def np_aupr(scores: Array, positive: Array) -> float:
    tpr, precision = [0.0], [1.0]
    for t in sorted({*scores.tolist()}, reverse=True):
        tpr.append(positive[scores >= t].sum() / positive.sum())
        precision.append(positive[scores >= t].mean())
    return float(np.trapezoid(precision, tpr))


class Call(NamedTuple):
    """A function of the API.

    Attributes:
        function: The function.
        kinds: Kinds of its arguments.
        truth: Formula of the same arguments; None where there is none.
    """

    function: Callable[..., Any]
    kinds: dict[str, str]
    truth: Callable[..., Any] | None = None


PY = {"probs": "probs", "labels": "labels"}
GAUSS = {"mean": "reals", "std": "positives", "y": "reals"}
SCORES = {"scores": "reals", "positive": "mask"}


def _states(cls: Any, build: str, names: tuple[str, ...], **arguments: Any) -> list[Any]:
    """Properties of a state that was added up over two halves, or of the whole where there is one row."""
    whole = getattr(cls, build)(**arguments)
    tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor)}
    n = min((len(v) for v in tensors.values()), default=0)
    parts = [
        getattr(cls, build)(**{k: v[s] if k in tensors else v for k, v in arguments.items()})
        for s in (slice(0, n // 2), slice(n // 2, None))
    ]
    both = sum(parts)
    for name in names:
        a, b = getattr(whole, name), getattr(both, name)
        if not torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True):
            raise Failure("wrong answer", f"{cls.__name__}.{name}: {a} of all, {b} of the sum of two parts")
    return [getattr(whole, name) for name in names]


def _round_trip(temperature: Any, x: Tensor) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        predictor = PREPARED.classifier
        neuboots.save(predictor, Path(folder) / "a")
        first, second = predictor.predict(x, 3).samples, neuboots.load(Path(folder) / "a").predict(x, 3).samples
    if not torch.equal(first, second):
        raise Failure("wrong answer", "a loaded predictor predicts something else")
    return second


CALLS: dict[str, Call] = {
    "error": Call(metrics.error, PY, lambda probs, labels: (probs.argmax(1) != labels).mean()),
    "accuracy": Call(metrics.accuracy, PY, lambda probs, labels: (probs.argmax(1) == labels).mean()),
    "nll": Call(
        metrics.nll, PY, lambda probs, labels: -np.log(probs[np.arange(len(labels)), labels].astype(float)).mean()
    ),
    "brier": Call(
        metrics.brier, PY, lambda probs, labels: np.square(probs - np.eye(probs.shape[1])[labels]).sum(1).mean()
    ),
    "ece": Call(metrics.ece, {**PY, "num_bins": "bins"}, np_ece),
    "mce": Call(metrics.mce, {**PY, "num_bins": "bins"}, partial(np_ece, worst=True)),
    "adaptive_ece": Call(metrics.adaptive_ece, {**PY, "num_bins": "bins"}),
    "reliability_curve": Call(metrics.reliability_curve, {**PY, "num_bins": "bins"}),
    "risk_coverage_curve": Call(metrics.risk_coverage_curve, PY),
    "aurc": Call(metrics.aurc, PY),
    "confusion_matrix": Call(metrics.confusion_matrix, PY, np_confusion),
    "precision": Call(
        metrics.precision, PY, lambda probs, labels: np_ratio(np.diag(t := np_confusion(probs, labels)), t.sum(0))
    ),
    "recall": Call(
        metrics.recall, PY, lambda probs, labels: np_ratio(np.diag(t := np_confusion(probs, labels)), t.sum(1))
    ),
    "f1": Call(
        metrics.f1,
        PY,
        lambda probs, labels: np_ratio(2 * np.diag(t := np_confusion(probs, labels)), t.sum(0) + t.sum(1)),
    ),
    "iou": Call(
        metrics.iou,
        PY,
        lambda probs, labels: np_ratio(np.diag(t := np_confusion(probs, labels)), t.sum(0) + t.sum(1) - np.diag(t)),
    ),
    "mean_iou": Call(metrics.mean_iou, PY),
    "dice": Call(metrics.dice, {**PY, "ignore_index": "seed"}),
    "nll_at_mean_logit": Call(
        metrics.nll_at_mean_logit,
        {"logits": "logits", "labels": "labels"},
        lambda logits, labels: -np_log_softmax(logits)[np.arange(len(labels)), labels].mean(),
    ),
    "paper_nll": Call(
        metrics.paper_nll,
        {"logits": "logits", "labels": "labels"},
        lambda logits, labels: -10 * np_log_softmax(logits)[np.arange(len(labels)), labels].mean(),
    ),
    "auroc": Call(metrics.auroc, SCORES, lambda scores, positive: roc_auc_score(positive, scores)),
    "aupr": Call(metrics.aupr, SCORES, np_aupr),
    "fpr_at_tpr": Call(metrics.fpr_at_tpr, {**SCORES, "tpr": "fraction"}),
    "tnr_at_tpr": Call(metrics.tnr_at_tpr, {**SCORES, "tpr": "fraction"}),
    "detection_accuracy": Call(metrics.detection_accuracy, SCORES),
    "disagreement": Call(metrics.disagreement, {"preds": "preds", "labels": "labels"}, np_disagreement),
    "q_statistic": Call(metrics.q_statistic, {"preds": "preds", "labels": "labels"}),
    "correlation": Call(metrics.correlation, {"preds": "preds", "labels": "labels"}),
    "ratio_error": Call(metrics.ratio_error, {"preds": "preds", "labels": "labels"}),
    "pairwise_kl": Call(metrics.pairwise_kl, {"samples": "samples probs"}, lambda samples: np_pairwise_kl(samples)),
    "rmse": Call(metrics.rmse, {"mean": "reals", "y": "reals"}, lambda mean, y: np.sqrt(np.square(mean - y).mean())),
    "sharpness": Call(metrics.sharpness, {"std": "positives"}, lambda std: np.sqrt(np.square(std).mean())),
    "gaussian_nll": Call(metrics.gaussian_nll, GAUSS, lambda mean, std, y: -norm.logpdf(y, mean, std).mean()),
    "crps": Call(metrics.crps, GAUSS, np_gaussian_crps),
    "check_score": Call(metrics.check_score, GAUSS),
    "mean_interval_score": Call(metrics.mean_interval_score, GAUSS),
    "calibration_curve": Call(metrics.calibration_curve, {**GAUSS, "num_levels": "bins"}),
    "mean_absolute_calibration": Call(metrics.mean_absolute_calibration, {**GAUSS, "num_levels": "bins"}),
    "rms_calibration": Call(metrics.rms_calibration, {**GAUSS, "num_levels": "bins"}),
    "miscalibration_area": Call(metrics.miscalibration_area, {**GAUSS, "num_levels": "bins"}),
    "interval_coverage": Call(
        metrics.interval_coverage,
        {"low": "low", "high": "high", "y": "reals"},
        lambda low, high, y: ((low <= y) & (y <= high)).mean(),
    ),
    "mean_width": Call(metrics.mean_width, {"low": "low", "high": "high"}, lambda low, high: (high - low).mean()),
    "interval_score": Call(
        metrics.interval_score, {"low": "low", "high": "high", "y": "reals", "level": "fraction"}, np_interval_score
    ),
    "pinball": Call(
        metrics.pinball,
        {"quantile": "reals", "y": "reals", "q": "fraction"},
        lambda quantile, y, q: np.maximum(q * (y - quantile), (q - 1) * (y - quantile)).mean(),
    ),
    "crps_samples": Call(metrics.crps_samples, {"samples": "samples", "y": "reals"}, np_crps_samples),
    "ClassificationMetrics": Call(
        partial(
            _states,
            metrics.ClassificationMetrics,
            "from_batch",
            ("error", "nll", "brier", "ece", "mce", "aurc", "adaptive_ece", "f1"),
        ),
        {**PY, "num_bins": "bins"},
    ),
    "ConfusionMatrix": Call(
        partial(_states, metrics.ConfusionMatrix, "from_preds", ("error", "f1", "mean_iou")),
        {"preds": "one preds", "labels": "labels", "num_classes": "size"},
    ),
    "ConfidenceRanking": Call(
        partial(_states, metrics.ConfidenceRanking, "from_confidence", ("aurc",)),
        {"confidence": "reals", "correct": "mask"},
    ),
    "RegressionMetrics": Call(
        partial(_states, metrics.RegressionMetrics, "from_batch", ("rmse", "nll", "crps", "coverage", "sharpness")),
        {**GAUSS, "level": "fraction", "num_levels": "bins"},
    ),
    "IntervalMetrics": Call(
        partial(_states, metrics.IntervalMetrics, "from_batch", ("coverage", "mean_width")),
        {"low": "low", "high": "high", "y": "reals", "level": "fraction"},
    ),
    "RunningMean": Call(partial(_states, metrics.RunningMean, "from_batch", ("value",)), {"values": "reals"}),
    "DetectionMetrics": Call(
        lambda a, b, tpr: metrics.DetectionMetrics.from_batch(a, b, positive="out", tpr=tpr).auroc,
        {"a": "reals", "b": "positives", "tpr": "fraction"},
    ),
    "Dirichlet": Call(
        lambda concentration, keys, size: weights.Dirichlet(concentration).sample(keys, size),
        {"concentration": "fraction", "keys": "keys", "size": "size"},
    ),
    "Exponential": Call(
        lambda concentration, keys, size: weights.Exponential(concentration).sample(keys, size),
        {"concentration": "fraction", "keys": "keys", "size": "size"},
    ),
    "Multinomial": Call(lambda keys, size: weights.Multinomial().sample(keys, size), {"keys": "keys", "size": "size"}),
    "covariance": Call(
        lambda concentration, size: torch.tensor(weights.Dirichlet(concentration).covariance(size)),
        {"concentration": "fraction", "size": "size"},
    ),
    "link_moments": Call(
        lambda size: torch.tensor(weights.link_moments(weights.Dirichlet(), "exp", size)), {"size": "size"}
    ),
    "apply_link": Call(partial(weights.apply_link, link="exp"), {"alpha": "reals"}, lambda alpha: np.exp(-alpha)),
    "assign_blocks": Call(
        lambda n, num_blocks, strata, seed: weights.assign_blocks(n, num_blocks, strata=strata, seed=seed),
        {"n": "n", "num_blocks": "size", "strata": "labels", "seed": "seed"},
    ),
    "compute_strata": Call(weights.compute_strata, {"targets": "reals", "num_bins": "bins"}),
    "HashedBlocks": Call(
        lambda num_blocks, seed, index: weights.HashedBlocks(num_blocks, seed)(index),
        {"num_blocks": "size", "seed": "seed", "index": "index"},
    ),
    "BlockTable": Call(
        lambda blocks, num_blocks, index: weights.BlockTable(blocks, num_blocks)(index),
        {"blocks": "blocks", "num_blocks": "size", "index": "index"},
    ),
    "WeightSchedule": Call(
        lambda seed, warmup, index: torch.stack(
            weights.WeightSchedule(weights.Dirichlet(), weights.HashedBlocks(4), seed, "sample", warmup).at_epoch(1)(
                index
            )[:1]
        ),
        {"seed": "seed", "warmup": "size", "index": "index"},
    ),
    "Prediction": Call(
        lambda samples, level, q: [
            (p := Prediction(samples)).mean,
            p.std,
            p.probs,
            p.entropy,
            p.mutual_information,
            p.quantile(q),
            *p.interval(level),
            *p.interval(level, method="percentile"),
            *p.prediction_interval(level, noise_std=1.0),
        ],
        {"samples": "outputs", "level": "fraction", "q": "fraction"},
    ),
    "predictive_std": Call(
        lambda samples, noise_std: Prediction(samples).predictive_std(noise_std),
        {"samples": "outputs", "noise_std": "fraction"},
        lambda samples, noise_std: np.sqrt(samples.astype(float).var(0, ddof=1) + noise_std**2),
    ),
    "predict": Call(
        lambda x, num_samples, seed: PREPARED.classifier.predict(x, num_samples, seed=seed).samples,
        {"x": "rows", "num_samples": "count", "seed": "seed"},
    ),
    "summarize": Call(
        lambda x, num_samples, seed, q: [
            (s := PREPARED.classifier.summarize(x, num_samples, seed=seed, quantiles=(q,))).probs,
            s.std,
            s.quantile(q),
        ],
        {"x": "rows", "num_samples": "count", "seed": "seed", "q": "fraction"},
    ),
    "predict regression": Call(
        lambda x, num_samples, level: [*PREPARED.regressor.predict(x, num_samples).interval(level)],
        {"x": "rows", "num_samples": "count", "level": "fraction"},
    ),
    "residual_std": Call(lambda x, y: neuboots.residual_std(PREPARED.regressor, x, y), {"x": "rows", "y": "reals"}),
    "split_gaussian": Call(
        lambda samples: [(pair := neuboots.split_gaussian(Prediction(samples)))[0].mean, pair[1]],
        {"samples": "gaussian outputs"},
    ),
    "evaluate_calibration": Call(
        lambda x, y, num_samples, num_bins: evaluate_calibration(
            PREPARED.classifier, (x, y), num_samples=num_samples, num_bins=num_bins, progress=False
        ),
        {"x": "rows", "y": "two labels", "num_samples": "count", "num_bins": "bins"},
    ),
    "evaluate_regression": Call(
        lambda x, y, level, noise_std: evaluate_regression(
            PREPARED.regressor, (x, y), num_samples=4, level=level, noise_std=noise_std, progress=False
        ),
        {"x": "rows", "y": "reals", "level": "fraction", "noise_std": "fraction"},
    ),
    "evaluate_diversity": Call(
        lambda x, y, num_samples: evaluate_diversity(
            PREPARED.classifier, (x, y), num_samples=num_samples, progress=False
        ),
        {"x": "rows", "y": "two labels", "num_samples": "count"},
    ),
    "evaluate_selective_prediction": Call(
        lambda x, y, tolerance: evaluate_selective_prediction(
            PREPARED.classifier, (x, y), num_samples=3, progress=False
        ),
        {"x": "rows", "y": "two labels", "tolerance": "fraction"},
    ),
    "fit_conformal_classifier": Call(
        lambda x, y, level, penalty: fit_conformal_classifier(
            PREPARED.classifier,
            (x, y),
            level=level,
            num_samples=3,
            score="regularised",
            penalty=penalty,
            progress=False,
        ).predict(x),
        {"x": "rows", "y": "two labels", "level": "fraction", "penalty": "fraction"},
    ),
    "fit_conformal_regressor": Call(
        lambda x, y, level, noise_std: fit_conformal_regressor(
            PREPARED.regressor,
            (x, y),
            level=level,
            num_samples=3,
            score="normalised",
            noise_std=noise_std,
            progress=False,
        ).predict(x),
        {"x": "rows", "y": "reals", "level": "fraction", "noise_std": "fraction"},
    ),
    "fit_risk_controlled_threshold": Call(
        lambda x, y, risk, delta: fit_risk_controlled_threshold(
            PREPARED.classifier, (x, y), risk=risk, delta=delta, num_samples=3, progress=False
        ),
        {"x": "rows", "y": "two labels", "risk": "fraction", "delta": "fraction"},
    ),
    "select_for_labeling": Call(
        lambda x, k, num_samples, seed: select_for_labeling(
            PREPARED.classifier, x, k, num_samples=num_samples, seed=seed, diverse=True, progress=False
        ),
        {"x": "rows", "k": "one", "num_samples": "count", "seed": "seed"},
    ),
    "greedy_diverse_selection": Call(greedy_diverse_selection, {"scores": "reals", "features": "rows", "k": "one"}),
    "TemperatureScaling": Call(
        lambda x, y, num_samples, prior_std, probe: (
            TemperatureScaling(num_samples=num_samples, prior_std=prior_std)
            .fit(PREPARED.classifier, (x, y))
            .predict(probe, 2)
            .samples
        ),
        {"x": "rows", "y": "two labels", "num_samples": "count", "prior_std": "fraction", "probe": "rows"},
    ),
    "StdScaling": Call(
        lambda x, y, num_samples, probe: (
            StdScaling(num_samples=num_samples).fit(PREPARED.regressor, (x, y)).predict(probe, 2).samples
        ),
        {"x": "rows", "y": "reals", "num_samples": "count", "probe": "rows"},
    ),
    "save, load": Call(_round_trip, {"temperature": "fraction", "x": "rows"}),
    "TrainingConfig": Call(
        lambda epochs, batch_size, seed, clip_norm, patience: TrainingConfig(
            epochs=epochs, batch_size=batch_size, seed=seed, clip_norm=clip_norm, patience=patience
        ),
        dict.fromkeys(("epochs", "batch_size", "seed", "patience"), "bins") | {"clip_norm": "fraction"},
    ),
    "create_method": Call(
        lambda name, num_blocks: neuboots.create_method(name, num_blocks=num_blocks),
        {"name": "name", "num_blocks": "size"},
    ),
    "list_methods": Call(neuboots.list_methods, {"task": "task"}),
    "as_dataset": Call(lambda x, y: as_dataset((x, y))[0], {"x": "rows", "y": "labels"}),
    "loss": Call(
        lambda outputs, targets: as_loss(nn.CrossEntropyLoss())(outputs, targets),
        {"outputs": "logits", "targets": "labels"},
        lambda outputs, targets: -np_log_softmax(outputs)[np.arange(len(targets)), targets],
    ),
    "MCDropout": Call(
        lambda rate, x: (
            MCDropout(rate=rate)
            .fit(partial(MLP, 4, 2, widths=(4,)), (x, torch.zeros(len(x)).long()), QUICK)
            .predict(x, 2)
            .samples
        ),
        {"rate": "fraction", "x": "rows"},
    ),
    "NeuBoots": Call(
        lambda num_blocks, x, y, epochs: (
            NeuBoots(num_blocks=num_blocks)
            .fit(partial(MLP, 4, 2, widths=(4,)), (x, y), TrainingConfig(epochs=epochs, progress=False))
            .predict(x, 2)
            .samples
        ),
        {"num_blocks": "one", "x": "rows", "y": "two labels", "epochs": "one"},
    ),
    "DeepEnsemble": Call(
        lambda num_members, x, y: (
            DeepEnsemble(num_members=num_members)
            .fit(partial(MLP, 4, 2, widths=(4,)), (x, y), QUICK)
            .predict(x, 2)
            .samples
        ),
        {"num_members": "one", "x": "rows", "y": "two labels"},
    ),
    "Laplace": Call(
        lambda prior_precision, x, y: (
            Laplace(prior_precision=prior_precision)
            .fit(partial(MLP, 4, 2, widths=(4,)), (x, y), QUICK)
            .predict(x, 2)
            .samples
        ),
        {"prior_precision": "fraction", "x": "rows", "y": "two labels"},
    ),
    "InfluenceBootstrap": Call(
        lambda ridge, x, y: (
            InfluenceBootstrap(ridge=ridge).fit(partial(MLP, 4, 2, widths=(4,)), (x, y), QUICK).predict(x, 2).samples
        ),
        {"ridge": "fraction", "x": "rows", "y": "two labels"},
    ),
}
QUICK = TrainingConfig(epochs=1, batch_size=8, progress=False)


# -- nets that return odd things -----------------------------------------------------------------------


class OddNet(nn.Module):
    """A net whose outputs are odd in one way."""

    def __init__(self, oddity: int, outputs: int) -> None:
        super().__init__()
        self.oddity, self.calls = oddity, 0
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, outputs)
        self.register_buffer("statistic", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        z = self.head(self.body(x).relu())
        return ODDITIES[self.oddity][1](self, x, z)


def _raise(*_: Any) -> Any:
    raise KeyError("the net")


def _scribble(net: Any, x: Tensor, z: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(1.0)
    return z


ODDITIES: list[tuple[str, Callable[[Any, Any, Tensor], Any]]] = [
    ("plain", lambda net, x, z: z),
    ("a tuple", lambda net, x, z: (z, x)),
    ("a dict", lambda net, x, z: {"logits": z}),
    ("a list", lambda net, x, z: [z]),
    ("None", lambda net, x, z: None),
    ("NumPy", lambda net, x, z: z.detach().numpy()),
    ("a number", lambda net, x, z: z.sum()),
    ("a text", lambda net, x, z: "z"),
    ("no batch axis", lambda net, x, z: z.mean(0)),
    ("one row less", lambda net, x, z: z[1:]),
    ("no outputs", lambda net, x, z: z[:, :0]),
    ("one output", lambda net, x, z: z[:, :1]),
    ("flat", lambda net, x, z: z[:, 0]),
    ("more axes", lambda net, x, z: z[:, :, None].expand(-1, -1, 3)),
    ("NaN", lambda net, x, z: z * float("nan")),
    ("infinite", lambda net, x, z: z + float("inf")),
    ("huge", lambda net, x, z: z * 1e38),
    ("NaN in evaluation", lambda net, x, z: z if net.training else z * float("nan")),
    ("NaN in one row", lambda net, x, z: torch.cat([z[:-1], z[-1:] * float("nan")]) if not net.training else z),
    ("integers", lambda net, x, z: z.long()),
    ("complex", lambda net, x, z: z.to(torch.complex64)),
    ("half", lambda net, x, z: z.half()),
    ("double", lambda net, x, z: z.double()),
    ("another width at each call", lambda net, x, z: torch.cat([z] * (1 + net.calls % 2), 1)),
    ("random", lambda net, x, z: z + torch.randn_like(z)),
    ("changes its input", _scribble),
    ("detached", lambda net, x, z: z.detach()),
    ("an error", _raise),
    ("a statistic", lambda net, x, z: z + 0 * net.statistic.add_(1)),
    ("sparse", lambda net, x, z: z.to_sparse()),
    ("constant", lambda net, x, z: z * 0),
]
METHODS: dict[str, Callable[[], Any]] = {
    "neuboots": lambda: NeuBoots(num_blocks=4),
    "deterministic": Deterministic,
    "ensemble": lambda: DeepEnsemble(num_members=2),
    "dropout": MCDropout,
    "influence": InfluenceBootstrap,
    "laplace": Laplace,
}


def run_net(case: "ApiCase", workspace: Workspace) -> str:
    """Fit a method to an odd net and predict: an error, finite outputs, or NaN that is seen; the net stays."""
    method = METHODS[sorted(METHODS)[case.odd[0] % len(METHODS)]]()
    torch.manual_seed(case.seed)
    net = OddNet(case.odd[1] % len(ODDITIES), 2)
    name = ODDITIES[net.oddity][0]
    x = torch.randn(12, 4)
    y = (x[:, 0] > 0).long()
    backup = x.clone()
    with workspace.guard():
        predictor = method.fit(net, (x, y), QUICK)
    if name not in ("a statistic", "random"):  # which change themselves, or draw
        workspace.nets.append(net)
    rows = x[:5].clone()
    with workspace.guard(may_draw=name == "random"):
        first = predictor.predict(rows, 3, seed=1)
        statistics = [first.samples, first.probs, first.std]
        second = predictor.predict(rows, 3, seed=1).samples
    if not torch.equal(x, backup) or not torch.equal(rows, x[:5]):
        raise Failure("input changed", "the training data or the inputs")
    if first.samples.shape[:2] != (3, 5):
        raise Failure("wrong answer", f"{name}: samples of shape {tuple(first.samples.shape)}")
    finite = all(bool(value.isfinite().all()) for value in statistics)
    if finite and name == "NaN in evaluation":
        raise Failure("wrong answer", "a net whose outputs are NaN predicts numbers")
    if finite and name not in ("random", "another width at each call") and not torch.equal(first.samples, second):
        raise Failure("wrong answer", f"{name}: two predictions of one seed differ")
    return CORRECT if finite else FLAGGED


# -- cases ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ApiCase:
    """A call, or a method and a net.

    Attributes:
        name: The call; "net" for an odd net.
        seed: Seed of the arguments.
        n: Number of rows.
        c: Number of classes.
        odd: Argument and oddity, several times; for a net its method and oddity.
    """

    name: str
    seed: int
    n: int
    c: int
    odd: tuple[int, ...]


CASES = st.builds(
    ApiCase,
    name=st.sampled_from([*CALLS, *["net"] * 20]),
    seed=st.integers(0, 1 << 20),
    n=st.sampled_from([1, 2, 3, 8, 24, 24, 60]),
    c=st.integers(2, 5),
    odd=st.lists(st.integers(0, 4095), min_size=2, max_size=4).map(tuple),
)


class Prepared(NamedTuple):
    """Fitted predictors of two classes and of a number."""

    classifier: Any
    regressor: Any


PREPARED: Prepared


def prepare(folder: Path) -> Prepared:
    """Fit the predictors."""
    global PREPARED
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classifier = NeuBoots(num_blocks=8).fit(partial(MLP, 4, 2, widths=(8,)), (x, (x[:, 0] > 0).long()), QUICK)
        regressor = NeuBoots.regression().fit(partial(MLP, 4, 1, widths=(8,)), (x, x[:, :1]), QUICK)
    PREPARED = Prepared(classifier, regressor)
    return PREPARED


def run(prepared: Prepared, case: ApiCase, workspace: Workspace) -> str:
    """Call the function and compare the answer with the formula."""
    if case.name == "net":
        return run_net(case, workspace)
    call, rng = CALLS[case.name], torch.Generator().manual_seed(case.seed)
    arguments: dict[str, Any] = {}
    for name, kind in call.kinds.items():
        special: dict[str, Callable[[], Any]] = {
            "n": lambda: case.n,
            "one": lambda: 1,
            "two labels": lambda: torch.arange(case.n) % 2,
            "blocks": lambda: torch.arange(100) % case.c,
            "gaussian outputs": lambda: torch.randn(4, case.n, 2, generator=rng),
            "name": lambda: "neuboots",
            "task": lambda: None,
        }
        arguments[name] = special[kind]() if kind in special else make_argument(kind, rng, case.n, case.c)
    odd = {}
    for k in range(0, len(case.odd) - 1, 2):
        if case.odd[k] % 4:  # a quarter stay as they are
            name = [*arguments][case.odd[k] // 4 % len(arguments)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    odd[name] = make_odd(arguments[name], case.odd[k + 1])
                except (RuntimeError, NotImplementedError, ValueError, IndexError):
                    continue  # torch has no such variant
    arguments |= odd
    workspace.nets += [predictor.module for predictor in prepared]
    copies = {
        name: value.clone()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.device.type != "meta"
    }
    with workspace.guard(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = call.function(**arguments)
    for name, copy in copies.items():
        value = arguments[name]
        if value.layout == torch.strided and not torch.allclose(value, copy, equal_nan=True):
            raise Failure("input changed", f"argument {name!r} of {case.name}")
    values = [*_numbers(found)]
    bad_input = any(_is_bad(value) for value in odd.values())
    finite = all(np.isfinite(value).all() for value in values)
    if not odd and not finite and case.n > 3 and case.name not in _MAY_BE_NAN:
        raise Failure("wrong answer", f"{case.name} of valid arguments is not finite")
    if bad_input and finite and values and case.name not in _MAY_IGNORE:
        raise Failure("wrong answer", f"{case.name} hides NaN or infinite values of {[*odd]}")
    if call.truth is not None and finite and values:
        _compare(case.name, call.truth, arguments, values[0])
    return CORRECT if finite else FLAGGED


_MAY_BE_NAN = {"reliability_curve", "q_statistic", "correlation", "ratio_error", "calibration_curve",
               "fit_conformal_regressor", "fit_conformal_classifier", "fit_risk_controlled_threshold"}  # fmt: skip
_MAY_IGNORE = {"list_methods", "as_dataset", "evaluate_selective_prediction", "save, load", "loss",
               "auroc", "aupr", "fpr_at_tpr", "tnr_at_tpr",
               "detection_accuracy", "DetectionMetrics", "ConfidenceRanking", "greedy_diverse_selection",
               "fit_risk_controlled_threshold",
               "fit_conformal_regressor"}  # fmt: skip


def _is_bad(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.device.type == "meta" or value.layout != torch.strided:
            return False
        return not bool(value.isfinite().all())
    return isinstance(value, float) and not math.isfinite(value)


def _numbers(value: Any) -> Any:
    """All arrays of numbers in a result."""
    if isinstance(value, Tensor):
        if value.device.type == "meta":
            raise Failure("wrong answer", "a result without values")
        yield value.detach().to_dense().double().numpy() if not value.is_complex() else value.detach().numpy()
    elif isinstance(value, bool | int | float | np.number):
        yield np.asarray(value, dtype=float)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        yield value.astype(float)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
    elif is_dataclass(value) and not isinstance(value, type | TrainingConfig):
        for part in fields(value):
            yield from _numbers(getattr(value, part.name))


def _compare(name: str, truth: Callable[..., Any], arguments: dict[str, Any], found: Array) -> None:
    plain = {}
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.device.type == "meta" or value.is_complex():
                return
            wide = value.double() if value.dtype in (torch.half, torch.bfloat16) else value
            plain[key] = wide.detach().numpy()
        elif isinstance(value, int | float | np.number) and not isinstance(value, bool):
            plain[key] = value
        else:
            return
    low = any(isinstance(value, Tensor) and value.dtype in (torch.half, torch.bfloat16) for value in arguments.values())
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = np.asarray(truth(**plain), dtype=float)
        except Exception:  # the formula knows fewer shapes than the library
            return
    if expected.shape == found.shape and np.isfinite(expected).all():
        tolerance = 0.05 if low else 1e-5
        if not np.allclose(found, expected, rtol=tolerance, atol=tolerance):
            raise Failure("wrong answer", f"{name} is {found.ravel()[:3]}, by its formula {expected.ravel()[:3]}")


AREA = Area("python api", 0.2, prepare, lambda prepared: CASES, run)
