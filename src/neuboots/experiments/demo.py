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

from neuboots.experiments import UsageError
from neuboots.methods import NeuBoots, Plain
from neuboots.metrics import auroc, brier, ece, error, nll, reliability_curve
from neuboots.nets import SmallCNN
from neuboots.prediction import Method, Prediction, Predictor
from neuboots.training import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

WIDTHS = (64, 128, 256)
SIZES = (1, 5, 100, 1000)  # the numbers of replicates B that are timed
ROUNDS = 7
RANKS = {"least": 0.0, "median": 0.5, "most": 1.0}  # which images are shown, by NeuBoots's entropy


@dataclass(frozen=True)
class Demo:
    """Train a small network on handwritten digits and show what NeuBoots adds to it.

    A plain network and its NeuBoots twin learn some of the digits, then are asked about all of them: how
    good their probabilities are, whether their uncertainty gives away the digits they never saw, and what
    it costs. Takes less than a minute on two CPU cores, downloads nothing and writes one figure.
    """

    seed: int = 0
    """Governs the split of the digits, both trainings and the replicates."""
    epochs: int = 20
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
    def recipe(self) -> Recipe:
        """How both networks are trained."""
        optimizer = partial(torch.optim.AdamW, lr=3e-3)
        return Recipe(epochs=self.epochs, batch_size=64, optimizer=optimizer, seed=self.seed, accelerator="cpu")

    def run(self) -> None:
        """Train both networks, print what they say and what it cost, and write the figure."""
        self._check()
        import lightning_fabric  # noqa: F401 -- here, lest its import count as training time
        from rich import get_console

        from neuboots.report.figures import write_png

        began = time.perf_counter()
        say = partial(get_console().print, highlight=False, markup=False, soft_wrap=True)
        digits = load(self.unknown, self.seed)
        say(self.command, style="bold")
        say(f"{digits}; a convolutional net of widths {WIDTHS}, {self.epochs} epochs, seed {self.seed}.")
        plain, plain_seconds = self._fit(Plain(), digits)
        boots, boots_seconds = self._fit(NeuBoots(), digits)
        say(f"Trained in {plain_seconds:.1f} s (plain) and {boots_seconds:.1f} s (NeuBoots).\n")
        pair = {
            "plain": Answers.of(plain, digits, num_samples=1, seed=self.seed),
            f"NeuBoots, B = {self.num_samples:,}": Answers.of(boots, digits, self.num_samples, seed=self.seed),
        }
        times = measure_times(plain, boots, digits.test_x)
        for table in (quality(pair, digits), separation(pair, digits), examples(pair, digits), cost(times, digits)):
            say(table)
            say()
        write_png(draw(pair, digits, times, f"seed {self.seed}, {self.epochs} epochs"), self.out)
        say(f"Figure: {self.out}. Finished in {time.perf_counter() - began:.0f} s.")

    def _fit(self, method: Method, digits: "Digits") -> tuple[Predictor, float]:
        def make_net() -> nn.Module:
            return SmallCNN(1, len(digits.classes), widths=WIDTHS)

        began = time.perf_counter()
        return method.fit(make_net, digits.train, self.recipe), time.perf_counter() - began

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
    """Images (N, 1, 8, 8) in [0, 1]. Labels count the known classes: label k is the digit classes[k]."""

    classes: list[int]
    train: TensorDataset
    test_x: Tensor
    test_y: Tensor
    unknown_x: Tensor
    unknown_digits: Tensor

    def __str__(self) -> str:
        strangers = ", ".join(map(str, sorted(set(self.unknown_digits.tolist()))))
        known, test, unknown = len(self.train), len(self.test_y), len(self.unknown_x)
        return f"{known} training digits, {test} test digits, {unknown} unknown digits ({strangers})"


