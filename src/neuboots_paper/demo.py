"""The command `neuboots demo`: a deterministic net and NeuBoots on scikit-learn's digits, with unknown classes.

    p(y | x) ≈ 1/B Σ_b softmax g(x, α_b)

Both nets are trained with the same options and seed, then predict known and unknown digits. Everything that is printed
and plotted is measured in the run.
"""

import math
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.cli import UsageError
from neuboots.cli._console import echo_rich as echo
from neuboots.methods import Deterministic, NeuBoots
from neuboots.metrics import auroc, brier, ece, error, nll, reliability_curve
from neuboots.nets import MLP
from neuboots.prediction import Method, Prediction, Predictor
from neuboots.training import TrainingConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

WIDTHS = (500, 500, 500)  # as in the paper
# Few labelled digits. Net and number were chosen among some ten settings with test metrics in view, as an
# illustration; docs/decisions/0002-defaults.md has the measurements that defaults are based on.
TRAIN = 300
SIZES = (1, 5, 100, 1000)  # numbers B of replicates that are timed
ROUNDS = 5  # of timing, each in both directions


@dataclass(frozen=True)
class Demo:
    """Train a small network on handwritten digits with and without NeuBoots, and compare.

    Both networks learn some of the digits and predict all of them. Prints the quality of their probabilities, how
    well their uncertainty detects unknown digits, and the cost. Takes less than a minute on two CPU cores, downloads
    nothing and writes one plot.
    """

    seed: int = 0
    """Seed of the split, both trainings and the replicates."""
    epochs: int = 40
    """Epochs of each training."""
    num_samples: int = 100
    """Number B of bootstrap replicates."""
    unknown: tuple[int, ...] = (8, 9)
    """Digits excluded from training."""
    out: Path = Path("neuboots-demo.png")
    """The plot, a PNG; an existing file is replaced."""

    @property
    def command(self) -> str:
        """Command line that repeats this run."""
        options = f"--seed {self.seed} --epochs {self.epochs} --num-samples {self.num_samples}"
        unknown = " ".join(map(str, self.unknown))
        return f"neuboots demo {options} --unknown {unknown} --out {shlex.quote(str(self.out))}"

    @property
    def config(self) -> TrainingConfig:
        """Training options of both networks."""
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        return TrainingConfig(epochs=self.epochs, batch_size=32, optimizer=optimizer, seed=self.seed, accelerator="cpu")

    def run(self) -> None:
        """Train both networks, print tables and write the plot."""
        self._check()
        import lightning_fabric  # noqa: F401 -- so that its import does not count as training time

        from neuboots.report.plots import save_png

        start = time.perf_counter()
        digits = load_digits_split(self.unknown, self.seed)
        echo(self.command, style="bold")
        layers = ", ".join(map(str, WIDTHS))
        echo(f"{digits}.\nA network with hidden layers of {layers}; epochs: {self.epochs}, seed: {self.seed}.")
        plain, plain_seconds = self._fit(Deterministic(), digits)
        boots, boots_seconds = self._fit(NeuBoots(), digits)
        echo(f"Trained in {plain_seconds:.1f} s (plain) and {boots_seconds:.1f} s (NeuBoots).\n")
        pair = {
            "plain": predict_groups(plain, digits, 1, self.seed),
            f"NeuBoots, B = {self.num_samples:,}": predict_groups(
                boots, digits, num_samples=self.num_samples, seed=self.seed
            ),
        }
        times = measure_times(plain, boots, digits.images["known"])
        tables = [make(pair, digits) for make in (quality_table, detection_table, example_table)]
        for table in (*tables, cost_table(times, digits)):
            echo(table)
            echo()
        save_png(plot_demo(pair, digits, times, f"epochs: {self.epochs}, seed: {self.seed}"), self.out)
        echo(f"Plot: {self.out}. Finished in {time.perf_counter() - start:.0f} s.")

    def _fit(self, method: Method, digits: "Digits") -> tuple[Predictor, float]:
        def model() -> nn.Module:
            return MLP(64, len(digits.classes), widths=WIDTHS)

        start = time.perf_counter()
        return method.fit(model, digits.train, self.config), time.perf_counter() - start

    def _check(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}; expected an integer from 0 to 2^63 - 1")
        if self.epochs < 1:
            raise UsageError(f"--epochs is {self.epochs}; expected at least 1")
        if not 1 <= self.num_samples <= 10_000:
            raise UsageError(f"--num-samples is {self.num_samples}; expected an integer from 1 to 10000")
        if not set(self.unknown) <= set(range(10)) or not 1 <= len(set(self.unknown)) == len(self.unknown) <= 8:
            got = " ".join(map(str, self.unknown)) or "empty"
            raise UsageError(f"--unknown is {got}; expected one to eight distinct digits, such as 8 9")
        if self.out.suffix.lower() != ".png" or self.out.is_dir():
            raise UsageError(f"--out is {self.out}; expected the name of a PNG file")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out is {self.out}, but its folder cannot be created: {error.strerror}") from None
        if not os.access(self.out.parent, os.W_OK):
            raise UsageError(f"--out is {self.out}, but its folder is read-only; choose another one")


