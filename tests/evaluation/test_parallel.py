"""Parallel jobs with a cache, and the fingerprint of their settings."""

import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from neuboots import NeuBoots, TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.evaluation._parallel import (
    cached_result,
    check_repeated_fit,
    fingerprint,
    make_reference_net,
    run_jobs,
    student_t_interval,
)
from neuboots.serialization import ArtifactError

# -- jobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
def test_run_jobs_returns_results_in_order(num_workers: int) -> None:
    weights = torch.arange(12.0).reshape(3, 4)  # captured by a closure
    results = run_jobs(lambda k: float(weights[k].sum()), 3, num_workers=num_workers, progress=False)
    assert results == [6.0, 22.0, 38.0]


def test_workers_are_processes_with_one_thread() -> None:
    seen = run_jobs(lambda k: [os.getpid(), torch.get_num_threads()], 4, num_workers=2, progress=False)
    assert os.getpid() not in {pid for pid, _ in seen}
    assert {threads for _, threads in seen} == {1}


def test_another_joblib_backend_runs_the_jobs() -> None:
    with joblib.parallel_config(backend="threading"):
        seen = run_jobs(lambda k: os.getpid(), 3, num_workers=2, progress=False)
    assert set(seen) == {os.getpid()}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_interrupted_run_resumes_with_missing_jobs(tmp_path: Path, num_workers: int) -> None:
    def job(k: int) -> dict[str, int]:
        with (tmp_path / f"ran-{k}").open("a") as log:
            log.write("x")
        if k == 2 and not (tmp_path / "repaired").exists():
            raise RuntimeError("broken")
        return {"k": k}

    options: dict[str, Any] = {
        "num_workers": num_workers,
        "folder": tmp_path / "jobs",
        "settings": {"key": "a"},
        "progress": False,
    }
    run_jobs(job, 2, **options)
    with pytest.raises(RuntimeError, match="broken"):
        run_jobs(job, 3, **options)
    (tmp_path / "repaired").touch()
    assert run_jobs(job, 3, **options) == [{"k": 0}, {"k": 1}, {"k": 2}]
    assert (tmp_path / "ran-0").read_text() == (tmp_path / "ran-1").read_text() == "x"
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == [
        *(f"job-000{k}.json" for k in range(3)),
        "key.json",
    ]


@pytest.mark.parametrize("damage", ["", "{", "[1, 2"])
def test_damaged_result_is_computed_again(tmp_path: Path, damage: str) -> None:
    run_jobs(lambda k: k, 3, folder=tmp_path, progress=False)
    (tmp_path / "job-0001.json").write_text(damage)
    done: list[int] = []
    assert run_jobs(lambda k: done.append(k) or k, 3, folder=tmp_path, progress=False) == [0, 1, 2]  # type: ignore[func-returns-value]
    assert done == [1]


def test_results_are_json_with_and_without_folder(tmp_path: Path) -> None:
    results = [run_jobs(lambda k: {1: (k,)}, 2, folder=f, progress=False) for f in (None, tmp_path, tmp_path)]
    assert results[0] == results[1] == results[2] == [{"1": [0]}, {"1": [1]}]
    with pytest.raises(TypeError, match="Tensor"):
        run_jobs(lambda k: torch.ones(1), 1, progress=False)


def test_folder_of_other_settings_is_rejected(tmp_path: Path) -> None:
    run_jobs(lambda k: k, 1, folder=tmp_path, settings={"key": "a"}, progress=False)
    with pytest.raises(ArgumentError, match="folder"):
        run_jobs(lambda k: k, 1, folder=tmp_path, settings={"key": "b"}, progress=False)
    (tmp_path / "key.json").unlink()
    with pytest.raises(ArgumentError, match="folder"):
        run_jobs(lambda k: k, 1, folder=tmp_path, settings={"key": "a"}, progress=False)
    with pytest.raises(ArgumentError, match="num_workers"):
        run_jobs(lambda k: k, 1, num_workers=0, progress=False)


def test_cached_result_is_computed_once_and_removes_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "round.json"

    def compute(folder: Path | None) -> dict[str, int]:
        assert folder == tmp_path / "round"
        folder.mkdir()
        return {"value": 1}

    assert cached_result(file, compute) == cached_result(file, lambda folder: {}) == json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["round.json"]
    assert cached_result(None, lambda folder: {"folder": folder}) == {"folder": None}


# -- fingerprint ---------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """Rows that are not in memory."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.targets = [0] * len(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        return self.values[i] + 0 * torch.rand(()), self.targets[i]


@dataclass(frozen=True)
class Options:
    rate: float = 0.5
    log: list[int] = field(default_factory=list, compare=False)


def scaled(k: float) -> Any:
    return lambda x: k * x


def linear(seed: int, bias: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, 2, bias=bias)


