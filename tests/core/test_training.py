"""The training loop: determined by the seed, resumable, interruptible, the same on one process and on two."""

import functools
import io
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _nets import Augmented
from _nets import noise as rows
from rich.console import Console
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from neuboots import ArgumentError, DeepEnsemble, Deterministic, InfluenceBootstrap, NeuBoots, TrainingConfig, training
from neuboots.loading import EpochLoader, load_targets
from neuboots.losses import BrierLoss, as_loss
from neuboots.methods._vmap import StackedNets
from neuboots.methods.neuboots import BootstrapGenerator, make_blocks
from neuboots.nets import MLP
from neuboots.training import (
    EpochReport,
    _catch_interrupt,
    constant_schedule,
    cosine_schedule,
    describe_callable,
    initialize_model,
    mean_validation_metrics,
    prepare_net,
    progress_bar,
    resolve_fit,
    validation_metrics,
)
from neuboots.weights import WeightSchedule

CONFIG = TrainingConfig(epochs=4, batch_size=8, progress=False)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def dropout_net() -> nn.Module:
    """Draws random numbers and keeps buffers: both must survive a resume."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class CrashError(Exception):
    """Stands for a machine that stops."""


FINGERPRINT = 30  # reads of the 30 examples that a checkpoint's description is made from


class CrashAt(Dataset[Any]):
    """Raises at the k-th read."""

    def __init__(self, data: Dataset[Any], reads: int) -> None:
        self.data, self.left = data, reads
        self.targets = data.targets  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise CrashError
        return self.data[i]


@pytest.mark.parametrize("method", [Deterministic(), NeuBoots(), NeuBoots(resample="step"), NeuBoots.paper()])
@pytest.mark.parametrize("reads", [25, 41, 73, 110])
def test_crashed_run_resumes_to_the_same_weights(method: Any, reads: int, tmp_path: Path) -> None:
    whole = method.fit(dropout_net, Augmented(), CONFIG).state_dict()
    config = replace(CONFIG, folder=tmp_path, checkpoint_steps=1)
    with pytest.raises(CrashError):
        method.fit(dropout_net, CrashAt(Augmented(), FINGERPRINT + reads + 1), config)
    resumed = method.fit(dropout_net, Augmented(), config)
    assert same(resumed.state_dict(), whole)


def test_epoch_checkpoints_resume_to_the_same_weights(tmp_path: Path) -> None:
    whole = NeuBoots().fit(dropout_net, Augmented(), CONFIG).state_dict()
    config = replace(CONFIG, folder=tmp_path)
    with pytest.raises(CrashError):
        NeuBoots().fit(dropout_net, CrashAt(Augmented(), FINGERPRINT + 80), config)
    assert same(NeuBoots().fit(dropout_net, Augmented(), config).state_dict(), whole)
    # a finished run is not repeated: nothing is read but the two rows that show the net an input, and the fingerprint
    assert same(NeuBoots().fit(dropout_net, CrashAt(Augmented(), 2 + FINGERPRINT), config).state_dict(), whole)


@pytest.mark.parametrize("fabric_first", [False, True])
def test_one_cpu_needs_no_fabric_and_trains_as_with_it(
    fabric_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(data: Any, config: TrainingConfig, *, with_fabric: bool) -> Any:
        with monkeypatch.context() as patch:
            if with_fabric:
                return NeuBoots().fit(dropout_net, data, replace(config, devices="1"))
            patch.setitem(sys.modules, "lightning_fabric", None)  # an import would raise
            return NeuBoots().fit(dropout_net, data, config)

    config = replace(CONFIG, clip_norm=0.5, checkpoint_steps=1)
    whole = fit(Augmented(), config, with_fabric=True).state_dict()
    config = replace(config, folder=tmp_path)
    with pytest.raises(CrashError):
        fit(CrashAt(Augmented(), FINGERPRINT + 73), config, with_fabric=fabric_first)
    assert same(fit(Augmented(), config, with_fabric=not fabric_first).state_dict(), whole)


SCRIPT = """
import sys, time, torch
sys.path[:0] = {tests!r}
from test_training import Augmented, dropout_net, CONFIG
from dataclasses import replace
from pathlib import Path
from neuboots import NeuBoots
class Slow(Augmented):
    def __getitem__(self, i):
        time.sleep({delay})
        return super().__getitem__(i)
config = replace(CONFIG, folder=Path({folder!r}), checkpoint_steps=1)
torch.save(NeuBoots().fit(dropout_net, Slow(), config).state_dict(), {out!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_killed_process_resumes_to_the_same_weights(kill: signal.Signals, tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "out.pt"
    tests = [str(path) for path in Path(__file__).parents[:2]]
    source = SCRIPT.format(tests=tests, folder=str(folder), out=str(out), delay=0.05)
    with subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE) as process:
        while not (folder / "checkpoint.ckpt").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(kill)
        _, words = process.communicate()
    assert process.returncode != 0
    assert not out.exists()
    if kill is signal.SIGINT:
        assert str(folder).encode() in words
    config = replace(CONFIG, folder=folder, checkpoint_steps=1)
    resumed = NeuBoots().fit(dropout_net, Augmented(), config).state_dict()
    assert same(resumed, NeuBoots().fit(dropout_net, Augmented(), CONFIG).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        NeuBoots(),
        DeepEnsemble(num_members=2, vectorized=False),
        DeepEnsemble(num_members=2, vectorized=True),
        InfluenceBootstrap(layers="all"),
    ],
)
def test_run_killed_at_random_moments_resumes_to_the_same_weights(method: Any, tmp_path: Path) -> None:
    """A forked process is killed again and again, also while it writes, until it has finished."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    config = replace(CONFIG, epochs=6)
    whole = method.fit(make, Augmented(), config).state_dict()
    config = replace(config, folder=tmp_path / "run", checkpoint_steps=1)
    moments = torch.rand(25, generator=torch.Generator().manual_seed(0)).tolist()
    for moment in moments:
        if (process := os.fork()) == 0:
            try:
                method.fit(make, Augmented(), config)
            finally:
                os._exit(0)
        time.sleep(0.05 + 0.25 * moment)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert same(method.fit(make, Augmented(), config).state_dict(), whole)
    left = [path.name for path in config.folder.rglob("*") if path.is_file()]
    assert set(left) == {"checkpoint.ckpt"}


def test_weights_independent_of_workers() -> None:
    alone = NeuBoots().fit(dropout_net, Augmented(), CONFIG).state_dict()
    helped = NeuBoots().fit(dropout_net, Augmented(), replace(CONFIG, num_workers=2)).state_dict()
    assert same(alone, helped)


class Noisy(IterableDataset[Any]):
    """A stream that draws as it goes."""

    def __init__(self, n: int = 24) -> None:
        self.n = n

    def __iter__(self) -> Any:
        for i in range(self.n):
            yield rows(4, seed=i) + 0.1 * torch.randn(4), i % 3


RATE = 0.1


def sgd_of_a_global(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def closure_loss(power: float) -> Any:
    return lambda outputs, y: F.cross_entropy(outputs, y, reduction="none") ** power


class PowerLoss:
    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none") ** self.power


class Act(nn.Module):
    """A net with an activation, a dropout rate, a fixed scale, and a frozen layer."""

    def __init__(self, act: Any = F.relu, p: float = 0.1, scale: float = 1.0, frozen: float = 1.0) -> None:
        super().__init__()
        self.act, self.p, self.calls, self.log = act, p, 0, list[int]()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.body.weight = nn.Parameter(frozen * rows(8, 4), requires_grad=False)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        return self.head(F.dropout(self.act(self.scale * self.body(x)), self.p, self.training))


class ActInCode(Act):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(x)))


ActInCode.__name__ = "Act"


def noise(std: float) -> Any:
    def decorate(forward: Any) -> Any:
        @functools.wraps(forward)
        def noisy(net: nn.Module, x: Tensor) -> Any:
            return forward(net, x + std * torch.randn_like(x) if net.training else x)

        return noisy

    return decorate


def rate_of_the_class(rate: float) -> Any:
    """A net whose dropout rate only training shows."""

    class Act(nn.Linear):
        RATE = rate

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, self.RATE, self.training))

    return lambda: Act(4, 3)


def noise_of_a_decorator(std: float) -> Any:
    class Act(nn.Linear):
        @noise(std)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return lambda: Act(4, 3)


class ScaledAct:
    """An activation whose noise only training shows."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def __call__(self, x: Tensor) -> Tensor:
        x = self.options.f(x)
        return x + self.options.noise * torch.randn_like(x) if torch.is_grad_enabled() else x


def double_relu(x: Tensor) -> Tensor:
    return 2 * F.relu(x)


class Numbered(Dataset[Any]):
    """Rows that are not in memory."""

    def __init__(self, shift: float = 0.0, targets: Tensor | None = None) -> None:
        self.shift = shift
        if targets is not None:
            self.targets = targets

    def __len__(self) -> int:
        return 70

    def __getitem__(self, i: int) -> Any:
        return rows(4, seed=i) + self.shift, getattr(self, "targets", torch.arange(70) % 3)[i]


X, Y = rows(20, 4), torch.arange(20) % 3
RUN: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "model": Act, "data": (X, Y), "val_data": (X, Y), "patience": 3,
                       "optimizer": SGD, "lr_scheduler": constant_schedule}  # fmt: skip
