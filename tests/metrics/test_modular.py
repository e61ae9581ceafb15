"""Tallies as torchmetrics metrics: in a collection, merged, and gathered over processes."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from neuboots.metrics import (
    ClassificationMetrics,
    ConfidenceRanking,
    DetectionMetrics,
    MetricState,
    SegmentationMetrics,
    ece,
    nll,
)
from neuboots.metrics.modular import StreamingMetric

PROBS = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
LABELS = torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))
BATCHES = list(zip(PROBS.split(7), LABELS.split(7), strict=True))
FIGURES = ["error", "nll", "brier", "ece", "adaptive_ece", "aurc", "f1", "confusion_matrix"]
BEFORE = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric Running was called before")


def whole(figure: str) -> Tensor:
    value: Tensor = getattr(ClassificationMetrics.from_batch(PROBS, LABELS), figure)
    return value


@pytest.mark.parametrize("figure", FIGURES)
def test_batches_add_up(figure: str) -> None:
    metric = StreamingMetric(ClassificationMetrics.from_batch, figure)
    for batch in BATCHES:
        metric.update(*batch)
    torch.testing.assert_close(metric.compute(), whole(figure), rtol=1e-12, atol=0)


def test_forward_gives_the_batch_and_keeps_the_whole() -> None:
    metric = StreamingMetric(ClassificationMetrics.from_batch, "nll")
    for batch in BATCHES:
        assert metric(*batch) == nll(*batch)
    assert metric.compute().item() == pytest.approx(whole("nll").item(), rel=1e-12)


def test_reset_forgets() -> None:
    metric = StreamingMetric(ClassificationMetrics.from_batch, "nll")
    metric.update(PROBS, LABELS)
    metric.reset()
    metric.update(*BATCHES[0])
    assert metric.compute() == nll(*BATCHES[0])


def test_sums_stay_one_part_and_kept_scores_a_few() -> None:
    sums = StreamingMetric(partial(SegmentationMetrics.from_batch, ignore_index=255), "mean_iou")
    kept = StreamingMetric(ClassificationMetrics.from_batch, "aurc")
    for _ in range(50):
        sums(PROBS, LABELS)
        kept.update(PROBS, LABELS)
    assert len(sums.parts) == 1
    assert len(kept.parts) < 8
    assert kept.compute().item() == pytest.approx(
        ClassificationMetrics.from_batch(PROBS.repeat(50, 1), LABELS.repeat(50)).aurc.item()
    )


def test_in_a_collection_alike_metrics_share_their_state() -> None:
    """ECE and NLL of one tally are one group; ten bins are another tally."""
    together = MetricCollection(
        {
            "nll": StreamingMetric(ClassificationMetrics.from_batch, "nll"),
            "ece": StreamingMetric(ClassificationMetrics.from_batch, "ece"),
            "ece_10": StreamingMetric(partial(ClassificationMetrics.from_batch, num_bins=10), "ece"),
        }
    )
    for batch in BATCHES:
        together.update(*batch)
    assert sorted(map(sorted, together.compute_groups.values())) == [["ece", "nll"], ["ece_10"]]
    values = together.compute()
    assert values["nll"].item() == pytest.approx(whole("nll").item(), rel=1e-12)
    assert values["ece"].item() == pytest.approx(whole("ece").item(), rel=1e-12)
    assert values["ece_10"].item() == pytest.approx(ece(PROBS, LABELS, num_bins=10).item(), rel=1e-12)
    together.reset()
    assert together(PROBS, LABELS)["nll"] == whole("nll")


def test_tallies_that_differ_in_an_option_alone_are_no_group() -> None:
    """The same scores, but another positive class."""
    sides = {
        side: StreamingMetric(partial(DetectionMetrics.from_batch, positive=side), "fpr_at_tpr")
        for side in ("in", "out")
    }
    together = MetricCollection(dict(sides))
    inside, outside = torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.7])
    together.update(inside, outside)
    together.update(inside, outside)
    assert {name: value.item() for name, value in together.compute().items()} == {"in": 1 / 2, "out": 1 / 4}


@BEFORE
def test_two_instances_merge() -> None:
    first, second = (
        StreamingMetric(ClassificationMetrics.from_batch, "aurc"),
        StreamingMetric(ClassificationMetrics.from_batch, "aurc"),
    )
    for batch in BATCHES[:2]:
        first.update(*batch)
    for batch in BATCHES[2:]:
        second.update(*batch)
    first.merge_state(second)
    assert first.compute().item() == pytest.approx(whole("aurc").item(), rel=1e-12)
    first.reset()
    first.merge_state(second)  # into one that has seen nothing
    assert first.compute() == second.compute()


@BEFORE
@pytest.mark.parametrize("seen", [0, 1, 2])
def test_processes_are_gathered(seen: int) -> None:
    """One of two processes has seen so many batches, none included, and the other the rest."""
    here, there = (
        StreamingMetric(ClassificationMetrics.from_batch, "aurc"),
        StreamingMetric(ClassificationMetrics.from_batch, "aurc"),
    )
    for batch in BATCHES[:seen]:
        here.update(*batch)
    for batch in BATCHES[seen:]:
        there.update(*batch)

    def gather(mine: Tensor, group: object) -> list[Tensor]:
        theirs = torch.cat(there.parts)
        assert mine.dtype == theirs.dtype  # else torch.distributed could not gather them
        return [mine, theirs]

    here.dist_sync_fn, here.distributed_available_fn = gather, lambda: True
    assert here.compute().item() == pytest.approx(whole("aurc").item(), rel=1e-12)
    assert len(torch.cat(here.parts)) < len(torch.cat(there.parts))  # its own again


def test_options_and_half_precision_survive_the_packing() -> None:
    metric = StreamingMetric(partial(DetectionMetrics.from_batch, positive="in"), "auroc")
    metric.update(torch.tensor([0.1, 0.2], dtype=torch.bfloat16), torch.tensor([0.3], dtype=torch.bfloat16))
    metric.update(torch.tensor([0.4], dtype=torch.bfloat16), torch.tensor([0.5], dtype=torch.bfloat16))
    assert metric.compute().item() == pytest.approx(5 / 6)


def test_a_curve_comes_as_a_dict() -> None:
    metric = StreamingMetric(ClassificationMetrics.from_batch, "reliability_curve")
    metric.update(PROBS, LABELS)
    curve = ClassificationMetrics.from_batch(PROBS, LABELS).reliability_curve
    assert metric.compute()["count"].tolist() == curve.count.tolist()


def test_an_unknown_figure_is_refused_at_the_first_batch() -> None:
    with pytest.raises(ValueError, match=r"^got figure='kappa'; expected a property of Classification$"):
        StreamingMetric(ClassificationMetrics.from_batch, "kappa").update(PROBS, LABELS)


@BEFORE
def test_a_figure_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^got no batch yet; expected at least one update before compute$"):
        StreamingMetric(ClassificationMetrics.from_batch, "nll").compute()


@pytest.mark.slow
def test_two_processes_gather_what_each_has_seen(tmp_path: Path) -> None:
    """By torch.distributed itself; the second process has seen nothing."""
    program = f"""