X, Y = torch.arange(12.0).reshape(4, 3), torch.arange(4)
CONFIG = TrainingConfig(epochs=2, optimizer=partial(torch.optim.Adam, lr=0.1))
EQUAL: dict[str, tuple[Any, Any]] = {
    "numbers": ((1, 2.5, "a"), (1, 2.5, "a")),
    "sets": ({"a", "b", "c"}, {"c", "b", "a"}),
    "arrays": (np.arange(3), np.arange(3)),
    "nets": (linear(0), linear(0)),
    "functions": (scaled(2), scaled(2)),
    "datasets": (TensorDataset(X, Y), Subset(TensorDataset(X, Y), range(4))),
    "rows": (Rows([1.0, 2.0]), Rows([1.0, 2.0])),
    "dataclass": (Options(), Options(log=[1])),
    "config": (CONFIG, replace(CONFIG, progress=False, num_workers=2, folder=Path("a"))),
    "method": (NeuBoots(), NeuBoots()),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "numbers": (1, 1.0000001),
    "types": (1, "1"),
    "arrays": (np.arange(3), np.arange(3.0)),
    "tensors": (X, X + 1e-6 * (X == 7)),
    "weights": (linear(0), linear(1)),
    "layers": (nn.Dropout(0.1), nn.Dropout(0.2)),
    "functions": (scaled(2), scaled(3)),
    "code": (lambda x: x + 1, lambda x: x * 1),
    "partial": (partial(scaled, 1), partial(scaled, 2)),
    "datasets": (TensorDataset(X, Y), TensorDataset(X, Y.flip(0))),
    "subsets": (Subset(Rows([1.0] * 90), range(30)), Subset(Rows([1.0] * 90), range(1, 31))),
    "rows": (Rows([1.0, 2.0]), Rows([1.0, 3.0])),
    "loaders": (DataLoader(TensorDataset(X, Y)), DataLoader(TensorDataset(X, Y.flip(0)))),
    "dataclass": (Options(), Options(rate=0.6)),
    "config": (CONFIG, replace(CONFIG, epochs=3)),
    "optimizer": (CONFIG, replace(CONFIG, optimizer=partial(torch.optim.Adam, lr=0.2))),
    "method": (NeuBoots(), NeuBoots(warmup=1)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_fingerprint_of_equal_settings_is_equal(name: str) -> None:
    a, b = EQUAL[name]
    state = torch.get_rng_state()
    assert fingerprint(value=a) == fingerprint(value=b) == fingerprint(value=copy.deepcopy(a))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", DIFFERENT)
def test_fingerprint_of_different_settings_differs(name: str) -> None:
    a, b = DIFFERENT[name]
    assert fingerprint(value=a) != fingerprint(value=b)
    assert fingerprint(a=a) != fingerprint(b=a)


@pytest.mark.slow
def test_fingerprint_is_equal_in_another_process() -> None:
    code = (
        "import torch; from neuboots import NeuBoots; from neuboots.evaluation._parallel import fingerprint; "
        "print(fingerprint(m=NeuBoots(), s={'a', 'b'}, f=lambda x: x + 1, x=torch.arange(3.0), o=object()))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": h},
        ).stdout
        for h in ("1", "2")
    }
    assert len(outputs) == 1


# -- repeated fits -------------------------------------------------------------------------------------


def test_repeated_fits_need_readable_data_and_new_nets(tmp_path: Path) -> None:
    net = linear(0)
    with pytest.raises(ArgumentError, match="config"):
        check_repeated_fit(replace(CONFIG, folder=tmp_path), None)
    with pytest.raises(ArgumentError, match="test_data"):
        check_repeated_fit(CONFIG, iter([]))
    with pytest.raises(ArgumentError, match="model"):
        make_reference_net(lambda: net, 0)
    assert make_reference_net(net, 0) is net
    assert fingerprint(net=make_reference_net(lambda: linear(0), 0)) == fingerprint(net=net)


def test_student_t_interval_matches_scipy() -> None:
    values = torch.tensor([[0.5, 0.7], [0.6, 0.9], [0.4, 0.75]]).double()
    low, high = student_t_interval(values, level=0.9)
    expected = scipy.stats.t.interval(0.9, 2, values.mean(0).numpy(), scipy.stats.sem(values.numpy()))
    np.testing.assert_allclose(torch.stack([low, high]), expected)
    with pytest.raises(ArgumentError, match="level"):
        student_t_interval(values, level=1.0)
    with pytest.raises(ArgumentError, match="values"):
        student_t_interval(values[:1])


@pytest.mark.parametrize(
    "error",
    [ArgumentError("f", lambda: 1, "a number", hint="use 1"), ArtifactError("model", "it is damaged")],
    ids=["argument", "artifact"],
)
def test_errors_of_other_processes_are_the_same(error: ValueError) -> None:
    copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error))))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert {name: str(value) for name, value in vars(copy).items()} == {
        name: str(value) for name, value in vars(error).items()
    }