OTHER_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one number": ({}, {"data": (X + 1e-6 * (X[7, 2] == X), Y)}, "data.all inputs"),
    "a NaN": ({}, {"val_data": (X.where(X[3, 1] != X, torch.nan), Y)}, "val_data.all inputs"),
    "targets": ({}, {"data": (X, Y.flip(0))}, "data.all targets"),
    "type": ({}, {"data": (X.double(), Y)}, "data.inputs"),
    "validation": ({}, {"val_data": (X + 1, Y)}, "val_data.inputs"),
    "rows": ({"data": Numbered()}, {"data": Numbered(0.5)}, "data.inputs"),
    "one target": (
        {"data": Numbered(targets=torch.arange(70) % 3)},
        {"data": Numbered(targets=(torch.arange(70) % 3).where(torch.arange(70) != 34, 0))},
        "data.all targets",
    ),
    "stream": ({"data": Noisy(24)}, {"data": [(rows(4, seed=i), i % 3) for i in range(24)]}, "data"),
    "lambda": (
        {},
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.06, momentum=0.9)},
        "groups.0..lr was 0.05, is 0.06",
    ),
    "decay": ({}, {"optimizer": partial(SGD, weight_decay=0.1)}, "groups.0..weight_decay was 0, is 0.1"),
    "tensor": (
        {"optimizer": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1))},
        {"optimizer": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.2))},
        "groups.0..lr",
    ),
    "schedule": (
        {"lr_scheduler": lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t)},
        {"lr_scheduler": lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.8**t)},
        "lr_scheduler...rates",
    ),
    "loss lambda": ({"loss": closure_loss(1)}, {"loss": closure_loss(2)}, "method.loss.power. was 1, is 2"),
    "loss object": ({"loss": PowerLoss(1)}, {"loss": PowerLoss(2)}, "method.loss.power was 1, is 2"),
    "loss function": (
        {"loss": lambda outputs, y: F.cross_entropy(outputs, y, reduction="none")},
        {"loss": lambda outputs, y: F.cross_entropy(outputs, y, reduction="none") + 1},
        "method.loss",
    ),
    "loss weight": ({}, {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 1.0]))}, "method.loss.weight was None"),
    "activation": ({}, {"model": partial(Act, F.gelu)}, "model.act was .*relu, is .*gelu"),
    "lambda activation": (
        {"model": partial(Act, lambda x: x.relu())},
        {"model": partial(Act, lambda x: x.sigmoid())},
        "model.act",
    ),
    "code": ({}, {"model": ActInCode}, "model"),
    "dropout rate": ({}, {"model": partial(Act, p=0.2)}, "model.p was 0.1, is 0.2"),
    "buffer": ({}, {"model": partial(Act, scale=2.0)}, "model.scale"),
    "class attribute": (
        {"model": rate_of_the_class(0.1)},
        {"model": rate_of_the_class(0.2)},
        "model.RATE was 0.1, is 0.2",
    ),
    "decorator": (
        {"model": noise_of_a_decorator(0.1)},
        {"model": noise_of_a_decorator(0.2)},
        "model.std. was 0.1, is 0.2",
    ),
    "namespace": (
        {"model": partial(Act, scale=1.0, act=ScaledAct(SimpleNamespace(f=F.relu, noise=0.1)))},
        {"model": partial(Act, scale=1.0, act=ScaledAct(SimpleNamespace(f=F.relu, noise=0.2)))},
        "model.act.options.noise was 0.1, is 0.2",
    ),
    "frozen weights": ({}, {"model": partial(Act, frozen=2.0)}, "model.body.weight"),
}


