"""Tests of `neuboots demo`: the printed metrics are computed again from the data."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss, roc_auc_score
from torch.utils.data import TensorDataset

from neuboots import Deterministic, NeuBoots
from neuboots.cli import main
from neuboots.nets import MLP
from neuboots_paper import demo

ARGS = ["--seed", "3", "--epochs", "2", "--num-samples", "20", "--unknown", "1", "7"]


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    png: Path

    def row(self, name: str) -> list[float]:
        """The numbers of the row that starts so."""
        (line,) = (line for line in self.out.splitlines() if line.strip().startswith(name + " "))
        return [float(number) for number in re.findall(r"\d+\.\d+", line)]

    @property
    def repeatable(self) -> str:
        """The printed text but for the times."""
        return "\n".join(line for line in self.out.split("Time for")[0].splitlines() if "Trained in" not in line)


def run(png: Path) -> Run:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(demo, "ROUNDS", 1)
        code = main(["demo", *ARGS, "--out", str(png)])
    return Run(code, out.getvalue(), png)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("demo") / "new" / "figure.png")


@dataclass(frozen=True)
class Recomputed:
    """Predictions of networks trained through the public API."""

    labels: np.ndarray
    plain: torch.Tensor
    boots: torch.Tensor
    boots_unknown: torch.Tensor


@pytest.fixture(scope="module")
def again() -> Recomputed:
    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    known = np.flatnonzero(~np.isin(digits, [1, 7]))
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(3)).numpy()]
    half = demo.TRAIN
    labels = np.array([[0, 2, 3, 4, 5, 6, 8, 9].index(digit) for digit in digits[known]])
    data = TensorDataset(x[known[:half]], torch.tensor(labels[:half]))
    config = demo.Demo(seed=3, epochs=2).config
    test, unknown = x[known[half:]], x[np.isin(digits, [1, 7])]
    plain = Deterministic().fit(lambda: MLP(64, 8, widths=demo.WIDTHS), data, config)
    boots = NeuBoots().fit(lambda: MLP(64, 8, widths=demo.WIDTHS), data, config)
    with torch.no_grad():
        plain_probs = plain.net(test).softmax(1)
    mean, mean_unknown = (boots.predict(x, 20, seed=3).samples.softmax(2).mean(0) for x in (test, unknown))
    return Recomputed(labels[half:], plain_probs, mean, mean_unknown)


def test_demo_prints_the_command_that_repeats_it(first: Run) -> None:
    assert first.code == 0
    assert first.out.startswith(f"neuboots demo {' '.join(ARGS)} --out {first.png}\n")
    assert "300 training digits, 1136 test digits, 361 unknown digits (1, 7)." in first.out


def test_printed_metrics_are_those_of_the_networks(first: Run, again: Recomputed) -> None:
    for column, probs in enumerate((again.plain, again.boots)):
        p = probs.double().numpy()
        # printed values are rounded
        assert first.row("error")[column] == pytest.approx(100 * np.mean(p.argmax(1) != again.labels), abs=0.006)
        assert first.row("negative log-likelihood, nats")[column] == pytest.approx(
            log_loss(again.labels, p / p.sum(1, keepdims=True)), abs=6e-5
        )
        truth = np.eye(8)[again.labels]
        assert first.row("Brier score")[column] == pytest.approx(((p - truth) ** 2).sum(1).mean(), abs=6e-5)


def test_printed_auroc_has_unknown_as_the_positive_class(first: Run, again: Recomputed) -> None:
    p = torch.cat([again.boots, again.boots_unknown]).double()
    entropy = -(p * p.clamp_min(1e-300).log()).sum(1).numpy()
    unknown = np.arange(len(p)) >= len(again.boots)
    assert first.row("entropy, AUROC")[1] == pytest.approx(roc_auc_score(unknown, entropy), abs=6e-5)
    assert first.row("entropy, known, mean in nats")[1] == pytest.approx(entropy[~unknown].mean(), abs=6e-5)
    limit = np.quantile(entropy[~unknown], 0.95)
    assert first.row("predicted though unknown")[1] == pytest.approx(100 * np.mean(entropy[unknown] <= limit), abs=0.06)


def test_times_are_relative_to_one_plain_pass(first: Run) -> None:
    plain = float(re.findall(r"one plain pass takes (\d+\.\d+) ms", first.out)[0])
    for size in ("1", "5", "100", "1,000"):
        outputs, ratio, _, _ = first.row(size)
        assert ratio == pytest.approx(outputs / plain, rel=0.05)


def test_same_seed_prints_the_same_metrics(first: Run) -> None:
    second = run(first.png)
    assert second.repeatable == first.repeatable


def test_plot_has_no_empty_panel(first: Run) -> None:
    pixels = imread(first.png)
    height, width = pixels.shape[:2]
    assert (width, height) == (1600, 1050)
    assert [path.name for path in first.png.parent.iterdir()] == ["figure.png"]
    ink = (pixels[..., :3].min(2) < 0.95).astype(float)
    top, bottom = ink[100:550], ink[650:980]
    panels = [*np.array_split(top, 3, axis=1), *np.array_split(bottom, 2, axis=1)]
    assert all(panel.mean() > 0.02 for panel in panels), [panel.mean() for panel in panels]
