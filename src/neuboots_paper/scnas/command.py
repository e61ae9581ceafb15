"""The command `neuboots scnas`: search cells, and compare them with random cells.

    min_a E_{z ~ p(a)} L_val(w, z)   against   E_{z ~ uniform} L_val(w, z)

The default task are noisy volumes of hollow balls, as dark inside as outside: only the neighbourhood of a voxel tells
the two apart, so that the operations of the cells matter.

The objective of the search is the expected validation loss under the architecture distribution with the shared weights.
Random cells are evaluated with the same weights, which were trained for that distribution and so favour it. In the
second comparison, found and random cells are trained from scratch with the same budget.

Volumes, widths and schedules were chosen among some ten settings with the results of seed 0 in view.
"""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from neuboots.cli import UsageError
from neuboots.cli._console import echo_rich as echo
from neuboots.evaluation._batching import format_table, iter_batches
from neuboots.evaluation._parallel import run_jobs
from neuboots.loading import Batch
from neuboots.metrics import dice
from neuboots.serialization import write_json
from neuboots.training import TrainingConfig, initialize_model, train
from neuboots_paper._common import one_thread
from neuboots_paper.scnas import SCNAS, Genotype, SearchResult, expected_loss, random_genotype, search

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SearchCommand:
    """Search the cells of a 3D U-net on small volumes, and compare them with random cells.

    Prints the objective of the search and the losses of nets trained from scratch, each with standard errors. Writes
    the cells as JSON and a plot. An interrupted run resumes with the same command.
    """

    seeds: tuple[int, ...] = (0, 1)
    """Independent runs; each has its own volumes, search and random cells."""
    data: Literal["balls", "hippocampus3d"] = "balls"
    """Noisy balls, generated on the fly, or MRI volumes of the hippocampus (halved), from the data root."""
    root: Path | None = None
    """Data root of hippocampus3d (default: the environment variable NEUBOOTS_DATA, then the hub)."""
    epochs: int = 100
    """Epochs of the search."""
    warmup: int = 40
    """First epochs, in which only the shared weights are learned."""
    train_epochs: int = 30
    """Epochs of each net trained from scratch."""
    random_cells: int = 8
    """Random genotypes that are trained from scratch."""
    repeats: int = 4
    """Trainings of the found genotype, with different initial weights."""
    samples: int = 40
    """Architectures drawn to estimate an expected loss."""
    smoke: bool = False
    """A few steps on tiny volumes, to test the installation."""
    num_workers: int = 2
    """Processes that share the trainings from scratch."""
    out: Path = Path("neuboots-scnas")
    """Folder for the cells, the plot and the checkpoints."""

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
        """Search, train, compare, print and write."""
        self._check()
        import lightning_fabric  # noqa: F401 -- so that its import does not count as training time

        from neuboots.report.plots import save_png

        echo(self.command, style="bold")
        start = time.perf_counter()
        trials = []
        for seed in self.seeds:
            try:
                with one_thread():
                    trials.append(self.trial(seed))
            except ValueError as error:  # a missing dataset, or a folder of other options
                raise UsageError(str(error)) from None
            echo(f"\n{trials[-1]}")
            write_json(self.out / f"genotype-{seed}.json", trials[-1].search.genotype)
        echo(f"\n{summarize_trials(trials)}")
        save_png(plot_trials(trials), self.out / "scnas.png")
        echo(f"Cells and plot: {self.out}. Finished in {time.perf_counter() - start:.0f} s.")

    def trial(self, seed: int) -> "Trial":
        """One search and both comparisons."""
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
            # without the seeds and the number of random cells, so that a longer run reuses the results
            settings={"key": f"{self.data} {self.root} {self.smoke} {self.train_epochs} {repeats} {found.genotype}"},
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
        return {part: balls(count, size=size, seed=3 * seed + k) for k, part in enumerate(SPLITS)}

    def _from_scratch(self, genotype: Genotype, parts: Mapping[str, Dataset[Any]], seed: int) -> dict[str, Any]:
        """Losses and Dice of a net with these cells, trained from scratch."""
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
        scores = {part: evaluate_net(net, parts[part]) for part in ("validation", "test")}
        size = sum(parameter.numel() for parameter in net.parameters())
        return {
            "validation": scores["validation"][0],
            "test": scores["test"][0],
            "dice": scores["test"][1],
            "parameters": size,
        }

    def _check(self) -> None:
        distinct = len(set(self.seeds)) == len(self.seeds)
        if not self.seeds or not distinct or any(not 0 <= seed < 2**31 for seed in self.seeds):
            got = " ".join(map(str, self.seeds)) or "empty"
            raise UsageError(f"--seeds is {got}; expected distinct integers of at least 0 and below 2**31")
        if not 0 <= self.warmup < self.epochs:
            raise UsageError(f"--warmup is {self.warmup}; expected an integer from 0 to {self.epochs - 1}")
        minimum = {"train_epochs": 1, "random_cells": 2, "repeats": 2, "samples": 2, "num_workers": 1}
        for name, least in minimum.items():
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {getattr(self, name)}; expected an integer of at least {least}")
        if self.out.is_file():
            raise UsageError(f"--out is {self.out}, a file; expected a folder")