def fit_run(folder: Path, options: dict[str, Any], **config: Any) -> Any:
    run = RUN | options
    config = {"folder": folder, **{name: run[name] for name in ("patience", "optimizer", "lr_scheduler")}, **config}
    streams = {"steps_per_epoch": 3 if isinstance(run["data"], IterableDataset) else None}
    options = replace(CONFIG, epochs=2, **config, **streams)  # type: ignore[assignment]
    return Deterministic(run["loss"]).fit(run["model"], run["data"], options, val_data=run["val_data"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_checkpoint_of_another_run_raises(name: str, tmp_path: Path) -> None:
    first, second, difference = OTHER_RUNS[name]
    before = torch.get_rng_state()
    fit_run(tmp_path, first)
    fit_run(tmp_path, first)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ArgumentError, match=f"folder=.*{difference}") as caught:
        fit_run(tmp_path, second)
    assert caught.value.name == "folder"


def test_checkpoint_of_other_globals_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit_run(tmp_path, {"optimizer": sgd_of_a_global})
    monkeypatch.setitem(globals(), "RATE", 0.2)
    with pytest.raises(ArgumentError, match="optimizer.RATE. was 0.1, is 0.2") as caught:
        fit_run(tmp_path, {"optimizer": sgd_of_a_global})
    assert "; optimizer().groups[0].lr was 0.1, is 0.2" in str(caught.value)
    net = Act(double_relu)
    fit_run(tmp_path / "net", {"model": net})
    monkeypatch.setattr(double_relu, "__code__", (lambda x: 3 * F.relu(x)).__code__)
    with pytest.raises(ArgumentError, match="model.act"):
        fit_run(tmp_path / "net", {"model": net})


def test_checkpoint_of_other_constants_of_a_module_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = ModuleType("options_of_a_user")
    options.RATE = 0.1
    monkeypatch.setitem(globals(), "options", options)
    net = Act(lambda x: F.dropout(x, options.RATE) if torch.is_grad_enabled() else x)
    fit_run(tmp_path, {"model": net})
    options.RATE = 0.2
    with pytest.raises(ArgumentError, match="model.act.options.RATE. was 0.1, is 0.2"):
        fit_run(tmp_path, {"model": net})


def test_checkpoint_of_a_net_with_another_function_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No attribute and no code of the net differs, but a function of a library that it calls."""
    fit_run(tmp_path, {"model": partial(Act, p=0.0)})
    monkeypatch.setattr(F, "dropout", lambda x, p, training: x + 1)
    with pytest.raises(ArgumentError, match="folder=.*loss"):
        fit_run(tmp_path, {"model": partial(Act, p=0.0)})


class OwnRandomness(Numbered):
    """Draws numbers that no seed determines."""

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.random.default_rng().normal(size=4)).float(), i % 3


def test_unchanged_run_resumes(tmp_path: Path) -> None:
    """The same module after Ctrl-C, code on other lines, closures that keep a log, other workers, random data."""
    log: list[float] = []

    def interrupt(report: EpochReport) -> None:
        raise KeyboardInterrupt

    def logged(outputs: Tensor, y: Tensor) -> Tensor:
        log.append(0.0)
        return F.cross_entropy(outputs, y, reduction="none")

    net, reports = Act(lambda x: x.relu()), list[EpochReport]()
    first = {"model": net, "data": Numbered(), "loss": logged}
    with pytest.raises(KeyboardInterrupt):
        fit_run(tmp_path / "a", first, on_epoch=interrupt)
    net.act = lambda x: x.relu()
    fit_run(tmp_path / "a", first, on_epoch=reports.append, progress=True, checkpoint_steps=2, devices="1")
    fit_run(tmp_path / "b", {"data": OwnRandomness()})
    fit_run(tmp_path / "b", {"data": OwnRandomness()}, on_epoch=reports.append)
    assert [report.epoch for report in reports] == [1]


def test_attributes_named_like_hooks_are_described(tmp_path: Path) -> None:
    """Also those of modules that torch.fx makes."""

    def model(hooks: list[int]) -> Any:
        net: Any = torch.fx.symbolic_trace(nn.Linear(4, 3))
        net.my_hooks = hooks
        return net

    fit_run(tmp_path, {"model": lambda: model([1])})
    with pytest.raises(ArgumentError, match=r"folder=.*model.my_hooks was \(1\), is \(2\)"):
        fit_run(tmp_path, {"model": lambda: model([2])})


def test_members_of_another_run_raise(tmp_path: Path) -> None:
    """Members that are trained together, sequentially, and as replicates of a calibration."""
    config = replace(CONFIG, epochs=1, folder=tmp_path / "a")
    for vectorized in (True, False):
        config = replace(CONFIG, epochs=1, folder=tmp_path / str(vectorized))
        method = DeepEnsemble(num_members=2, vectorized=vectorized)
        for data in ((X, Y), (X, Y)):
            method.fit(lambda: MLP(4, 3, widths=(4,)), data, config)
        with pytest.raises(ArgumentError, match="folder=.*data.all inputs"):
            method.fit(lambda: MLP(4, 3, widths=(4,)), (X + 1, Y), config)
        with pytest.raises(ArgumentError, match=r"folder=.*method\[0\].loss.label_smoothing was 0, is 0.1"):
            replace(method, loss=nn.CrossEntropyLoss(label_smoothing=0.1)).fit(
                lambda: MLP(4, 3, widths=(4,)), (X, Y), config
            )


def test_code_is_not_compared_between_versions_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = OTHER_RUNS["loss function"]
    fit_run(tmp_path, first)
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    monkeypatch.setattr(training._Run, "_probe_loss", lambda run: None)
    fit_run(tmp_path, second)


def test_options_without_effect_are_not_compared() -> None:
    paths = training.describe(CONFIG, "config", training=True)
    names = {"epochs", "batch_size", "optimizer", "lr_scheduler", "seed", "clip_norm", "patience", "steps_per_epoch"}
    assert {re.split(r"[.(]", path)[1] for path in paths if path != "config"} == names | {"precision"}


def test_differences_are_listed_values_first() -> None:
    """Six of them, and the number of the others."""
    run: Any = object.__new__(training._Run)
    for count, more in ((6, ""), (7, " and 1 more")):
        new = {"model.act": "relu"} | {f"config.{k}": str(k) for k in range(count - 1)}
        run.description = new | {"other": "1"}
        old = {key: text + "0" for key, text in new.items()} | {"model.act": "g#" + "1" * 16}
        found = run._compare_description({"description": old, "python": sys.implementation.cache_tag})
        shown = [f"config.{k} was {old[f'config.{k}']}, is {k}" for k in range(count - 1)]
        shown += [f"model.act was {old['model.act']}, is {new['model.act']}"] * (count == 6)
        assert found == f"a checkpoint of the same run ({'; '.join(shown)}{more})"


def test_schedule_is_described_by_its_rates() -> None:
    """Without a change of the optimizer, also of a learning rate in a tensor."""
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=rate, capturable=True)
    found = [
        training._describe_schedule(lambda o, n: LambdaLR(o, lambda step: 0.5**step), optimizer, steps)
        for steps in (3, 4, 5)
    ]
    names = ["lr_scheduler().rates", "lr_scheduler()"]
    assert [found[0][name] for name in names] == ["0.5, 0.25, 0.125", "LambdaLR"]
    assert all(re.fullmatch("0.5, 0.25, 0.125, … [0-9a-f]{16}", each[names[0]]) for each in found[1:])
    assert found[1][names[0]] != found[2][names[0]]
    assert all(path.startswith("lr_scheduler()") for path in found[0])
    assert len(found[0]) > 2
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    assert training._describe_schedule(lambda o, n: ReduceLROnPlateau(o), optimizer, 3) == {}  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("size", [0, 1, 5, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_checksum_is_that_of_zlib(size: int) -> None:
    content = bytes(torch.randint(0, 256, (size + 3,), generator=torch.Generator().manual_seed(0)).tolist())
    file = io.BytesIO(content)
    crc = zlib.crc32(content[:size])
    assert training._checksum(file, size) == training._MAGIC + crc.to_bytes(4, "big")
    assert file.read() == content[size:]


def test_initial_weights_are_not_compared(tmp_path: Path) -> None:
    frozen = partial(torch.optim.SGD, lr=0.0)
    found = [fit_run(tmp_path, {"optimizer": frozen, "model": nn.Linear(4, 3)}).state_dict() for _ in range(2)]
    assert same(*found)


def test_workers_count_for_streams_only(tmp_path: Path) -> None:
    fit_run(tmp_path / "stream", {"data": Noisy()})
    with pytest.raises(ArgumentError, match=r"folder=.*\(num_workers was 0 in 1 processes, is 2 in 1"):
        fit_run(tmp_path / "stream", {"data": Noisy()}, num_workers=2)
    fit_run(tmp_path / "rows", {})
    fit_run(tmp_path / "rows", {}, num_workers=2)


def test_validation_data_count_with_early_stopping_only(tmp_path: Path) -> None:
    """Rows that draw random numbers of their own are not compared."""
    fit_run(tmp_path / "a", {"val_data": (X, Y), "patience": None})
    fit_run(tmp_path / "a", {"val_data": (X + 1, Y), "patience": None})
    for _ in range(2):
        fit_run(tmp_path / "b", {"val_data": OwnRandomness(), "patience": 3})


class NoisyOutputs(nn.Linear):
    """Draws random numbers in evaluation mode, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(3)


def test_loss_of_the_examples_is_compared_within_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        fit_run(tmp_path, {"model": lambda: NoisyOutputs(4, 3)})
    run: Any = object.__new__(training._Run)
    run.probe = training.Batch(torch.arange(5), X[:5], Y[:5], 0)
    for old, new, same_run in ((1.0, 1.001, True), (1.0, 1.01, False), (0.0, 5e-6, True), (0.0, 5e-5, False)):
        monkeypatch.setattr(training._Run, "_probe_loss", lambda run, new=new: new)
        assert (run._compare_loss(old) == "") == same_run
    assert run._compare_loss(None) == ""


def test_values_of_a_checkpoint_are_limited() -> None:
    def nested(value: Any, depth: int, kind: Callable[[Any], Any]) -> Any:
        return value if depth == 0 else kind(nested(value, depth - 1, kind))

    for kind in (lambda value: [value], lambda value: {0: value}, lambda value: (value,)):
        training._check_values(nested("x", 50, kind), 1000)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="too many"):
            training._check_values(nested("x", 51, kind), 1000)  # type: ignore[arg-type]
    for value in ([1, 2.0, None, True], {"a": 1, "b": 2}, {1, 2, 3, 4}):
        training._check_values(value, 5)
        with pytest.raises(ValueError, match="too many"):
            training._check_values(value, 4)
    training._check_values([b"x", 1j, torch.float32, torch.device("cpu"), torch.ones(3), torch.ones(4)[::2]], 100)
    wide = torch.zeros(3).expand(5, 3)
    for tensor in (torch.ones(2).to_sparse(), torch.ones(2, device="meta"), wide, [{"a": wide}], {"a": [wide]}):
        with pytest.raises(ValueError, match="tensor"):
            training._check_values(tensor, 100)
    for other in (CrashError(), [CrashError()], {"a": (CrashError,)}):
        with pytest.raises(ValueError, match="a value of"):
            training._check_values(other, 100)


def test_values_that_replace_others_are_like_them() -> None:
    """Entries are compared to a depth, numbers are numbers, and NaN is accepted where there was one."""
    nan = torch.tensor([torch.nan, 1.0])
    alike = [
        (nan, nan),
        (torch.ones(2), nan),
        ({"a": [1]}, {"a": [1, 2]}),
        (1, 2.5),
        (None, 1.0),
        ([1], (2,)),
        ("x", "y"),
    ]
    for ours, theirs in alike:
        training._check_like(theirs, ours if not isinstance(ours, Tensor) else nan, "x", 1)
    others = [
        (torch.ones(2), nan),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": "x"}),
        ([1, 2], [1]),
        (1, math.nan),
        ("x", 1),
    ]
    for ours, theirs in others:
        with pytest.raises(ValueError, match="^here"):
            training._check_like(theirs, ours, "here", 1)
    with pytest.raises(ValueError, match=r"here\['a'\] "):
        training._check_like({"a": [1, 2]}, {"a": [1]}, "here", 2)
    training._check_like({"b": 1}, {"a": 1}, "here", 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda good: {"net": {**good["net"], "0.bias": torch.zeros(1)}}, r"net\['0.bias'\]"),
        (lambda good: {"state": {**good["state"], "waited": "x"}}, r"state\['waited'\]"),
        (
            lambda good: {"lr_scheduler": {**good["lr_scheduler"], "base_lrs": [1.0, 2.0]}},
            r"lr_scheduler\['base_lrs'\]",
        ),
        (lambda good: {"optimizer": {**good["optimizer"], "param_groups": []}}, "param_groups has"),
        (
            lambda good: {"optimizer": {**good["optimizer"], "state": {**good["optimizer"]["state"], 0: {}}}},
            "state of the optimizer has",
        ),
    ],
)
def test_error_names_the_part_of_a_checkpoint(
    change: Callable[[dict[str, Any]], dict[str, Any]], text: str, interrupted: tuple[Path, Callable[[], Any]]
) -> None:
    path, resume = interrupted
    good = torch.load(path, weights_only=True)
    write_checkpoint(path, good | change(good))
    with pytest.raises(ArgumentError, match=f"ValueError: {text}"):
        resume()


def test_compressed_checkpoint_raises(interrupted: tuple[Path, Callable[[], Any]], tmp_path: Path) -> None:
    path, resume = interrupted
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    training._append_checksum(packed)
    path.write_bytes(packed.read_bytes())
    with pytest.raises(ArgumentError, match="ValueError: it is compressed"):
        resume()


