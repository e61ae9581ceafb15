"""The loop: governed by the seed, resumed exactly, interrupted safely, the same on one process and on two."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from neuboots import Deterministic, NeuBoots, TrainingConfig
from neuboots.generator import BootstrapGenerator
from neuboots.loading import Batch, EpochLoader, IndexedDataset, load_targets
from neuboots.losses import weighted_mean
from neuboots.methods.neuboots import make_blocks
from neuboots.nets import MLP
from neuboots.training import EpochReport, constant_schedule, describe_callable, train
from neuboots.weights import WeightSchedule

RECIPE = TrainingConfig(epochs=4, batch_size=8, progress=False)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dropout_net() -> nn.Module:
    """Draws random numbers and keeps buffers: both must survive a resume."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


class Augmented(Dataset[Any]):
    """Rows with noise from torch, NumPy and Python, as augmentations draw it."""

    def __init__(self, n: int = 30) -> None:
        self.x, self.targets = rows(n, 4), torch.arange(n) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + float(np.random.rand()) + random.random()
        return self.x[i] + 0.1 * noise, self.targets[i]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class Crash(Exception):
    """Stands for a machine that stops."""


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
            raise Crash
        return self.data[i]


@pytest.mark.parametrize("method", [Deterministic(), NeuBoots(), NeuBoots(resample="step"), NeuBoots.paper()])
@pytest.mark.parametrize("reads", [25, 41, 73, 110])
def test_a_run_that_crashed_resumes_to_the_same_weights(method: Any, reads: int, tmp_path: Path) -> None:
    whole = method.fit(dropout_net, Augmented(), RECIPE).state_dict()
    config = replace(RECIPE, folder=tmp_path, checkpoint_steps=1)
    with pytest.raises(Crash):
        method.fit(dropout_net, CrashAt(Augmented(), reads + 1), config)
    resumed = method.fit(dropout_net, Augmented(), config)
    assert same(resumed.state_dict(), whole)


def test_checkpoints_at_epochs_only_resume_exactly_too(tmp_path: Path) -> None:
    whole = NeuBoots().fit(dropout_net, Augmented(), RECIPE).state_dict()
    config = replace(RECIPE, folder=tmp_path)
    with pytest.raises(Crash):
        NeuBoots().fit(dropout_net, CrashAt(Augmented(), 80), config)
    assert same(NeuBoots().fit(dropout_net, Augmented(), config).state_dict(), whole)
    # a finished run is not repeated: nothing is read but the two rows that show the net an input
    assert same(NeuBoots().fit(dropout_net, CrashAt(Augmented(), 2), config).state_dict(), whole)


SCRIPT = """
import sys, time, torch
sys.path.insert(0, {tests!r})
from test_training import Augmented, dropout_net, RECIPE
from dataclasses import replace
from pathlib import Path
from neuboots import NeuBoots
class Slow(Augmented):
    def __getitem__(self, i):
        time.sleep({delay})
        return super().__getitem__(i)
recipe = replace(RECIPE, folder=Path({folder!r}), checkpoint_steps=1)
torch.save(NeuBoots().fit(dropout_net, Slow(), recipe).state(), {out!r})
"""


def run_script(tmp_path: Path, delay: float) -> "subprocess.Popen[bytes]":
    source = SCRIPT.format(
        tests=str(Path(__file__).parent), folder=str(tmp_path / "run"), out=str(tmp_path / "out.pt"), delay=delay
    )
    return subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE)