# -- volumes -------------------------------------------------------------------------------------------

SPLITS = ("train", "validation", "test")


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
    x = torch.stack([_crop_or_pad(x, (36, 52, 36))[:, ::2, ::2, ::2] for x, _ in rows])
    y = torch.stack([_crop_or_pad(y[None], (36, 52, 36))[0, ::2, ::2, ::2] for _, y in rows])
    return TensorDataset(x, y)


def _crop_or_pad(volume: Tensor, size: Sequence[int]) -> Tensor:
    """Center crop or zero-pad (C, D, H, W) to this size."""
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
def evaluate_net(net: torch.nn.Module, data: Dataset[Any]) -> tuple[float, float]:
    """Mean cross-entropy over voxels, and mean Dice without the background."""
    net.eval()
    logits, labels = zip(
        *((net(x), y) for x, y in iter_batches(data, 16, title="evaluating", progress=False)), strict=True
    )
    z, y = torch.cat(logits), torch.cat(labels)
    return float(functional.cross_entropy(z, y)), float(dice(z.softmax(1), y)[1:].mean())


# -- results -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trial:
    """One search: losses (S,) of random architectures by (cells, split), and metrics of nets trained from scratch."""

    seed: int
    search: SearchResult
    expected: dict[tuple[str, str], Tensor]
    trained: dict[str, list[dict[str, Any]]]

    def __str__(self) -> str:
        inside = [
            {
                "shared weights": f"{name} cells",
                "drawn": len(self.expected[name, "validation"]),
                **{f"{part} loss": _format_mean(self.expected[name, part]) for part in ("validation", "test")},
            }
            for name in ("found", "random")
        ]
        outside = [
            {
                "from scratch": f"{name} cells",
                "nets": len(rows),
                "validation loss": _format_mean(self.losses(name)),
                "best": float(self.losses(name).min()),
                "test loss": _format_mean(self.losses(name, "test")),
                "Dice": _format_mean(self.losses(name, "dice")),
                "parameters": round(float(self.losses(name, "parameters").mean())),
            }
            for name, rows in self.trained.items()
        ]
        each = ", ".join(f"{loss:.4f}" for loss in self.losses("random").tolist())
        tables = [format_table(inside), format_table(outside), f"each random net: {each}", self.summary]
        return f"Seed {self.seed}: {self.search}\n\n" + "\n\n".join(tables)

    def losses(self, name: str, metric: str = "validation") -> Tensor:
        """A metric of the nets trained from scratch."""
        return torch.tensor([float(row[metric]) for row in self.trained[name]])

    @property
    def gains(self) -> dict[str, tuple[float, float]]:
        """Validation loss of random cells minus that of the found ones, and its standard error."""
        pairs = {
            "with shared weights": [self.expected[name, "validation"] for name in ("found", "random")],
            "from scratch": [self.losses(name) for name in ("found", "random")],
        }
        return {
            where: (float(other.mean() - own.mean()), math.hypot(_standard_error(own), _standard_error(other)))
            for where, (own, other) in pairs.items()
        }

    @property
    def summary(self) -> str:
        """Whether the found cells are better than random ones; ± are standard errors."""
        lines = []
        for where, (gain, error) in self.gains.items():
            ratio = gain / error if error > 0 else math.copysign(math.inf, gain) if gain else 0.0
            direction = "lower" if gain >= 0 else "HIGHER"
            lines.append(
                f"{where} the loss of found cells is {direction} by {abs(gain):.4f} ± {error:.4f} "
                f"({ratio:.1f} standard errors)"
            )
        return ";\n".join(lines) + "."


def _standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def _format_mean(values: Tensor) -> str:
    return f"{float(values.mean()):.4f} ± {_standard_error(values):.4f}"


def summarize_trials(trials: Sequence[Trial]) -> str:
    """Number of runs in which the found cells were better than random ones."""
    lines = []
    for where in trials[0].gains:
        clearly = sum(trial.gains[where][0] > 2 * trial.gains[where][1] for trial in trials)
        at_all = sum(trial.gains[where][0] > 0 for trial in trials)
        lines.append(
            f"{where}: better than random cells by more than two standard errors in {clearly} of {len(trials)} runs, "
            f"by any amount in {at_all}"
        )
    return "\n".join(lines)


def plot_trials(trials: Sequence[Trial]) -> "Figure":
    """Plot the objective over the steps, and the losses of nets trained from scratch."""
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
