"""The stochastic search: which cells have the least validation loss, with weights that learn at the same time?

    min_a E_{z ~ p(a)} L_val(w, z),   w following E_{z ~ p(a)} L_train(w, z),   z by Gumbel-softmax at temperature τ

In turn, a batch of one half of the data moves the weights w of the architecture that was drawn for it, and a batch of
the other half moves the architecture parameters a by the straight-through gradient. The temperature falls
geometrically. One architecture at a time is in memory, beside the weights of all and what a step compares.

Kim et al. 2019 learn weights and cells together by stochastic sampling under a continuous relaxation. What else is
here is from DARTS where that has it (two halves of the data, alternating first-order steps, Adam for a) and from SNAS
(the falling temperature). The weights learn at a constant rate: under a falling one they stop before the cells are
chosen, and the search then prefers operations that need no learning.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from neuboots._validation import check_int
from neuboots.loading import Batch, EpochLoader, check_length, preserve_rng_state, seed_everything
from neuboots.training import describe_callable, progress_bar
from neuboots_paper.scnas.net import Choices, Genotype, SuperNet

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search found, and how: the loss on validation batches and the temperature, step by step."""

    genotype: Genotype
    objective: tuple[float, ...]
    temperature: tuple[float, ...]
    probabilities: dict[str, list[dict[str, float]]]
    seed: int
    net: SuperNet  # with the shared weights and the architecture parameters

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
    compared: int | None = 2,
    loss: Loss = functional.cross_entropy,
    seed: int = 0,
    device: str = "cpu",
    folder: Path | None = None,
    progress: bool = True,
) -> SearchResult:
    """argmin_a E_{z ~ p(a)} L_val(w, z): the cells for rows (x, y), x (channels, D, H, W) and y (D, H, W).

    `data` moves the weights and `validation` the architecture, from epoch `warmup` on. Each architecture step compares
    `compared` candidates on an edge (None: all), each for a pass and the memory of its output. With a `folder`, a
    search that was cut short goes on after its last whole epoch and finds what it would have found uninterrupted.
    A net with levels=1 has encoder_normal cells alone: the other three kinds are then not searched.
    The seed decides on one machine and number of threads; other rounding leads to other cells.

    >>> from torch.utils.data import TensorDataset
    >>> x = torch.randn(4, 1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> rows = TensorDataset(x, (x[:, 0] > 0).long())
    >>> found = search(rows, rows, num_classes=2, width=2, levels=1, nodes=1, epochs=3, warmup=1, progress=False)
    >>> len(found.objective), [len(rows) for rows in found.genotype.values()]
    (2, [1, 1, 1, 1])
    """
    for name, size in (("num_classes", num_classes), ("epochs", epochs), ("batch_size", batch_size)):
        check_int(name, size, minimum=1)
    _check(warmup, epochs, lr, architecture_lr, temperature, compared)
    if type(seed) is not int:
        raise ValueError(f"seed is {seed!r}; expected an int")
    settings = {
        "rows": [check_length(data), check_length(val_data)],
        "num_classes": num_classes,
        "width": width,
        "levels": levels,
        "nodes": nodes,
        "epochs": epochs,
        "warmup": warmup,
        "batch_size": batch_size,
        "lr": lr,
        "architecture_lr": architecture_lr,
        "temperature": temperature,
        "compared": compared,
        "loss": describe_callable(loss),
        "seed": seed,
    }
    with preserve_rng_state():
        learning = EpochLoader(data, batch_size=batch_size, seed=seed)
        judging = EpochLoader(val_data, batch_size=batch_size, seed=seed + 1)
        seed_everything(seed, "init")
        channels = _volumes_of(next(iter(learning.epoch(0)))[1]).shape[1]
        made_by = json.dumps({"channels": channels, **settings})
        seed_everything(seed, "init")
        net = _moved(SuperNet(channels, num_classes, width=width, levels=levels, nodes=nodes), device)
        run = _Run(net, epochs * learning.steps, lr, architecture_lr)
        run.from_config(folder, made_by)
        first, late = warmup * learning.steps, max(1, (epochs - warmup) * learning.steps - 1)
        batches = _from(learning, run.step), _from(judging, max(0, run.step - first))
        with progress_bar("searching", run.total, enabled=progress, done=run.step) as advance:
            while run.step < run.total:
                learn = next(batches[0])
                seed_everything(seed, "weights", run.step)
                value = run.step_weights(learn, loss)
                if run.step >= first:
                    high, low = temperature
                    tau = high * (low / high) ** ((run.step - first) / late)
                    judge = next(batches[1])  # reading it may draw an augmentation, so the seed comes after it
                    seed_everything(seed, "architecture", run.step)
                    value = run.step_architecture(judge, loss, tau, compared)
                run.step += 1
                advance(f"searching  epoch {(run.step - 1) // learning.steps + 1}/{epochs}  loss {value:.4f}")
                if run.step % learning.steps == 0:
                    run.save(folder, made_by)
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
    """L(w, z_s) for architectures z_1, …, z_S from p(a), or of random cells (`uniform_design`), over all the data: (S,).

    Their mean estimates the objective of the search; their standard deviation over √S is its standard error.

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
                value = _finite(_loss_of(net, batch, choices, loss), f"on batch {k + 1} of the data")
                total, count = total + value * len(batch.index), count + len(batch.index)
            found.append(total / count)
    return torch.tensor(found)


# -- one search under way ------------------------------------------------------------------------------


class _Run:
    """The net, its two optimisers, and where the search is: what a checkpoint holds."""

    def __init__(self, net: SuperNet, total: int, lr: float, architecture_lr: float) -> None:
        self.net, self.total, self.step = net, total, 0
        self.objective: list[float] = []
        self.temperature: list[float] = []
        self.weights = torch.optim.AdamW(net.weights, lr=lr)
        # the moments of DARTS: a short memory, since every draw asks about another architecture
        self.architecture = torch.optim.Adam(net.architecture, lr=architecture_lr, betas=(0.5, 0.999))

    def step_weights(self, batch: Batch, loss: Loss) -> float:
        """One step of w for an architecture drawn from p(a)."""
        with torch.no_grad():  # no gates: only what was drawn runs
            choices = self.net.sample(torch.default_generator)
        value = _loss_of(self.net, batch, choices, loss)
        self.weights.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        self.weights.step()
        return _finite(value, f"in step {self.step + 1} of the search")

    def step_architecture(self, batch: Batch, loss: Loss, temperature: float, compared: int | None) -> float:
        """One step of a by the straight-through gradient of one draw."""
        choices = self.net.sample(torch.default_generator, temperature=temperature, compared=compared)
        value = _loss_of(self.net, batch, choices, loss)
        parameters = self.net.architecture
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.architecture.step()
        self.objective.append(_finite(value, f"in step {self.step + 1} of the search"))
        self.temperature.append(temperature)
        return self.objective[-1]

    def save(self, folder: Path | None, made_by: str) -> None:
        """Written aside and renamed: the last good one is never lost."""
        if folder is None:
            return
        path = Path(folder) / "search.ckpt"
        aside = path.with_name(path.name + ".part")
        torch.save({"made_by": made_by, **{name: part.state_dict() for name, part in self._parts()}, **self._at}, aside)
        os.replace(aside, path)

    def from_config(self, folder: Path | None, made_by: str) -> None:
        if folder is None:
            return
        path = Path(folder) / "search.ckpt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise ValueError(
                f"got folder={str(folder)!r}, which cannot be made ({fault.strerror}): give another"
            ) from None
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"got folder={str(folder)!r}, which cannot be written to: give another")
        if not path.exists():
            return
        try:
            kept = torch.load(path, map_location="cpu", weights_only=True)
            theirs = kept["made_by"]
        except Exception as fault:
            raise ValueError(f"cannot read {path} ({type(fault).__name__}); delete it to search anew") from None
        if theirs != made_by:
            mine, other = json.loads(made_by), json.loads(theirs)
            said = "; ".join(
                f"{name} was {other.get(name)}, is {mine[name]}" for name in mine if mine[name] != other.get(name)
            )
            raise ValueError(f"{path} is of another search ({said}): choose another folder, or delete it")
        for name, part in self._parts():
            part.load_state_dict(kept[name])
        self.step, self.objective, self.temperature = kept["step"], kept["objective"], kept["temperature"]

    def _parts(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in ("net", "weights", "architecture")]

    @property
    def _at(self) -> dict[str, Any]:
        return {"step": self.step, "objective": self.objective, "temperature": self.temperature}


def _volumes_of(batch: Batch) -> Tensor:
    x = batch.x
    if not isinstance(x, Tensor) or x.ndim != 5:
        got = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
        raise ValueError(f"got inputs {got}; expected (N, channels, D, H, W): give rows of volumes (channels, D, H, W)")
    return x


def _moved(net: SuperNet, device: str) -> SuperNet:
    try:
        return net.to(device)
    except (AssertionError, RuntimeError) as fault:  # a torch without CUDA asserts
        raise ValueError(f"got device={device!r}, which cannot be used here ({fault}): give another") from None


def _loss_of(net: SuperNet, batch: Batch, choices: Choices, loss: Loss) -> Tensor:
    like = next(net.parameters())
    outputs, y = net(_volumes_of(batch).to(like), choices), batch.y.to(like.device)
    try:
        return loss(outputs, y).mean()
    except (IndexError, RuntimeError) as fault:
        raise ValueError(
            f"the loss refuses targets {tuple(y.shape)} of {y.dtype} for outputs {tuple(outputs.shape)} ({fault}); "
            "expected labels (N, D, H, W) of torch.int64 below num_classes: where some are void, pass a loss that "
            "ignores them"
        ) from None


def _finite(loss: Tensor, where: str) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss became {value} {where}: look for NaN in the data or a batch of void labels alone, or lower lr"
        )
    return value


def _from(loader: EpochLoader, step: int) -> Iterator[Batch]:
    """Batches without end, from this step on."""
    epoch, start = divmod(step, loader.steps)
    while True:
        yield from (batch for _, batch, _ in loader.epoch(epoch, start))
        epoch, start = epoch + 1, 0


def _check(
    warmup: int, epochs: int, lr: float, architecture_lr: float, temperature: tuple[float, float], compared: int | None
) -> None:
    if type(warmup) is not int or not 0 <= warmup < epochs:
        raise ValueError(f"warmup is {warmup!r}; expected a whole number of epochs from 0 to {epochs - 1}")
    for name, rate in (("lr", lr), ("architecture_lr", architecture_lr)):
        if not _is_positive(rate):
            raise ValueError(f"{name} is {rate!r}; expected a positive number: pass one such as 0.01")
    pair = isinstance(temperature, tuple | list) and len(temperature) == 2 and all(map(_is_positive, temperature))
    if not pair or temperature[1] > temperature[0]:
        raise ValueError(f"temperature is {temperature!r}; expected (first, last), positive and not rising")
    if compared is not None and (type(compared) is not int or compared < 2):
        raise ValueError(f"compared is {compared!r}; expected None for all candidates, or at least 2")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")
