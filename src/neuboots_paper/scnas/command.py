"""The SCNAS search against random cells, by its own objective and from scratch.

    min_a E_{z ~ p(a)} L_val(w, z)   against   E_{z ~ uniform} L_val(w, z)

The shipped task are noisy volumes of hollow balls, inside as dark as outside: only the neighbourhood of a voxel tells
the two apart, so that it matters which operations the cells have.

The objective in the strict sense is the expected validation loss under the architecture distribution that was found,
with the shared weights; random cells are judged with those same weights. These have followed the distribution, and so
favour it. The second comparison does not: the found cells and random ones are trained from scratch with one budget.

Volumes, widths and schedules were chosen among some ten settings with the figures of seed 0 in view.
"""

import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from neuboots._io import write_json
from neuboots.cli._console import UsageError
from neuboots.evaluation._batching import format_table, iter_batches
from neuboots.evaluation._parallel import run_jobs
from neuboots.loading import Batch
from neuboots.metrics import dice
from neuboots.training import TrainingConfig, initialize_model, train
from neuboots_paper.scnas import SCNAS, Genotype, SearchResult, expected_loss, random_genotype, search

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Scnas:
    """Search the cells of a 3D U-net on small volumes, and compare what was found with random cells.

    Prints the search's own objective and the losses of nets trained from scratch, each with standard errors, and says
    whether the search did better. Writes the found cells as JSON and a picture. Cut short, it goes on where it stopped.
    """

    seeds: tuple[int, ...] = (0, 1)
    """Independent runs: each has its own volumes, search and random cells."""
    data: Literal["balls", "hippocampus3d"] = "balls"
    """Noisy balls, made on the spot, or MRI volumes of the hippocampus (halved), read from the data root."""
    root: Path | None = None
    """The data root for hippocampus3d; without it, the environment variable NEUBOOTS_DATA, or the hub."""
    epochs: int = 100
    """Passes of the search over the training volumes."""
    warmup: int = 40
    """The first of these, in which the shared weights learn and the architecture stays."""
    train_epochs: int = 30
    """Passes for each net that is trained from scratch."""
    random_cells: int = 8
    """Random genotypes that are trained from scratch."""
    repeats: int = 4
    """Trainings of the found genotype, from different first weights."""
    samples: int = 40
    """Architectures drawn to estimate an expected loss."""
    smoke: bool = False
    """A few steps on tiny volumes, to see that everything runs."""
    num_workers: int = 2
    """Processes that share the trainings from scratch."""
    out: Path = Path("neuboots-scnas")
    """A folder for the found cells, the picture and what is needed to resume."""

    @property
    def command(self) -> str:
        """The command line that repeats this run."""
        words = [f"--seeds {' '.join(map(str, self.seeds))}", f"--data {self.data}"]
        words += [] if self.root is None else [f"--root {shlex.quote(str(self.root))}"]
        words += [f"--epochs {self.epochs} --warmup {self.warmup} --train-epochs {self.train_epochs}"]
        words += [f"--random-cells {self.random_cells} --repeats {self.repeats} --samples {self.samples}"]
        words += ["--smoke"] * self.smoke
        return f"neuboots scnas {' '.join(words)} --out {shlex.quote(str(self.out))}"

    def run(self) -> None:
        """Search, train, compare; print it all, and write cells and picture."""
        self._check()
        import lightning_fabric  # noqa: F401 -- here, lest its import count as training time
        from rich import get_console

        from neuboots.report.plots import save_png

        say = partial(get_console().print, highlight=False, markup=False, soft_wrap=True)
        say(self.command, style="bold")
        began = time.perf_counter()
        trials = []
        for seed in self.seeds:
            try:
                with one_thread():
                    trials.append(self.trial(seed))
            except ValueError as fault:  # such as a missing set, or a folder that holds the work of other options
                raise UsageError(str(fault)) from None
            say(f"\n{trials[-1]}")
            write_json(self.out / f"genotype-{seed}.json", trials[-1].search.genotype)
        say(f"\n{verdict(trials)}")
        save_png(draw(trials), self.out / "scnas.png")
        say(f"Cells and picture: {self.out}. Finished in {time.perf_counter() - began:.0f} s.")

    def trial(self, seed: int) -> "Trial":
        """One search, judged twice."""
        parts = self._volumes(seed)
        found = search(
            parts["train"],
            parts["validation"],
            num_classes=3,
            seed=seed,
            folder=self.out / f"search-{seed}",
            **self._scale,
            **self._budget,
        )
        expected = {
            (name, part): expected_loss(
                found.net, parts[part], samples=self._few(self.samples, 6), seed=seed, uniform=name == "random"
            )
            for name in ("found", "random")
            for part in ("validation", "test")
        }
        repeats = self._few(self.repeats, 2)
        genotypes = [found.genotype] * repeats
        genotypes += [random_genotype(2, seed=1000 * seed + k) for k in range(self._few(self.random_cells, 2))]
        trained = run_jobs(
            lambda k: self._from_scratch(genotypes[k], parts, 1000 * seed + k),
            len(genotypes),
            num_workers=self.num_workers,
            folder=self.out / f"trained-{seed}",
            # not the other seeds, nor the number of random cells: what is kept is of use to a longer run
            key=f"{self.data} {self.root} {self.smoke} {self.train_epochs} {repeats} {found.genotype}",
            description="training found and random cells",
        )
        return Trial(seed, found, expected, {"found": trained[:repeats], "random": trained[repeats:]})

    def _few(self, count: int, most: int) -> int:
        return min(count, most) if self.smoke else count

    @property
    def _scale(self) -> dict[str, Any]:
        return {"width": 4, "levels": 2}

    @property
    def _budget(self) -> dict[str, Any]:
        epochs, warmup = (3, 1) if self.smoke else (self.epochs, self.warmup)
        return {"epochs": epochs, "warmup": warmup, "batch_size": 4, "lr": 1e-2}

    def _volumes(self, seed: int) -> dict[str, Dataset[Any]]:
        if self.data == "hippocampus3d":
            return hippocampus(self.root, seed, smoke=self.smoke)
        count, size = (8, 6) if self.smoke else (64, 12)
        return {part: balls(count, size=size, seed=3 * seed + k) for k, part in enumerate(PARTS)}

    def _from_scratch(self, genotype: Genotype, parts: Mapping[str, Dataset[Any]], seed: int) -> dict[str, Any]:
        """The losses and the Dice of a net with these cells, trained with the budget that all have."""
        x, _ = parts["train"][0]
        net = initialize_model(lambda: SCNAS(x.shape[0], 3, genotype=genotype, **self._scale), seed)
        optimizer = partial(torch.optim.AdamW, lr=self._budget["lr"])
        epochs = 2 if self.smoke else self.train_epochs
        batch_size = self._budget["batch_size"]
        config = TrainingConfig(
            epochs=epochs, batch_size=batch_size, optimizer=optimizer, seed=seed, accelerator="cpu", progress=False
        )

        def objective(net: torch.nn.Module, batch: Batch) -> Tensor:
            return functional.cross_entropy(net(batch.x), batch.y)

        train(net, parts["train"], lambda epoch: objective, config)
        judged = {part: judge(net, parts[part]) for part in ("validation", "test")}
        size = sum(parameter.numel() for parameter in net.parameters())
        return {
            "validation": judged["validation"][0],
            "test": judged["test"][0],
            "dice": judged["test"][1],
            "parameters": size,
        }

    def _check(self) -> None:
        different = len(set(self.seeds)) == len(self.seeds)
        if not self.seeds or not different or any(not 0 <= seed < 2**31 for seed in self.seeds):
            said = " ".join(map(str, self.seeds)) or "empty"
            raise UsageError(f"--seeds is {said}; give different numbers from 0 on")
        if not 0 <= self.warmup < self.epochs:
            raise UsageError(
                f"--warmup is {self.warmup}; give a number from 0 to --epochs − 1, which is {self.epochs - 1}"
            )
        for name, least in (
            ("train_epochs", 1),
            ("random_cells", 2),
            ("repeats", 2),
            ("samples", 2),
            ("num_workers", 1),
        ):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {getattr(self, name)}; give at least {least}")
        if self.out.is_file():
            raise UsageError(f"--out is {self.out}, a file; give the name of a folder")


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are then the same on any number of cores: the least rounding, and a search draws other cells."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- volumes -------------------------------------------------------------------------------------------

