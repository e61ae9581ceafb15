"""Metrics of each class with their spread over replicates and seeds."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from _nets import Stored, noise, numbered
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from neuboots import Deterministic, TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.data import subsample_classes
from neuboots.evaluation.imbalance import (
    ImbalanceOverSeedsReport,
    ImbalanceReport,
    evaluate_imbalance,
    evaluate_imbalance_over_seeds,
)
from neuboots.methods import create_method
from neuboots.prediction import Predictor
from neuboots.training import EpochReport, constant_schedule


def measure(samples: Tensor, y: Tensor, **options: Any) -> ImbalanceReport:
    return evaluate_imbalance(Stored(samples), numbered(y), num_samples=len(samples), progress=False, **options)


# -- one predictor -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 64])
@pytest.mark.parametrize("outputs", [1, 4])
def test_f1_of_every_replicate_agrees_with_scikit_learn(outputs: int, batch_size: int) -> None:
    """Also precision and recall of the predictive mean; one class never occurs, and one is hardly ever predicted."""
    classes = max(2, outputs)
    samples = 2 * noise(6, 50, outputs)
    y = torch.randint(0, max(2, classes - 1), (50,), generator=torch.Generator().manual_seed(1))
    found = measure(samples, y, batch_size=batch_size)
    full = torch.cat([torch.zeros_like(samples), samples], 2) if outputs == 1 else samples
    options = {"labels": range(classes), "average": None, "zero_division": 0}
    for b in range(6):
        theirs = sklearn.metrics.f1_score(y.numpy(), full[b].argmax(1).numpy(), **options)
        np.testing.assert_allclose(found.f1_replicates[b], theirs, atol=1e-12)
    preds = full.softmax(2).mean(0).argmax(1).numpy()
    for name, score in (("f1", "f1"), ("precision", "precision"), ("recall", "recall")):
        theirs = getattr(sklearn.metrics, f"{score}_score")(y.numpy(), preds, **options)
        np.testing.assert_allclose(getattr(found, name), theirs, atol=1e-12)
    np.testing.assert_allclose(found.f1_std, found.f1_replicates.numpy().std(0, ddof=1))
    assert found.support.tolist() == y.bincount(minlength=classes).tolist()
    assert found.macro_f1 == pytest.approx(float(found.f1.mean()))


def test_constant_predictor() -> None:
    y = torch.tensor([0] * 6 + [1] * 3 + [2])
    constant = torch.tensor([0.0, 5.0, 0.0]).expand(4, 10, 3)
    found = measure(constant, y)
    assert found.f1.tolist() == [0.0, pytest.approx(2 * 3 / (3 + 10)), 0.0]
    assert found.f1_std.tolist() == [0.0, 0.0, 0.0]
    assert found.recall.tolist() == [0.0, 1.0, 0.0]
    assert (found.minor, found.major) == (2, 0)


@pytest.mark.parametrize("ignore_index", [255, -100, 1])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_ignored_pixels_do_not_count(ignore_index: int, batch_size: int) -> None:
    """Also where a whole batch is ignored, or where ignore_index is the number of a class."""
    samples = 2 * noise(4, 5, 3, 2, 2)
    y = torch.randint(0, 3, (5, 2, 2), generator=torch.Generator().manual_seed(1))
    y[y == 1] = ignore_index
    y[2] = ignore_index
    there = y != ignore_index
    flat = samples.movedim(2, -1)[:, there]
    found, expected = measure(samples, y, batch_size=batch_size, ignore_index=ignore_index), measure(flat, y[there])
    for name in ("f1", "precision", "recall", "f1_replicates", "support"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-12)
    with pytest.raises(ArgumentError, match="ignore_index"):
        measure(samples, torch.full_like(y, ignore_index), ignore_index=ignore_index)


def test_num_samples_is_at_most_number_of_members() -> None:
    """Three members make three replicates, however many are requested."""
    samples, y = noise(3, 40, 3), torch.arange(40) % 3
    found = evaluate_imbalance(Stored(samples, num_distinct=3), numbered(y), num_samples=100, progress=False)
    assert found.num_samples == 3
    assert found.f1_replicates.shape == (3, 3)


def test_train_counts_define_minor_and_major_class() -> None:
    samples, y = noise(3, 40, 4), torch.arange(40) % 4
    assert (measure(samples, y).minor, measure(samples, y).major) == (0, 0)  # all equal
    found = measure(samples, y, train_counts=[30, 5, 500, 20])
    assert (found.minor, found.major) == (1, 2)
    lines = str(found).splitlines()
    assert lines[0].startswith("N = 40, B = 3, seed 0; F1 of the predictive mean (macro ")
    assert lines[3].startswith("1 (minor)")
    assert lines[4].startswith("2 (major)")
    for counts in (np.array([30, 5, 500, 20]), torch.tensor([30, 5, 500, 20])):
        assert (measure(samples, y, train_counts=counts).minor, found.major) == (1, 2)
    # A class without training rows is not the rarest.
    assert measure(samples, y, train_counts=[30, 0, 500]).minor == 0
    with pytest.raises(ArgumentError, match="train_counts"):
        measure(samples, y, train_counts=[1, 2, 3, 4, 5])


def test_invalid_arguments_are_errors() -> None:
    for name, call in {
        "predictor": lambda: evaluate_imbalance(nn.Linear(1, 2), numbered(torch.arange(3))),  # type: ignore[arg-type]
        "labels": lambda: measure(noise(2, 4, 3), torch.arange(4)),
        "labels ": lambda: measure(noise(2, 4, 3), torch.rand(4)),
        "train_counts": lambda: measure(noise(2, 3, 3), torch.arange(3), train_counts=[0.5, 0.2, 0.3]),
        "num_samples": lambda: evaluate_imbalance(Stored(noise(2, 3, 3)), numbered(torch.arange(3)), num_samples=0),
    }.items():
        with pytest.raises(ArgumentError, match=name.strip()):
            call()


# -- several seeds -------------------------------------------------------------------------------------------

CONFIG = TrainingConfig(epochs=3, batch_size=32, progress=False)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))


def digits() -> tuple[Dataset[Any], TensorDataset]:
    """The paper's counts, a tenth of them, and 300 rows to test on."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    train = subsample_classes(TensorDataset(x[:-300], y[:-300]), [5 * (c + 1) for c in range(10)])
    return train, TensorDataset(x[-300:], y[-300:])


