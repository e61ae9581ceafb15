"""Benchmark: exact ratios by a fake clock, memory that is really held, and real methods."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _nets import MixedInputs, noise
from torch import nn
from torch.utils.data import TensorDataset

import neuboots.evaluation.benchmark as module
from neuboots import BayesianBootstrap, DeepEnsemble, Deterministic, NeuBoots, TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.evaluation.benchmark import BenchmarkResult, benchmark_methods, measure_peak_memory
from neuboots.methods.deterministic import DeterministicPredictor
from neuboots.prediction import Predictor, SampleStream

CONFIG = TrainingConfig(epochs=1, batch_size=16, progress=False)
DATA = TensorDataset(torch.zeros(12, 2), torch.zeros(12))
X = torch.zeros(7, 2)
needs_linux = pytest.mark.skipif(measure_peak_memory(lambda: None) is None, reason="memory cannot be measured here")


def make_net() -> nn.Module:
    return nn.Linear(2, 1)


# -- time ----------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Advances by the work that is done; two runs in three are disturbed."""

    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> None:
        self.log.append(name)
        self.now += seconds + self.log.count(name) % 3


@dataclass(frozen=True)
class TickingPredictor(DeterministicPredictor):
    clock: Clock = field(default_factory=Clock)
    seconds: float = 1.0

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        self.clock.work(f"predict {self.seconds:g} {num_samples}", self.seconds)
        return super().stream(x, num_samples, seed=seed)


@dataclass(frozen=True)
class TickingMethod:
    clock: Clock
    fit_seconds: float
    predict_seconds: float = 1.0

    def fit(self, model: Any, data: Any, config: Any = None, *, val_data: Any = None) -> Predictor:
        assert not config.progress
        torch.rand(3)
        self.clock.work(f"fit {self.fit_seconds:g}", self.fit_seconds)
        return TickingPredictor(model(), self.clock, self.predict_seconds)


def run(clock: Clock, **options: Any) -> BenchmarkResult:
    methods = {
        "base": lambda K: TickingMethod(clock, 10.0, 4.0),
        "members": lambda K: TickingMethod(clock, 10.0 * K, 4.0 * K * K),
    } | options.pop("methods", {})
    settings = {"baseline": "base", "num_members": (1, 2, 5), "memory": False, "clock": clock, "progress": False}
    return benchmark_methods(methods, make_net, DATA, X, CONFIG, **(settings | options))


def test_ratios_are_those_of_undisturbed_runs() -> None:
    state = torch.get_rng_state()
    result = run(Clock())
    for K in (1, 2, 5):
        base, row = result.row("base", K), result.row("members", K)
        assert (base.fit_seconds, base.fit_ratio, base.predict_seconds, base.predict_ratio) == (10, 1, 4, 1)
        assert (row.fit_seconds, row.fit_ratio) == (10 * K, K)
        assert (row.predict_seconds, row.predict_ratio) == (4 * K * K, K * K)
        assert row.fit_mb is row.predict_mb_ratio is None
    assert [(row.method, row.num_members) for row in result.rows[:3]] == [("base", 1), ("members", 1), ("base", 2)]
    assert result.row("base", 1).size_mb == pytest.approx(3 * 4 / 2**20)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ArgumentError, match="method"):
        result.row("base", 3)


def test_methods_alternate_in_changing_order() -> None:
    clock = Clock()
    run(clock, num_members=(2,), repeats=2)
    assert [entry for entry in clock.log if entry.startswith("fit")] == ["fit 10", "fit 20"] * 3
    predictions = [entry for entry in clock.log if entry.startswith("predict")]
    assert len(predictions) == 2 + 2 * 2 * 5
    assert {entry.split()[-1] for entry in predictions} == {"2"}
    order: list[str] = []
    module._min_seconds({name: lambda: None for name in "abc"}, 4, lambda: 0.0, order.append)
    assert "".join(order) == "abc" + "acb" + "cab" + "cba"


def test_printed_table_has_a_column_for_each_k() -> None:
    lines = str(run(Clock())).splitlines()
    assert "n = 12" in lines[0]
    at = lines.index("training time, × base")
    assert re.split("  +", lines[at + 1]) == ["method", "K = 1", "K = 2", "K = 5"]
    assert lines[at + 3].split() == ["members", "1", "2", "5"]
    assert not any("memory" in line for line in lines)


# -- memory --------------------------------------------------------------------------------------------