PARTS = ("train", "validation", "test")


def balls(count: int, *, size: int, seed: int) -> TensorDataset:
    """Volumes (1, size, size, size) of three hollow balls in noise: 0 outside, 1 inside, 2 the bright wall.

    >>> x, y = balls(2, size=12, seed=0).tensors
    >>> x.shape, y.shape, sorted(set(y.flatten().tolist()))
    (torch.Size([2, 1, 12, 12, 12]), torch.Size([2, 12, 12, 12]), [0, 1, 2])
    """
    rng = torch.Generator().manual_seed(seed)
    axis = torch.arange(float(size))
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1)  # (size, size, size, 3)
    labels = torch.zeros(count, size, size, size, dtype=torch.long)
    for volume in labels:
        for _ in range(3):
            u = torch.rand(4, generator=rng)
            distance = (grid - 1.5 - u[:3] * (size - 4)).norm(dim=-1)
            radius = 3.0 + 1.2 * u[3]
            volume[distance < radius] = 2
            volume[distance < radius - 1.5] = 1
    x = (labels == 2).float() + 0.2 * torch.randn(labels.shape, generator=rng)
    return TensorDataset(x[:, None], labels)


def hippocampus(root: Path | None, seed: int, *, smoke: bool) -> dict[str, Dataset[Any]]:
    """MRI volumes on one grid of half the resolution, (1, 18, 26, 18), in memory: 160 and their labels are 16 MB."""
    from neuboots.data import load_dataset

    whole = load_dataset("hippocampus3d", root=root, val_fraction=0.3, seed=seed)
    parts: dict[str, Any] = {"train": whole.train, "validation": whole.validation, "test": whole.test}
    return {name: _on_grid(part, smoke=smoke) for name, part in parts.items()}


