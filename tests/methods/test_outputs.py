"""Every method with independent labels and with one output per token, from `fit` to conformal sets."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _artifacts import rewrite_artifact
from _nets import QUICK, noise, quick_options
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import Deterministic, InfluenceBootstrap, NeuBoots, load, save
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.evaluation.conformal import fit_conformal_classifier
from neuboots.methods import METHODS, DeterministicPredictor, create_method, list_methods
from neuboots.posthoc import TemperatureScaling
from neuboots.serialization import ArtifactError

list_methods()
OURS = [name for name, info in METHODS.items() if info.make.__module__.startswith("neuboots.") and info.needs_net]
X = noise(40, 5)
LABELS = TensorDataset(X, (X[:, :4] + 0.5 * noise(40, 4, seed=1) > 0).float())
IDS = torch.randint(1, 11, (40, 6), generator=torch.Generator().manual_seed(0))
TAGS = (IDS % 3).masked_fill(torch.arange(6) == 5, -100)
quiet: dict[str, Any] = {"progress": False, "num_samples": 4}


class Tagger(nn.Module):
    """Scores (N, T, C) of tokens in an object with .logits."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden, self.score = nn.Linear(8, 8), nn.Linear(8, classes)

    def forward(self, ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.score(self.hidden(self.embed(ids)).relu()))


def make_labeller() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 4))


def check_evaluations(predictor: Any, data: TensorDataset) -> None:
    x, y = data.tensors
    counted = int((y != -100).sum())
    scaled = TemperatureScaling(num_samples=4).fit(predictor, data)
    torch.testing.assert_close(scaled.predict(x, 3).samples * scaled.temperature, predictor.predict(x, 3).samples)
    assert evaluate_calibration(predictor, data, **quiet).count == counted
    sets = fit_conformal_classifier(predictor, data, level=0.8, **quiet)
    report = sets.evaluate(data, progress=False)
    assert report.count == counted
    assert 0.8 <= report.coverage <= 1  # on the calibration data
    assert (sets.predict(x, progress=False).size.shape) == y.shape


@pytest.mark.parametrize("name", OURS)
def test_independent_labels(name: str, tmp_path: Path) -> None:
    method = create_method(name, loss=nn.BCEWithLogitsLoss(), **quick_options(name))
    predictor = method.fit(make_labeller, LABELS, QUICK, val_data=LABELS)
    predictors = [predictor]
    if hasattr(method, "from_trained"):
        predictors.append(method.from_trained(make_labeller(), LABELS))
    save(predictor, tmp_path)
    predictors.append(load(tmp_path, model=make_labeller()))
    for each in predictors:
        prediction = each.predict(X[:7], 4)
        torch.testing.assert_close(prediction.probs, prediction.samples.sigmoid().mean(0))
        torch.testing.assert_close(each.summarize(X[:7], 4).probs, prediction.probs)
        assert prediction.labels.shape == (7, 4)
        assert prediction.entropy.shape == (7,)
    check_evaluations(predictor, LABELS)


@pytest.mark.parametrize("name", OURS)
def test_tokens(name: str, tmp_path: Path) -> None:
    """Six tokens and six classes, of which three occur: no shape tells them apart."""
    method = create_method(name, **quick_options(name))
    data = TensorDataset(IDS, TAGS)
    predictor: Any = method.fit(lambda: Tagger(6), data, QUICK, val_data=data)
    predictors = [predictor]
    if hasattr(method, "from_trained"):
        predictors.append(method.from_trained(Tagger(6), data))
    save(predictor, tmp_path)
    predictors.append(load(tmp_path, model=Tagger(6)))
    for each in predictors:
        full = each.predict(IDS[:7], 4)
        assert full.samples.shape == (4, 7, 6, 6)
        short = each.predict(IDS[:7, :4], 4).samples
        if name != "mc-dropout":  # whose masks depend on the number of tokens
            torch.testing.assert_close(short, full.samples[..., :4], rtol=1e-4, atol=1e-5)  # tokens are the last axis
        assert short.shape == (4, 7, 6, 4)
        torch.testing.assert_close(each.summarize(IDS[:7], 4).probs, full.probs)
    check_evaluations(predictor, data)


@pytest.mark.parametrize("name", OURS)
def test_ignored_tokens_do_not_count(name: str) -> None:
    """Under any label; and tokens of this label, where no label is ignored, do."""
    tags = (IDS % 2).masked_fill(IDS == 3, 2)
    losses = [(nn.CrossEntropyLoss(ignore_index=2), 2), (nn.CrossEntropyLoss(), -100), (nn.CrossEntropyLoss(), 2)]
    found, metrics = [], []
    for loss, label in losses:
        method = create_method(name, loss=loss, **quick_options(name))
        data = TensorDataset(IDS, tags.masked_fill(tags == 2, label))
        reports: list[Any] = []
        config = replace(QUICK, epochs=1, on_epoch=reports.append)
        found.append(method.fit(Tagger, data, config, val_data=data).predict(IDS[:5], 4).samples)
        metrics.append(reports[-1].val_metrics)
    assert torch.equal(found[0], found[1])
    assert metrics[0] == metrics[1]
    assert not torch.allclose(found[0], found[2])
    assert metrics[0]["loss"] != metrics[2]["loss"]


def test_layers_that_cannot_follow_tokens_raise() -> None:
    with pytest.raises(ValueError, match="layers=1"):
        InfluenceBootstrap(layers="all").fit(Tagger, TensorDataset(IDS, TAGS), QUICK)


def test_saved_predictors_say_that_labels_are_independent(tmp_path: Path) -> None:
    predictor = Deterministic(nn.BCEWithLogitsLoss()).fit(make_labeller, LABELS, QUICK)
    scaled = TemperatureScaling(num_samples=1).fit(predictor, LABELS)
    save(scaled, tmp_path)
    loaded: Any = load(tmp_path, model=make_labeller())
    assert loaded.independent is loaded.inner.independent is True
    assert torch.equal(loaded.predict(X, 2).probs, scaled.predict(X, 2).probs)
    assert torch.equal(loaded.inner.predict(X, 2).probs, predictor.predict(X, 2).probs)
    assert not NeuBoots().fit(make_labeller, (X, torch.arange(40) % 4), QUICK).independent


@pytest.mark.parametrize("value", [False, "yes", 1])
def test_saved_predictors_with_another_kind_of_outputs_are_rejected(tmp_path: Path, value: Any) -> None:
    save(DeterministicPredictor(make_labeller()).as_independent(), tmp_path)
    rewrite_artifact(tmp_path, lambda config, tensors: config.update(independent=value))
    with pytest.raises(ArtifactError):
        load(tmp_path, model=make_labeller())