def interrupt_first(report: EpochReport) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def interrupted(tmp_path: Path) -> tuple[Path, Callable[[], dict[str, Tensor]]]:
    """A checkpoint after the first epoch, and a function that resumes."""
    config = replace(CONFIG, folder=tmp_path, epochs=2)
    with pytest.raises(KeyboardInterrupt):
        Deterministic().fit(dropout_net, (X, Y), replace(config, on_epoch=interrupt_first))
    return tmp_path / "checkpoint.ckpt", lambda: Deterministic().fit(dropout_net, (X, Y), config).state_dict()


def write_checkpoint(path: Path, content: Any) -> None:
    torch.save(content, path)
    training._append_checksum(path)


def test_damaged_checkpoint_raises(interrupted: tuple[Path, Callable[[], Any]]) -> None:
    """Every flipped bit is noticed, and every missing byte."""
    path, resume = interrupted
    data = path.read_bytes()
    rng = torch.Generator().manual_seed(0)
    places = torch.randint(0, 8 * len(data), (100,), generator=rng).tolist()
    damaged = [data[: b // 8] + bytes([data[b // 8] ^ 1 << b % 8]) + data[b // 8 + 1 :] for b in places]
    for content in [*damaged, b"", data[:-1], data[: len(data) // 2], data + b"x", b"not a checkpoint"]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="damaged|incomplete"):
            training._read_checkpoint(path)
    path.write_bytes(damaged[0])
    with pytest.raises(ArgumentError) as raised:
        resume()
    assert raised.value.name == "folder"
    path.write_bytes(data)
    resume()


class RunsCode:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def deep(value: Any, times: int) -> Any:
    for _ in range(times):
        value = [value, value]
    return value


def changes(part: dict[Any, Any], *values: Any) -> list[dict[Any, Any]]:
    """Each entry replaced by each value, each one missing, and one more."""
    replaced = [part | {key: value} for key in part for value in values]
    return [*replaced, *({k: v for k, v in part.items() if k != key} for key in part), part | {"more": 1}]


WIDE = torch.zeros(1).expand(1 << 40)


def crafted_weights(good: dict[str, Any]) -> list[Any]:
    name, weight = next(iter(good["net"].items()))
    others = (weight * torch.nan, weight / 0, weight[:1], weight.double(), weight.to_sparse(), WIDE)
    return changes(good["net"], {"x": 1}) + [good["net"] | {name: value} for value in others]


def crafted_states(good: dict[str, Any]) -> list[Any]:
    numbers = {"epoch": (-1, 3, 0.5, True), "step": (-1, 4, 1.0), "waited": (None, torch.nan), "loss_sum": (None, "x")}
    replaced = [good["state"] | {key: value} for key, values in numbers.items() for value in values]
    best = [good["state"] | {"best": value} for value in (7, {}, good["net"] | {"0.bias": torch.zeros(1)})]
    return [*changes(good["state"], {"x": 1}), *replaced, *best]


def crafted_optimizers(good: dict[str, Any]) -> list[Any]:
    optimizer = good["optimizer"]
    (group,), state = optimizer["param_groups"], optimizer["state"]
    options = {"betas": [(0.5,), (0.5, "x")], "lr": ["x", torch.nan], "amsgrad": [True, 0], "eps": [10**20, None]}
    groups: list[Any] = [[group | {key: value}] for key, values in options.items() for value in values]
    groups += [[group | {"params": [0]}], [group, group], [], 7, *([other] for other in changes(group))]
    values = (None, state[0]["exp_avg"][:1], state[0]["exp_avg"] * torch.nan, "x", WIDE)
    firsts = [state[0] | {"exp_avg": value} for value in values] + changes(state[0])
    firsts += [state[0] | {"step": value} for value in (torch.tensor(-1.0), torch.tensor(4.0), torch.ones(2))]
    return [optimizer | {"param_groups": value} for value in groups] + [
        optimizer | {"state": state | {0: first}} for first in firsts
    ]


CRAFTED: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "net": crafted_weights,
    "state": crafted_states,
    "optimizer": crafted_optimizers,
    "lr_scheduler": lambda good: changes(good["lr_scheduler"], {"x": 1}, [1.0, 2.0], torch.nan, None),
    "description": lambda good: [*changes(good["description"], 7)[:3], {7: "x"}],
    "python": lambda good: [None, deep("x", 49)],
    "loss": lambda good: [7, "x", 1 + good["loss"], torch.ones(2)],
}


@pytest.mark.parametrize("part", CRAFTED)
def test_crafted_checkpoint_raises_and_runs_nothing(
    part: str, interrupted: tuple[Path, Callable[[], Any]], tmp_path: Path
) -> None:
    path, resume = interrupted
    good, runs = torch.load(path, weights_only=True), RunsCode(tmp_path / "mark")
    values = [7, [1], {}, {"a": WIDE}, {"a": runs}, {"a": deep(0, 40)}, {"a": [torch.Size([1])]}, runs]
    contents = [good | {part: value} for value in [*values, *CRAFTED[part](good)]]
    contents += [{key: value for key, value in good.items() if key != part}]
    contents += [None, [good], good | {"more": 1}, runs] if part == "loss" else []
    for content in contents:
        write_checkpoint(path, content)
        with pytest.raises(ArgumentError) as caught:
            resume()
        assert caught.value.name == "folder", content
    assert not (tmp_path / "mark").exists()
    write_checkpoint(path, good)
    assert same(resume(), Deterministic().fit(dropout_net, (X, Y), replace(CONFIG, epochs=2)).state_dict())


def test_checkpoint_that_is_no_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.ckpt"
    for make in (path.mkdir, partial(os.mkfifo, path), partial(path.symlink_to, "/dev/zero")):
        make()
        with pytest.raises(ArgumentError, match="folder"):
            Deterministic().fit(dropout_net, (X, Y), replace(CONFIG, folder=tmp_path))
        path.rmdir() if path.is_dir() else path.unlink()


def test_checkpoint_folder_that_is_a_file_raises_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Deterministic().fit(dropout_net, CrashAt(Augmented(), 2), replace(CONFIG, folder=tmp_path / "file"))


def test_failed_save_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(report: EpochReport) -> None:
        if report.epoch == 1:
            monkeypatch.setattr(os, "replace", lambda source, target: (_ for _ in ()).throw(OSError("disk full")))

    config = replace(CONFIG, folder=tmp_path)
    with pytest.raises(OSError, match="disk full"):
        Deterministic().fit(dropout_net, Augmented(), replace(config, on_epoch=fill_disk))
    monkeypatch.undo()
    for epoch in (2, 4):
        assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["state"]["epoch"] == epoch
        Deterministic().fit(dropout_net, Augmented(), config)


def test_early_stopping_restores_the_best_weights() -> None:
    reports: list[EpochReport] = []
    data = TensorDataset(rows(24, 4), torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1)))
    held_out = TensorDataset(rows(40, 4, seed=2), torch.arange(40) % 3)
    config = TrainingConfig(
        epochs=60, batch_size=8, optimizer=partial(torch.optim.Adam, lr=0.05), patience=3, progress=False,
        on_epoch=reports.append,
    )  # fmt: skip
    predictor = NeuBoots().fit(dropout_net, data, config, val_data=held_out)
    losses = [report.val_metrics["loss"] for report in reports]
    assert len(reports) < 60  # labels are noise: it stopped
    assert all(0 <= report.val_metrics["error"] <= 1 for report in reports)
    best = min(losses)
    assert losses.index(best) == len(losses) - 4  # three epochs without a better one, then no more
    # the weights are those of the best epoch: its loss, computed afresh from the mean over replicates
    x, y = held_out.tensors
    assert float(F.cross_entropy(predictor.predict(x, 1).mean, y)) == pytest.approx(best, rel=1e-5)


class GrowingDecay(torch.optim.lr_scheduler.LRScheduler):
    """Doubles the weight decay at each step."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 1e-6 * 2**self.last_epoch
        return [group["lr"] for group in self.optimizer.param_groups]


def test_schedule_of_the_weight_decay_resumes_to_the_same_weights(tmp_path: Path) -> None:
    config = replace(CONFIG, lr_scheduler=lambda optimizer, steps: GrowingDecay(optimizer))
    whole = Deterministic().fit(dropout_net, (X, Y), config).state_dict()
    cut = replace(config, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Deterministic().fit(dropout_net, (X, Y), replace(cut, on_epoch=interrupt_first))
    assert same(Deterministic().fit(dropout_net, (X, Y), cut).state_dict(), whole)


def test_early_stopping_resumes_to_the_same_weights(tmp_path: Path) -> None:
    held_out = TensorDataset(rows(40, 4, seed=2), torch.arange(40) % 3)
    config = replace(CONFIG, epochs=12, optimizer=partial(torch.optim.Adam, lr=0.05), patience=2)
    whole = NeuBoots().fit(dropout_net, Augmented(), config, val_data=held_out).state_dict()
    cut = replace(config, folder=tmp_path)
    with pytest.raises(CrashError):
        NeuBoots().fit(dropout_net, CrashAt(Augmented(), FINGERPRINT + 70), cut, val_data=held_out)
    assert same(NeuBoots().fit(dropout_net, Augmented(), cut, val_data=held_out).state_dict(), whole)


def test_ranks_see_every_example_once() -> None:
    """22 rows in batches of 4: the last has 2 rows, so that the third of three ranks gets none of it."""
    data = TensorDataset(rows(22, 2), torch.arange(22))
    for world in (1, 2, 3):
        seen: list[int] = []
        weights: dict[int, float] = {}
        for rank in range(world):
            for k, batch, share in EpochLoader(data, batch_size=4, seed=1, rank=rank, world_size=world).epoch(2):
                if share > 0:
                    seen += batch.index.tolist()
                weights[k] = weights.get(k, 0.0) + share / world
        assert sorted(seen) == list(range(22))
        assert all(total == pytest.approx(1.0) for total in weights.values())


@pytest.mark.parametrize(("n", "sizes"), [(8, [4, 4]), (9, [4, 5]), (10, [4, 4, 2]), (1, [1]), (5, [5])])
def test_last_single_example_joins_the_previous_batch(n: int, sizes: list[int]) -> None:
    data = TensorDataset(rows(n, 4), torch.arange(n) % 3)
    assert [len(batch.index) for _, batch, _ in EpochLoader(data, batch_size=4, seed=0).epoch(0)] == sizes
    if n > 1:
        Deterministic().fit(dropout_net, data, replace(CONFIG, batch_size=4))  # BatchNorm refuses a single row


def test_stream_resumes_to_the_same_weights(tmp_path: Path) -> None:
    config = replace(CONFIG, steps_per_epoch=3)
    torch.manual_seed(1)
    whole = NeuBoots().fit(dropout_net, Noisy(), config).state_dict()

    class Cut(Noisy):
        passes = 0

        def __iter__(self) -> Any:
            Cut.passes += 1
            for i, row in enumerate(super().__iter__()):
                if Cut.passes == 4 and i == 20:
                    raise CrashError
                yield row

    cut = replace(config, folder=tmp_path, checkpoint_steps=1)
    with pytest.raises(CrashError):
        NeuBoots().fit(dropout_net, Cut(), cut)
    torch.manual_seed(2)
    assert same(NeuBoots().fit(dropout_net, Noisy(), cut).state_dict(), whole)


def test_stream_that_is_too_short_raises() -> None:
    with pytest.raises(ArgumentError, match="steps_per_epoch=5"):
        NeuBoots().fit(dropout_net, Noisy(), replace(CONFIG, steps_per_epoch=5))
    with pytest.raises(ArgumentError, match="data"):
        NeuBoots().fit(dropout_net, Noisy(0), replace(CONFIG, steps_per_epoch=5))
    with pytest.raises(ArgumentError, match="steps_per_epoch"):
        NeuBoots().fit(dropout_net, Noisy(), CONFIG)


def test_subset_of_tensors_matches_its_examples() -> None:
    data = TensorDataset(rows(30, 4), torch.arange(30) % 3)
    places = [3, 29, 4, 8, 15, 16, 23, 0, 1, 2]
    direct = EpochLoader(Subset(data, places), batch_size=4, seed=0)
    by_row = EpochLoader(list(Subset(data, places)), batch_size=4, seed=0)
    for (_, a, _), (_, b, _) in zip(direct.epoch(1), by_row.epoch(1), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.index, b.index)


def test_lbfgs() -> None:
    x = rows(40, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    config = TrainingConfig(
        epochs=5, batch_size=40, optimizer=torch.optim.LBFGS, lr_scheduler=constant_schedule, progress=False
    )
    predictor = Deterministic(loss=nn.MSELoss()).fit(lambda: nn.Linear(3, 1), data, config)
    torch.testing.assert_close(predictor.net.weight, torch.ones(1, 3), rtol=1e-3, atol=1e-3)


def test_validation_error_of_binary_logit() -> None:
    x = rows(60, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    reports: list[EpochReport] = []
    config = TrainingConfig(epochs=30, batch_size=20, optimizer=partial(torch.optim.Adam, lr=0.1), progress=False,
                    on_epoch=reports.append)  # fmt: skip
    net = Deterministic(loss=nn.BCEWithLogitsLoss()).fit(lambda: nn.Linear(4, 1), data, config, val_data=data)
    wrong = (net.predict(x, 1).labels != data.tensors[1]).float().mean()
    assert reports[-1].val_metrics["error"] == pytest.approx(float(wrong))
    assert reports[-1].val_metrics["error"] < 0.2
    pixels = validation_metrics(as_loss(nn.BCEWithLogitsLoss()), rows(3, 1, 5), torch.ones(3, 1, 5))
    assert float(pixels["error"]) == pytest.approx(float((rows(3, 1, 5) < 0).float().mean()))


def test_soft_labels_have_no_validation_error() -> None:
    soft = TensorDataset(rows(12, 4), rows(12, 3, seed=1).softmax(1))
    reports: list[EpochReport] = []
    config = replace(CONFIG, epochs=1, on_epoch=reports.append)
    Deterministic(loss=nn.CrossEntropyLoss(reduction="none")).fit(dropout_net, soft, config, val_data=soft)
    assert set(reports[0].val_metrics) == {"loss"}


def test_load_targets_without_reading_inputs() -> None:
    data = CrashAt(Augmented(), 0)
    assert torch.equal(load_targets(data), data.targets)
    assert load_targets(Subset(data, [4, 1])).tolist() == [1, 1]
    assert torch.equal(load_targets(list(Augmented())), Augmented().targets)


def test_fit_matches_custom_loop() -> None:
    """The method's objective, step by step, against an ordinary torch loop over the same rows."""
    data = TensorDataset(rows(30, 4), rows(30, 1, seed=1))
    config = TrainingConfig(
        epochs=3, batch_size=8, optimizer=SGD, lr_scheduler=constant_schedule, clip_norm=0.5, progress=False
    )
    for method in (NeuBoots.paper(nn.MSELoss()), NeuBoots(loss=nn.MSELoss())):
        net = MLP(4, 1, widths=(16,))
        start = {key: value.clone() for key, value in net.state_dict().items()}
        fitted = method.fit(lambda net=net: net, data, config).state_dict()
        oracle = MLP(4, 1, widths=(16,))
        oracle.load_state_dict(start)
        g = BootstrapGenerator(oracle)
        plan = WeightSchedule(method.weight_distribution, make_blocks(data, 16), seed=0, resample=method.resample)
        optimizer = SGD(g.parameters())
        for epoch in range(3):
            weights = plan.at_epoch(epoch)
            for _, batch, _ in EpochLoader(data, batch_size=8, seed=0).epoch(epoch):
                alpha, w = weights(batch.index)
                residuals = g(batch.x, alpha) - batch.y
                optimizer.zero_grad()
                (w.float()[:, None] * residuals.square()).mean().backward()
                nn.utils.clip_grad_norm_(g.parameters(), 0.5)
                optimizer.step()
        for key, value in oracle.state_dict().items():
            torch.testing.assert_close(fitted[key], value)


DDP = """
import os, sys, torch
from functools import partial
from pathlib import Path
from neuboots import NeuBoots, StandardBootstrap, TrainingConfig
from neuboots.nets import MLP
x = torch.randn(51, 4, generator=torch.Generator().manual_seed(0))
config = TrainingConfig(epochs=3, batch_size=10, optimizer=partial(torch.optim.SGD, lr=.1), progress=False,
                        accelerator="cpu", devices=int(sys.argv[1]), strategy=sys.argv[2], folder=Path(sys.argv[4]))
method = {
    "paper": NeuBoots.paper(),
    "step": NeuBoots(resample="step"),
    "sample": NeuBoots(),
    "bootstrap": StandardBootstrap(num_members=2, vectorized=False),
}[sys.argv[3]]
state = method.fit(partial(MLP, 4, 3, widths=(16,)), (x, torch.arange(51) % 3), config).state_dict()
if os.environ.get("LOCAL_RANK", "0") == "0":
    torch.save(state, sys.argv[4] + "/out.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["paper", "step", "sample", "bootstrap"])
def test_two_processes_match_one(method: str, tmp_path: Path) -> None:
    """gloo on two CPU processes, started by the script itself or forked, with the same global batch of 10."""
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    states = []
    for devices, strategy in ((1, "auto"), (2, "ddp"), (2, "ddp_fork")):
        folder = tmp_path / strategy
        folder.mkdir()
        command = [sys.executable, str(script), str(devices), strategy, method, str(folder)]
        subprocess.run(command, check=True, timeout=300)
        states.append(torch.load(folder / "out.pt"))
    for other in states[1:]:
        for key, value in states[0].items():
            # 15 steps of single-precision rounding in another order of summation
            torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5)


class FailsAt(Augmented):
    """Fails at the k-th read in a process other than the one that made it, of one rank."""

    def __init__(self, fail: Callable[[], Any], reads: int, rank: int = 0) -> None:
        super().__init__()
        self.fail, self.left, self.rank, self.maker = fail, reads, rank, os.getpid()

    def __getitem__(self, i: int) -> Any:
        if os.getpid() != self.maker and int(os.environ.get("LOCAL_RANK", "0")) == self.rank:
            self.left -= 1
            if self.left == 0:
                self.fail()
        return super().__getitem__(i)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_to_read() -> None:
    raise OSError("disk gone")


def raise_error(error: Exception) -> None:
    raise error


FORKED = replace(CONFIG, accelerator="cpu", strategy="ddp_fork", epochs=2)
WRONG = ArgumentError("shape", (3, 4), "two", hint="pass two")


@pytest.mark.parametrize(
    ("fail", "kind", "text"),
    [
        (kill_self, RuntimeError, "ended in process 0 .*SIGKILL.*{path} is at epoch 1, step 2: the same call resumes"),
        (fail_to_read, RuntimeError, "^training ended in process 0 .OSError: disk gone.; the checkpoint {path} is at"),
        (partial(raise_error, WRONG), ArgumentError, "expected two: pass two$"),
        (partial(raise_error, FloatingPointError("NaN in row 3")), FloatingPointError, "^NaN in row 3$"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt, "{path}"),
    ],
    ids=["killed", "raised", "argument", "floating", "Ctrl-C"],
)
def test_failure_of_a_forked_process_is_one_error_and_the_run_resumes(
    fail: Callable[[], Any], kind: type[Exception], text: str, tmp_path: Path
) -> None:
    config = replace(FORKED, folder=tmp_path, checkpoint_steps=1)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(kind, match=text.format(path=tmp_path / "checkpoint.ckpt")) as caught:
        Deterministic().fit(dropout_net, FailsAt(fail, FINGERPRINT + 18), config)
    if isinstance(caught.value, ArgumentError):
        assert (caught.value.name, caught.value.value) == ("shape", "(3, 4)")
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is before
    resumed: list[Any] = []
    thread = threading.Thread(target=lambda: resumed.append(Deterministic().fit(dropout_net, Augmented(), config)))
    thread.start()  # signals belong to the main thread
    thread.join()
    assert same(
        resumed[0].state_dict(), Deterministic().fit(dropout_net, Augmented(), replace(CONFIG, epochs=2)).state_dict()
    )


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (None, "; there is no checkpoint, since TrainingConfig has no folder"),
        (Path.unlink, "there is no checkpoint in {folder} yet"),
        (partial(Path.write_bytes, data=b"x"), "{folder}/checkpoint.ckpt cannot be read .it is incomplete"),
    ],
)
def test_failure_says_what_is_saved(damage: Any, text: str, tmp_path: Path) -> None:
    def fail() -> None:
        if damage is not None:
            damage(tmp_path / "checkpoint.ckpt")
        raise OSError("a\nb" + 300 * "c")

    config = replace(FORKED, folder=None if damage is None else tmp_path, checkpoint_steps=1)
    with pytest.raises(RuntimeError, match=text.format(folder=tmp_path)) as caught:
        Deterministic().fit(dropout_net, FailsAt(fail, (0 if damage is None else FINGERPRINT) + 18), config)
    assert "OSError: a bccc" in str(caught.value)
    assert "c" * 200 not in str(caught.value)


def test_ctrl_c_reaches_forked_processes_once(tmp_path: Path) -> None:
    """The first one makes them write a checkpoint and end, however often it comes."""
    parent = os.getpid()

    def press() -> None:
        for process in (parent, os.getpid()):
            os.kill(process, signal.SIGINT)

    config = replace(FORKED, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt, match="checkpoint.ckpt"):
        Deterministic().fit(dropout_net, FailsAt(press, FINGERPRINT + 18), config)
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["state"]["epoch"] == 0
    whole = Deterministic().fit(dropout_net, Augmented(), replace(CONFIG, epochs=2)).state_dict()
    assert same(Deterministic().fit(dropout_net, Augmented(), config).state_dict(), whole)


def test_two_forked_processes_train_as_one(tmp_path: Path) -> None:
    """With a last batch of 3 rows; reports have the means of both, and one process writes."""

    def net() -> nn.Module:
        return MLP(4, 3, widths=(8,))

    def write(report: EpochReport) -> None:
        with (tmp_path / "reports").open("a") as file:
            print(report.epoch, report.loss, report.val_metrics["loss"], file=file)

    data = (rows(19, 4), torch.arange(19) % 3)
    config = replace(CONFIG, epochs=2, optimizer=SGD, on_epoch=write, patience=2)
    two = replace(config, accelerator="cpu", devices=2, strategy="ddp_fork", folder=tmp_path)
    states = [Deterministic().fit(net, data, each, val_data=(X, Y)).state_dict() for each in (config, two)]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)  # rounding in another order of sums
    lines = [[*map(float, line.split())] for line in (tmp_path / "reports").read_text().splitlines()]
    assert [line[0] for line in lines] == [0, 1, 0, 1]
    assert lines[2:] == [pytest.approx(line, rel=1e-4) for line in lines[:2]]
    with pytest.raises(ArgumentError, match="config.seed was 0, is 1"):
        Deterministic().fit(net, data, replace(two, seed=1), val_data=(X, Y))


@pytest.mark.parametrize("fail", [kill_self, fail_to_read])
def test_failed_worker_names_the_checkpoint(fail: Callable[[], Any], tmp_path: Path) -> None:
    config = replace(CONFIG, folder=tmp_path, num_workers=2)
    with pytest.raises(RuntimeError, match=r"worker.*checkpoint.ckpt is at epoch 2, step [0-9]+: the same"):
        Deterministic().fit(dropout_net, FailsAt(fail, 28), replace(config, checkpoint_steps=1))
    resumed = Deterministic().fit(dropout_net, Augmented(), config).state_dict()
    assert same(resumed, Deterministic().fit(dropout_net, Augmented(), CONFIG).state_dict())


@pytest.mark.slow
def test_failed_process_ends_the_others_and_the_next_run_resumes(tmp_path: Path) -> None:
    """Two forked processes: one is killed, ends, raises, or the user presses Ctrl-C."""
    parent = os.getpid()
    faults: dict[str, tuple[Callable[[], Any], type[BaseException]]] = {
        "killed": (kill_self, RuntimeError),
        "ended": (lambda: os._exit(0), RuntimeError),
        "raised": (fail_to_read, RuntimeError),
        "Ctrl-C": (lambda: os.kill(parent, signal.SIGINT) or time.sleep(0.5), KeyboardInterrupt),  # type: ignore[func-returns-value]
    }
    config = replace(CONFIG, accelerator="cpu", devices=2, strategy="ddp_fork")
    whole = NeuBoots().fit(dropout_net, Augmented(), config).state_dict()
    for rank, name in [(0, "killed"), (1, "killed"), (0, "ended"), (1, "raised"), (1, "Ctrl-C")]:
        fail, kind = faults[name]
        folder = tmp_path / f"{name}-{rank}"
        # 30 reads of the fingerprint, 15 of each epoch
        with pytest.raises(kind, match=f"{folder.name}/checkpoint.ckpt") as caught:
            NeuBoots().fit(dropout_net, FailsAt(fail, 30 + 15 + 4, rank), replace(config, folder=folder))
        assert kind is KeyboardInterrupt or "Traceback" not in str(caught.value)
        assert multiprocessing.active_children() == []
        resumed = NeuBoots().fit(dropout_net, Augmented(), replace(config, folder=folder))
        assert same(resumed.state_dict(), whole)
        assert [path.name for path in folder.iterdir()] == ["checkpoint.ckpt"]
    with pytest.raises(RuntimeError, match="no checkpoint"):
        NeuBoots().fit(dropout_net, FailsAt(kill_self, 8), replace(config, folder=tmp_path / "none"))
    with pytest.raises(ArgumentError, match="data.inputs") as wrong:
        NeuBoots().fit(dropout_net, Numbered(), replace(config, folder=tmp_path / "killed-0"))
    assert wrong.value.name == "folder"


KILLED = """
import os, signal, sys, torch
from functools import partial
from pathlib import Path
from neuboots import NeuBoots, TrainingConfig
from neuboots.nets import MLP
class Rows(torch.utils.data.Dataset):
    reads = 0
    def __len__(self): return 12
    def __getitem__(self, i):
        self.reads += 1  # at least 12 for the fingerprint, 6 for each epoch
        if self.reads == 12 + 3 * 6 + 4 and os.environ.get("LOCAL_RANK", "0") == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 3
config = TrainingConfig(epochs=4, batch_size=4, progress=False, accelerator="cpu", devices=2, strategy="ddp",
                        folder=Path(sys.argv[1]))
state = NeuBoots().fit(partial(MLP, 4, 3, widths=(8,)), Rows(), config).state_dict()
if os.environ.get("LOCAL_RANK", "0") == "0":
    torch.save(state, Path(sys.argv[1]).with_suffix(".pt"))
"""


@pytest.mark.slow
def test_killed_process_of_a_script_ends_the_other_and_the_next_run_resumes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    for folder, rank in (("whole", "none"), ("first", "0"), ("second", "1")):
        command = [sys.executable, str(script), str(tmp_path / folder), rank]
        if rank != "none":
            failed = subprocess.run(command, timeout=300, capture_output=True, text=True)
            assert failed.returncode != 0
            assert re.search(rf"{folder}/checkpoint.ckpt is at epoch [2-4], step 0: the same call", failed.stderr)
            command[-1] = "none"
        subprocess.run(command, check=True, timeout=300)
        assert same(torch.load(tmp_path / f"{folder}.pt"), torch.load(tmp_path / "whole.pt"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("clip_norm", float("nan")),
        ("steps_per_epoch", 0),
        ("seed", 0.5),
        ("optimizer", "adam"),
        ("optimizer", torch.optim.SGD([torch.zeros(1, requires_grad=True)])),
        ("lr_scheduler", None),
        ("epochs", None),
        ("batch_size", None),
    ],
)
def test_wrong_option_raises(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        TrainingConfig(**{name: value})
    assert caught.value.name == name


PLATEAU = replace(CONFIG, lr_scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("patience", lambda: Deterministic().fit(dropout_net, Augmented(), replace(CONFIG, patience=2))),
        ("model", lambda: Deterministic().fit(nn.Linear(4, 3).requires_grad_(False), Augmented(), CONFIG)),
        ("lr_scheduler", lambda: Deterministic().fit(dropout_net, Augmented(), PLATEAU)),
        ("model", lambda: NeuBoots().fit(lambda: None, Augmented(), CONFIG)),
        ("model", lambda: NeuBoots().fit(3, Augmented(), CONFIG)),
        ("config", lambda: NeuBoots().fit(dropout_net, Augmented(), {"epochs": 3})),
        ("strategy", lambda: Deterministic().fit(dropout_net, Augmented(), replace(CONFIG, strategy="ddp_spawn"))),
        ("data", lambda: NeuBoots().fit(dropout_net, rows(5, 4), CONFIG)),
        ("data", lambda: NeuBoots().fit(dropout_net, [torch.zeros(4)] * 5, CONFIG)),
        ("val_data", lambda: NeuBoots().fit(dropout_net, Augmented(), CONFIG, val_data=rows(5, 4))),
    ],
)
def test_wrong_argument_of_fit_raises(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.name == name


@pytest.mark.parametrize("clip_norm", [None, 1e30])
def test_diverging_loss_raises(clip_norm: float | None) -> None:
    data = TensorDataset(1e6 * rows(8, 4), rows(8, 1))
    config = replace(CONFIG, epochs=200, optimizer=partial(torch.optim.SGD, lr=1e3), clip_norm=clip_norm)
    with pytest.raises(FloatingPointError, match="the loss became (nan|inf) in epoch"):
        Deterministic(loss=nn.MSELoss()).fit(lambda: nn.Linear(4, 1), data, config)


# -- the arguments of fit ------------------------------------------------------------------------------


def test_fit_of_module_trains_it_in_place_from_its_weights() -> None:
    net, twin = dropout_net(), dropout_net()
    twin.load_state_dict(net.state_dict())
    predictor = Deterministic().fit(net, Augmented(), CONFIG)
    assert predictor.net is net
    assert same(predictor.state_dict(), Deterministic().fit(lambda: twin, Augmented(), CONFIG).state_dict())


def test_fit_of_arrays_and_loaders_matches_dataset() -> None:
    x, y = rows(20, 4), torch.arange(20) % 3
    config = replace(CONFIG, batch_size=8)
    states = [
        Deterministic().fit(dropout_net, data, config, val_data=data).state_dict()
        for data in (TensorDataset(x, y), (x, y), (x.numpy(), y.numpy()), DataLoader(TensorDataset(x, y), batch_size=8))
    ]
    assert all(same(states[0], state) for state in states[1:])


def test_fit_uses_the_batch_size_of_a_batch_sampler() -> None:
    batches = BatchSampler(SequentialSampler(range(20)), 7, drop_last=False)
    inputs = training.resolve_fit(MLP(4, 3), DataLoader(TensorDataset(X, Y), batch_sampler=batches))
    assert inputs.config.batch_size == 7


def test_fit_uses_the_collate_function_of_a_loader() -> None:
    lengths = [3, 5, 4, 2]
    data = [(torch.ones(length, 2), i % 2) for i, length in enumerate(lengths)]

    def collate(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        xs, ys = zip(*examples, strict=True)
        return nn.utils.rnn.pad_sequence(list(xs), batch_first=True).mean(1), torch.tensor(ys)

    predictor = NeuBoots().fit(nn.Linear(2, 2), DataLoader(data, batch_size=2, collate_fn=collate), CONFIG)  # type: ignore[arg-type]
    assert predictor.predict(torch.ones(3, 2), 2).samples.shape == (2, 3, 2)


def test_members_of_a_module_are_reinitialized_copies() -> None:
    net = dropout_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    predictor = DeepEnsemble(num_members=2).fit(net, Augmented(), CONFIG)
    assert same(net.state_dict(), before)
    first, second = (member.state_dict() for member in predictor.nets)
    assert not torch.equal(first["0.weight"], second["0.weight"])

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    with pytest.raises(ArgumentError, match="scale"):
        DeepEnsemble(num_members=2).fit(Scaled(), Augmented(), CONFIG)


def test_members_have_new_initial_weights() -> None:
    """Those of all layers, by the method that torch's layers have, public or not."""
    net = nn.ModuleDict({"linear": nn.Linear(4, 3), "attention": nn.MultiheadAttention(4, 2)})
    copied = training._copy_and_reset(net)
    old, new = net.state_dict(), copied.state_dict()
    drawn = [name for name in old if "weight" in name]
    assert len(drawn) == 3
    assert not any(torch.equal(new[name], old[name]) for name in drawn)
    net["scale"] = nn.ParameterList([nn.Parameter(torch.ones(3))])
    with pytest.raises(ArgumentError, match="scale.0") as caught:
        training._copy_and_reset(net)
    assert caught.value.name == "model"


def test_training_returns_its_net_and_describes_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a bar that begins where the run resumes, with the mean loss of all members."""
    bars: list[tuple[Any, ...]] = []
    texts: list[str] = []
    reports: list[EpochReport] = []

    @contextmanager
    def record(title: str, total: int, *, enabled: bool, done: int) -> Iterator[Callable[[str], None]]:
        bars.append((title, total, enabled, done))
        yield texts.append

    monkeypatch.setattr(training, "progress_bar", record)
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)  # one CPU needs none
    nets = StackedNets([nn.Linear(4, 1), nn.Linear(4, 1)])
    x, y = rows(10, 4), rows(10, 1, seed=1)

    def objective(net: nn.Module, batch: training.Batch) -> Tensor:
        return (net(batch.x)[..., 0] - batch.y[..., 0]).square().mean(1).sum()

    frozen = partial(torch.optim.SGD, lr=0.0)
    for progress in (True, False):
        config = TrainingConfig(
            epochs=2, batch_size=5, optimizer=frozen, progress=progress, on_epoch=reports.append, accelerator="cpu"
        )
        found = training.train(
            nets, TensorDataset(x, y), lambda epoch: objective, config, title="two nets", seeds=[0, 1]
        )
        assert found is nets
    assert bars == [("training", 4, True, 0), ("training", 4, False, 0)]
    mean = float((nets(x, shared_input=True) - y).detach().square().mean())
    assert [text.split("  loss ")[0] for text in texts[:4]] == ["two nets  epoch 1/2"] * 2 + ["two nets  epoch 2/2"] * 2
    assert [report.loss for report in reports] == pytest.approx([mean] * 4)
    assert {report.title for report in reports} == {"two nets"}
    assert all(report.val_metrics == {} for report in reports)


def test_progress_begins_where_a_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    original = training.progress_bar

    def record(*args: Any, **options: Any) -> Any:
        done.append(options["done"])
        return original(*args, **options)

    monkeypatch.setattr(training, "progress_bar", record)
    config = replace(CONFIG, folder=tmp_path, checkpoint_steps=1)
    with pytest.raises(CrashError):  # in the third step of the second epoch, of four
        Deterministic().fit(dropout_net, CrashAt(Augmented(), FINGERPRINT + 2 + 30 + 17), config)
    Deterministic().fit(dropout_net, Augmented(), config)
    assert done == [0, 6]


def test_equal_losses_are_no_progress() -> None:
    reports: list[EpochReport] = []
    config = replace(CONFIG, epochs=9, patience=2, optimizer=partial(torch.optim.SGD, lr=0.0), on_epoch=reports.append)
    Deterministic().fit(lambda: nn.Linear(4, 3), (X, Y), config, val_data=(X, Y))
    assert len(reports) == 3


def test_loss_of_a_single_step_is_that_of_the_batch() -> None:
    reports: list[EpochReport] = []
    net = nn.Linear(4, 3)
    config = replace(CONFIG, epochs=1, batch_size=20, optimizer=partial(torch.optim.SGD, lr=0.0))
    Deterministic().fit(net, (X, Y), replace(config, on_epoch=reports.append))
    assert reports[0].loss == pytest.approx(float(F.cross_entropy(net(X), Y).detach()))


def test_workers_and_batches_of_a_loader_are_used() -> None:
    data = TensorDataset(X, Y)
    found = resolve_fit(nn.Linear(4, 3), DataLoader(data, batch_size=7, num_workers=1)).config
    assert (found.batch_size, found.num_workers) == (7, 1)


def test_lazy_layers_are_initialized_before_training() -> None:
    found = Deterministic().fit(lambda: nn.LazyLinear(3), (X, Y), CONFIG)
    assert found.predict(X, 1).mean.shape == (20, 3)


def test_describe_callable() -> None:
    """By keyword or by place; no addresses, which change between runs."""
    assert describe_callable(CrashError("an object without a name")) == "CrashError"
    by_keyword, by_place = partial(torch.optim.SGD, lr=0.1), partial(pow, 2)
    assert describe_callable(by_keyword) == "SGD [('lr', 0.1)]"
    assert describe_callable(by_place) == "pow 2 []"
    assert describe_callable(partial(map, len)) == "map len []"
    assert describe_callable(by_place) != describe_callable(partial(pow, 3))


def test_progress_bar_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    for place in ("rich.get_console", "rich.progress.get_console"):
        monkeypatch.setattr(place, lambda: console)
    with progress_bar("[red]a[/red] \x1b]0;x\x07", 2) as step:
        step("[link=http://a]b[/link] [/x]\u202e")
    lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", out.getvalue())
    assert any(line.startswith("[red]a[/red] \\x1b]0;x\\x07") for line in lines)
    assert any(line.startswith("[link=http://a]b[/link] [/x]\\u202e") for line in lines)


@pytest.mark.parametrize("done", [0, 5])
def test_progress_bar_estimates_after_the_first_step(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [0.0], io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, get_time=lambda: now[0])
    for place in ("rich.get_console", "rich.progress.get_console"):
        monkeypatch.setattr(place, lambda: console)
    with progress_bar("slow", done + 4, done=done) as step:
        now[0] = 120.0
        step("slow")
        now[0] = 240.0
        step("slow")
    assert f"{done + 2}/{done + 4}" in out.getvalue()
    assert "0:04:00" in out.getvalue()  # two more of two minutes each; what was done before took no time


# -- parts of the loop ---------------------------------------------------------------------------------


def test_learning_rates() -> None:
    assert TrainingConfig().optimizer([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"] == 1e-3
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    for make, expected in (
        (cosine_schedule, lambda k: 0.2 * (1 + math.cos(math.pi * k / 10))),
        (constant_schedule, lambda k: 0.4),
    ):
        optimizer.param_groups[0]["lr"] = 0.4
        single = make(optimizer, 1)  # of one step
        optimizer.step()
        single.step()
        assert single.get_last_lr()[0] == pytest.approx(expected(10), abs=1e-12)
        optimizer.param_groups[0]["lr"] = 0.4
        scheduler = make(optimizer, 10)
        for k in range(11):
            assert scheduler.get_last_lr()[0] == pytest.approx(expected(k), abs=1e-12)
            optimizer.step()
            scheduler.step()


def test_reports_have_means_of_losses() -> None:
    """A net that does not learn: batches of 4, 4 and 3 rows have the means of their rows."""
    net, x, y = nn.Linear(4, 1), rows(11, 4), rows(11, 1, seed=1)
    held_out = TensorDataset(rows(10, 4, seed=2), rows(10, 1, seed=3))
    reports: list[EpochReport] = []
    frozen = partial(torch.optim.SGD, lr=0.0)
    config = TrainingConfig(epochs=2, batch_size=4, optimizer=frozen, progress=False, on_epoch=reports.append)
    loss = nn.MSELoss()
    began = time.monotonic()
    Deterministic(loss=loss).fit(net, (x, y), config, val_data=held_out)
    elapsed = time.monotonic() - began
    losses = (net(x) - y).detach().square()[:, 0]
    for k, report in enumerate(reports):
        order = [batch.index for _, batch, _ in EpochLoader(TensorDataset(x, y), batch_size=4, seed=0).epoch(k)]
        assert sorted(len(index) for index in order) == [3, 4, 4]
        assert report.loss == pytest.approx(sum(float(losses[index].mean()) for index in order) / 3)
        val_loss = (net(held_out.tensors[0]) - held_out.tensors[1]).detach().square().mean()
        assert report.val_metrics == pytest.approx({"loss": float(val_loss)})
        assert (report.epoch, report.epochs, report.title) == (k, 2, "")
    assert 0 < sum(report.seconds for report in reports) <= elapsed


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_gradients_are_clipped(clip_norm: float | None) -> None:
    net, data = nn.Linear(4, 1), (rows(8, 4), 100 + rows(8, 1))
    before = torch.cat([p.detach().flatten().clone() for p in net.parameters()])
    sgd = partial(torch.optim.SGD, lr=1.0)
    config = TrainingConfig(epochs=1, optimizer=sgd, clip_norm=clip_norm, progress=False)
    Deterministic(loss=nn.MSELoss()).fit(net, data, config)
    moved = (torch.cat([p.detach().flatten() for p in net.parameters()]) - before).norm()
    assert float(moved) == pytest.approx(0.1, rel=1e-4) if clip_norm else float(moved) > 10


@pytest.mark.parametrize(("checkpoint_steps", "saves"), [(None, 2), (3, 4)])
def test_number_of_checkpoints(
    checkpoint_steps: int | None, saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of four steps: after steps 3 and 6, and at both ends."""
    count, save = [0], training._SingleCPU.save

    def counting(*args: Any) -> None:
        count[0] += 1
        save(*args)

    monkeypatch.setattr(training._SingleCPU, "save", counting)
    config = replace(CONFIG, epochs=2, batch_size=4, folder=tmp_path, checkpoint_steps=checkpoint_steps)
    Deterministic(loss=nn.MSELoss()).fit(nn.Linear(4, 1), (rows(16, 4), rows(16, 1)), config)
    assert count == [saves]


def test_prepared_net_is_the_net_or_a_copy() -> None:
    net, x = nn.Linear(4, 3), rows(7, 4)
    inputs = resolve_fit(net, (x, torch.arange(7) % 3), CONFIG)
    same_net, example = prepare_net(inputs)
    assert same_net is net
    assert bool(torch.isin(example, x).all())
    wrapped = resolve_fit(nn.DataParallel(net), (x, torch.arange(7) % 3), CONFIG)
    assert prepare_net(wrapped)[0] is net
    copied, _ = prepare_net(inputs, copy=True)
    assert copied is not net
    assert torch.equal(copied(x), net(x))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(ignore_index=2), BrierLoss()], ids=str)
