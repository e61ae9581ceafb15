"""Tests of the validity study for regression: problems, statistics of bands, tables and checks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from neuboots_paper.studies import validity_curves as curves
from neuboots_paper.studies.validity_report import band_checks, band_tables
from neuboots_paper.studies.validity_summary import (
    IDEAL,
    BandSummary,
    c4,
    jackknife,
    student_quantile,
    summarize,
)
from neuboots_paper.study import Rows


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- curves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["constant", "varying"])
@pytest.mark.parametrize("function", ["smooth", "wiggly", "gap", "edge"])
def test_make_problem(function: str, noise: str) -> None:
    truth = curves.make_problem(function, noise)
    x, y = truth.draw(20_000, seed=0, number=0).tensors
    assert float(x.abs().max()) <= 2.0
    assert bool((x.abs() < 0.5).any()) == (function != "gap")
    residual = y - truth.function(x)
    for low, high in ((0.5, 0.7), (1.8, 2.0)):
        there = (x[:, 0].abs() > low) & (x[:, 0].abs() < high)
        expected = 0.3 if noise == "constant" else 0.1 + 0.2 * (low + high) / 2
        assert float(residual[there].std()) == pytest.approx(expected, rel=0.06)
    mask = curves.is_inside(function, truth.grid[:, 0])
    assert int(mask.sum()) == (28 if function == "gap" else 39)


def test_band_row_counts_coverage() -> None:
    truth = curves.make_problem("smooth", "constant")
    values = truth.values.double()
    mean = torch.stack([values, values + 1.0])
    std = torch.full((2, 39), 1 / curves.Z + 1e-5).double()
    std[1, :5] = 0.1
    row = curves.band_row("mine", mean, std, truth, 1)
    assert row["held"] == [1] * 5 + [2] * 34
    assert row["sets"] == 2
    assert len(row["stds"]) == 1
    assert row["error"][0] == pytest.approx(0.5, abs=1e-3)
    assert row["square"][0] == pytest.approx(0.5, abs=1e-3)


# -- what is said of them ------------------------------------------------------------------------------


def made_rows(band: Tensor, true: Tensor, halves: tuple[Tensor, Tensor], **options: Any) -> Rows:
    """Rows of one cell: R bands of these standard deviations, all held but at the first x."""
    cell = {"function": "smooth", "noise": "constant", "width": 8, "n": 30, "seed": 0, **options}
    sets, places = band.shape
    held = [sets // 2] + [sets] * (places - 1)
    common = {"sets": sets, "error": [0.0] * places, "square": [0.04] * places}
    bands = {**cell, **common, "method": curves.SCALED, "held": held, "std": band.mean(0).tolist()}
    nets = {**cell, **common, "method": curves.BOOTSTRAP, "held": held, "std": true.mean(0).tolist(), "members": 8}
    nets |= {"stds": true.tolist(), "halves": [half.tolist() for half in halves]}
    nets |= {"away": torch.linspace(0.0, 4.0, sets * places).view(sets, places).tolist()}
    return {"bands": [{**bands, "stds": band.tolist()}], "true": [nets]}


def test_likeness_is_corrected_for_few_nets() -> None:
    """Noise on the true bootstrap's side lowers a correlation, and not this one; noise of the band does."""
    generator = rng(0)
    shape = 1.0 + 0.3 * torch.linspace(-1.0, 1.0, 39).square()
    sets = 300

    def noisy(size: float) -> Tensor:
        return shape + size * torch.randn(sets, 39, generator=generator)

    halves = (noisy(0.3), noisy(0.3))
    true = (halves[0] + halves[1]) / 2
    found = summarize(made_rows(shape.expand(sets, -1).clone(), true, halves))
    mine = next(iter(found.values()))[curves.SCALED]
    assert mine.likeness is not None
    assert mine.likeness[0] == pytest.approx(1.0, abs=4 * mine.likeness[1])
    plain = torch.corrcoef(torch.stack([shape.expand(sets, -1).flatten(), true.flatten()]))[0, 1]
    assert float(plain) < 0.6
    blurred = summarize(made_rows(noisy(0.3), true, halves))
    assert next(iter(blurred.values()))[curves.SCALED].likeness[0] < 0.5  # type: ignore[index]


