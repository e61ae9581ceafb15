"""Evaluation report of a regression: errors, prediction intervals and selective prediction.

r = y − μ,   RMSE² = mean r²,   R² = 1 − mean r² / var y,   PIT = Φ(r / σ), uniform for a correct σ
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from neuboots.metrics import CalibrationCurve, IntervalMetrics, RegressionMetrics, RiskCoverageCurve
from neuboots.report.checks import Check, decide, wilson_interval
from neuboots.report.evaluation import (
    MARGIN,
    OOD_LABEL,
    Draw,
    EvaluationReport,
    Reference,
    Topic,
    Z,
    check_better_than_baseline,
    data_topic,
    format_count,
    format_interval,
    format_number,
    format_percent,
    make_table,
    metrics_table,
    plot_clipped_histograms,
    thin_curve,
)

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
    *,
    num_unlabeled: int = 0,
) -> EvaluationReport:
    """Build the report of predicted numbers.

    Args:
        sample: Columns of a uniform sample of the rows: y, mean, std, low, high, abstain and ood_score, float64.
        by_level: Metrics of the intervals at several levels.
        level: Level of low and high.
        count: Number of labeled rows.
        reference: Results at training time.
        num_unlabeled: Rows that were excluded.

    Returns:
        The report.
    """
    y, mean, std, abstain = (sample[name] for name in ("y", "mean", "std", "abstain"))
    r, inside = y - mean, (sample["low"] <= y) & (y <= sample["high"])
    normal = RegressionMetrics.from_batch(mean, std, y, level=level)
    intervals = IntervalMetrics.from_batch(sample["low"], sample["high"], y, level=level)
    variance, mse, coverage = float(y.var(correction=0)), float(r.square().mean()), float(intervals.coverage)
    correlation = _rank_correlation(std, r.abs())
    num_ood = int((sample["ood_score"] > 1).sum())
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
        "ood_fraction": num_ood / len(y),
    }
    scale = math.sqrt(variance)
    nll = math.log(scale) + 0.5 * math.log(2 * math.pi * math.e) if scale > 0 else None
    baseline = {"rmse": scale, "r2": 0.0, "bias": 0.0, "nll": nll}
    levels, groups = _level_rows(by_level), _group_rows(sample, inside)
    pit = torch.special.ndtr(torch.where(r == 0, 0.0, r / std))
    pit_counts = torch.bincount((pit * _PIT_BINS).long().clamp_max(_PIT_BINS - 1), minlength=_PIT_BINS)
    details = {"levels": levels, "groups": groups, "pit": pit_counts.tolist()}
    training = dict(reference.metrics)
    if training.get("level", level) != level:
        training |= dict.fromkeys(("coverage", "mean_width", "interval_score"))
    square_std = float(r.square().std(correction=0))
    half = Z * square_std / math.sqrt(len(y)) if len(y) > 1 else math.inf
    evidence = f"RMSE {format_number(metrics['rmse'])} against {format_number(scale)} of their mean"
    decisions = [
        {"rows": name, "number": len(rows), "fraction": len(rows) / len(y), "rmse": _rms(rows)}
        for name, rows in (("accepted", accepted), ("abstained", rejected))
    ]
    title = f"{format_count(count, 'row')}, in the units of {reference.target}; {100 * level:g} % intervals."
    note = f"Of the first {levels[0]['rows']:,} rows." if levels[0]["rows"] < count else ""
    topics = [
        Topic(
            "predictions",
            "How large are the errors?",
            [metrics_table(title, _LABELS, metrics, baseline, training, {"coverage": coverage_interval})],
            [
                _check_rmse(mse, square_std, len(y), reference.metrics.get("rmse"), reference.num_test),
                check_better_than_baseline("RMSE", mse - half, mse + half, evidence, variance),
            ],
            ["predictions"],
        ),
        Topic(
            "intervals",
            "Do prediction intervals contain the true value as often as their level says?",
            [
                make_table("Intervals at several levels.", _with_intervals(levels), note=note),
                make_table(
                    "Rows by predicted standard deviation, the smallest first.", _with_intervals(groups), num_keys=2
                ),
            ],
            [_check_coverage(coverage, level, len(y))],
            ["coverage-by-level", "pit"],
        ),
        Topic(
            "selective prediction",
            "The model abstains on wide intervals and out-of-distribution rows. Are errors larger there?",
            [make_table("Rows by the decision of the model.", decisions)],
            [_check_error_correlation(correlation, len(y))],
            ["risk-coverage", "spread-skill"],
        ),
        data_topic(count + num_unlabeled, num_unlabeled, num_ood, len(y), reference.num_held_out),
    ]
    plots = partial(_plots, sample, metrics, details, normal.calibration_curve)
    return EvaluationReport(count, metrics, baseline, details, topics, plots)


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


def _level_rows(by_level: Mapping[float, IntervalMetrics]) -> list[dict[str, Any]]:
    """Coverage and mean width at each level."""
    rows = []
    for level, state in sorted(by_level.items()):
        coverage = float(state.coverage)
        low, high = wilson_interval(coverage, state.count)
        row = {"level": level, "coverage": coverage, "low": low, "high": high}
        rows.append(row | {"mean_width": float(state.mean_width), "rows": state.count})
    return rows


def _group_rows(sample: Mapping[str, Tensor], inside: Tensor) -> list[dict[str, Any]]:
    """RMSE and coverage of groups of rows with similar σ."""
    std, error = sample["std"], sample["y"] - sample["mean"]
    rows = []
    for index in std.argsort(stable=True).tensor_split(max(1, min(_MAX_GROUPS, len(std) // _MIN_GROUP_ROWS))):
        coverage = float(inside[index].double().mean())
        low, high = wilson_interval(coverage, len(index))
        rows.append(
            {
                "from": float(std[index].min()),
                "to": float(std[index].max()),
                "rows": len(index),
                "std": _rms(std[index]),
                "rmse": _rms(error[index]),
                **{"coverage": coverage, "low": low, "high": high},
            }
        )
    return rows


def _plots(
    sample: Mapping[str, Tensor],
    metrics: Mapping[str, Any],
    details: Mapping[str, Any],
    normal: CalibrationCurve,
) -> dict[str, Draw]:
    from neuboots.report import plots

    points = [sample[name][:_MAX_POINTS] for name in ("y", "mean", "low", "high")]
    expected, observed = (torch.tensor([row[key] for row in details["levels"]]) for key in ("level", "coverage"))
    curves = {"its intervals": CalibrationCurve(expected, observed), "a Gaussian of its std": normal}
    spread, skill = ([group[name] for group in details["groups"]] for name in ("std", "rmse"))
    pit, scores = torch.tensor(details["pit"]), {"rows": sample["ood_score"][: 5 * _MAX_POINTS]}

    def risk_coverage(ax: Any) -> None:
        order = sample["std"].argsort(stable=True)
        number = torch.arange(1, len(order) + 1, dtype=torch.float64)
        risk = (sample["y"] - sample["mean"]).abs()[order].cumsum(0) / number
        thin = RiskCoverageCurve(*thin_curve(number / len(order), risk, -sample["std"][order]))
        plots.plot_risk_coverage(ax, {"smallest std first": thin})
        ax.axvline(metrics["accepted"], color=plots.ORANGE, lw=2, ls="--", label="fraction that the model accepts")
        ax.set_ylabel("mean absolute error of accepted rows")
        ax.legend(fontsize=9)

    return {
        "predictions": lambda ax: plots.plot_predictions(ax, *points, name="the model", level=metrics["level"]),
        "coverage-by-level": lambda ax: plots.plot_calibration_curve(ax, curves),
        "pit": lambda ax: plots.plot_pit_histogram(ax, pit, name="the model", label="PIT under N(prediction, std²)"),
        "risk-coverage": risk_coverage,
        "spread-skill": lambda ax: plots.plot_spread_skill(ax, spread, skill, name="the model, by groups"),
        "ood-score": lambda ax: plot_clipped_histograms(ax, scores, OOD_LABEL),
    }


# -- checks --------------------------------------------------------------------------------------------


def _check_rmse(mse: float, std: float, count: int, training_rmse: Any, num_test: int) -> Check | None:
    """Check that squared errors of this mean and std are not above those of the test split; None if unknown.

    Squares of normal errors have a std of √2 times their mean; few rows may show less by chance.

    Example:
        >>> str(_check_rmse(9.0, 13.0, 100, 1.0, 100))
        'does NOT hold: errors no larger than on the test split at training time (RMSE 3 against 1)'
        >>> _check_rmse(9.0, 0.0, 1, 1.0, 100).holds
    """
    if not isinstance(training_rmse, float | int) or num_test < 1 or not training_rmse > 0:
        return None
    before, relative = training_rmse**2, max(math.sqrt(2), std / mse if mse > 0 else 0.0)
    half = Z * relative * math.hypot(mse / math.sqrt(count), before / math.sqrt(num_test))
    holds = decide(mse - before + half < before, mse - before > half)
    evidence = f"RMSE {format_number(math.sqrt(mse))} against {format_number(training_rmse)}"
    return Check("errors no larger than on the test split at training time", holds, evidence)


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
    return Check("the intervals cover as often as their level says", holds, evidence)


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