import sys, torch, warnings
from neuboots.metrics import Classification
from neuboots.metrics.running import Running
warnings.simplefilter("ignore")
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
metric = Running(Classification.of, "aurc")
if rank == 0:
    metric.update(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
print(f"{{metric.compute():.6f}}")
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [run.communicate(timeout=120)[0].strip() for run in runs] == ["0.250000", "0.250000"]


@pytest.mark.parametrize("calls", ["uff", "ufu", "fuf", "fff", "uuf"])
def test_update_and_forward_mixed_in_a_collection_count_each_batch_once(calls: str) -> None:
    """After an update, metrics that tally alike hold one list; a batch must not enter it once for each of them."""
    figures = ("count", "nll", "aurc")
    together = MetricCollection({name: StreamingMetric(ClassificationMetrics.from_batch, name) for name in figures})
    for call, batch in zip(calls, BATCHES, strict=False):
        if call == "u":
            together.update(*batch)
        else:
            step = together(*batch)
            assert step["nll"] == nll(*batch)
            assert together["nll"]._forward_cache == nll(*batch), "what a trainer logs on the step"
    seen = ClassificationMetrics.from_batch(PROBS[:21], LABELS[:21])
    values = together.compute()
    assert values["count"] == 21
    for name in ("nll", "aurc"):
        assert values[name].item() == pytest.approx(getattr(seen, name).item(), rel=1e-12)


def test_a_batch_may_come_by_name() -> None:
    metric = StreamingMetric(ClassificationMetrics.from_batch, "nll")
    metric.update(probs=PROBS, labels=LABELS)
    assert metric.compute() == whole("nll")
    assert metric(probs=PROBS, labels=LABELS) == whole("nll")
    together = MetricCollection({"nll": StreamingMetric(ClassificationMetrics.from_batch, "nll")})
    together.update(probs=PROBS, labels=LABELS)
    assert together.compute()["nll"] == whole("nll")


@pytest.mark.parametrize(
    ("make", "figure"), [(ClassificationMetrics.from_batch, "of"), (ConfidenceRanking.from_confidence, "adaptive_ece")]
)
def test_only_properties_are_figures(make: Callable[..., MetricState], figure: str) -> None:
    batch = (PROBS, LABELS) if make == ClassificationMetrics.from_batch else (PROBS[:, 0], LABELS == 0)
    with pytest.raises(ValueError, match=rf"^got figure='{figure}'; expected a property of "):
        StreamingMetric(make, figure).update(*batch)