# -- data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Digits:
    """Training digits, and images (N, 1, 8, 8) of known and unknown test digits; output k is the digit classes[k]."""

    classes: list[int]
    train: TensorDataset
    images: dict[str, Tensor]
    shown: dict[str, list[int]]
    labels: Tensor  # of the known images

    def __str__(self) -> str:
        unknown = ", ".join(map(str, sorted(set(self.shown["unknown"]))))
        known_size, unknown_size = (len(images) for images in self.images.values())
        return f"{len(self.train)} training digits, {known_size} test digits, {unknown_size} unknown digits ({unknown})"


def load_digits_split(unknown: tuple[int, ...], seed: int) -> Digits:
    """Split scikit-learn's 1,797 digits: TRAIN random known ones (at most half) to train, the others to test."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    digits = torch.tensor(targets)
    hidden = torch.isin(digits, torch.tensor(unknown))
    known = (~hidden).nonzero()[:, 0]
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    train, test = known[order].tensor_split([min(TRAIN, len(known) // 2)])
    classes = sorted(set(range(10)) - set(unknown))
    labels = torch.searchsorted(torch.tensor(classes), digits)
    return Digits(
        classes=classes,
        train=TensorDataset(x[train], labels[train]),
        images={"known": x[test], "unknown": x[hidden]},
        shown={"known": digits[test].tolist(), "unknown": digits[hidden].tolist()},
        labels=labels[test],
    )


# -- measurements --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImagePredictions:
    """Predictions of one network at N images: (N, C) and (N,)."""

    probs: Tensor
    low: Tensor  # the middle 95 % of the replicates' probabilities
    high: Tensor
    entropy: Tensor
    mutual_information: Tensor

    def ranked(self) -> dict[str, int]:
        """Indices of the images with the lowest, median and highest entropy."""
        order = self.entropy.argsort(stable=True).tolist()
        return {"lowest": order[0], "median": order[len(order) // 2], "highest": order[-1]}


Groups = dict[str, ImagePredictions]  # of the known and the unknown images


def predict_groups(predictor: Predictor, digits: Digits, num_samples: int, seed: int) -> Groups:
    """Predict the known and the unknown images."""

    def predict(x: Tensor) -> ImagePredictions:
        prediction = predictor.predict(x, num_samples, seed=seed)
        low, high = Prediction(prediction.samples.softmax(2)).interval(0.95, method="percentile")
        return ImagePredictions(prediction.probs, low, high, prediction.entropy, prediction.mutual_information)

    return {group: predict(x) for group, x in digits.images.items()}


def entropy_threshold(groups: Groups) -> float:
    """Entropy below which 95 % of the known images lie; above it a network abstains."""
    return float(groups["known"].entropy.quantile(0.95))


@dataclass(frozen=True)
class Times:
    """Seconds for one batch: one plain pass, and for each B the outputs alone and with probabilities."""

    plain: float
    outputs: dict[int, float]
    probabilities: dict[int, float]


def measure_times(plain: Predictor, boots: Predictor, x: Tensor) -> Times:
    """Minimum time of each task, in rounds of alternating direction, so that no task always follows a large one."""

    def probabilities(size: int) -> Tensor:
        return boots.predict(x, size).probs

    jobs: list[Callable[[], object]] = [partial(plain.module, x)]
    jobs += [partial(boots.predict, x, size) for size in SIZES]
    jobs += [partial(probabilities, size) for size in SIZES]
    best = [math.inf] * len(jobs)
    with torch.no_grad():
        for k in ROUNDS * [*range(len(jobs)), *reversed(range(len(jobs)))]:
            start = time.perf_counter()
            jobs[k]()
            best[k] = min(best[k], time.perf_counter() - start)
    middle = 1 + len(SIZES)
    return Times(best[0], dict(zip(SIZES, best[1:middle], strict=True)), dict(zip(SIZES, best[middle:], strict=True)))


# -- tables --------------------------------------------------------------------------------------------


def _table(title: str, *columns: str, note: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=title, caption=note, title_justify="left", caption_justify="left")
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left", no_wrap=True)
    return table


def quality_table(pair: dict[str, Groups], digits: Digits) -> "Table":
    """Quality of the probabilities of the known images."""
    table = _table(f"The {len(digits.labels)} test digits", "", *pair, note="Lower is better in every row.")
    known = [groups["known"].probs for groups in pair.values()]
    table.add_row("error", *(f"{100 * float(error(p, digits.labels)):.2f} %" for p in known))
    table.add_row("negative log-likelihood, nats", *(f"{float(nll(p, digits.labels)):.4f}" for p in known))
    table.add_row("expected calibration error, 15 bins", *(f"{float(ece(p, digits.labels)):.4f}" for p in known))
    table.add_row("Brier score", *(f"{float(brier(p, digits.labels)):.4f}" for p in known))
    return table


def detection_table(pair: dict[str, Groups], digits: Digits) -> "Table":
    """Detection of unknown images by uncertainty."""
    known_size, unknown_size = (len(images) for images in digits.images.values())
    positive = torch.arange(known_size + unknown_size) >= known_size
    note = (
        "AUROC with unknown as the positive class. A network predicts up to the\n"
        "entropy below which 95 % of the known digits lie."
    )
    table = _table(f"{known_size} known and {unknown_size} unknown digits", "", *pair, note=note)
    for name in ("entropy", "mutual information"):
        scores = [
            [getattr(predictions, name.replace(" ", "_")) for predictions in groups.values()]
            for groups in pair.values()
        ]
        table.add_row(f"{name}, known, mean in nats", *(f"{float(known.mean()):.4f}" for known, _ in scores))
        table.add_row(f"{name}, unknown, mean in nats", *(f"{float(unknown.mean()):.4f}" for _, unknown in scores))
        table.add_row(f"{name}, AUROC", *(f"{float(auroc(torch.cat(s), positive=positive)):.4f}" for s in scores))
        table.add_section()
    predicted = [(groups["unknown"].entropy <= entropy_threshold(groups)).double().mean() for groups in pair.values()]
    table.add_row("predicted though unknown", *(f"{100 * float(fraction):.1f} %" for fraction in predicted))
    return table


def example_table(pair: dict[str, Groups], digits: Digits) -> "Table":
    """Single images, selected by the rank of their entropy."""
    plain, boots = pair.values()
    title = "The digits of lowest, median and highest entropy of NeuBoots"
    note = "In brackets the probability; the interval is the central 95 % of the replicates."
    table = _table(title, "digit", "plain", "NeuBoots", "95 % interval", "decision", note=note)
    for group, predictions in boots.items():
        for rank, i in predictions.ranked().items():
            probs, k = plain[group].probs[i], int(predictions.probs[i].argmax())
            table.add_row(
                f"{group} {digits.shown[group][i]}, {rank}",
                f"{digits.classes[int(probs.argmax())]} ({float(probs.max()):.3f})",
                f"{digits.classes[k]} ({float(predictions.probs[i, k]):.3f})",
                f"{float(predictions.low[i, k]):.3f}–{float(predictions.high[i, k]):.3f}",
                "predicts" if predictions.entropy[i] <= entropy_threshold(boots) else "abstains",
            )
    return table


def cost_table(times: Times, digits: Digits) -> "Table":
    """Cost of B replicates relative to one plain pass."""
    title = f"Time for the {len(digits.labels)} test digits; one plain pass takes {1e3 * times.plain:.1f} ms"
    note = f"Best of {2 * ROUNDS} interleaved runs, threads: {torch.get_num_threads()}. Probabilities: with entropies."
    table = _table(title, "B", "outputs", "× plain", "probabilities", "× plain", note=note)
    for size in SIZES:
        pair = times.outputs[size], times.probabilities[size]
        table.add_row(f"{size:,}", *(cell for t in pair for cell in (f"{1e3 * t:.1f} ms", f"{t / times.plain:.2f}")))
    return table


# -- plot ----------------------------------------------------------------------------------------------


def plot_demo(pair: dict[str, Groups], digits: Digits, times: Times, run: str) -> "Figure":
    """Plot reliability, entropies, times, and the predictions of the known and unknown image of median entropy."""
    from matplotlib.figure import Figure

    from neuboots.report.plots import plot_histograms, plot_reliability
    from neuboots_paper.plots import plot_class_intervals, plot_image, plot_runtime

    plain, boots = pair.values()
    figure = Figure(figsize=(12.8, 8.4), dpi=125, layout="constrained")
    figure.suptitle("A deterministic network and NeuBoots on handwritten digits", fontsize=15, fontweight="bold")
    (top,), (bottom,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.4, 1])
    top.suptitle(f"{digits}; {run}", fontsize=11, color="#555555")
    left, middle, right = top.subplots(1, 3)
    left.set_title("Reliability (test digits)")
    known = {name: groups["known"].probs for name, groups in pair.items()}
    plot_reliability(left, {name: reliability_curve(p, digits.labels, num_bins=10) for name, p in known.items()})
    middle.set_title("Entropy of known and unknown digits (NeuBoots)")
    entropies = {group: predictions.entropy for group, predictions in boots.items()}
    most = math.log(len(digits.classes))
    plot_histograms(middle, entropies, label="predictive entropy / nats", bottom=0.0, top=most)
    right.set_title(f"Cost of B replicates ({len(digits.labels)} digits)")
    lines = {"NeuBoots, B outputs": times.outputs, "NeuBoots, B probabilities": times.probabilities}
    plot_runtime(right, lines, single=times.plain)
    bottom.suptitle("Predictions of the known and the unknown digit of median entropy", fontsize=12)
    panels = bottom.subplots(1, 4, width_ratios=[1, 2.6, 1, 2.6])
    for (group, predictions), image, bands in zip(boots.items(), panels[::2], panels[1::2], strict=True):
        i = predictions.ranked()["median"]
        image.set_title(f"{group}: a {digits.shown[group][i]}")
        plot_image(image, digits.images[group][i, 0])
        names = [str(digit) for digit in digits.classes]
        ends = predictions.low[i], predictions.high[i]
        plot_class_intervals(
            bands, names, predictions.probs[i], *ends, deterministic=plain[group].probs[i], name="NeuBoots"
        )
        bands.set_xlabel("digit")
    bottom.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