def test_relative_width_is_at_equal_coverage() -> None:
    flat = torch.full((10, 39), 0.2)
    rows = made_rows(2 * flat, flat, (flat, flat))
    mine = next(iter(summarize(rows).values()))[curves.SCALED]
    assert mine.coverage == pytest.approx(1 - 0.5 / 39)
    level = 1 - 0.5 / 39
    scale = 4.0 * level / curves.Z  # `away` is uniform on (0, 4), with standard deviations of eight nets
    scale *= student_quantile(level) / student_quantile(level, 8) / c4(8)
    assert mine.relative_width is not None
    assert mine.relative_width[0] == pytest.approx(2 / scale, rel=1e-3)
    assert mine.worst == (0.5, pytest.approx(-1.9))
    assert mine.std / mine.mean_curve_std == pytest.approx(2.0)


def test_jobs_are_weighted_by_their_datasets() -> None:
    flat = torch.full((10, 39), 0.2)
    first, second = made_rows(flat, flat, (flat, flat)), made_rows(3 * flat[:5], flat[:5], (flat[:5], flat[:5]), seed=1)
    rows: Rows = {"bands": first["bands"] + second["bands"], "true": first["true"]}
    mine = next(iter(summarize(rows).values()))[curves.SCALED]
    assert isinstance(mine, BandSummary)
    assert mine.sets == 15
    assert mine.std == pytest.approx((10 * 0.2 + 5 * 0.6) / 15)
    assert float(mine.rate[0]) == pytest.approx(7 / 15)


def test_ideal_band_has_the_coverage_of_a_biased_gaussian() -> None:
    """Rates against draws of a Gaussian error, within five standard errors."""
    generator = rng(2)
    spread = 0.1 + 0.1 * torch.linspace(-1.0, 1.0, 39).square()
    bias = spread * torch.linspace(-1.5, 1.5, 39)
    flat = torch.full((40, 39), 0.2)
    rows = made_rows(flat, flat, (flat, flat))
    rows["bands"] = [
        {**row, "error": bias.tolist(), "square": (bias.square() + spread.square()).tolist()} for row in rows["bands"]
    ]
    ideal = next(iter(summarize(rows).values()))[curves.SCALED].ideal
    drawn = bias + spread * torch.randn(100_000, 39, generator=generator)
    held = (drawn.abs() <= curves.Z * spread).double().mean(0)
    assert bool(((ideal.rate - held).abs() <= 5 * (held * (1 - held) / len(drawn)).sqrt() + 1e-4).all())
    assert ideal.std / ideal.mean_curve_std == pytest.approx(1.0)


def true_nets(nets: int, sets: int, own: float) -> tuple[Rows, Tensor]:
    """Rows of one cell with a true bootstrap of so few nets, whose standard deviation over x is of one shape for all
    data sets up to bumps of its own size in each; and that standard deviation (R, N). The truth is zero."""
    generator = rng(3)
    x = torch.linspace(-1.9, 1.9, 39)
    own_bumps = torch.randn(sets, 1, generator=generator) * torch.sin(3 * x) + torch.randn(
        sets, 1, generator=generator
    ) * torch.cos(3 * x)
    std = (1.0 + 0.15 * x.square() + own * own_bumps).double().clamp_min(0.2)
    error = std * torch.randn(sets, 39, generator=generator).double()  # of the mean of very many nets
    outputs = error[:, None] + std[:, None] * torch.randn(sets, nets, 39, generator=generator).double()
    truth = curves.make_problem("smooth", "constant")
    outputs = (
        outputs + truth.values.double() + (error - (outputs.mean(1)))[:, None]
    )  # the noise of the mean is left out
    cell = {"function": "smooth", "noise": "constant", "width": 8, "n": 30, "seed": 0}
    band = curves.band_row(curves.SCALED, truth.values.double() + error, std, truth, sets)
    return {"bands": [{**cell, **band}], "true": [{**cell, **curves.bootstrap_row(outputs, truth)}]}, std


@pytest.mark.parametrize("nets", [6, 100])
def test_few_nets_of_the_true_bootstrap_cause_no_bias(nets: int) -> None:
    """A band with its very standard deviation: as wide, perfectly alike; and it covers as one of very many nets."""
    rows, _ = true_nets(nets, 500, own=0.1)
    methods = next(iter(summarize(rows).values()))
    mine, true = methods[curves.SCALED], methods[curves.BOOTSTRAP]
    assert mine.coverage == pytest.approx(0.95, abs=5 * math.sqrt(0.95 * 0.05 / (500 * 39)))
    assert true.coverage == pytest.approx(0.95, abs=5 * math.sqrt(0.95 * 0.05 / (500 * 39)))
    for found in (mine.relative_width, mine.likeness):
        assert found is not None
        assert found[0] == pytest.approx(1.0, abs=4 * found[1])
        assert found[1] < 0.05