def test_validation_metrics_of_classes(loss: Any) -> None:
    output, y = rows(9, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    counted = y != 2 if isinstance(loss, nn.CrossEntropyLoss) else torch.ones(9, dtype=torch.bool)
    found = validation_metrics(as_loss(loss), output, y)
    wrong = (output.argmax(1) != y)[counted].float().mean()
    assert float(found["error"]) == pytest.approx(float(wrong))
    per_example = as_loss(loss)(output, y)[counted]
    assert float(found["loss"]) == pytest.approx(float(per_example.mean()))
    outputs = torch.stack([output, -output])
    both = [validation_metrics(as_loss(loss), each, y) for each in outputs]
    means = mean_validation_metrics(as_loss(loss), outputs, y)
    assert {name: float(value) for name, value in means.items()} == pytest.approx(
        {name: float(both[0][name] + both[1][name]) / 2 for name in ("loss", "error")}
    )
    assert mean_validation_metrics(as_loss(loss), outputs[:1], y) == both[0]


def test_validation_metrics_of_numbers_have_no_error() -> None:
    assert validation_metrics(as_loss(nn.MSELoss()), rows(5, 1), rows(5, 1, seed=1)).keys() == {"loss"}


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    nets = [initialize_model(lambda: nn.Linear(4, 3), seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(nets[0].weight, nets[1].weight)
    assert not torch.equal(nets[0].weight, nets[2].weight)


def test_second_interrupt_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with _catch_interrupt() as interrupted:
        assert not interrupted.is_set()
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with _catch_interrupt():
        pass
    assert signal.getsignal(signal.SIGINT) is before
    found: list[bool] = []

    def elsewhere() -> None:  # signals belong to the main thread
        with _catch_interrupt() as event:
            found.append(event.is_set())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]