def wait_for_checkpoint(path: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 500
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_a_killed_process_resumes_to_the_same_weights(kill: signal.Signals, tmp_path: Path) -> None:
    with run_script(tmp_path, delay=0.05) as process:
        wait_for_checkpoint(tmp_path / "run" / "checkpoint.ckpt", process)
        process.send_signal(kill)
        _, words = process.communicate()
    assert process.returncode != 0
    assert not (tmp_path / "out.pt").exists()
    if kill is signal.SIGINT:
        assert b"training was interrupted; the checkpoint is in" in words
    config = replace(RECIPE, folder=tmp_path / "run", checkpoint_steps=1)
    resumed = NeuBoots().fit(dropout_net, Augmented(), config).state_dict()
    assert same(resumed, NeuBoots().fit(dropout_net, Augmented(), RECIPE).state_dict())


def test_workers_and_ranks_do_not_change_what_is_drawn() -> None:
    alone = NeuBoots().fit(dropout_net, Augmented(), RECIPE).state_dict()
    helped = NeuBoots().fit(dropout_net, Augmented(), replace(RECIPE, num_workers=2)).state_dict()
    assert same(alone, helped)


@pytest.mark.parametrize("method", [Deterministic(), NeuBoots()])
def test_the_callers_random_state_is_left_alone(method: Any) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    method.fit(dropout_net, Hidden(Augmented()), RECIPE)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    config = replace(RECIPE, folder=tmp_path)
    NeuBoots().fit(dropout_net, Augmented(), config)
    for method, other, said in [
        (NeuBoots(), replace(config, seed=1), r"\(seed was 0, is 1\)"),
        (NeuBoots(), replace(config, optimizer=SGD), "optimizer was AdamW"),
        (Deterministic(), config, "what was NeuBoots .*is Plain"),
        (NeuBoots(warmup=1), config, "what was NeuBoots"),
    ]:
        with pytest.raises(ValueError, match=f"was made by another run.*{said}.*choose another folder"):
            method.fit(dropout_net, Augmented(), other)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"cannot read the checkpoint .*checkpoint.ckpt.*delete it"):
        Deterministic().fit(dropout_net, Augmented(), replace(RECIPE, folder=tmp_path))