def load(unknown: tuple[int, ...], seed: int) -> Digits:
    """scikit-learn's 1,797 digits: a random half of the known classes trains, the other half tests."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    digits = torch.tensor(targets)
    strange = torch.isin(digits, torch.tensor(unknown))
    classes = digits[~strange].unique()
    x_known, y_known = x[~strange], torch.searchsorted(classes, digits[~strange])
    order = torch.randperm(len(y_known), generator=torch.Generator().manual_seed(seed))
    train, test = order.chunk(2)
    return Digits(
        classes.tolist(),
        TensorDataset(x_known[train], y_known[train]),
        x_known[test],
        y_known[test],
        x[strange],
        digits[strange],
    )


# -- measurements --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answer:
    """What one network says of N images; `low` and `high` bound the middle 95 % of its replicates: (N, C)."""

    probs: Tensor
    low: Tensor
    high: Tensor
    entropy: Tensor
    mutual_information: Tensor

    @property
    def answers(self) -> Tensor:
        """True where the network would answer: its class has the 95 % interval above one half: (N,)."""
        return self.low.gather(1, self.probs.argmax(1, keepdim=True))[:, 0] > 0.5


@dataclass(frozen=True, eq=False)
class Answers:
    """What one network says of the test digits and of the unknown ones."""

    known: Answer
    unknown: Answer

    @classmethod
    def of(cls, predictor: Predictor, digits: Digits, num_samples: int, *, seed: int) -> "Answers":
        def ask(x: Tensor) -> Answer:
            prediction = predictor.predict(x, num_samples, seed=seed)
            low, high = Prediction(prediction.samples.softmax(2)).interval(0.95)
            return Answer(prediction.probs, low, high, prediction.entropy, prediction.mutual_information)

        return cls(ask(digits.test_x), ask(digits.unknown_x))


@dataclass(frozen=True)
class Times:
    """Seconds for all test digits: one plain pass, and for each B the replicates without and with their figures."""

    plain: float
    replicates: dict[int, float]
    figures: dict[int, float]


def measure_times(plain: Predictor, boots: Predictor, x: Tensor) -> Times:
    """Each job in turn, several rounds, so that all meet the same machine; the best time of each."""
    jobs: list[Callable[[], object]] = [lambda: plain.net(x)]
    jobs += [partial(boots.predict, x, size) for size in SIZES]
    jobs += [lambda size=size: boots.predict(x, size).probs for size in SIZES]  # type: ignore[misc]
    best = [math.inf] * len(jobs)
    with torch.no_grad():
        for _ in range(ROUNDS):
            for k, job in enumerate(jobs):
                began = time.perf_counter()
                job()
                best[k] = min(best[k], time.perf_counter() - began)
    replicates, figures = best[1 : 1 + len(SIZES)], best[1 + len(SIZES) :]
    return Times(best[0], dict(zip(SIZES, replicates, strict=True)), dict(zip(SIZES, figures, strict=True)))


def ranked(answer: Answer) -> dict[str, int]:
    """The images of least, median and most entropy."""
    order = answer.entropy.argsort(stable=True).tolist()
    return {name: order[round(rank * (len(order) - 1))] for name, rank in RANKS.items()}


# -- tables --------------------------------------------------------------------------------------------


def _table(title: str, *columns: str, note: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=title, caption=note, title_justify="left", caption_justify="left")
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left")
    return table


def quality(pair: dict[str, Answers], digits: Digits) -> "Table":
    """How good the probabilities of the test digits are."""
    table = _table(f"The {len(digits.test_y)} test digits", "", *pair, note="Lower is better in every row.")
    known = [answers.known.probs for answers in pair.values()]
    table.add_row("error", *(f"{float(error(p, digits.test_y)):.2%}" for p in known))
    table.add_row("negative log-likelihood, nats", *(f"{float(nll(p, digits.test_y)):.4f}" for p in known))
    table.add_row("expected calibration error, 15 bins", *(f"{float(ece(p, digits.test_y)):.4f}" for p in known))
    table.add_row("Brier score", *(f"{float(brier(p, digits.test_y)):.4f}" for p in known))
    return table


def separation(pair: dict[str, Answers], digits: Digits) -> "Table":
    """How well uncertainty tells unknown digits from known ones."""
    title = f"{len(digits.test_y)} known against {len(digits.unknown_x)} unknown digits"
    note = "AUROC: unknown is the positive class. A net would answer where the 95 % interval\nof its digit's probability lies above one half; a plain net's interval is a point."
    table = _table(title, "", *pair, note=note)
    positive = torch.arange(len(digits.test_y) + len(digits.unknown_x)) >= len(digits.test_y)
    scores: dict[str, Callable[[Answer], Tensor]] = {
        "entropy": lambda answer: answer.entropy,
        "mutual information": lambda answer: answer.mutual_information,
    }
    for name, score in scores.items():
        both = [(score(answers.known), score(answers.unknown)) for answers in pair.values()]
        table.add_row(f"mean {name}, known, nats", *(f"{float(known.mean()):.4f}" for known, _ in both))
        table.add_row(f"mean {name}, unknown, nats", *(f"{float(unknown.mean()):.4f}" for _, unknown in both))
        areas = [auroc(torch.cat(scores), positive=positive) for scores in both]
        table.add_row(f"AUROC of {name}", *(f"{float(area):.4f}" for area in areas))
        table.add_section()
    for group in ("known", "unknown"):
        shares = [getattr(answers, group).answers.float().mean() for answers in pair.values()]
        table.add_row(f"would answer, {group}", *(f"{float(share):.1%}" for share in shares))
    return table


def examples(pair: dict[str, Answers], digits: Digits) -> "Table":
    """Single images: the least, median and most uncertain of each group."""
    plain, boots = pair.values()
    note = "Chosen by NeuBoots's entropy. Interval: the middle 95 % of the replicates' probabilities."
    table = _table("Six digits", "image", "plain says", "NeuBoots says", "95 % interval", "and", note=note)
    truth = {"known": [digits.classes[k] for k in digits.test_y.tolist()], "unknown": digits.unknown_digits.tolist()}
    for group, labels in truth.items():
        one, other = getattr(plain, group), getattr(boots, group)
        for rank, i in ranked(other).items():
            c, k = int(one.probs[i].argmax()), int(other.probs[i].argmax())
            table.add_row(
                f"{group} {labels[i]}, {rank} uncertain",
                f"{digits.classes[c]} ({float(one.probs[i, c]):.3f})",
                f"{digits.classes[k]} ({float(other.probs[i, k]):.3f})",
                f"{float(other.low[i, k]):.3f}–{float(other.high[i, k]):.3f}",
                "would answer" if other.answers[i] else "does not know",
            )
    return table


def cost(times: Times, digits: Digits) -> "Table":
    """What B replicates cost beside one plain pass."""
    title = f"Time for {len(digits.test_y)} digits; one plain pass takes {1e3 * times.plain:.1f} ms"
    threads = torch.get_num_threads()
    note = f"Best of {ROUNDS} interleaved rounds, {threads} thread(s). Figures: probabilities and entropies."
    table = _table(title, "B", "replicates", "× plain", "with figures", "× plain", note=note)
    for size in SIZES:
        pair = times.replicates[size], times.figures[size]
        table.add_row(f"{size:,}", *(text for t in pair for text in (f"{1e3 * t:.1f} ms", f"{t / times.plain:.2f}")))
    return table


# -- the figure ----------------------------------------------------------------------------------------


def draw(pair: dict[str, Answers], digits: Digits, times: Times, run: str) -> "Figure":
    """Reliability, entropies, times; below, the class probabilities of the median known and unknown digit."""
    from matplotlib.figure import Figure

    from neuboots.report.figures import draw_bands, draw_histograms, draw_image, draw_reliability, draw_times

    plain, boots = pair.values()
    figure = Figure(figsize=(12.8, 8), dpi=125, layout="constrained")
    figure.suptitle(f"NeuBoots and a plain network on handwritten digits\n{digits}; {run}")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    left, middle, right = top.subplots(1, 3)
    curves = {name: reliability_curve(answers.known.probs, digits.test_y) for name, answers in pair.items()}
    draw_reliability(left, curves)
    left.set_title("Are the probabilities honest? (test digits)")
    groups = {"known": boots.known.entropy, "unknown": boots.unknown.entropy}
    draw_histograms(middle, groups, label="entropy / nats", top=math.log(len(digits.classes)))
    middle.set_title("Does NeuBoots notice the unknown digits?")
    draw_times(right, {"replicates": times.replicates, "with figures": times.figures}, single=times.plain)
    right.set_title(f"What do B replicates cost? ({len(digits.test_y)} digits)")
    panels = bottom.subplots(1, 4, width_ratios=[1, 2.6, 1, 2.6])
    truth = {"known": [digits.classes[k] for k in digits.test_y.tolist()], "unknown": digits.unknown_digits.tolist()}
    for (group, labels), image, bands in zip(truth.items(), panels[::2], panels[1::2], strict=True):
        one, other = getattr(plain, group), getattr(boots, group)
        i = ranked(other)["median"]
        x = digits.test_x if group == "known" else digits.unknown_x
        draw_image(image, x[i, 0])
        image.set_title(f"{group}: a {labels[i]}")
        names = [str(digit) for digit in digits.classes]
        draw_bands(bands, names, other.probs[i], other.low[i], other.high[i], plain=one.probs[i])
        bands.set_xlabel("digit")
    return figure