def _on_grid(part: Any, *, smoke: bool) -> TensorDataset:
    rows = [part[i] for i in range(4 if smoke else len(part))]
    x = torch.stack([_fit(x, (36, 52, 36))[:, ::2, ::2, ::2] for x, _ in rows])
    y = torch.stack([_fit(y[None], (36, 52, 36))[0, ::2, ::2, ::2] for _, y in rows])
    return TensorDataset(x, y)


def _fit(volume: Tensor, size: Sequence[int]) -> Tensor:
    """The middle of (C, D, H, W), cut or filled with zeros to this size."""
    for axis, wanted in enumerate(size, 1):
        extra = volume.shape[axis] - wanted
        if extra > 0:
            volume = volume.narrow(axis, extra // 2, wanted)
    pads = [
        side
        for wanted, got in zip(reversed(size), reversed(volume.shape), strict=False)
        for side in ((wanted - got) // 2, (wanted - got + 1) // 2)
    ]
    return functional.pad(volume, pads)


@torch.no_grad()
def judge(net: torch.nn.Module, data: Dataset[Any]) -> tuple[float, float]:
    """The mean cross-entropy over the voxels, and the mean Dice of the classes but the background."""
    net.eval()
    logits, labels = zip(
        *((net(x), y) for x, y in iter_batches(data, 16, title="judging", progress=False)), strict=True
    )
    z, y = torch.cat(logits), torch.cat(labels)
    return float(functional.cross_entropy(z, y)), float(dice(z.softmax(1), y)[1:].mean())


# -- figures -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trial:
    """One search: losses (S,) of drawn architectures by (cells, part), and figures of nets trained from scratch."""

    seed: int
    search: SearchResult
    expected: dict[tuple[str, str], Tensor]
    trained: dict[str, list[dict[str, Any]]]

    def __str__(self) -> str:
        inside = [
            {
                "shared weights": f"{name} cells",
                "drawn": len(self.expected[name, "validation"]),
                **{f"{part} loss": _pm(self.expected[name, part]) for part in ("validation", "test")},
            }
            for name in ("found", "random")
        ]
        outside = [
            {
                "from scratch": f"{name} cells",
                "nets": len(rows),
                "validation loss": _pm(self.losses(name)),
                "best": float(self.losses(name).min()),
                "test loss": _pm(self.losses(name, "test")),
                "Dice": _pm(self.losses(name, "dice")),
                "parameters": round(float(self.losses(name, "parameters").mean())),
            }
            for name, rows in self.trained.items()
        ]
        each = ", ".join(f"{loss:.4f}" for loss in self.losses("random").tolist())
        tables = [format_table(inside), format_table(outside), f"each random net: {each}", sentence(self)]
        return f"Seed {self.seed}: {self.search}\n\n" + "\n\n".join(tables)

    def losses(self, name: str, figure: str = "validation") -> Tensor:
        return torch.tensor([float(row[figure]) for row in self.trained[name]])

    @property
    def gains(self) -> dict[str, tuple[float, float]]:
        """How much less the validation loss is than that of random cells, and the standard error of that."""
        pairs = {
            "with shared weights": [self.expected[name, "validation"] for name in ("found", "random")],
            "from scratch": [self.losses(name) for name in ("found", "random")],
        }
        return {
            where: (float(other.mean() - own.mean()), math.hypot(standard_error(own), standard_error(other)))
            for where, (own, other) in pairs.items()
        }


def standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def _pm(values: Tensor) -> str:
    return f"{float(values.mean()):.4f} ± {standard_error(values):.4f}"


def sentence(trial: Trial) -> str:
    """Whether the found cells did better, in words; ± are standard errors."""
    said = []
    for where, (gain, error) in trial.gains.items():
        ratio = gain / error if error > 0 else math.copysign(math.inf, gain) if gain else 0.0
        better = "lower" if gain >= 0 else "HIGHER"
        held = "the search did better" if ratio > 2 else "the search did NOT do better by two standard errors"
        said.append(
            f"{where} the loss is {better} by {abs(gain):.4f} ± {error:.4f} ({ratio:.1f} standard errors): {held}"
        )
    return "Found against random cells: " + ";\n".join(said) + "."


def verdict(trials: Sequence[Trial]) -> str:
    """In how many runs it held."""
    lines = []
    for where in trials[0].gains:
        held = sum(trial.gains[where][0] > 2 * trial.gains[where][1] for trial in trials)
        below = sum(trial.gains[where][0] > 0 for trial in trials)
        lines.append(
            f"{where}: better than random cells by more than two standard errors in {held} of {len(trials)} runs, "
            f"by any amount in {below}"
        )
    return "\n".join(lines)


def draw(trials: Sequence[Trial]) -> "Figure":
    """The objective over the steps, and the losses of nets trained from scratch."""
    from matplotlib.figure import Figure

    from neuboots.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE

    colors = (BLUE, ORANGE, GREEN, PURPLE)
    figure = Figure(figsize=(11, 4.4), dpi=125, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    left.set_title("The objective of the search")
    for k, trial in enumerate(trials):
        color, objective = colors[k % len(colors)], torch.tensor(trial.search.objective)
        width = max(1, len(objective) // 20)
        smooth = objective.unfold(0, width, 1).mean(1)
        left.plot(range(width, len(objective) + 1), smooth.tolist(), color=color, label=f"seed {trial.seed}")
        for name, style in (("found", "--"), ("random", ":")):
            left.axhline(float(trial.expected[name, "validation"].mean()), color=color, ls=style, lw=1)
    left.plot([], [], color=GREY, ls="--", label="found cells, expected")
    left.plot([], [], color=GREY, ls=":", label="random cells, same weights")
    left.set(xlabel="architecture step", ylabel="validation loss (running mean)")
    left.legend(fontsize=9)
    right.set_title("Trained from scratch")
    for k, trial in enumerate(trials):
        for place, name in enumerate(("found", "random")):
            losses = trial.losses(name).tolist()
            right.plot([place + 0.12 * k] * len(losses), losses, "o", color=colors[k % len(colors)], alpha=0.7)
    right.set(xticks=[0, 1], xlim=(-0.5, 1.7), ylabel="validation loss")
    right.set_xticklabels(["found cells", "random cells"])
    return figure