def test_a_foreign_checkpoint_or_folder_is_named_before_training(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "checkpoint.ckpt")
    with pytest.raises(ValueError, match=r"is not a checkpoint of neuboots; delete it"):
        Deterministic().fit(dropout_net, Augmented(), replace(RECIPE, folder=tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write checkpoints to .*file"):
        Deterministic().fit(dropout_net, Augmented(), replace(RECIPE, folder=tmp_path / "file"))


def test_a_failing_save_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(RECIPE, folder=tmp_path)
    Deterministic().fit(dropout_net, Augmented(), config)
    (tmp_path / "checkpoint.ckpt").unlink()
    calls = 0
    replace_file = os.replace

    def broken(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("disk full")
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        Deterministic().fit(dropout_net, Augmented(), config)
    monkeypatch.undo()
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["at"]["epoch"] == 2
    Deterministic().fit(dropout_net, Augmented(), config)
    after = torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)
    assert after["at"]["epoch"] == 4


def test_validation_figures_are_reported_and_early_stopping_restores_the_best() -> None:
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


def test_early_stopping_resumes_exactly(tmp_path: Path) -> None:
    held_out = TensorDataset(rows(40, 4, seed=2), torch.arange(40) % 3)
    config = replace(RECIPE, epochs=12, optimizer=partial(torch.optim.Adam, lr=0.05), patience=2)
    whole = NeuBoots().fit(dropout_net, Augmented(), config, val_data=held_out).state_dict()
    cut = replace(config, folder=tmp_path)
    with pytest.raises(Crash):
        NeuBoots().fit(dropout_net, CrashAt(Augmented(), 70), cut, val_data=held_out)
    assert same(NeuBoots().fit(dropout_net, Augmented(), cut, val_data=held_out).state_dict(), whole)


def test_the_loop_equals_a_loop_written_out() -> None:
    """The oracle: an ordinary torch loop over the same order of rows."""
    x, y = rows(20, 4), rows(20, 1, seed=1)
    torch.manual_seed(0)
    ours = nn.Linear(4, 1)
    oracle = nn.Linear(4, 1)
    oracle.load_state_dict(ours.state_dict())
    config = TrainingConfig(
        epochs=3, batch_size=6, optimizer=SGD, lr_scheduler=constant_schedule, clip_norm=0.5, progress=False
    )

    def objective(net: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(net(batch.x), batch.y)

    train(ours, TensorDataset(x, y), lambda epoch: objective, config)
    optimizer = SGD(oracle.parameters())
    order = EpochLoader(TensorDataset(x, y), batch_size=6, seed=0)
    for epoch in range(3):
        for _, batch, share in order.epoch(epoch):
            assert share == 1.0
            optimizer.zero_grad()
            F.mse_loss(oracle(x[batch.index]), y[batch.index]).backward()
            nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
            optimizer.step()
    assert same(ours.state_dict(), oracle.state_dict())


def test_every_row_is_seen_once_in_each_epoch_by_all_ranks_together() -> None:
    """22 rows in batches of 4: the last has 2 rows, so that the third of three ranks gets none of it."""
    data = TensorDataset(rows(22, 2), torch.arange(22))
    for world in (1, 2, 3):
        seen: list[int] = []
        weights: dict[int, float] = {}
        for rank in range(world):
            for k, batch, share in EpochLoader(data, batch_size=4, seed=1, rank=rank, world=world).epoch(2):
                if share > 0:
                    seen += batch.index.tolist()
                weights[k] = weights.get(k, 0.0) + share / world
        assert sorted(seen) == list(range(22))
        assert all(total == pytest.approx(1.0) for total in weights.values())


@pytest.mark.parametrize(("n", "sizes"), [(8, [4, 4]), (9, [4, 5]), (10, [4, 4, 2]), (1, [1]), (5, [5])])
def test_a_last_single_row_joins_the_batch_before(n: int, sizes: list[int]) -> None:
    data = TensorDataset(rows(n, 4), torch.arange(n) % 3)
    assert [len(batch.index) for _, batch, _ in EpochLoader(data, batch_size=4, seed=0).epoch(0)] == sizes
    if n > 1:
        Deterministic().fit(dropout_net, data, replace(RECIPE, batch_size=4))  # BatchNorm refuses a single row


def test_a_pass_may_start_in_the_middle() -> None:
    loader = EpochLoader(Augmented(), batch_size=7, seed=0)
    whole = [(k, batch.index.tolist(), batch.x) for k, batch, _ in loader.epoch(3)]
    late = [(k, batch.index.tolist(), batch.x) for k, batch, _ in loader.epoch(3, start=2)]
    assert [part[:2] for part in late] == [part[:2] for part in whole[2:]]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(late, whole[2:], strict=True))


def test_a_stream_gives_the_same_numbers_at_each_pass() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return ((torch.full((2,), float(i)), i) for i in range(10))

    loader = EpochLoader(Stream(), batch_size=3, seed=0, steps_per_epoch=3)
    for _ in range(2):
        for _, batch, _ in loader.epoch(0):
            assert batch.index.tolist() == batch.y.tolist()


class Noisy(IterableDataset[Any]):
    """A stream that draws as it goes."""

    def __init__(self, n: int = 24) -> None:
        self.n = n

    def __iter__(self) -> Any:
        for i in range(self.n):
            yield rows(4, seed=i) + 0.1 * torch.randn(4), i % 3


def test_a_stream_is_governed_by_the_seed_and_resumes_exactly(tmp_path: Path) -> None:
    config = replace(RECIPE, steps_per_epoch=3)
    torch.manual_seed(1)
    whole = NeuBoots().fit(dropout_net, Noisy(), config).state_dict()

    class Cut(Noisy):
        passes = 0

        def __iter__(self) -> Any:
            Cut.passes += 1
            for i, row in enumerate(super().__iter__()):
                if Cut.passes == 4 and i == 20:
                    raise Crash
                yield row

    cut = replace(config, folder=tmp_path, checkpoint_steps=1)
    with pytest.raises(Crash):
        NeuBoots().fit(dropout_net, Cut(), cut)
    torch.manual_seed(2)
    assert same(NeuBoots().fit(dropout_net, Noisy(), cut).state_dict(), whole)


def test_a_stream_that_ends_too_soon_is_said() -> None:
    config = replace(RECIPE, steps_per_epoch=5)
    with pytest.raises(ValueError, match=r"the stream ended after 3 of 5 batches in epoch 1; expected"):
        NeuBoots().fit(dropout_net, Noisy(), config)
    with pytest.raises(ValueError, match="got a stream that gives no row"):
        NeuBoots().fit(dropout_net, Noisy(0), config)


def test_augmented_targets_do_not_disturb_the_blocks() -> None:
    """Targets that are drawn when read: the same blocks, whatever state the caller's generators are in."""

    class Cropped(Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return rows(4, seed=i), torch.randint(0, 3, (4, 4))

    tables = []
    for state in (1, 2):
        torch.manual_seed(state)
        tables.append(make_blocks(Cropped(), 6, seed=0).blocks)  # type: ignore[union-attr]
    assert torch.equal(*tables)


def test_a_subset_of_tensors_is_the_same_as_its_rows() -> None:
    data = TensorDataset(rows(30, 4), torch.arange(30) % 3)
    places = [3, 29, 4, 8, 15, 16, 23, 0, 1, 2]
    direct = EpochLoader(Subset(data, places), batch_size=4, seed=0)
    by_row = EpochLoader(Hidden(Subset(data, places)), batch_size=4, seed=0)
    for (_, a, _), (_, b, _) in zip(direct.epoch(1), by_row.epoch(1), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.index, b.index)


def test_lbfgs_evaluates_its_loss_as_often_as_it_likes() -> None:
    x = rows(40, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    config = TrainingConfig(
        epochs=5, batch_size=40, optimizer=torch.optim.LBFGS, lr_scheduler=constant_schedule, progress=False
    )
    predictor = Deterministic(loss=nn.MSELoss()).fit(lambda: nn.Linear(3, 1), data, config)
    torch.testing.assert_close(predictor.net.weight, torch.ones(1, 3), rtol=1e-3, atol=1e-3)


def test_validation_errors_of_one_logit() -> None:
    x = rows(60, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    reports: list[EpochReport] = []
    config = TrainingConfig(epochs=30, batch_size=20, optimizer=partial(torch.optim.Adam, lr=0.1), progress=False,
                    on_epoch=reports.append)  # fmt: skip
    net = Deterministic(loss=nn.BCEWithLogitsLoss()).fit(lambda: nn.Linear(4, 1), data, config, val_data=data)
    wrong = (net.predict(x, 1).labels != data.tensors[1]).float().mean()
    assert reports[-1].val_metrics["error"] == pytest.approx(float(wrong))
    assert reports[-1].val_metrics["error"] < 0.2


def test_soft_labels_have_a_loss_and_no_error() -> None:
    soft = TensorDataset(rows(12, 4), rows(12, 3, seed=1).softmax(1))
    reports: list[EpochReport] = []
    config = replace(RECIPE, epochs=1, on_epoch=reports.append)
    Deterministic(loss=nn.CrossEntropyLoss(reduction="none")).fit(dropout_net, soft, config, val_data=soft)
    assert set(reports[0].validation) == {"loss"}


def test_targets_are_found_without_reading_the_data() -> None:
    data = CrashAt(Augmented(), 0)
    assert torch.equal(load_targets(data), data.targets)
    assert load_targets(Subset(data, [4, 1])).tolist() == [1, 1]
    assert torch.equal(load_targets(Hidden(Augmented())), Augmented().targets)


class Hidden(Dataset[Any]):
    """A data set that keeps its targets to itself: they are read row by row."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.inner = data

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> Any:
        return self.inner[i]


def test_a_loop_of_ones_own_in_three_lines() -> None:
    """A plain PyTorch loop that we did not write: wrap the data, resample, weight the loss. It learns."""
    x = rows(200, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    torch.manual_seed(0)
    method = NeuBoots.paper()
    g = method.make_generator(MLP(4, 2, widths=(32,)))
    plan = method.make_schedule(g, data, seed=0)
    optimizer = torch.optim.Adam(g.parameters(), lr=0.01)
    loader = DataLoader(IndexedDataset(data), batch_size=32, shuffle=True)
    for epoch in range(15):
        weights = plan.at_epoch(epoch)
        for inputs, labels, index in loader:
            alpha, w = weights(index)
            loss = weighted_mean(F.cross_entropy(g(inputs, alpha), labels, reduction="none"), w)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        assert float((g(x).argmax(1) == data.tensors[1]).float().mean()) > 0.95


def test_fit_minimises_eq_2_6_as_the_own_loop_does() -> None:
    """The method's objective, step by step, against the three lines in a loop over the same rows."""
    data = TensorDataset(rows(30, 4), rows(30, 1, seed=1))
    config = TrainingConfig(epochs=3, batch_size=8, optimizer=SGD, lr_scheduler=constant_schedule, progress=False)
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
                optimizer.step()
        for key, value in oracle.state_dict().items():
            torch.testing.assert_close(fitted[key], value)


DDP = """
import sys, torch
from functools import partial
from pathlib import Path
from torch.utils.data import TensorDataset
from neuboots import *
from neuboots.nets import MLP
g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(51, 4, generator=g), torch.arange(51) % 3)
recipe = Recipe(epochs=3, batch_size=10, optimizer=partial(torch.optim.SGD, lr=.1), progress=False,
                accelerator="cpu", devices=int(sys.argv[1]), strategy=sys.argv[2], folder=Path(sys.argv[4]))
method = {{"paper": NeuBoots.paper(), "step": NeuBoots(redraw="step"), "sample": NeuBoots()}}[sys.argv[3]]
state = method.fit(partial(MLP, 4, 3, widths=(16,)), data, recipe).state()
import os
if os.environ.get("LOCAL_RANK", "0") == "0":
    torch.save(state, sys.argv[4] + "/out.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("resample", ["paper", "step", "sample"])
def test_two_processes_follow_one(resample: str, tmp_path: Path) -> None:
    """gloo on two CPU processes, started by the script itself or forked, with the same global batch of 10."""
    script = tmp_path / "ddp.py"
    script.write_text(DDP.format())
    states = []
    for devices, strategy in ((1, "auto"), (2, "ddp"), (2, "ddp_fork")):
        folder = tmp_path / strategy
        folder.mkdir()
        command = [sys.executable, str(script), str(devices), strategy, resample, str(folder)]
        subprocess.run(command, check=True, timeout=300)
        states.append(torch.load(folder / "out.pt"))
    for other in states[1:]:
        for key, value in states[0].items():
            # 15 steps of single-precision rounding in another order of summation
            torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epochs": 0}, "got epochs=0; expected at least 1"),
        ({"batch_size": 0}, "got batch_size=0"),
        ({"clip_norm": 0.0}, "got clip_norm=0.0"),
        ({"clip_norm": float("nan")}, "got clip_norm=nan"),
        ({"epochs": 1.5}, "got epochs=1.5; expected at least 1, and a whole number"),
        ({"patience": 0}, "got patience=0"),
        ({"checkpoint_steps": -1}, "got checkpoint_steps=-1"),
        ({"steps_per_epoch": 0}, "got steps_per_epoch=0"),
        ({"optimizer": "adam"}, "got optimizer='adam'; expected a function of the parameters"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)])}, "expected a function of the parameters"),
        ({"schedule": None}, "got schedule=None; expected a function such as cosine"),
    ],
)
def test_bad_recipes_get_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainingConfig(**options)


def test_more_bad_calls() -> None:
    with pytest.raises(ValueError, match="got patience=2 without validation data"):
        Deterministic().fit(dropout_net, Augmented(), replace(RECIPE, patience=2))
    with pytest.raises(FloatingPointError, match=r"the loss became (nan|inf).*lower the learning rate"):
        Deterministic(loss=nn.MSELoss()).fit(
            lambda: nn.Linear(4, 1),
            TensorDataset(1e6 * rows(8, 4), rows(8, 1)),
            replace(RECIPE, epochs=200, optimizer=partial(torch.optim.SGD, lr=1e3)),
        )
    frozen = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(ValueError, match="the net has no parameters to train"):
        Deterministic().fit(lambda: frozen, Augmented(), RECIPE)
    plateau = replace(RECIPE, schedule=lambda o, n: torch.optim.lr_scheduler.ReduceLROnPlateau(o))
    with pytest.raises(ValueError, match="got ReduceLROnPlateau, which waits for a figure"):
        Deterministic().fit(dropout_net, Augmented(), plateau)
    with pytest.raises(ValueError, match="got a net; expected a function that makes one"):
        Deterministic().fit(nn.Linear(4, 3), Augmented(), RECIPE)
    with pytest.raises(ValueError, match=r"make_net\(\) gave a NoneType; expected an nn.Module"):
        NeuBoots().fit(lambda: None, Augmented(), RECIPE)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"got a DataLoader; expected the data set itself: give loader.dataset"):
        NeuBoots().fit(dropout_net, DataLoader(Augmented()), RECIPE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got strategy='ddp_spawn'.*expected 'ddp'"):
        Deterministic().fit(dropout_net, Augmented(), replace(RECIPE, strategy="ddp_spawn"))
    with pytest.raises(ValueError, match=r"got a row of type Tensor; expected \(x, y\)"):
        NeuBoots().fit(dropout_net, rows(5, 4), RECIPE)  # type: ignore[arg-type]


def test_what_a_partial_fixes_is_in_its_name() -> None:
    """By keyword or by place; no addresses, which change between runs."""
    by_keyword, by_place = partial(torch.optim.SGD, lr=0.1), partial(pow, 2)
    assert describe_callable(by_keyword) == "SGD [('lr', 0.1)]"
    assert describe_callable(by_place) == "pow 2 []"
    assert describe_callable(partial(map, len)) == "map len []"
    assert describe_callable(by_place) != describe_callable(partial(pow, 3))