def several(
    method: Any = None, config: TrainingConfig = CONFIG, make: Any = model, change: Any = None, **options: Any
) -> ImbalanceOverSeedsReport:
    train, test = digits()
    train, test = (train, test) if change is None else change(train, test)
    options = {"seeds": (0, 1, 2), "num_samples": 4, "progress": False, **options}
    return evaluate_imbalance_over_seeds(method or Deterministic(), make, train, test, config, **options)


NET = model()


def assert_same(a: ImbalanceOverSeedsReport, b: ImbalanceOverSeedsReport) -> None:
    assert torch.equal(a.f1, b.f1)
    assert torch.equal(a.replicate_std, b.replicate_std)
    assert a.seeds == b.seeds


METHODS = {"deterministic": {}, "neuboots": {}, "mc-dropout": {}, "deep-ensemble": {"num_members": 2}}


@pytest.mark.parametrize("name", list(METHODS))
def test_seeds_match_single_fits(name: str) -> None:
    method = create_method(name, **METHODS[name])
    found = several(method, seeds=(0, 5))
    train, test = digits()
    for k, seed in enumerate((0, 5)):
        predictor = method.fit(model, train, replace(CONFIG, seed=seed))
        alone = evaluate_imbalance(predictor, test, num_samples=4, progress=False)
        if predictor.num_distinct or name == "deterministic":  # replicates that no seed changes
            assert torch.equal(found.f1[k], alone.f1)
            assert torch.equal(found.replicate_std[k], alone.f1_std)
    assert (found.minor, found.major) == (0, 9)
    assert found.train_counts.tolist() == [5 * (c + 1) for c in range(10)]
    assert found.num_samples == {"deterministic": 1, "deep-ensemble": 2}.get(name, 4)
    torch.testing.assert_close(found.mean, (found.f1[0] + found.f1[1]) / 2)
    torch.testing.assert_close(found.std, (found.f1[0] - found.f1[1]).abs() / 2**0.5)
    spread = bool((found.replicate_std > 0).any())
    assert spread == (name != "deterministic")


