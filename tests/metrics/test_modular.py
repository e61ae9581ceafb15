"""States as torchmetrics metrics: in a collection, merged, and gathered over processes."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from neuboots._validation import ArgumentError
from neuboots.metrics import ClassificationMetrics, DetectionMetrics, RegressionMetrics, SegmentationMetrics, ece, nll
from neuboots.metrics.modular import StreamingMetric

PROBS = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
LABELS = torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))
BATCHES = list(zip(PROBS.split(7), LABELS.split(7), strict=True))
METRICS = ["error", "nll", "brier", "ece", "adaptive_ece", "aurc", "f1", "confusion_matrix"]
without_update = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric StreamingMetric was called before")


def expected(metric: str) -> Tensor:
    value: Tensor = getattr(ClassificationMetrics.from_batch(PROBS, LABELS), metric)
    return value


@pytest.mark.parametrize("metric", METRICS)
def test_compute_is_the_metric_of_all_batches(metric: str) -> None:
    streaming = StreamingMetric(ClassificationMetrics, metric)
    for batch in BATCHES:
        streaming.update(*batch)
    torch.testing.assert_close(streaming.compute(), expected(metric), rtol=1e-12, atol=0)


def test_forward_returns_the_metric_of_the_batch() -> None:
    streaming = StreamingMetric(ClassificationMetrics, "nll")
    for probs, labels in BATCHES:
        assert streaming(probs=probs, labels=labels) == nll(probs, labels)
    assert streaming.compute().item() == pytest.approx(expected("nll").item(), rel=1e-12)
    streaming.reset()
    streaming.update(*BATCHES[0])
    assert streaming.compute() == nll(*BATCHES[0])


def test_sums_stay_one_part_and_stored_scores_a_few() -> None:
    sums = StreamingMetric(SegmentationMetrics, "mean_iou", ignore_index=255)
    stored = StreamingMetric(ClassificationMetrics, "aurc")
    for _ in range(50):
        sums(PROBS, LABELS)
        stored.update(PROBS, LABELS)
    assert len(sums.parts) == 1
    assert len(stored.parts) < 8
    whole = ClassificationMetrics.from_batch(PROBS.repeat(50, 1), LABELS.repeat(50))
    assert stored.compute().item() == pytest.approx(whole.aurc.item())


def test_metrics_of_one_state_are_one_group_of_a_collection() -> None:
    collection = MetricCollection(
        {
            "nll": StreamingMetric(ClassificationMetrics, "nll"),
            "ece": StreamingMetric(ClassificationMetrics, "ece"),
            "ece_10": StreamingMetric(ClassificationMetrics, "ece", num_bins=10),
        }
    )
    for batch in BATCHES:
        collection.update(*batch)
    assert sorted(map(sorted, collection.compute_groups.values())) == [["ece", "nll"], ["ece_10"]]
    values = collection.compute()
    assert values["nll"].item() == pytest.approx(expected("nll").item(), rel=1e-12)
    assert values["ece"].item() == pytest.approx(expected("ece").item(), rel=1e-12)
    assert values["ece_10"].item() == pytest.approx(ece(PROBS, LABELS, num_bins=10).item(), rel=1e-12)


def test_states_of_other_options_are_separate_groups() -> None:
    """The first batch gives equal sums, the second does not."""
    collection = MetricCollection(
        {str(k): StreamingMetric(SegmentationMetrics, "error", ignore_index=k) for k in (254, 255)}
    )
    probs = torch.tensor([[0.9, 0.1]])
    collection.update(probs, torch.tensor([0]))
    collection["255"].update(probs, torch.tensor([255]))
    assert {name: value.item() for name, value in collection.compute().items()} == {"254": 0.0, "255": 0.0}
    assert len(collection.compute_groups) == 2


@pytest.mark.parametrize("calls", ["uff", "ufu", "fuf"])
def test_update_and_forward_in_a_collection_count_each_batch_once(calls: str) -> None:
    collection = MetricCollection({name: StreamingMetric(ClassificationMetrics, name) for name in ("count", "nll")})
    for call, batch in zip(calls, BATCHES, strict=False):
        if call == "u":
            collection.update(*batch)
        else:
            assert collection(*batch)["nll"] == nll(*batch)
            assert collection["nll"]._forward_cache == nll(*batch), "what a trainer logs on the step"
    values = collection.compute()
    assert values["count"] == 21
    assert values["nll"].item() == pytest.approx(nll(PROBS[:21], LABELS[:21]).item(), rel=1e-12)


@without_update
def test_two_instances_merge() -> None:
    first, second = StreamingMetric(ClassificationMetrics, "aurc"), StreamingMetric(ClassificationMetrics, "aurc")
    for k, batch in enumerate(BATCHES):
        (first if k < 2 else second).update(*batch)
    first.merge_state(second)
    assert first.compute().item() == pytest.approx(expected("aurc").item(), rel=1e-12)
    first.reset()
    first.merge_state(second)  # into one that has no data
    assert first.compute() == second.compute()


@without_update
@pytest.mark.parametrize("seen", [0, 1])
def test_states_of_processes_are_gathered(seen: int) -> None:
    """One of two processes has so many batches, possibly none, and the other the rest."""
    here, there = StreamingMetric(ClassificationMetrics, "aurc"), StreamingMetric(ClassificationMetrics, "aurc")
    for k, batch in enumerate(BATCHES):
        (here if k < seen else there).update(*batch)

    def gather(mine: Tensor, group: object) -> list[Tensor]:
        theirs = torch.cat(there.parts)
        assert mine.dtype == theirs.dtype  # else torch.distributed could not gather them
        return [mine, theirs]

    here.dist_sync_fn, here.distributed_available_fn = gather, lambda: True
    assert here.compute().item() == pytest.approx(expected("aurc").item(), rel=1e-12)
    assert len(torch.cat(here.parts)) < len(torch.cat(there.parts))  # its own again


def test_nested_states_options_and_half_precision_are_restored() -> None:
    detection = StreamingMetric(DetectionMetrics, "auroc", positive="in")
    for scores in ([0.1, 0.2], [0.3]), ([0.4], [0.5]):
        detection.update(*(torch.tensor(part, dtype=torch.bfloat16) for part in scores))
    assert detection.compute().item() == pytest.approx(5 / 6)
    regression, data = StreamingMetric(RegressionMetrics, "interval_score", level=0.5), torch.rand(3, 8)
    for k in range(2):
        regression.update(*data[:, 4 * k : 4 * k + 4])
    whole = RegressionMetrics.from_batch(*data, level=0.5).interval_score
    assert regression.compute().item() == pytest.approx(whole.item(), rel=1e-12)


def test_curve_is_returned_as_dict() -> None:
    streaming = StreamingMetric(ClassificationMetrics, "reliability_curve")
    streaming.update(PROBS, LABELS)
    curve = ClassificationMetrics.from_batch(PROBS, LABELS).reliability_curve
    assert streaming.compute()["count"].tolist() == curve.count.tolist()


@without_update
def test_invalid_metric_and_missing_data_are_errors() -> None:
    for name in ("kappa", "from_batch"):
        with pytest.raises(ArgumentError, match="metric"):
            StreamingMetric(ClassificationMetrics, name)
    with pytest.raises(ArgumentError, match="batches"):
        StreamingMetric(ClassificationMetrics, "nll").compute()


@without_update
@pytest.mark.parametrize("content", [pickle.dumps(print), bytes(40), b"\xff" * 30, bytes([0] * 7 + [9]) + b"x" * 9])
def test_bytes_that_are_no_states_are_an_error(content: bytes) -> None:
    metric = StreamingMetric(ClassificationMetrics, "nll")
    metric.parts = [torch.frombuffer(bytearray(content), dtype=torch.uint8)]
    with pytest.raises(ArgumentError, match="parts"):
        metric.compute()


@pytest.mark.slow
def test_two_processes_gather_by_torch_distributed(tmp_path: Path) -> None:
    """The second process has no data."""
    program = f"""
import sys, torch, warnings
from neuboots.metrics import ClassificationMetrics
from neuboots.metrics.modular import StreamingMetric
warnings.simplefilter("ignore")
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
metric = StreamingMetric(ClassificationMetrics, "aurc")
if rank == 0:
    metric.update(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
print(f"{{metric.compute():.6f}}")
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [run.communicate(timeout=120)[0].strip() for run in runs] == ["0.250000", "0.250000"]
