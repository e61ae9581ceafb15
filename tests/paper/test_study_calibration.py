"""Tests of the calibration study: jobs, overconfidence and checks."""

from typing import Any

import pytest

from neuboots_paper.studies.calibration import CalibrationStudy, check_speed, overconfidence
from neuboots_paper.study import SCALES


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


@pytest.mark.parametrize(("ratio", "holds"), [(3.2, True), (2.8, False)])
def test_check_speed(ratio: float, holds: bool) -> None:
    places: list[dict[str, Any]] = [{"data": "a", "net": "x"}, {"data": "b", "net": "x"}, {"data": "b", "net": "y"}]
    rows = [
        {**place, "method": method, "predict_ratio": value * speed}
        for place, speed in zip(places, (1.0, 1.1, 1.2), strict=True)
        for method, value in (("neuboots", 1.0), ("other", ratio + speed / 100))
    ]
    assert check_speed(rows, "predict_ratio", "other", least=3).holds is holds