def test_memory_is_relative_to_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([8.0, 4.0, 72.0, 36.0])
    monkeypatch.setattr(module, "measure_peak_memory", lambda work, gpu: next(peaks))
    result = run(Clock(), memory=True, num_members=(1,))
    base, more = ((r.fit_mb, r.predict_mb, r.fit_mb_ratio, r.predict_mb_ratio) for r in result.rows)
    assert (base, more) == ((8.0, 4.0, 1.0, 1.0), (72.0, 36.0, 9.0, 9.0))
    assert "peak memory of training, MB" in str(result)


@needs_linux
@pytest.mark.parametrize(("pieces", "size"), [(1, 2**23), (32, 2**18), (2**13, 2**10)])
def test_memory_in_large_and_small_pieces_is_measured(pieces: int, size: int) -> None:
    """32 MB; tensors of 4 kB need a tenth more for their objects."""
    [torch.ones(2**12) for _ in range(2000)]
    peaks = [measure_peak_memory(lambda: [torch.ones(size) for _ in range(pieces)]) for _ in range(2)]
    assert peaks == pytest.approx([32, 32], rel=0.15)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.15)


@needs_linux
def test_benchmark_measures_the_memory_of_each_method() -> None:
    @dataclass(frozen=True)
    class Holding(TickingMethod):
        def fit(self, *args: Any, **options: Any) -> Predictor:
            torch.ones(int(self.fit_seconds) * 2**18)  # 1 MB each
            return super().fit(*args, **options)

    clock = Clock()
    methods: dict[str, Any] = {"base": lambda K: Holding(clock, 16.0), "members": lambda K: Holding(clock, 32.0)}
    result = run(clock, methods=methods, memory=True, num_members=(1,), repeats=1)
    assert [row.fit_mb for row in result.rows] == pytest.approx([16, 32], rel=0.1)
    assert result.row("members", 1).fit_mb_ratio == pytest.approx(2, rel=0.1)
    assert [row.predict_mb for row in result.rows] == pytest.approx([0, 0], abs=1)


def test_missing_measurement_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    result = run(Clock(), memory=True, num_members=(1,))
    assert result.row("base", 1).fit_mb is None
    assert "not measured" in result.note
    assert run(Clock(), num_members=(1,)).note == ""
    assert [module._memory_ratio(a, b) for a, b in ((5.0, 0.4), (None, 4.0), (6.0, 4.0))] == [None, None, 1.5]


def test_gpu_memory_is_read_from_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"now": 10 * 2**20, "peak": 99 * 2**20}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(peak=held["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert measure_peak_memory(lambda: held.update(peak=held["now"] + 6 * 2**20), gpu=True) == 6.0


# -- methods and errors --------------------------------------------------------------------------------


def test_real_methods_with_several_inputs() -> None:
    methods: dict[str, Any] = {
        "deterministic": lambda K: Deterministic(),
        "neuboots": lambda K: NeuBoots(),
        "bootstrap": lambda K: BayesianBootstrap(num_members=K),
        "ensemble": lambda K: DeepEnsemble(num_members=K),
    }
    x = (noise(9, 4), torch.arange(9) % 5)
    data = TensorDataset(*x, torch.arange(9) % 2)
    result = benchmark_methods(
        methods, MixedInputs, data, x, CONFIG, num_members=(1, 3), repeats=1, memory=False, progress=False
    )
    assert [(row.method, row.num_members) for row in result.rows] == [(name, K) for K in (1, 3) for name in methods]
    assert all(row.fit_ratio > 0 and row.predict_ratio > 0 for row in result.rows)
    sizes = [result.row("bootstrap", K).size_mb / result.row("deterministic", K).size_mb for K in (1, 3)]
    assert sizes == pytest.approx([1, 3])
    assert (result.n, result.num_inputs) == (9, 9)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"baseline": "none"}, "baseline"), ({"num_members": (0, 1)}, "num_samples"), ({"repeats": 0}, "repeats")],
)
def test_invalid_options_are_rejected(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        run(Clock(), **options)


def test_config_with_folder_is_rejected(tmp_path: Path) -> None:
    methods: dict[str, Any] = {"deterministic": lambda K: Deterministic(nn.MSELoss())}
    with pytest.raises(ArgumentError, match="config"):
        benchmark_methods(methods, make_net, DATA, X, replace(CONFIG, folder=tmp_path), progress=False)
