"""Stochastic architecture search: cells with minimal validation loss, while the shared weights are learned.

    min_a E_{z ~ p(a)} L_val(w, z),   w following E_{z ~ p(a)} L_train(w, z),   z by Gumbel-softmax at temperature τ

Steps alternate: a training batch updates the weights w of an architecture drawn for it, and a validation batch updates
the architecture parameters a by the straight-through gradient. The temperature decreases geometrically. Only one
architecture at a time has activations in memory, besides the outputs that a step compares.

Kim et al. 2019 learn weights and cells jointly by stochastic sampling of a continuous relaxation. The other choices are
those of DARTS (two halves of the data, alternating first-order steps, Adam for a) and SNAS (decreasing temperature).
The weights have a constant learning rate: with a decaying one they stop learning before the cells are chosen, and the
search then prefers operations without weights.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from neuboots._validation import ArgumentError, check_int
from neuboots.loading import Batch, EpochLoader, check_length, preserve_rng_state, seed_everything
from neuboots.serialization import atomic_file
from neuboots.training import describe_callable, progress_bar
from neuboots_paper.scnas.net import Choices, Genotype, SuperNet

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Result of a search.

    Args:
        genotype: Most probable operation of each edge.
        objective: Validation loss of each architecture step.
        temperature: Temperature of each architecture step.
        probabilities: Probability of each operation of each edge.
        seed: Seed of the search.
        net: Supernet with the shared weights and the architecture parameters.
    """

    genotype: Genotype
    objective: tuple[float, ...]
    temperature: tuple[float, ...]
    probabilities: dict[str, list[dict[str, float]]]
    seed: int
    net: SuperNet

    def __str__(self) -> str:
        tenth = max(1, len(self.objective) // 10)
        first, last = (sum(part) / len(part) for part in (self.objective[:tenth], self.objective[-tenth:]))
        lines = [f"{len(self.objective)} steps; objective {first:.4f} in the first tenth, {last:.4f} in the last"]
        for kind, rows in self.genotype.items():
            lines += [f"{kind}, node {j}: {', '.join(row)}" for j, row in enumerate(rows)]
        return "\n".join(lines)


def search(
    data: Dataset[Any],
    val_data: Dataset[Any],
    *,
    num_classes: int,
    width: int = 8,
    levels: int = 3,
    nodes: int = 2,
    epochs: int = 100,
    warmup: int = 40,
    batch_size: int = 4,
    lr: float = 1e-2,
    architecture_lr: float = 5e-2,
    temperature: tuple[float, float] = (1.0, 0.5),
    num_compared: int | None = 2,
    loss: Loss = functional.cross_entropy,
    seed: int = 0,
    device: str = "cpu",
    folder: Path | None = None,
    progress: bool = True,
) -> SearchResult:
    """Search the cells argmin_a E_{z ~ p(a)} L_val(w, z).

    The seed determines the result on one machine with one number of threads; other rounding leads to other cells.

    Args:
        data: Rows (x, y) that update the weights, x (channels, D, H, W) and y (D, H, W).
        val_data: Rows that update the architecture.
        num_classes: Number of classes.
        width: Channels of the first level.
        levels: Number of resolutions; with 1 only the kind encoder_normal is searched.
        nodes: Nodes of each cell.
        epochs: Passes over `data`.
        warmup: First epochs, in which only the weights are updated.
        batch_size: Rows of a step.
        lr: Learning rate of the weights.
        architecture_lr: Learning rate of the architecture parameters.
        temperature: First and last temperature.
        num_compared: Candidates that an architecture step compares on each edge; None for all.
        loss: Loss of outputs and labels.
        seed: Seed of the search.
        device: Device of the net.
        folder: Folder for checkpoints; an interrupted search resumes after its last complete epoch.
        progress: Whether to show a progress bar.

    Returns:
        The cells that were found, and the history of the search.

    Raises:
        ArgumentError: If an option is invalid, or the folder holds another search.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> x = torch.randn(4, 1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
        >>> rows = TensorDataset(x, (x[:, 0] > 0).long())
        >>> found = search(rows, rows, num_classes=2, width=2, levels=1, nodes=1, epochs=3, warmup=1, progress=False)
        >>> len(found.objective), [len(rows) for rows in found.genotype.values()]
        (2, [1, 1, 1, 1])
    """
    settings: dict[str, Any] = {
        "rows": [check_length(data), check_length(val_data)],
        "num_classes": check_int("num_classes", num_classes, minimum=1),
        "width": width,
        "levels": levels,
        "nodes": nodes,
        "epochs": check_int("epochs", epochs, minimum=1),
        "warmup": check_int("warmup", warmup, minimum=0),
        "batch_size": check_int("batch_size", batch_size, minimum=1),
        "lr": lr,
        "architecture_lr": architecture_lr,
        "temperature": temperature,
        "num_compared": None if num_compared is None else check_int("num_compared", num_compared, minimum=2),
        "loss": describe_callable(loss),
        "seed": check_int("seed", seed),
    }
    if warmup >= epochs:
        raise ArgumentError("warmup", warmup, f"fewer than epochs={epochs}")
    high, low = temperature
    if not high >= low > 0:
        raise ArgumentError("temperature", temperature, "(first, last), positive and not increasing")
    with preserve_rng_state():
        learning = EpochLoader(data, batch_size=batch_size, seed=seed)
        judging = EpochLoader(val_data, batch_size=batch_size, seed=seed + 1)
        seed_everything(seed, "init")
        channels = _check_volumes(next(iter(learning.epoch(0)))[1]).shape[1]
        key = json.dumps({"channels": channels, **settings})
        seed_everything(seed, "init")
        net = SuperNet(channels, num_classes, width=width, levels=levels, nodes=nodes).to(device)
        run = _SearchState(net, epochs * learning.steps, lr, architecture_lr, folder, key)
        run.resume()
        first, late = warmup * learning.steps, max(1, (epochs - warmup) * learning.steps - 1)
        batches = _iter_from(learning, run.step), _iter_from(judging, max(0, run.step - first))
        with progress_bar("searching", run.total, enabled=progress, done=run.step) as advance:
            while run.step < run.total:
                learn = next(batches[0])
                seed_everything(seed, "weights", run.step)
                value = run.step_weights(learn, loss)
                if run.step >= first:
                    tau = high * (low / high) ** ((run.step - first) / late)
                    evaluate = next(batches[1])  # before the seed, since reading may draw an augmentation
                    seed_everything(seed, "architecture", run.step)
                    value = run.step_architecture(evaluate, loss, tau, num_compared)
                run.step += 1
                advance(f"searching  epoch {(run.step - 1) // learning.steps + 1}/{epochs}  loss {value:.4f}")
                if run.step % learning.steps == 0:
                    run.save()
    return SearchResult(
        net.genotype(), tuple(run.objective), tuple(run.temperature), net.probabilities(), seed, net.eval()
    )


def expected_loss(
    net: SuperNet,
    data: Dataset[Any],
    *,
    samples: int,
    seed: int,
    uniform: bool = False,
    batch_size: int = 4,
    loss: Loss = functional.cross_entropy,
) -> Tensor:
    """Losses L(w, z_s) over all rows for random architectures z_1, …, z_S.

    Their mean estimates the objective of the search; their standard deviation over √S is its standard error.

    Args:
        net: Supernet with shared weights.
        data: Rows (x, y).
        samples: Number S of architectures.
        seed: Seed of the architectures.
        uniform: Whether to draw operations uniformly instead of from p(a).
        batch_size: Rows of a batch.
        loss: Loss of outputs and labels.

    Returns:
        The losses: (S,).

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> rows = TensorDataset(torch.zeros(2, 1, 4, 4, 4), torch.zeros(2, 4, 4, 4, dtype=torch.long))
        >>> expected_loss(SuperNet(1, 2, width=2, levels=1), rows, samples=3, seed=0).shape
        torch.Size([3])
    """
    check_int("samples", samples, minimum=1)
    check_length(data)
    found = []
    with preserve_rng_state(), torch.no_grad():
        loader = EpochLoader(data, batch_size=batch_size, seed=seed, shuffle=False)
        for s in range(samples):
            seed_everything(seed, "sample", s)
            choices = net.sample(torch.default_generator, uniform=uniform)
            total: float = 0.0
            count: int = 0
            for k, batch, _ in loader.epoch(0):
                value = _check_finite(_compute_loss(net, batch, choices, loss), f"on batch {k + 1} of the data")
                total, count = total + value * len(batch.index), count + len(batch.index)
            found.append(total / count)
    return torch.tensor(found)


# -- state of a search ---------------------------------------------------------------------------------


class _SearchState:
    """The net, its two optimizers and the history: the content of a checkpoint."""

    def __init__(
        self, net: SuperNet, total: int, lr: float, architecture_lr: float, folder: Path | None, key: str
    ) -> None:
        self.net, self.total, self.step = net, total, 0
        self.path, self.key = None if folder is None else Path(folder) / "search.ckpt", key
        self.objective: list[float] = []
        self.temperature: list[float] = []
        self.weights = torch.optim.AdamW(net.weights, lr=lr)
        # the betas of DARTS: a short memory, since every draw is another architecture
        self.architecture = torch.optim.Adam(net.architecture, lr=architecture_lr, betas=(0.5, 0.999))

    def step_weights(self, batch: Batch, loss: Loss) -> float:
        """One step of w for an architecture drawn from p(a)."""
        with torch.no_grad():  # no gates: only the drawn operations run
            choices = self.net.sample(torch.default_generator)
        value = _compute_loss(self.net, batch, choices, loss)
        self.weights.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        self.weights.step()
        return _check_finite(value, f"in step {self.step + 1} of the search")

    def step_architecture(self, batch: Batch, loss: Loss, temperature: float, num_compared: int | None) -> float:
        """One step of a by the straight-through gradient of one draw."""
        choices = self.net.sample(torch.default_generator, temperature=temperature, num_compared=num_compared)
        value = _compute_loss(self.net, batch, choices, loss)
        parameters = self.net.architecture
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.architecture.step()
        self.objective.append(_check_finite(value, f"in step {self.step + 1} of the search"))
        self.temperature.append(temperature)
        return self.objective[-1]

    def save(self) -> None:
        """Write the checkpoint, atomically."""
        if self.path is not None:
            state = {name: module.state_dict() for name, module in self._modules()}
            history = {"step": self.step, "objective": self.objective, "temperature": self.temperature}
            with atomic_file(self.path) as temporary:
                torch.save({"key": self.key, **state, **history}, temporary)

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        if self.path is None or not self.path.exists():
            return
        try:
            stored = torch.load(self.path, map_location="cpu", weights_only=True)
            other = json.loads(stored["key"])
        except Exception as error:
            raise ValueError(f"cannot read {self.path} ({type(error).__name__}); delete it to search again") from None
        mine = json.loads(self.key)
        if different := [f"{k}: {other.get(k)}, now {mine[k]}" for k in mine if mine[k] != other.get(k)]:
            raise ArgumentError(
                "folder", str(self.path.parent), "a new folder, or one of the same search", hint="; ".join(different)
            )
        for name, module in self._modules():
            module.load_state_dict(stored[name])
        self.step, self.objective, self.temperature = stored["step"], stored["objective"], stored["temperature"]

    def _modules(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in ("net", "weights", "architecture")]


def _check_volumes(batch: Batch) -> Tensor:
    x = batch.x
    if not isinstance(x, Tensor) or x.ndim != 5:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError("inputs", got, "volumes (N, channels, D, H, W)")
    return x


def _compute_loss(net: SuperNet, batch: Batch, choices: Choices, loss: Loss) -> Tensor:
    parameter = next(net.parameters())
    outputs, y = net(_check_volumes(batch).to(parameter), choices), batch.y.to(parameter.device)
    try:
        return loss(outputs, y).mean()
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"the loss rejects targets {tuple(y.shape)} of {y.dtype} for outputs {tuple(outputs.shape)} ({error}); "
            "expected labels (N, D, H, W) of torch.int64 below num_classes: for an ignore_index, pass a loss with it"
        ) from None


def _check_finite(loss: Tensor, where: str) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss became {value} {where}: look for NaN in the data or a batch of ignored labels only, or lower lr"
        )
    return value


def _iter_from(loader: EpochLoader, step: int) -> Iterator[Batch]:
    """Endless batches, from this step on."""
    epoch, start = divmod(step, loader.steps)
    while True:
        yield from (batch for _, batch, _ in loader.epoch(epoch, start))
        epoch, start = epoch + 1, 0
