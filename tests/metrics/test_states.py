"""All metrics: states of batches against functions of all data, and invalid arguments."""

import ast
import math
import re
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
from neuboots._validation import ArgumentError

many = settings(deadline=None, max_examples=5, derandomize=True)
FUNCTIONS = {name for name in m.__all__ if name.islower()}

# -- every metric as a state and as a function ---------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A metric: its function, the state with the property of it (None for a plain mean), and data to try it on."""

    function: Callable[..., Any]
    make: Callable[..., m.MetricState] | None
    metric: str
    draw: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    axes: tuple[int, ...]  # the axis of the inputs in each argument

    def data(self, num: int, seed: int = 0) -> tuple[Tensor, ...]:
        return self.draw(torch.Generator().manual_seed(seed), num)

    def rows(self, data: tuple[Tensor, ...], index: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.index_select(axis, index) for part, axis in zip(data, self.axes, strict=True))


def class_data(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    """Half of the rows are of five kinds only, so that confidences tie."""
    few = torch.randn(5, 4, generator=rng, dtype=torch.float64)[torch.randint(5, (num,), generator=rng)]
    fresh = torch.randn(num, 4, generator=rng, dtype=torch.float64)
    logits = torch.where(torch.rand(num, 1, generator=rng) < 0.5, few, fresh)
    return (2 * logits).softmax(1), torch.randint(4, (num,), generator=rng)


def logit_data(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num, 3, generator=rng), torch.randint(3, (num,), generator=rng)


def image_data(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(5, (num, 4, 3), generator=rng, dtype=torch.uint8)
    return torch.randn(num, 4, 4, 3, generator=rng).softmax(1), torch.where(labels == 4, 255, labels)


def normal_data(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, y = torch.randn(2, num, generator=rng, dtype=torch.float64)
    return mean, 0.1 + torch.rand(num, generator=rng, dtype=torch.float64), y


def point_data(rng: torch.Generator, num: int) -> tuple[Tensor, ...]:
    return normal_data(rng, num)[::2]


def std_data(rng: torch.Generator, num: int) -> tuple[Tensor]:
    return (normal_data(rng, num)[1],)


def interval_data(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, std, y = normal_data(rng, num)
    return mean - std, mean + std, y


def width_data(rng: torch.Generator, num: int) -> tuple[Tensor, ...]:
    return interval_data(rng, num)[:2]


def sample_data(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    return torch.randn(7, num, generator=rng), torch.randn(num, generator=rng)


def score_data(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    """Few distinct scores, so that they tie."""
    return torch.randint(8, (num,), generator=rng).double(), torch.rand(num, generator=rng) < 0.4


def replicate_data(rng: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    samples = torch.randn(4, num, 3, generator=rng, dtype=torch.float64)
    return samples.softmax(2), torch.randint(3, (num,), generator=rng)


def detection(scores: Tensor, is_ood: Tensor, **options: Any) -> m.DetectionMetrics:
    return m.DetectionMetrics.from_batch(scores[~is_ood], scores[is_ood], **options)


def of_positive(metric: Callable[..., Tensor], positive: str) -> Callable[..., Tensor]:
    if positive == "out":
        return lambda scores, is_ood: metric(scores, positive=is_ood)
    return lambda scores, is_ood: metric(-scores, positive=~is_ood)


def of_preds(metric: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda samples, labels: metric(samples.argmax(2), labels)


CLASS_METRICS = [
    "error", "accuracy", "nll", "brier", "ece", "mce", "adaptive_ece", "aurc", "reliability_curve",
    "risk_coverage_curve", "confusion_matrix", "precision", "recall", "f1",
]  # fmt: skip
NORMAL_METRICS = [
    "crps", "check_score", "mean_interval_score", "calibration_curve", "mean_absolute_calibration", "rms_calibration",
    "miscalibration_area",
]  # fmt: skip
classification, intervals = m.ClassificationMetrics.from_batch, m.IntervalMetrics.from_batch
segmentation = partial(m.SegmentationMetrics.from_batch, ignore_index=255)
CASES = [
    *(Case(getattr(m, name), classification, name, class_data, (0, 0)) for name in CLASS_METRICS),
    Case(partial(m.ece, num_bins=4), partial(classification, num_bins=4), "ece", class_data, (0, 0)),
    Case(partial(m.adaptive_ece, num_bins=4), partial(classification, num_bins=4), "adaptive_ece", class_data, (0, 0)),
    *(Case(getattr(m, name), None, name, logit_data, (0, 0)) for name in ("nll_at_mean_logit", "paper_nll")),
    *(Case(getattr(m, name), segmentation, name, image_data, (0, 0)) for name in ("iou", "mean_iou", "dice")),
    *(Case(getattr(m, name), m.RegressionMetrics.from_batch, name, normal_data, (0, 0, 0)) for name in NORMAL_METRICS),
    Case(m.gaussian_nll, m.RegressionMetrics.from_batch, "nll", normal_data, (0, 0, 0)),
    Case(m.rmse, None, "rmse", point_data, (0, 0)),
    Case(m.sharpness, None, "sharpness", std_data, (0,)),
    Case(m.interval_coverage, intervals, "coverage", interval_data, (0, 0, 0)),
    Case(partial(m.interval_score, level=0.95), intervals, "interval_score", interval_data, (0, 0, 0)),
    Case(m.mean_width, None, "mean_width", width_data, (0, 0)),
    Case(partial(m.pinball, q=0.3), None, "pinball", point_data, (0, 0)),
    Case(m.crps_samples, None, "crps", sample_data, (1, 0)),
    *(
        Case(of_positive(metric, side), partial(detection, positive=side), metric.__name__, score_data, (0, 0))
        for metric in (m.auroc, m.tnr_at_tpr, m.fpr_at_tpr, m.detection_accuracy)
        for side in ("in", "out")
    ),
    Case(
        of_positive(partial(m.fpr_at_tpr, tpr=0.7), "in"),
        partial(detection, positive="in", tpr=0.7), "fpr_at_tpr", score_data, (0, 0),
    ),
    Case(of_positive(m.aupr, "in"), partial(detection, positive="out"), "aupr_in", score_data, (0, 0)),
    Case(of_positive(m.aupr, "out"), partial(detection, positive="out"), "aupr_out", score_data, (0, 0)),
    *(
        Case(of_preds(getattr(m, name)), m.DiversityMetrics.from_batch, name, replicate_data, (1, 0))
        for name in ("disagreement", "q_statistic", "correlation", "ratio_error")
    ),
    Case(lambda p, _: m.pairwise_kl(p), m.DiversityMetrics.from_batch, "pairwise_kl", replicate_data, (1, 0)),
]  # fmt: skip
IDS = [f"{case.metric}-{k}" for k, case in enumerate(CASES)]
every = pytest.mark.parametrize("case", CASES, ids=IDS)
every_state = pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.make],
    ids=[name for case, name in zip(CASES, IDS, strict=True) if case.make],
)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a metric: itself, or those of a curve."""
    return [getattr(value, part.name) for part in fields(value)] if is_dataclass(value) else [value]


def assert_same(value: Any, expected: Any) -> None:
    for a, b in zip(leaves(value), leaves(expected), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15, equal_nan=True)


def calls(function: Any, metric: Any) -> bool:
    if isinstance(function, partial):
        return calls(function.func, metric)
    if function.__name__ != "<lambda>":
        return bool(function is metric)
    names = function.__code__.co_names
    return metric.__name__ in names or any(
        calls(cell.cell_contents, metric) for cell in function.__closure__ or () if callable(cell.cell_contents)
    )


def test_every_function_is_in_the_table_of_cases() -> None:
    assert {name for name in FUNCTIONS if any(calls(case.function, getattr(m, name)) for case in CASES)} == FUNCTIONS


def test_every_function_is_compared_with_a_reference() -> None:
    """In a test named so: an outside library, or where none has the metric, its definition in plain code."""
    compared = set()
    for file in Path(__file__).parent.glob("test_*.py"):
        for part in ast.parse(file.read_text()).body:
            if isinstance(part, ast.FunctionDef) and re.match("test_.*(agree|match|is_expectation|is_best)", part.name):
                compared |= {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
    assert compared >= FUNCTIONS


@every_state
@many
@given(seed=st.integers(0, 10**6), num=st.integers(12, 40), cuts=st.sets(st.integers(1, 40), max_size=8))
def test_states_of_batches_add_in_any_order(case: Case, seed: int, num: int, cuts: set[int]) -> None:
    assert case.make is not None
    data = case.data(num, seed)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed))
    batches = [case.rows(data, order[rows]) for rows in torch.arange(num).tensor_split(sorted(cuts))]  # some are empty
    assert_same(getattr(sum(case.make(*batch) for batch in batches), case.metric), case.function(*data))


@every_state
def test_empty_batch_changes_nothing(case: Case) -> None:
    assert case.make is not None
    data = case.data(12)
    empty, full = case.make(*case.rows(data, torch.tensor([], dtype=torch.long))), case.make(*data)
    for state in (empty + full, full + empty):
        assert_same(getattr(state, case.metric), case.function(*data))
    with pytest.raises(ArgumentError):
        getattr(empty, case.metric)


@every
def test_metric_is_detached_float64_and_leaves_data_unchanged(case: Case) -> None:
    data = case.data(20)
    before = [part.clone() for part in data]
    tracked = [part.requires_grad_() if part.is_floating_point() else part for part in data]
    for value in leaves(case.function(*tracked)):
        assert value.dtype == torch.float64 or case.metric in ("confusion_matrix", "reliability_curve")
        assert not value.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(data, before, strict=True))


@every
def test_metric_of_one_input_is_defined_and_of_none_is_an_error(case: Case) -> None:
    data = case.data(1)
    if case.draw is score_data:  # one input of each class
        data = torch.tensor([0.0, 1.0]), torch.tensor([False, True])
    if case.draw is image_data:
        data = data[0], torch.zeros_like(data[1])
    for value in leaves(case.function(*data)):
        assert not value.isnan().any() or case.metric == "reliability_curve"
        assert value.isfinite().all() or case.metric in ("reliability_curve", "ratio_error")
    with pytest.raises(ArgumentError):
        case.function(*case.rows(data, torch.tensor([], dtype=torch.long)))


# -- invalid arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every
def test_nan_and_infinity_are_errors(case: Case, bad: float) -> None:
    """Only scores and the ends of an interval may be infinite."""
    for k, argument in enumerate(case.data(12)):
        if not argument.is_floating_point():
            continue
        data = case.data(12)
        data[k].view(-1)[-1] = bad
        functions = (
            [case.function] if case.metric not in ("disagreement", "q_statistic", "correlation", "ratio_error") else []
        )
        functions += [] if case.make is None else [lambda *d: getattr(case.make(*d), case.metric)]
        for function in functions:
            if bad == math.inf and (case.draw is score_data or (case.draw in (interval_data, width_data) and k == 1)):
                assert not leaves(function(*data))[0].isnan()
            else:
                with pytest.raises(ArgumentError):
                    function(*data)


@every
def test_arguments_of_other_lengths_are_errors(case: Case) -> None:
    data = case.data(12)
    for k in range(len(data) if len(data) > 1 and case.metric != "pairwise_kl" else 0):
        short = [
            part.narrow(axis, 0, 11) if k == j else part
            for j, (part, axis) in enumerate(zip(data, case.axes, strict=True))
        ]
        with pytest.raises(ArgumentError, match="shape"):
            case.function(*short)


def test_states_of_other_options_do_not_add() -> None:
    probs, labels = class_data(torch.Generator().manual_seed(0), 12)
    ones = torch.ones(2)
    for name, one, other in [
        ("bin_confidence", classification(probs, labels), classification(probs, labels, num_bins=10)),
        ("level", intervals(ones, ones, ones), intervals(ones, ones, ones, level=0.9)),
        ("positive", *(m.DetectionMetrics.from_batch(ones, ones, positive=side) for side in ("in", "out"))),
    ]:
        with pytest.raises(ArgumentError, match=name):
            one + other
    with pytest.raises(TypeError, match="unsupported operand"):
        classification(probs, labels) + intervals(ones, ones, ones)


def test_running_mean_rejects_nan_and_complex_values() -> None:
    for values in (torch.tensor([1.0, math.nan]), torch.tensor([1j])):
        with pytest.raises(ArgumentError, match="values"):
            m.RunningMean.from_batch(values)


def test_memory_of_sums_does_not_grow_with_the_data() -> None:
    """Only ranking metrics store a score per input."""

    def num_elements(state: m.MetricState) -> int:
        parts = [getattr(state, part.name) for part in fields(state)]
        tensors = [x for part in parts for x in (part if isinstance(part, tuple) else [part]) if isinstance(x, Tensor)]
        return sum(num_elements(x) for x in parts if isinstance(x, m.MetricState)) + sum(x.numel() for x in tensors)

    rng = torch.Generator().manual_seed(0)
    for draw, make in [
        (image_data, segmentation), (normal_data, m.RegressionMetrics.from_batch),
        (replicate_data, m.DiversityMetrics.from_batch),
    ]:  # fmt: skip
        assert num_elements(make(*draw(rng, 100))) == num_elements(make(*draw(rng, 10)))
    large, small = classification(*class_data(rng, 110)), classification(*class_data(rng, 10))
    assert num_elements(large) - num_elements(small) == 200


REJECTED = [None, [0.5, 0.5], torch.full((2,), 0.5).numpy(), torch.ones(2).to_sparse(), torch.ones(2, device="meta")]


@pytest.mark.parametrize("value", REJECTED, ids=["None", "list", "array", "sparse", "meta"])
def test_what_is_no_dense_tensor_is_rejected_by_name(value: Any) -> None:
    y, labels, probs = torch.ones(2), torch.tensor([0, 1]), torch.full((2, 2), 0.5)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("probs", lambda: m.nll(value, labels)),
        ("labels", lambda: m.ece(probs, value)),
        ("mean", lambda: m.rmse(value, y)),
        ("y", lambda: m.crps(y, y, value)),
        ("low", lambda: m.mean_width(value, y)),
        ("samples", lambda: m.crps_samples(value, y)),
        ("samples", lambda: m.pairwise_kl(value)),
        ("preds", lambda: m.disagreement(value, labels)),
        ("scores", lambda: m.auroc(value, positive=labels > 0)),
        ("values", lambda: m.RunningMean.from_batch(value)),
    ]
    for name, call in calls:
        with pytest.raises(ArgumentError) as raised:
            call()
        assert raised.value.name == name


def test_more_bins_than_inputs_leave_bins_empty() -> None:
    probs, labels = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]]), torch.tensor([0, 0, 1])
    expected = m.adaptive_ece(probs, labels, num_bins=3)
    assert m.adaptive_ece(probs, labels, num_bins=10**12) == expected == pytest.approx((0.1 + 0.6 + 0.7) / 3)


def test_bins_and_classes_beyond_the_memory_are_rejected() -> None:
    probs, labels = torch.full((2, 2), 0.5), torch.tensor([0, 1])
    for name, call in (
        ("num_bins", lambda: m.ece(probs, labels, num_bins=10**15)),
        ("num_classes", lambda: m.ConfusionMatrix.from_preds(labels, labels, num_classes=10**8)),
        ("num_levels", lambda: m.calibration_curve(labels.float(), labels + 1.0, labels.float(), num_levels=10**15)),
    ):
        with pytest.raises(ArgumentError) as raised:
            call()
        assert raised.value.name == name
