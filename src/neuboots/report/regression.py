"""Evaluation report of a regression: errors, prediction intervals and selective prediction.

r = y − μ,   RMSE² = mean r²,   R² = 1 − mean r² / var y,   PIT = Φ(r / σ), uniform for a correct σ
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from neuboots.metrics import CalibrationCurve, IntervalMetrics, RegressionMetrics, RiskCoverageCurve
from neuboots.report.checks import Check, decide, wilson_interval
from neuboots.report.evaluation import (
    MARGIN,
    EvaluationReport,
    Reference,
    Z,
    check_better_than_baseline,
    data_topic,
    decisions_table,
    format_count,
    make_plot,
    metrics_table,
)
from neuboots.report.section import Section
from neuboots.report.tables import format_interval, format_number, format_percent, make_table

_PIT_BINS = 20
_MAX_GROUPS, _MIN_GROUP_ROWS = 10, 30
_MAX_POINTS = 1_000  # rows of a scatter plot
_LABELS = {
    "rmse": "RMSE",
    "mae": "mean absolute error",
    "r2": "R²",
    "bias": "bias",
    "nll": "log loss, nats",
    "crps": "CRPS",
    "coverage": "coverage of the intervals",
    "mean_width": "mean width",
    "interval_score": "interval score",
}


def build_regression_report(
    sample: Mapping[str, Tensor],
    by_level: Mapping[float, IntervalMetrics],
    level: float,
    count: int,
    reference: Reference,
) -> EvaluationReport:
    """Build the report of predicted numbers.

    Args:
        sample: Columns of a uniform sample of the rows: y, prediction, std, low, high, abstain and ood_score, float64.
        by_level: Metrics of the intervals at several levels.
        level: Level of low and high.
        count: Number of labeled rows.
        reference: Results at training time.

    Returns:
        The report.
    """
    y, mean, std, abstain = (sample[name] for name in ("y", "prediction", "std", "abstain"))
    r, inside = y - mean, (sample["low"] <= y) & (y <= sample["high"])
    normal = RegressionMetrics.from_batch(mean, std, y, level=level)
    intervals = IntervalMetrics.from_batch(sample["low"], sample["high"], y, level=level)
    variance, mse, coverage = float(y.var(correction=0)), float(r.square().mean()), float(intervals.coverage)
    correlation = _rank_correlation(std, r.abs())
    coverage_interval = wilson_interval(coverage, len(y))
    accepted, rejected = r[~abstain], r[abstain]
    metrics: dict[str, Any] = {
        "rmse": math.sqrt(mse),
        "mae": float(r.abs().mean()),
        "r2": 1 - mse / variance if variance > 0 else None,
        "bias": -float(r.mean()),
        "nll": float(normal.nll) if bool((std > 0).all()) else None,
        "crps": float(normal.crps),
        "level": level,
        "coverage": coverage,
        **dict(zip(("coverage_low", "coverage_high"), coverage_interval, strict=True)),
        "mean_width": float(intervals.mean_width),
        "interval_score": float(intervals.interval_score),
        "miscalibration_area": float(normal.miscalibration_area),
        "sharpness": float(normal.sharpness),
        "std_error_correlation": correlation,
        "accepted": len(accepted) / len(y),
        "rmse_accepted": _rms(accepted),
        "rmse_rejected": _rms(rejected),
        "coverage_accepted": float(inside[~abstain].double().mean()) if len(accepted) else None,
        "ood_fraction": float((sample["ood_score"] > 1).double().mean()),
    }
    scale = math.sqrt(variance)
    nll = math.log(scale) + 0.5 * math.log(2 * math.pi * math.e) if scale > 0 else None
    baseline = {"rmse": scale, "r2": 0.0, "bias": 0.0, "nll": nll}
    levels, groups = _level_rows(by_level), _group_rows(sample, inside)
    pit = torch.special.ndtr(torch.where(r == 0, 0.0, r / std))
    pit = torch.bincount((pit * _PIT_BINS).long().clamp_max(_PIT_BINS - 1), minlength=_PIT_BINS)
    details = {"levels": levels, "groups": groups, "pit": pit.tolist()}
    training = dict(reference.metrics)
    if training.get("level", level) != level:
        training |= dict.fromkeys(("coverage", "mean_width", "interval_score"))
    square_std = float(r.square().std(correction=0))
    half = Z * square_std / math.sqrt(len(y)) if len(y) > 1 else math.inf
    evidence = f"RMSE {format_number(metrics['rmse'])} against {format_number(scale)} of their mean"
    title = f"{format_count(count, 'row')}, in the units of {reference.target}; {100 * level:g} % intervals."
    note = f"Of the first {levels[0]['rows']:,} rows." if levels[0]["rows"] < count else ""
    points = [sample[name][:_MAX_POINTS] for name in ("y", "prediction", "low", "high")]
    expected, observed = (torch.tensor([row[key] for row in levels]) for key in ("level", "coverage"))
    curves = {"its intervals": CalibrationCurve(expected, observed), "a Gaussian of its std": normal.calibration_curve}
    spread = ([group[name] for group in groups] for name in ("std", "rmse"))
    risk = {"smallest std first": _risk_coverage_curve(std, r.abs())}
    mark = metrics["accepted"], float(accepted.abs().mean()) if len(accepted) else None
    topics = [
        Section(
            "predictions",
            "How large are the errors?",
            tables=(metrics_table(title, _LABELS, metrics, baseline, training, {"coverage": coverage_interval}),),
            checks=(
                *_check_rmse(mse, square_std, len(y), reference.metrics.get("rmse"), reference.num_test),
                check_better_than_baseline("RMSE", mse - half, mse + half, evidence, variance),
            ),
            plots={"predictions": make_plot("plot_predictions", *points, name="the model", level=level)},
        ),
        Section(
            "intervals",
            "Do prediction intervals contain the true value as often as their level says?",
            tables=(
                make_table("Intervals at several levels.", _with_intervals(levels), note=note),
                make_table(
                    "Rows by predicted standard deviation, the smallest first.", _with_intervals(groups), num_keys=2
                ),
            ),
            checks=(_check_coverage(coverage, level, len(y)),),
            plots={
                "coverage-by-level": make_plot("plot_calibration_curve", curves),
                "pit": make_plot("plot_pit_histogram", pit, name="the model", label="PIT under N(prediction, std²)"),
            },
        ),
        Section(
            "selective prediction",
            "The model abstains on wide intervals and out-of-distribution rows. Are errors larger there?",
            tables=(decisions_table(abstain, "rmse", {False: _rms(accepted), True: _rms(rejected)}),),
            checks=(_check_error_correlation(correlation, len(y)),),
            plots={
                "risk-coverage": make_plot("plot_risk_coverage", risk, mark=mark, label="mean absolute error"),
                "spread-skill": make_plot("plot_spread_skill", *spread, name="the model, by groups"),
            },
        ),
        data_topic({"rows": sample["ood_score"]}, count, reference),
    ]
    return EvaluationReport(count, metrics, baseline, details, topics)


def _rms(values: Tensor) -> float | None:
    return float(values.square().mean().sqrt()) if len(values) else None


def _with_intervals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the limits "low" and "high" of the coverage by one column."""
    return [
        {name: value for name, value in row.items() if name not in ("low", "high")}
        | {"95 % interval": format_interval(row["low"], row["high"])[2:-1]}
        for row in rows
    ]


