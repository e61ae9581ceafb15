"""Evaluations of independent labels: each label is a decision between two classes, as that of a pixel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _nets import noise
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import ArgumentError, Predictor
from neuboots.evaluation.active_learning import select_for_labeling
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.evaluation.conformal import fit_conformal_classifier
from neuboots.evaluation.corruption import evaluate_corruptions
from neuboots.evaluation.diversity import evaluate_diversity
from neuboots.evaluation.imbalance import evaluate_imbalance
from neuboots.evaluation.ood import Entropy, MaxSoftmax, Odin
from neuboots.evaluation.segmentation import predict_segmentation
from neuboots.evaluation.selective import evaluate_selective_prediction
from neuboots.methods.ensembles import EnsemblePredictor
from neuboots.posthoc import TemperatureScaling

X = 2 * noise(60, 4, dtype=torch.float64)
Y = (torch.rand(60, 4, generator=torch.Generator().manual_seed(0)) < X.sigmoid()).double()
Y[::7, 1] = -100  # not known
DATA = TensorDataset(X, Y)
quiet: dict[str, Any] = {"progress": False}


class Scaled(nn.Module):
    """The inputs are the logits of labels: z (N, C), or as those of two classes (0, z), (N, 2, C)."""

    def __init__(self, scale: float, two_classes: bool) -> None:
        super().__init__()
        self.scale, self.two_classes = nn.Parameter(torch.tensor(scale, dtype=torch.float64)), two_classes

    def forward(self, x: Tensor) -> Tensor:
        z = self.scale * x
        return torch.stack([torch.zeros_like(z), z], 1) if self.two_classes else z


def make_predictor(*, two_classes: bool) -> Predictor:
    nets = nn.ModuleList(Scaled(scale, two_classes) for scale in (0.5, 1.0, 3.0))
    return EnsemblePredictor(nets.eval(), "deep-ensemble")


LABELS, PIXELS = make_predictor(two_classes=False).as_independent(), make_predictor(two_classes=True)


def conformal_sets(predictor: Predictor, **options: Any) -> Any:
    classifier = fit_conformal_classifier(predictor, DATA, level=0.8, **options, **quiet)
    report = classifier.evaluate(DATA, progress=False)
    found = [classifier.predict(X, progress=False).mask, torch.tensor(classifier.quantiles)]
    return [*found, torch.tensor([report.coverage, report.mean_size, report.count])]


SAME: dict[str, Callable[[Predictor], Any]] = {
    "temperature": lambda p: TemperatureScaling(num_samples=3).fit(p, DATA).temperature,
    "threshold": lambda p: conformal_sets(p, score="threshold"),
    "adaptive": lambda p: conformal_sets(p, score="adaptive", allow_empty=False),
    "regularised": lambda p: conformal_sets(p, score="regularised", k_reg=0),
    "diversity": lambda p: evaluate_diversity(p, DATA, **quiet).metrics,
    "corruptions": lambda p: (
        evaluate_corruptions(
            p, DATA, corruptions={"dim": lambda x, severity, **_: x / severity}, severities=[2], **quiet
        ).clean
    ),
    "confidence": lambda p: MaxSoftmax(p).score(X, **quiet),
    "odin": lambda p: Odin(p, temperature=10.0, epsilon=0.1).score(X, **quiet),
}


@pytest.mark.parametrize("name", SAME)
def test_labels_are_evaluated_as_pixels_of_two_classes(name: str) -> None:
    torch.testing.assert_close(SAME[name](LABELS), SAME[name](PIXELS), rtol=1e-9, atol=1e-12)


def test_calibration_of_labels_is_that_of_decisions() -> None:
    """Entropies are of inputs, sums over the labels."""
    found = evaluate_calibration(LABELS, DATA, num_samples=3, batch_size=16, **quiet)
    pixels = evaluate_calibration(PIXELS, DATA, num_samples=3, **quiet)
    assert found.count == pixels.count == int((Y != -100).sum())
    entropies = {"entropy", "expected_entropy", "mutual_information"}
    for name in found.metrics.keys() - entropies:
        assert found.metrics[name] == pytest.approx(pixels.metrics[name], rel=1e-9), name
    prediction = LABELS.predict(X, 3)
    for name in entropies:
        assert found.metrics[name] == pytest.approx(float(getattr(prediction, name).mean()), rel=1e-9), name
    p = prediction.probs[Y != -100]
    y = Y[Y != -100]
    assert found.metrics["nll"] == pytest.approx(float(nn.functional.binary_cross_entropy(p, y)), rel=1e-9)
    assert found.metrics["error"] == pytest.approx(float(((p > 0.5) != y.bool()).double().mean()))


def test_calibration_skips_entropies_of_inputs_without_labels() -> None:
    y = Y.clone()
    y[:50] = -100
    found = evaluate_calibration(LABELS, TensorDataset(X, y), num_samples=3, **quiet).metrics["entropy"]
    assert found == pytest.approx(float(LABELS.predict(X[50:], 3).entropy.mean()))


def test_sets_of_labels_cover() -> None:
    """Of new inputs, at a level that few labels would reach by their more probable value."""
    x = 0.5 * noise(4000, 4, seed=1, dtype=torch.float64)
    y = (torch.rand(4000, 4, generator=torch.Generator().manual_seed(1)) < x.sigmoid()).long()
    old, new = TensorDataset(x[:2000], y[:2000]), TensorDataset(x[2000:], y[2000:])
    classifier = fit_conformal_classifier(LABELS, old, level=0.9, num_samples=3, **quiet)
    assert abs(classifier.evaluate(new, progress=False).coverage - 0.9) < 0.02


def test_entropies_rank_inputs() -> None:
    entropy = LABELS.predict(X, 3).entropy
    torch.testing.assert_close(Entropy(LABELS, num_samples=3).score(X, **quiet).double(), entropy)
    assert select_for_labeling(LABELS, X, k=3, strategy="entropy", **quiet).rows.tolist() == entropy.topk(3)[1].tolist()
    spread = LABELS.predict(X, 3).samples.sigmoid().std(0).sum(1)
    assert select_for_labeling(LABELS, X, k=3, strategy="std", **quiet).rows.tolist() == spread.topk(3)[1].tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda: evaluate_selective_prediction(LABELS, DATA, **quiet),
        lambda: evaluate_imbalance(LABELS, DATA, **quiet),
        lambda: predict_segmentation(LABELS, X[:2, :, None, None].repeat(1, 1, 8, 8), **quiet),
        lambda: select_for_labeling(LABELS, X, k=3, strategy="margin", **quiet),
    ],
    ids=["selective", "imbalance", "segmentation", "margin"],
)
def test_evaluations_of_exclusive_classes_raise(call: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == "predictor"


def test_class_conditional_sets_of_labels_raise() -> None:
    with pytest.raises(ArgumentError) as error:
        fit_conformal_classifier(LABELS, DATA, class_conditional=True, **quiet)
    assert error.value.name == "class_conditional"