class FitError(Exception):
    pass


@dataclass(frozen=True)
class Breaking:
    """The plain net, but fit number `at` breaks."""

    at: int = field(compare=False)  # the same method, whenever it breaks
    fits: list[int] = field(default_factory=list, compare=False)

    def fit(self, make: Any, data: Any, config: Any) -> Predictor:
        self.fits.append(config.seed)
        if len(self.fits) == self.at + 1:
            raise FitError
        return Deterministic().fit(make, data, config)


def test_interrupted_seeds_resume_and_more_can_be_added(tmp_path: Path) -> None:
    with pytest.raises(FitError):
        several(Breaking(at=1), folder=tmp_path)
    second = Breaking(at=99)
    assert_same(several(second, folder=tmp_path), several())
    assert second.fits == [1, 2]
    third = Breaking(at=99)
    assert_same(several(third, folder=tmp_path, seeds=(3, 2, 0)), several(seeds=(3, 2, 0)))
    assert third.fits == [3]
    with pytest.raises(ArgumentError, match="folder"):
        several(Breaking(at=99), folder=tmp_path, num_samples=5)


def test_folder_of_other_settings_is_an_error(tmp_path: Path) -> None:
    several(folder=tmp_path, seeds=(0,))

    changes: list[dict[str, Any]] = [
        {"make": lambda: nn.Linear(64, 10)},
        {"change": lambda train, test: (test, test)},
        {"change": lambda train, test: (train, train)},
        {"method": Deterministic(lambda z, y: z.logsumexp(1) - z[torch.arange(len(y)), y])},
        {"config": replace(CONFIG, lr_scheduler=lambda optimizer, steps: constant_schedule(optimizer, steps))},
    ]
    for change in changes:
        with pytest.raises(ArgumentError, match="folder"):
            several(folder=tmp_path, seeds=(0, 1), **change)


def test_interrupted_training_resumes_from_checkpoint(tmp_path: Path) -> None:
    epochs: list[int] = []

    def count(report: EpochReport) -> None:
        epochs.append(report.epoch)
        if len(epochs) == 2:
            raise FitError

    config = replace(CONFIG, on_epoch=count)
    with pytest.raises(FitError):
        several(config=config, folder=tmp_path)
    assert_same(several(config=config, folder=tmp_path), several())
    assert len(epochs) == 3 * CONFIG.epochs
    assert not list(tmp_path.rglob("*.ckpt"))


def test_table_marks_minor_and_major_class() -> None:
    f1 = torch.tensor([[0.5, 1.0], [0.25, 1.0]]).double()
    found = ImbalanceOverSeedsReport("Deterministic", f1, f1 / 10, torch.tensor([3, 90]), 0, 1, (4, 7), 20)
    lines = str(found).splitlines()
    assert lines[0] == "Deterministic: F1 of the predictive mean, 2 seeds, B = 20 (macro 0.6875)"
    assert lines[2].split() == ["0", "(minor)", "3", "0.375", "0.1768", "0.0375"]
    assert lines[3].split() == ["1", "(major)", "90", "1", "0", "0.1"]


def test_classes_without_training_rows() -> None:
    """A net may have more classes than the training set."""
    x = noise(40, 64)
    train = TensorDataset(x, torch.arange(40) % 2)
    test = TensorDataset(x, torch.arange(40) % 10)
    options = {"seeds": (0,), "num_samples": 2, "progress": False}
    found = evaluate_imbalance_over_seeds(Deterministic(), model, train, test, CONFIG, **options)
    assert found.train_counts.tolist() == [20, 20] + 8 * [0]
    assert found.std.tolist() == 10 * [0.0]  # a single seed


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"seeds": (0, 1.5)}, "seeds"),
        ({"make": lambda: NET}, "model"),
        ({"make": NET}, "model"),
        ({"num_samples": 1.5}, "num_samples"),
        ({"num_workers": 1.5}, "num_workers"),
        ({"change": lambda train, test: (train, iter([test[:9]]))}, "test_data"),
        ({"config": replace(CONFIG, folder=Path("here"))}, "config"),
    ],
)
def test_invalid_options_of_repeated_fits_are_errors(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        several(**change)
    assert error.value.name == name
