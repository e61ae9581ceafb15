"""The demo: a plain net and its NeuBoots twin on scikit-learn's digits, some of which neither ever saw.

    p(y | x) ≈ 1/B Σ_b softmax g(x, α_b)

Both are trained with one recipe and one seed, then asked about known and unknown digits. Whatever is printed
and drawn is measured in the run.
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

from neuboots.cli._console import UsageError
from neuboots.methods import Deterministic, NeuBoots
from neuboots.metrics import auroc, brier, ece, error, nll, reliability_curve
from neuboots.nets import MLP
from neuboots.prediction import Method, Prediction, Predictor
from neuboots.training import TrainingConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

WIDTHS = (500, 500, 500)  # the paper's
# Few labelled digits, as where uncertainty matters. Net and number were chosen among some ten settings with test
# figures in view: an illustration. The measurements that count are in docs/decisions/0002-defaults.md.
TRAIN = 300
SIZES = (1, 5, 100, 1000)  # the numbers of replicates B that are timed
ROUNDS = 5  # of timing, each to and fro


@dataclass(frozen=True)
class Demo:
    """Train a small network on handwritten digits and show what NeuBoots adds to it.

    A plain network and its NeuBoots twin learn some of the digits, then are asked about all of them: how
    good their probabilities are, whether their uncertainty gives away the digits they never saw, and what
    it costs. Takes less than a minute on two CPU cores, downloads nothing and writes one figure.
    """

    seed: int = 0
    """Governs the split of the digits, both trainings and the replicates."""
    epochs: int = 40
    """Passes over the training digits, for each of the two networks."""
    num_samples: int = 100
    """Bootstrap replicates B behind each answer of NeuBoots."""
    unknown: tuple[int, ...] = (8, 9)
    """Digits kept out of training altogether."""
    out: Path = Path("neuboots-demo.png")
    """The figure, a PNG; an existing file is replaced."""

    @property
    def command(self) -> str:
        """The command line that repeats this run."""
        options = f"--seed {self.seed} --epochs {self.epochs} --num-samples {self.num_samples}"
        unknown = " ".join(map(str, self.unknown))
        return f"neuboots demo {options} --unknown {unknown} --out {shlex.quote(str(self.out))}"

    @property
    def config(self) -> TrainingConfig:
        """How both networks are trained."""
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        return TrainingConfig(epochs=self.epochs, batch_size=32, optimizer=optimizer, seed=self.seed, accelerator="cpu")

    def run(self) -> None:
        """Train both networks, print what they say and what it cost, and write the figure."""
        self._check()
        import lightning_fabric  # noqa: F401 -- here, lest its import count as training time
        from rich import get_console

        from neuboots.report.plots import save_png

        began = time.perf_counter()
        say = partial(get_console().print, highlight=False, markup=False, soft_wrap=True)
        digits = load(self.unknown, self.seed)
        say(self.command, style="bold")
        layers = ", ".join(map(str, WIDTHS))
        say(f"{digits}.\nA network with hidden layers of {layers}; epochs: {self.epochs}, seed: {self.seed}.")
        plain, plain_seconds = self._fit(Deterministic(), digits)
        boots, boots_seconds = self._fit(NeuBoots(), digits)
        say(f"Trained in {plain_seconds:.1f} s (plain) and {boots_seconds:.1f} s (NeuBoots).\n")
        pair = {
            "plain": ask(plain, digits, num_samples=1, seed=self.seed),
            f"NeuBoots, B = {self.num_samples:,}": ask(boots, digits, num_samples=self.num_samples, seed=self.seed),
        }
        times = measure_times(plain, boots, digits.images["known"])
        for table in (quality(pair, digits), separation(pair, digits), examples(pair, digits), cost(times, digits)):
            say(table)
            say()
        save_png(draw(pair, digits, times, f"epochs: {self.epochs}, seed: {self.seed}"), self.out)
        say(f"Figure: {self.out}. Finished in {time.perf_counter() - began:.0f} s.")

    def _fit(self, method: Method, digits: "Digits") -> tuple[Predictor, float]:
        def model() -> nn.Module:
            return MLP(64, len(digits.classes), widths=WIDTHS)

        began = time.perf_counter()
        return method.fit(model, digits.train, self.config), time.perf_counter() - began

    def _check(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}; give a whole number from 0 to 2^63 - 1")
        if self.epochs < 1:
            raise UsageError(f"--epochs is {self.epochs}; give at least 1")
        if not 1 <= self.num_samples <= 10_000:
            raise UsageError(f"--num-samples is {self.num_samples}; give a whole number from 1 to 10000")
        if not set(self.unknown) <= set(range(10)) or not 1 <= len(set(self.unknown)) == len(self.unknown) <= 8:
            got = " ".join(map(str, self.unknown)) or "empty"
            raise UsageError(f"--unknown is {got}; give one to eight different digits from 0 to 9, such as 8 9")
        if self.out.suffix.lower() != ".png" or self.out.is_dir():
            raise UsageError(f"--out is {self.out}; give the name of a file that ends in .png")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise UsageError(f"--out is {self.out}, but its folder cannot be made: {fault.strerror}") from None
        if not os.access(self.out.parent, os.W_OK):
            raise UsageError(f"--out is {self.out}, but its folder is read-only; give another one")


# -- data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Digits:
    """Images (N, 1, 8, 8) in [0, 1] to train with and, known and unknown, to ask about.

    Outputs count the known classes: output k is the digit classes[k], and `labels` are those of the known images.
    """

    classes: list[int]
    train: TensorDataset
    images: dict[str, Tensor]
    shown: dict[str, list[int]]
    labels: Tensor

    def __str__(self) -> str:
        unknown = ", ".join(map(str, sorted(set(self.shown["unknown"]))))
        known_size, unknown_size = (len(images) for images in self.images.values())
        return f"{len(self.train)} training digits, {known_size} test digits, {unknown_size} unknown digits ({unknown})"


def load(unknown: tuple[int, ...], seed: int) -> Digits:
    """scikit-learn's 1,797 digits: TRAIN random ones of those known (at most half) train, the others test."""
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
class Answer:
    """What one network says of N images: (N, C) and (N,)."""

    probs: Tensor
    low: Tensor  # the middle 95 % of the replicates' probabilities
    high: Tensor
    entropy: Tensor
    mutual_information: Tensor

    def ranked(self) -> dict[str, int]:
        """The images of least, median and most entropy."""
        order = self.entropy.argsort(stable=True).tolist()
        return {"least": order[0], "median": order[len(order) // 2], "most": order[-1]}


Answers = dict[str, Answer]  # to the known and to the unknown images


def ask(predictor: Predictor, digits: Digits, *, num_samples: int, seed: int) -> Answers:
    """What a network says of the known and of the unknown images."""

    def answer(x: Tensor) -> Answer:
        said = predictor.predict(x, num_samples, seed=seed)
        low, high = Prediction(said.samples.softmax(2)).interval(0.95, method="percentile")
        return Answer(said.probs, low, high, said.entropy, said.mutual_information)

    return {group: answer(x) for group, x in digits.images.items()}


def threshold(answers: Answers) -> float:
    """The entropy up to which a network answers: 95 % of the known images stay below it."""
    return float(answers["known"].entropy.quantile(0.95))


@dataclass(frozen=True)
class Times:
    """Seconds for one batch: a plain pass, and for each B the outputs alone and with their probabilities."""

    plain: float
    outputs: dict[int, float]
    probabilities: dict[int, float]


def measure_times(plain: Predictor, boots: Predictor, x: Tensor) -> Times:
    """The best time of each job. Rounds run to and fro, so that no job always follows a large one."""

    def probabilities(size: int) -> Tensor:
        return boots.predict(x, size).probs

    jobs: list[Callable[[], object]] = [partial(plain.module, x)]
    jobs += [partial(boots.predict, x, size) for size in SIZES]
    jobs += [partial(probabilities, size) for size in SIZES]
    best = [math.inf] * len(jobs)
    with torch.no_grad():
        for k in ROUNDS * [*range(len(jobs)), *reversed(range(len(jobs)))]:
            began = time.perf_counter()
            jobs[k]()
            best[k] = min(best[k], time.perf_counter() - began)
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


def quality(pair: dict[str, Answers], digits: Digits) -> "Table":
    """How good the probabilities of the known images are."""
    table = _table(f"The {len(digits.labels)} test digits", "", *pair, note="Lower is better in every row.")
    known = [answers["known"].probs for answers in pair.values()]
    table.add_row("error", *(f"{100 * float(error(p, digits.labels)):.2f} %" for p in known))
    table.add_row("negative log-likelihood, nats", *(f"{float(nll(p, digits.labels)):.4f}" for p in known))
    table.add_row("expected calibration error, 15 bins", *(f"{float(ece(p, digits.labels)):.4f}" for p in known))
    table.add_row("Brier score", *(f"{float(brier(p, digits.labels)):.4f}" for p in known))
    return table


def separation(pair: dict[str, Answers], digits: Digits) -> "Table":
    """How well uncertainty tells unknown images from known ones."""
    known_size, unknown_size = (len(images) for images in digits.images.values())
    positive = torch.arange(known_size + unknown_size) >= known_size
    note = (
        "AUROC counts unknown as positive. A network answers up to the entropy\n"
        "that 95 % of the known digits stay below."
    )
    table = _table(f"{known_size} known and {unknown_size} unknown digits", "", *pair, note=note)
    for name in ("entropy", "mutual information"):
        scores = [[getattr(answer, name.replace(" ", "_")) for answer in answers.values()] for answers in pair.values()]
        table.add_row(f"{name}, known, mean in nats", *(f"{float(known.mean()):.4f}" for known, _ in scores))
        table.add_row(f"{name}, unknown, mean in nats", *(f"{float(unknown.mean()):.4f}" for _, unknown in scores))
        table.add_row(f"{name}, AUROC", *(f"{float(auroc(torch.cat(s), positive=positive)):.4f}" for s in scores))
        table.add_section()
    answered = [(answers["unknown"].entropy <= threshold(answers)).double().mean() for answers in pair.values()]
    table.add_row("answered though unknown", *(f"{100 * float(share):.1f} %" for share in answered))
    return table


def examples(pair: dict[str, Answers], digits: Digits) -> "Table":
    """Single images, chosen by rank."""
    plain, boots = pair.values()
    title = "The digits of least, median and most entropy (NeuBoots's)"
    note = "In brackets the probability; the interval holds the middle 95 % of the replicates'."
    table = _table(title, "digit", "plain", "NeuBoots", "95 % interval", "so NeuBoots", note=note)
    for group, answer in boots.items():
        for rank, i in answer.ranked().items():
            probs, k = plain[group].probs[i], int(answer.probs[i].argmax())
            table.add_row(
                f"{group} {digits.shown[group][i]}, {rank}",
                f"{digits.classes[int(probs.argmax())]} ({float(probs.max()):.3f})",
                f"{digits.classes[k]} ({float(answer.probs[i, k]):.3f})",
                f"{float(answer.low[i, k]):.3f}–{float(answer.high[i, k]):.3f}",
                "would answer" if answer.entropy[i] <= threshold(boots) else "does not know",
            )
    return table


def cost(times: Times, digits: Digits) -> "Table":
    """What B replicates cost beside one plain pass."""
    title = f"Time for the {len(digits.labels)} test digits; one plain pass takes {1e3 * times.plain:.1f} ms"
    note = f"Best of {2 * ROUNDS} interleaved runs, threads: {torch.get_num_threads()}. Probabilities: with entropies."
    table = _table(title, "B", "outputs", "× plain", "probabilities", "× plain", note=note)
    for size in SIZES:
        pair = times.outputs[size], times.probabilities[size]
        table.add_row(f"{size:,}", *(cell for t in pair for cell in (f"{1e3 * t:.1f} ms", f"{t / times.plain:.2f}")))
    return table


# -- the figure ----------------------------------------------------------------------------------------


def draw(pair: dict[str, Answers], digits: Digits, times: Times, run: str) -> "Figure":
    """Reliability, entropies, times; below, what is said of the known and the unknown image of median entropy."""
    from matplotlib.figure import Figure

    from neuboots.report.plots import plot_class_intervals, plot_histograms, plot_image, plot_reliability, plot_runtime

    plain, boots = pair.values()
    figure = Figure(figsize=(12.8, 8.4), dpi=125, layout="constrained")
    figure.suptitle("A plain network and its NeuBoots twin on handwritten digits", fontsize=15, fontweight="bold")
    (top,), (bottom,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.4, 1])
    top.suptitle(f"{digits}; {run}", fontsize=11, color="#555555")
    left, middle, right = top.subplots(1, 3)
    left.set_title("Are the probabilities right? (test digits)")
    known = {name: answers["known"].probs for name, answers in pair.items()}
    plot_reliability(left, {name: reliability_curve(p, digits.labels, num_bins=10) for name, p in known.items()})
    middle.set_title("Are the unknown digits noticed? (NeuBoots)")
    entropies = {group: answer.entropy for group, answer in boots.items()}
    most = math.log(len(digits.classes))
    plot_histograms(middle, entropies, label="predictive entropy / nats", bottom=0.0, top=most)
    right.set_title(f"What do B replicates cost? ({len(digits.labels)} digits)")
    lines = {"NeuBoots, B outputs": times.outputs, "NeuBoots, B probabilities": times.probabilities}
    plot_runtime(right, lines, single=times.plain)
    bottom.suptitle("What is said of one digit? (the known and the unknown one of median entropy)", fontsize=12)
    panels = bottom.subplots(1, 4, width_ratios=[1, 2.6, 1, 2.6])
    for (group, answer), image, bands in zip(boots.items(), panels[::2], panels[1::2], strict=True):
        i = answer.ranked()["median"]
        image.set_title(f"{group}: a {digits.shown[group][i]}")
        plot_image(image, digits.images[group][i, 0])
        names = [str(digit) for digit in digits.classes]
        ends = answer.low[i], answer.high[i]
        plot_class_intervals(bands, names, answer.probs[i], *ends, deterministic=plain[group].probs[i], name="NeuBoots")
        bands.set_xlabel("digit")
    bottom.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