def _rank_correlation(std: Tensor, error: Tensor) -> float | None:
    """Spearman's correlation; None where either is constant."""
    if len(std) < 3 or float(std.max() - std.min()) <= 1e-6 * float(std.max()) or error.max() == error.min():
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(std.numpy(), error.numpy()).statistic)


def _coverage(coverage: float, count: int) -> dict[str, float]:
    low, high = wilson_interval(coverage, count)
    return {"coverage": coverage, "low": low, "high": high}


def _level_rows(by_level: Mapping[float, IntervalMetrics]) -> list[dict[str, Any]]:
    """Coverage and mean width at each level."""
    return [
        {"level": level, **_coverage(float(state.coverage), state.count)}
        | {"mean_width": float(state.mean_width), "rows": state.count}
        for level, state in sorted(by_level.items())
    ]


def _group_rows(sample: Mapping[str, Tensor], inside: Tensor) -> list[dict[str, Any]]:
    """RMSE and coverage of groups of rows with similar σ."""
    std, error = sample["std"], sample["y"] - sample["prediction"]
    groups = std.argsort(stable=True).tensor_split(max(1, min(_MAX_GROUPS, len(std) // _MIN_GROUP_ROWS)))
    return [
        {
            "from": float(std[index].min()),
            "to": float(std[index].max()),
            "rows": len(index),
            "std": _rms(std[index]),
            "rmse": _rms(error[index]),
            **_coverage(float(inside[index].double().mean()), len(index)),
        }
        for index in groups
    ]


def _risk_coverage_curve(std: Tensor, error: Tensor) -> RiskCoverageCurve:
    """Mean absolute error of the rows with the smallest σ."""
    order = std.argsort(stable=True)
    number = torch.arange(1, len(order) + 1, dtype=torch.float64)
    return RiskCoverageCurve(number / len(order), error[order].cumsum(0) / number, -std[order])


# -- checks --------------------------------------------------------------------------------------------


def _check_rmse(mse: float, std: float, count: int, training_rmse: Any, num_test: int) -> list[Check]:
    """Check that squared errors of this mean and std are not above those of the test split, if known.

    Squares of normal errors have a std of √2 times their mean; few rows may show less by chance.

    Example:
        >>> str(_check_rmse(9.0, 13.0, 100, 1.0, 100)[0])
        'does NOT hold: errors no larger than on the test split at training time (RMSE 3 against 1)'
        >>> _check_rmse(9.0, 0.0, 1, 1.0, 100)[0].holds
    """
    if not isinstance(training_rmse, float | int) or num_test < 1 or not training_rmse > 0:
        return []
    before, relative = training_rmse**2, max(math.sqrt(2), std / mse if mse > 0 else 0.0)
    half = Z * relative * math.hypot(mse / math.sqrt(count), before / math.sqrt(num_test))
    holds = decide(mse - before + half < before, mse - before > half)
    evidence = f"RMSE {format_number(math.sqrt(mse))} against {format_number(training_rmse)}"
    return [Check("errors no larger than on the test split at training time", holds, evidence)]


def _check_coverage(coverage: float, level: float, count: int) -> Check:
    """Check that intervals cover at least as often as their level says.

    Example:
        >>> (
        ...     _check_coverage(0.8, 0.95, 500).holds,
        ...     _check_coverage(0.95, 0.95, 5000).holds,
        ...     _check_coverage(1.0, 0.95, 5).holds,
        ... )
        (False, True, None)
    """
    low, high = wilson_interval(coverage, count)
    margin = min(MARGIN, 0.6 * (1 - level))  # 3 points at 95 %, 0.6 at 99 %
    wide = "; they are wider than necessary" if low > level + margin else ""
    evidence = f"{100 * level:g} % intervals cover {format_percent(coverage)}{format_interval(low, high)}{wide}"
    holds = decide(low > level - margin, high < level - margin)
    return Check("the intervals cover at least as often as their level says", holds, evidence)


def _check_error_correlation(correlation: float | None, count: int) -> Check:
    """Check that errors grow with the standard deviation, by Spearman's correlation.

    Example:
        >>> _check_error_correlation(0.5, 100).holds, _check_error_correlation(0.0, 100).holds
        (True, None)
    """
    claim = "errors are larger where the standard deviation is"
    if correlation is None:
        return Check(claim, None, "all standard deviations are equal" if count > 2 else "too few rows")
    half = Z / math.sqrt(max(1, count - 1))
    return Check(claim, decide(correlation > half, correlation < -half), f"rank correlation {correlation:.2f}")
