"""Tests of the calibration study: jobs, overconfidence and checks."""

from typing import Any

import pytest

from neuboots_paper.studies.calibration import CalibrationStudy, check_speed, overconfidence
from neuboots_paper.study import SCALES, Rows

STUDY = CalibrationStudy.from_preset("cpu")


def make_rows(ece: dict[str, float] | None = None, **ratios: float) -> Rows:
    """Rows of all trained units with these ECEs, and times with these ratios of NeuBoots and the original ensemble."""
    known = {"deterministic": 0.2, "mc-dropout": 0.15, "deep-ensemble": 0.05, "neuboots": 0.06, "neuboots-paper": 0.07}
    ece = known | (ece or {})
    jobs = STUDY.jobs()
    scores, bins, times = [], [], []
    for job in jobs:
        if STUDY.is_timing_job(job):
            for method in STUDY.methods:
                ratio = ratios.get(method.replace("-", "_"), {"neuboots": 1.0, "deterministic": 1.0}.get(method, 11.0))
                times.append({**job, "method": method, "fit_ratio": ratio, "predict_ratio": ratio / 2 + 0.5})
        else:
            figures = dict.fromkeys(("nll", "paper_nll", "brier", "overconfidence"), 1.0)
            noise = job["seed"] / 10_000
            scores.append({**job, **figures, "error": 0.3 + noise, "ece": ece.get(job["method"], 0.3) + noise})
            bins.append({**job, "bin": 14, "confidence": 0.99, "accuracy": 0.9, "count": 10})
    return {"scores": scores, "bins": bins, "times": times}


def test_costly_methods_have_one_seed() -> None:
    for scale in SCALES:
        study = CalibrationStudy.from_preset(scale)
        trained = [job for job in study.jobs() if not study.is_timing_job(job)]
        for method in study.methods:
            seeds = {job["seed"] for job in trained if job["method"] == method}
            assert seeds == ({study.seeds[0]} if method in study.few_seeds else {*study.seeds})
        timed = [(job["data"], job["net"]) for job in study.jobs() if study.is_timing_job(job)]
        assert timed == [(data, net) for data in study.data for net in study.nets]


def test_overconfidence_is_confidence_minus_accuracy() -> None:
    bins = [{"confidence": 0.9, "accuracy": 0.5, "count": 30}, {"confidence": 0.3, "accuracy": 0.4, "count": 10}]
    assert overconfidence(bins) == pytest.approx((30 * 0.9 + 10 * 0.3 - 30 * 0.5 - 10 * 0.4) / 40)


def test_checks_follow_the_rows() -> None:
    assert [verdict.holds for verdict in STUDY.checks(make_rows())] == [True] * 10
    worse = STUDY.checks(make_rows(ece={"neuboots": 0.25}))
    assert [verdict.holds for verdict in worse] == [False] * 3 + [True] * 7
    worse = STUDY.checks(make_rows(ece={"neuboots-paper": 0.25}))
    assert [verdict.holds for verdict in worse] == [True] * 4 + [False] * 3 + [True] * 3
    slow = STUDY.checks(make_rows(neuboots=6.0))
    assert [verdict.holds for verdict in slow] == [True] * 8 + [False] * 2


@pytest.mark.parametrize(("ratio", "holds"), [(3.2, True), (2.8, False)])
def test_check_speed(ratio: float, holds: bool) -> None:
    places: list[dict[str, Any]] = [{"data": "a", "net": "x"}, {"data": "b", "net": "x"}, {"data": "b", "net": "y"}]
    rows = [
        {**place, "method": method, "predict_ratio": value * speed}
        for place, speed in zip(places, (1.0, 1.1, 1.2), strict=True)
        for method, value in (("neuboots", 1.0), ("other", ratio + speed / 100))
    ]
    assert check_speed(rows, "predict_ratio", "other", least=3).holds is holds