@pytest.mark.parametrize("own", [0.1, 0.0, 0.3])
def test_max_likeness_of_a_constant_band(own: float) -> None:
    """That of the mean standard deviation reaches it; bumps of single data sets lower it."""
    rows, std = true_nets(10, 500, own)
    mine = next(iter(summarize(rows).values()))[curves.SCALED]
    same = std.mean(0, keepdim=True).expand_as(std)
    rows["bands"] = [{**row, "stds": same.tolist()} for row in rows["bands"]]
    mean = next(iter(summarize(rows).values()))[curves.SCALED]
    assert mine.max_likeness is not None
    assert mean.likeness is not None
    assert mean.likeness[0] == pytest.approx(mine.max_likeness[0], abs=0.02)
    expected = same.var(1).mean().sqrt() / std.var(1).mean().sqrt()
    assert mine.max_likeness[0] == pytest.approx(float(expected), abs=4 * mine.max_likeness[1])


def test_jackknife() -> None:
    values = torch.randn(50, generator=rng(1)).double()
    found = jackknife(lambda part: float(part.mean()), values)
    assert found is not None
    assert found[1] == pytest.approx(float(values.std()) / math.sqrt(50))
    assert jackknife(lambda part: math.nan, values) is None


def test_checks_list_the_cells_that_fail() -> None:
    flat = torch.full((10, 39), 0.2)
    good = made_rows(flat, flat, (flat, flat))
    said = [str(verdict) for verdict in band_checks(good)]
    assert said[1].startswith("does NOT hold")
    assert "smooth, constant noise, width 8, n = 30: 50.0%" in said[1]
    assert "missed in 1, by more than two standard errors in 1 of them" in said[1]
    assert said[3].startswith("holds")
    assert said[2].endswith("(not measured; undetermined in 1)")  # neither band varies with x
    assert band_tables(good)[1].rows[0][6].text == "50 ± 16 at −1.9"


def test_overview_table_has_one_row_per_width() -> None:
    """From its least to its greatest cell, and how many of them miss the mark."""
    flat = torch.full((100, 39), 0.2)
    rows: Rows = {"bands": [], "true": []}
    for n, missing in ((30, 2), (60, 20)):  # data sets whose band misses, at every x
        for key, table in made_rows(flat, flat, (flat, flat), n=n).items():
            rows[key] += [{**row, "held": [100 - missing] * 39} for row in table]
    rows["bands"] = [{**row, "held": [95] * 39} if row["n"] == 30 else row for row in rows["bands"]]
    edge = made_rows(flat, flat, (flat, flat), function="edge")["bands"]  # shown elsewhere, and not in the mark
    line, ideal = band_tables({**rows, "bands": rows["bands"] + edge})[0].rows
    shown = [cell.text for cell in line]
    assert shown[:6] == [curves.SCALED, "8", "2", "80.0 to 95.0", "80.0 to 95.0", "1"]
    assert shown[8] == "59 to 59"  # `away` is uniform on (0, 4), and Student's quantile of eight nets is 2.36
    assert [cell.text for cell in ideal][:6] == [IDEAL, "8", "2", "95.0 to 95.0", "95.0 to 95.0", "0"]


def test_costs_are_relative_to_a_training() -> None:
    flat = torch.full((10, 39), 0.2)
    seconds = {curves.SCALED: 4.2, curves.WHOLE: 0.2, "neuboots": 3.0}
    costs = [{"method": name, "width": 8, "plain": 2.0, "seconds": value} for name, value in seconds.items()]
    rows = {**made_rows(flat, flat, (flat, flat)), "cost": costs}
    said = [str(verdict) for verdict in band_checks(rows) if "plain trainings" in verdict.claim]
    assert [each.split(":")[0] for each in said] == ["does NOT hold", "holds"]
    assert "2.10 at width 8" in said[0]
    assert "1.10 at width 8" in said[1]  # the net's own training, and a tenth
    shown = {line[0].text: line[1].text for line in band_tables(rows)[-1].rows}
    assert shown["neuboots"] == "1.500"


# -- from end to end -----------------------------------------------------------------------------------
