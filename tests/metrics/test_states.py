"""All metrics, each in parts against all at once, and what all of them refuse."""

import ast
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import neuboots.metrics as m

many = settings(deadline=None, max_examples=10, derandomize=True)

# -- every metric, in parts and all at once ------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A metric: its one-shot form, the tally and the figure of it, and data to try it on."""

    once: Callable[..., Any]
    make: Callable[..., m.Tally]
    figure: str
    draw: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    axes: tuple[int, ...]  # where each argument has its inputs

    def __str__(self) -> str:
        return self.figure

    def rows(self, data: tuple[Tensor, ...], index: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.index_select(axis, index) for part, axis in zip(data, self.axes, strict=True))


def classes(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    """Half of the rows are of five kinds only, so that confidences tie."""
    few = torch.randn(5, 4, generator=rng, dtype=torch.float64)[torch.randint(5, (num,), generator=rng)]
    fresh = torch.randn(num, 4, generator=rng, dtype=torch.float64)
    logits = torch.where(torch.rand(num, 1, generator=rng) < 0.5, few, fresh)
    return (2 * logits).softmax(1), torch.randint(4, (num,), generator=rng)


def raw(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num, 3, generator=rng), torch.randint(3, (num,), generator=rng)


def images(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(5, (num, 4, 3), generator=rng, dtype=torch.uint8)  # 4 is void: 255
    return torch.randn(num, 4, 4, 3, generator=rng).softmax(1), torch.where(labels == 4, 255, labels)


def numbers(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, y = torch.randn(2, num, generator=rng, dtype=torch.float64)
    return mean, 0.1 + torch.rand(num, generator=rng, dtype=torch.float64), y


def pairs(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    mean, _, y = numbers(rng, num)
    return mean, y


def spreads(rng: torch.Generator, num: int) -> tuple[Tensor]:
    return (numbers(rng, num)[1],)


def bands(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, std, y = numbers(rng, num)
    return mean - std, mean + std, y


def widths(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    return bands(rng, num)[:2]


def drawn(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    return torch.randn(7, num, generator=rng), torch.randn(num, generator=rng)


def scored(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    """Few different scores, so that they tie; of both kinds, however few."""
    scores = torch.randint(8, (num,), generator=rng).double()
    outside = torch.rand(num, generator=rng) < 0.4
    return scores, outside


def voted(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    samples = torch.randn(4, num, 3, generator=rng, dtype=torch.float64)
    return samples.softmax(2), torch.randint(3, (num,), generator=rng)


def detection(scores: Tensor, outside: Tensor, *, positive: Any, tpr: float = 0.95) -> m.Detection:
    return m.Detection.of(scores[~outside], scores[outside], positive=positive, tpr=tpr)


def of_side(metric: Callable[..., Tensor], positive: str) -> Callable[..., Tensor]:
    if positive == "out":
        return lambda scores, outside: metric(scores, positive=outside)
    return lambda scores, outside: metric(-scores, positive=~outside)


def of_labels(metric: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda samples, labels: metric(samples.argmax(2), labels)


BY_CLASS = [
    "error", "accuracy", "nll", "brier", "ece", "mce", "adaptive_ece", "aurc", "reliability_curve", "risk_coverage",
    "confusion_matrix", "precision", "recall", "f1",
]  # fmt: skip
BY_NUMBER = [
    "crps", "check_score", "mean_interval_score", "calibration_curve", "mean_absolute_calibration", "rms_calibration",
    "miscalibration_area",
]  # fmt: skip
BY_SIDE = {"auroc": m.auroc, "tnr_at_95_tpr": m.tnr_at_tpr, "fpr_at_95_tpr": m.fpr_at_tpr}
CASES = [
    *(Case(getattr(m, name), m.Classification.of, name, classes, (0, 0)) for name in BY_CLASS),
    Case(partial(m.ece, num_bins=4), partial(m.Classification.of, num_bins=4), "ece", classes, (0, 0)),
    Case(
        partial(m.adaptive_ece, num_bins=4), partial(m.Classification.of, num_bins=4), "adaptive_ece", classes, (0, 0)
    ),
    *(Case(getattr(m, name), m.LogitScores.of, name, raw, (0, 0)) for name in ("nll_at_mean_logit", "paper_nll")),
    *(Case(getattr(m, name), m.Segmentation.of, name, images, (0, 0)) for name in ("iou", "mean_iou", "dice")),
    *(Case(getattr(m, name), m.Regression.of, name, numbers, (0, 0, 0)) for name in BY_NUMBER),
    Case(m.gaussian_nll, m.Regression.of, "nll", numbers, (0, 0, 0)),
    Case(m.rmse, m.Residuals.of, "rmse", pairs, (0, 0)),
    Case(m.sharpness, m.Spreads.of, "sharpness", spreads, (0,)),
    Case(m.coverage, m.Intervals.of, "coverage", bands, (0, 0, 0)),
    Case(partial(m.interval_score, level=0.95), m.Intervals.of, "interval_score", bands, (0, 0, 0)),
    Case(m.mean_width, m.Widths.of, "mean_width", widths, (0, 0)),
    Case(partial(m.pinball, q=0.3), partial(m.Quantiles.of, q=0.3), "pinball", pairs, (0, 0)),
    Case(m.crps_samples, m.SampleScores.of, "crps", drawn, (1, 0)),
    *(
        Case(of_side(metric, side), partial(detection, positive=side), name, scored, (0, 0))
        for name, metric in BY_SIDE.items()
        for side in ("in", "out")
    ),
    *(
        Case(of_side(partial(metric, tpr=0.7), "in"), partial(detection, positive="in", tpr=0.7), name, scored, (0, 0))
        for name, metric in {"tnr_at_tpr": m.tnr_at_tpr, "fpr_at_tpr": m.fpr_at_tpr}.items()
    ),
    Case(of_side(m.aupr, "in"), partial(detection, positive="out"), "aupr_in", scored, (0, 0)),
    Case(of_side(m.aupr, "out"), partial(detection, positive="out"), "aupr_out", scored, (0, 0)),
    Case(of_side(m.detection_accuracy, "in"), partial(detection, positive="in"), "detection_accuracy", scored, (0, 0)),
    *(
        Case(of_labels(getattr(m, name)), m.Diversity.of, name, voted, (1, 0))
        for name in ("disagreement", "q_statistic", "correlation", "ratio_error")
    ),
    Case(lambda samples, labels: m.pairwise_kl(samples), m.Diversity.of, "pairwise_kl", voted, (1, 0)),
]
ORACLES = {
    "test_metrics_classification.py::test_agrees_with_torchmetrics": {"accuracy", "ece", "mce"},
    "test_metrics_classification.py::test_agrees_with_scikit_learn": {"error", "nll", "brier"},
    "test_metrics_classification.py::test_classes_agree_with_scikit_learn": {
        "confusion_matrix", "precision", "recall", "f1",
    },
    "test_metrics_classification.py::test_nll_at_mean_logit_agrees_with_scipy": {"nll_at_mean_logit", "paper_nll"},
    "test_metrics_classification.py::test_ece_on_bin_edges_is_the_definition": {"reliability_curve"},
    "test_metrics_ranking.py::test_adaptive_ece_is_its_definition": {"adaptive_ece"},
    "test_metrics_ranking.py::test_risk_and_coverage_are_their_definition": {"risk_coverage"},
    "test_metrics_ranking.py::test_aurc_is_the_expectation_over_the_orders_of_ties": {"aurc"},
    "test_metrics_regression.py::test_agrees_with_uncertainty_toolbox": {
        "gaussian_nll", "crps", "check_score", "mean_interval_score", "mean_absolute_calibration", "rms_calibration",
        "miscalibration_area", "sharpness", "calibration_curve",
    },
    "test_metrics_regression.py::test_agrees_with_scoringrules_and_scikit_learn": {"rmse"},
    "test_metrics_regression.py::test_intervals_and_quantiles_agree": {
        "interval_score", "pinball", "mean_width", "coverage",
    },
    "test_metrics_regression.py::test_crps_of_samples_agrees_with_scoringrules": {"crps_samples"},
    "test_metrics_ood.py::test_auroc_agrees_with_scikit_learn_and_torchmetrics": {"auroc"},
    "test_metrics_ood.py::test_aupr_agrees_with_scikit_learn": {"aupr"},
    "test_metrics_ood.py::test_rates_agree_with_scikit_learn": {"fpr_at_tpr", "tnr_at_tpr"},
    "test_metrics_ood.py::test_detection_accuracy_is_the_best_balanced_accuracy": {"detection_accuracy"},
    "test_metrics_segmentation.py::test_iou_agrees_with_torchmetrics_and_scikit_learn": {"iou", "mean_iou", "dice"},
    "test_metrics_diversity.py::test_agrees_with_scipy_and_scikit_learn": {
        "disagreement", "correlation", "q_statistic",
    },
    "test_metrics_diversity.py::test_ratio_error_is_its_definition": {"ratio_error"},
    "test_metrics_diversity.py::test_pairwise_kl_agrees_with_scipy": {"pairwise_kl"},
}  # fmt: skip
every = pytest.mark.parametrize("case", CASES, ids=[f"{case}-{k}" for k, case in enumerate(CASES)])


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a figure: itself, or those of a curve."""
    return [getattr(value, part.name) for part in fields(value)] if is_dataclass(value) else [value]


def same(value: Any, expected: Any) -> None:
    for a, b in zip(leaves(value), leaves(expected), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15, equal_nan=True)


def test_every_function_of_the_package_is_in_the_table() -> None:
    functions = {name for name in m.__all__ if name.islower()}
    used = {name for name in functions if any(_calls(case.once, getattr(m, name)) for case in CASES)}
    assert functions == used


def test_every_metric_is_held_to_an_oracle() -> None:
    """Each in a test that exists and calls it: an outside library, or where none has it, its definition done slowly."""
    functions = {name for name in m.__all__ if name.islower()}
    assert functions == set().union(*ORACLES.values())
    for place, names in ORACLES.items():
        file, test = place.split("::")
        module = ast.parse((Path(__file__).parent / file).read_text())
        (body,) = (part for part in module.body if isinstance(part, ast.FunctionDef) and part.name == test)
        called = {part.id for part in ast.walk(body) if isinstance(part, ast.Name)}
        assert names <= called, (place, names - called)


def _calls(once: Any, metric: Any) -> bool:
    if isinstance(once, partial):
        return _calls(once.func, metric)
    if once.__name__ != "<lambda>":
        return bool(once is metric)
    return (
        metric in [cell.cell_contents for cell in once.__closure__ or ()] or metric.__name__ in once.__code__.co_names
    )


@every
@many
@given(seed=st.integers(0, 10**6), num=st.integers(12, 40), cuts=st.sets(st.integers(1, 40), max_size=8))
def test_parts_add_up_to_the_whole(case: Case, seed: int, num: int, cuts: set[int]) -> None:
    """In any order and any parts."""
    rng = torch.Generator().manual_seed(seed)
    data = case.draw(rng, num)
    order = torch.randperm(num, generator=rng)
    parts = [case.rows(data, order[rows]) for rows in torch.arange(num).tensor_split(sorted(cuts))]  # some are empty
    same(getattr(sum(case.make(*part) for part in parts), case.figure), case.once(*data))


@every
def test_parts_of_one_row_add_up_to_the_whole(case: Case) -> None:
    data = case.draw(torch.Generator().manual_seed(0), 20)
    tally = sum(case.make(*case.rows(data, torch.tensor([k]))) for k in range(20))
    same(getattr(tally, case.figure), case.once(*data))


@every
def test_a_figure_is_float64_and_says_nothing_of_gradients(case: Case) -> None:
    data = case.draw(torch.Generator().manual_seed(0), 20)
    tracked = [part.requires_grad_() if part.is_floating_point() else part for part in data]
    for value in leaves(case.once(*tracked)):
        assert value.dtype == torch.float64 or case.figure in ("confusion_matrix", "reliability_curve")
        assert not value.requires_grad


@every
def test_data_are_left_as_they_were(case: Case) -> None:
    data = case.draw(torch.Generator().manual_seed(0), 20)
    before = [part.clone() for part in data]
    case.once(*data)
    assert all(torch.equal(a, b) for a, b in zip(data, before, strict=True))


@every
def test_one_input_has_a_figure(case: Case) -> None:
    """Of two kinds of input there must be one each."""
    data = case.draw(torch.Generator().manual_seed(0), 1)
    if case.draw is scored:
        data = torch.tensor([0.0, 1.0]), torch.tensor([False, True])
    if case.draw is images:
        data = data[0], torch.zeros_like(data[1])
    for value in leaves(case.once(*data)):
        assert not value.isnan().any() or case.figure == "reliability_curve"
        assert value.isfinite().all() or case.figure in ("reliability_curve", "ratio_error")


# -- bad arguments -------------------------------------------------------------------------------------

FLOATS = [
    pytest.param(case, k, id=f"{case}-{n}-{k}")
    for n, case in enumerate(CASES)
    for k, part in enumerate(case.draw(torch.Generator().manual_seed(0), 12))
    if part.is_floating_point()
]


def calls(case: Case) -> list[Callable[..., Any]]:
    """Both forms, where they take the same arguments and check them."""

    def tallied(*data: Tensor) -> Any:
        return getattr(case.make(*data), case.figure)

    if case.draw is voted and case.figure != "pairwise_kl":  # the one-shot form takes guesses, which cannot be NaN
        return [tallied]
    return [case.once, tallied]


@pytest.mark.parametrize(("case", "argument"), FLOATS)
def test_nan_is_refused_with_a_sentence(case: Case, argument: int) -> None:
    data = case.draw(torch.Generator().manual_seed(0), 12)
    data[argument].view(-1)[-1] = math.nan
    for call in calls(case):
        with pytest.raises(ValueError, match=r"NaN.*; expected .*numbers: "):
            call(*data)


@pytest.mark.parametrize(("case", "argument"), FLOATS)
def test_infinity_is_refused_where_it_means_nothing(case: Case, argument: int) -> None:
    """Ends of an interval and scores may be infinite; nothing else may."""
    data = case.draw(torch.Generator().manual_seed(0), 12)
    data[argument].view(-1)[-1] = math.inf
    for call in calls(case):
        if case.draw is scored or (case.draw in (bands, widths) and argument == 1):
            assert not leaves(call(*data))[0].isnan()
        else:
            with pytest.raises(ValueError, match=r"; expected "):
                call(*data)


@pytest.mark.parametrize("dropped", [0, 1, 2])
@every
def test_shapes_that_do_not_fit_are_refused_with_a_sentence(case: Case, dropped: int) -> None:
    data = list(case.draw(torch.Generator().manual_seed(0), 12))
    if dropped >= len(data) or len(data) == 1 or case.figure == "pairwise_kl":
        return
    data[dropped] = data[dropped].narrow(case.axes[dropped], 0, 11)
    with pytest.raises(ValueError, match=r"shapes? .*; expected .*: reshape|expected one shape"):
        case.once(*data)


@every
def test_an_empty_part_changes_nothing(case: Case) -> None:
    """As the last batch of a loader may be one."""
    data = case.draw(torch.Generator().manual_seed(0), 12)
    none, whole = case.make(*case.rows(data, torch.tensor([], dtype=torch.long))), case.make(*data)
    for tally in (none + whole, whole + none):
        same(getattr(tally, case.figure), case.once(*data))
    with pytest.raises(ValueError, match=r"; expected (at least one|some of both)"):
        getattr(none, case.figure)


@every
def test_arrays_and_lists_are_refused_with_a_sentence(case: Case) -> None:
    if case.draw is scored:  # the table parts the scores itself; see below
        return
    data = case.draw(torch.Generator().manual_seed(0), 12)
    for convert, place in itertools.product((Tensor.numpy, Tensor.tolist), range(len(data))):
        bad = [convert(part) if k == place else part for k, part in enumerate(data)]
        for call in calls(case):
            if (call, case.figure, place) != (case.once, "pairwise_kl", 1):  # it takes no labels
                with pytest.raises(ValueError, match=r"^got \w+ of type (ndarray|list); expected a tensor: "):
                    call(*bad)


def test_arrays_of_scores_and_guesses_are_refused_too() -> None:
    scores, guesses = torch.rand(4), torch.zeros(2, 4, dtype=torch.long)
    for call in (
        lambda: m.auroc(scores.numpy(), positive=scores > 0.5),
        lambda: m.auroc(scores, positive=[True, False, True, False]),
        lambda: m.Detection.of(scores, scores.tolist(), positive="in"),
        lambda: m.disagreement(guesses.numpy(), guesses[0]),
        lambda: m.disagreement(guesses, guesses[0].tolist()),
        lambda: m.Mean.of([1.0]),
    ):
        with pytest.raises(ValueError, match=r"^got \w+ of type (ndarray|list); expected a tensor: torch.as_tensor"):
            call()


def test_a_mean_of_nan_is_refused() -> None:
    for values in (torch.tensor([1.0, math.nan]), torch.tensor([1j])):
        with pytest.raises(ValueError, match=r"NaN among \d values of torch.*; expected real numbers: "):
            m.Mean.of(values)


def test_the_bundle_of_normal_predictions_has_the_figures_of_its_parts() -> None:
    mean, std, y = numbers(torch.Generator().manual_seed(0), 12)
    whole = m.Regression.of(mean, std, y)
    assert whole.rmse == m.rmse(mean, y)
    assert whole.sharpness == m.sharpness(std)


@every
def test_nothing_is_refused_with_a_sentence(case: Case) -> None:
    none = case.rows(case.draw(torch.Generator().manual_seed(0), 12), torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match=r"; expected (at least one|some of both)"):
        case.once(*none)


def test_tallies_of_other_options_do_not_add() -> None:
    probs, labels = classes(torch.Generator().manual_seed(0), 12)
    with pytest.raises(ValueError, match=r"^got confidence of shapes \(15,\) and \(10,\); expected the same: "):
        m.Classification.of(probs, labels) + m.Classification.of(probs, labels, num_bins=10)
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=r"^got level=0.95 and level=0.9; expected tallies with the same options$"):
        m.Regression.of(ones, ones, ones) + m.Regression.of(ones, ones, ones, level=0.9)
    with pytest.raises(ValueError, match=r"^got positive='in' and positive='out'; expected "):
        m.Detection.of(ones, ones, positive="in") + m.Detection.of(ones, ones, positive="out")
    with pytest.raises(TypeError, match="unsupported operand"):
        m.Classification.of(probs, labels) + m.Regression.of(ones, ones, ones)


def test_sums_take_memory_that_does_not_grow_with_the_data() -> None:
    """Only what needs ranks keeps a score for each input; a segmentation keeps nothing."""

    def held(tally: m.Tally) -> int:
        parts = [getattr(tally, part.name) for part in fields(tally)]
        inner = [held(part) for part in parts if isinstance(part, m.Tally)]
        joined = [x for part in parts for x in (part if isinstance(part, tuple) else [part]) if isinstance(x, Tensor)]
        return sum(inner) + sum(x.numel() for x in joined)

    rng = torch.Generator().manual_seed(0)
    for draw, make in [(images, m.Segmentation.of), (numbers, m.Regression.of), (voted, m.Diversity.of)]:
        assert held(make(*draw(rng, 100))) == held(make(*draw(rng, 10)))
    assert held(m.Classification.of(*classes(rng, 110))) - held(m.Classification.of(*classes(rng, 10))) == 200
