"""Cost: exact ratios by a clock of our own, memory that is really there, and real methods on real data."""

import gc
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import neuboots.evaluation.benchmark as module
from neuboots import MIMO, BayesianBootstrap, DeepEnsemble, Deterministic, MCDropout, NeuBoots, TrainingConfig
from neuboots.evaluation.benchmark import BenchmarkResult, benchmark_methods, measure_peak_memory
from neuboots.methods import DeterministicPredictor
from neuboots.prediction import Predictor, SampleStream

RECIPE = TrainingConfig(epochs=1, batch_size=16, progress=False)
DATA = TensorDataset(torch.zeros(12, 2), torch.zeros(12))
X = torch.zeros(7, 2)
forks = pytest.mark.skipif(measure_peak_memory(lambda: None) is None, reason="memory cannot be measured here")


def model() -> nn.Module:
    return nn.Linear(2, 1)


# -- time ----------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Stands still until somebody works; a second is a tick."""

    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def work(self, what: str, ticks: float) -> None:
        """Only every third time undisturbed, as on a machine that does other things."""
        self.log.append(what)
        self.now += ticks + self.log.count(what) % 3


@dataclass(frozen=True)
class TickingPredictor(DeterministicPredictor):
    clock: Clock = field(default_factory=Clock)
    ticks: float = 1.0

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        self.clock.work(f"predict {self.ticks:g} {num_samples}", self.ticks)
        return super().stream(x, num_samples, seed=seed)


@dataclass(frozen=True)
class Ticking:
    clock: Clock
    fit_ticks: float
    predict_ticks: float = 1.0

    def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
        assert not config.progress
        self.clock.work(f"fit {self.fit_ticks:g}", self.fit_ticks)
        return TickingPredictor(model(), self.clock, self.predict_ticks)


def ticking(ticks: Clock, **options: Any) -> BenchmarkResult:
    methods = {
        "base": lambda K: Ticking(ticks, 10.0, 4.0),
        "members": lambda K: Ticking(ticks, 10.0 * K, 4.0 * K * K),
    }
    settings = {"baseline": "base", "members": (1, 2, 5), "memory": False, "clock": ticks, "progress": False}
    return benchmark_methods(methods, model, DATA, X, RECIPE, **(settings | options))


def test_with_a_clock_of_ticks_the_ratios_are_exact() -> None:
    """Two runs in three are disturbed; the best of three (of fifteen) is not, though warming up never counts."""
    found = ticking(Clock())
    for K in (1, 2, 5):
        base, row = found.row("base", K), found.row("members", K)
        assert (base.fit_seconds, base.fit_ratio, base.predict_seconds, base.predict_ratio) == (10, 1, 4, 1)
        assert (row.fit_seconds, row.fit_ratio) == (10 * K, K)
        assert (row.predict_seconds, row.predict_ratio) == (4 * K * K, K * K)


def test_methods_take_turns() -> None:
    """A round of warming up, then rounds in which each begins once, and K replicates are asked of every predictor."""
    clock = Clock()
    ticking(clock, members=(2,), repeats=2)
    fits = [entry for entry in clock.log if entry.startswith("fit")]
    assert fits == ["fit 10", "fit 20", "fit 10", "fit 20", "fit 10", "fit 20"]
    predictions = [entry for entry in clock.log if entry.startswith("predict")]
    assert len(predictions) == 2 + 2 * 2 * 5
    assert {entry.split()[-1] for entry in predictions} == {"2"}
    assert predictions[2:6] == ["predict 4 2", "predict 16 2", "predict 4 2", "predict 16 2"]
    order: list[str] = []
    works = {name: lambda: None for name in "abc"}
    module._best(works, 4, lambda: 0.0, order.append)
    assert "".join(order) == "abc" + "acb" + "cab" + "cba"


def test_rows_are_tidy_and_complete() -> None:
    found = ticking(Clock(), members=(1, 5))
    assert [(row.method, row.members) for row in found.rows] == [
        ("base", 1),
        ("members", 1),
        ("base", 5),
        ("members", 5),
    ]
    assert all(row.fit_mb is None and row.predict_mb_ratio is None for row in found.rows)
    assert found.row("base", 1).size_mb == pytest.approx(3 * 4 / 2**20)
    assert set(asdict(found.rows[0])) >= {"method", "members", "fit_ratio", "predict_ratio", "fit_mb", "predict_mb"}
    with pytest.raises(ValueError, match="got 'base' at K = 3; expected one of the methods and one of K = .1, 5."):
        found.row("base", 3)


def test_the_table_has_a_column_for_each_number_of_members() -> None:
    lines = str(ticking(Clock())).splitlines()
    assert lines[0] == "n = 12 rows, N = 7 inputs, best of 3; base at K = 1: 10 s to train, 4 s to predict"
    at = lines.index("training time, × base")
    assert re.split("  +", lines[at + 1]) == ["method", "K = 1", "K = 2", "K = 5"]
    assert lines[at + 3].split() == ["members", "1", "2", "5"]
    at = lines.index("prediction time of K replicates, × base")
    assert lines[at + 3].split() == ["members", "1", "4", "25"]
    assert not any("memory" in line for line in lines)


# -- memory --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldPredictor(DeterministicPredictor):
    megabytes: int = 0

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        held = torch.ones(self.megabytes * 2**18)
        return super().stream(x + 0 * held[: 1 if self.megabytes else 0].sum(), num_samples, seed=seed)


@dataclass(frozen=True)
class Holding:
    """Holds so many megabytes while it fits, and gives them back."""

    fit_megabytes: int
    predict_megabytes: int

    def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
        torch.ones(self.fit_megabytes * 2**18).sum()
        return HeldPredictor(model(), self.predict_megabytes)


@forks
def test_memory_that_is_held_for_a_while_is_seen() -> None:
    """64 MB more in fitting and 32 MB more in predicting than the other, within a quarter; also after larger work here,
    whose freed memory a forked process could otherwise fill without a trace."""
    torch.ones(2**26).sum()
    [torch.ones(2**12) for _ in range(10_000)]  # 160 MB in pieces that malloc keeps
    methods = {"plain": lambda K: Holding(8, 4), "more": lambda K: Holding(8 + 64, 4 + 32)}
    found = benchmark_methods(methods, model, DATA, X, RECIPE, num_members=(1,), repeats=1, progress=False)
    plain, more = found.rows
    assert None not in (plain.fit_mb, more.fit_mb, plain.predict_mb, more.predict_mb)
    assert more.fit_mb - plain.fit_mb == pytest.approx(64, rel=0.25)  # type: ignore[operator]
    assert more.predict_mb - plain.predict_mb == pytest.approx(32, rel=0.25)  # type: ignore[operator]
    assert plain.fit_mb == pytest.approx(8, rel=0.25)
    assert more.fit_mb_ratio == pytest.approx(9, rel=0.25)
    assert plain.fit_mb_ratio == plain.predict_mb_ratio == 1.0
    text = str(found)
    assert "peak memory of training, MB" in text
    assert "peak memory of prediction, MB" in text


@forks
@pytest.mark.parametrize(("pieces", "size"), [(1, 2**23), (32, 2**18), (2**13, 2**10)])
def test_memory_in_large_and_small_pieces_is_seen_alike_and_again(pieces: int, size: int) -> None:
    """32 MB: tensors of 4 kB need a tenth more for what holds them; the same work shows the same peak again."""
    [torch.ones(2**12) for _ in range(2000)]  # holes to fall into
    peaks = [measure_peak_memory(lambda: [torch.ones(size) for _ in range(pieces)]) for _ in range(2)]
    assert peaks == pytest.approx([32, 32], rel=0.15)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


@forks
def test_the_measured_work_leaves_no_trace_and_runs_alone() -> None:
    seen: list[int] = []
    assert measure_peak_memory(lambda: seen.append(1)) == pytest.approx(0, abs=0.5)
    assert not seen
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert measure_peak_memory(lambda: None if torch.get_num_threads() == 1 else 1 / 0) is not None
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@forks
def test_work_that_fails_is_said() -> None:
    with pytest.raises(RuntimeError, match="(?s)process that measures its memory.*ZeroDivisionError"):
        measure_peak_memory(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="the process ended without a word"):
        measure_peak_memory(lambda: os._exit(1))


def test_without_a_way_to_measure_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_fork", lambda: False)
    assert measure_peak_memory(lambda: None) is None
    found = ticking(Clock(), memory=True, members=(1,))
    assert found.row("base", 1).fit_mb is None
    assert re.search("no memory: .* its peak read on Linux alone, and only where no GPU is in use$", str(found))
    assert "peak memory" not in str(found)
    assert ticking(Clock(), members=(1,)).note == ""  # nobody asked


@forks
def test_a_kernel_that_does_not_forget_is_not_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_FORGET", tmp_path / "missing" / "clear_refs")
    assert measure_peak_memory(lambda: None) is None


def test_a_ratio_to_less_than_a_megabyte_is_none() -> None:
    assert module._memory_ratio(5.0, 0.4) is None
    assert module._memory_ratio(None, 4.0) is None
    assert module._memory_ratio(6.0, 4.0) == 1.5


def test_on_a_gpu_the_allocator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: its functions are replaced, to see that the peak is counted from what was held before."""
    held = {"now": 10 * 2**20, "peak": 99 * 2**20}

    def work() -> None:
        held["peak"] = max(held["peak"], held["now"] + 6 * 2**20)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(peak=held["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert measure_peak_memory(work, gpu=True) == 6.0
    assert not module._on_gpu(DeterministicPredictor(model()))


# -- real methods --------------------------------------------------------------------------------------


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_real_methods_on_real_data() -> None:
    loss = nn.MSELoss()
    x, y = (torch.from_numpy(part[:32]).float() for part in load_diabetes(return_X_y=True))
    methods: dict[str, Any] = {
        "plain": lambda K: Deterministic(loss),
        "neuboots": lambda K: NeuBoots.regression(),
        "dropout": lambda K: MCDropout(loss),
        "bootstrap": lambda K: BayesianBootstrap(loss, num_members=K),
        "ensemble": lambda K: DeepEnsemble(loss, num_members=K),
        "mimo": lambda K: MIMO(loss, num_members=K),
    }
    net = lambda: nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))  # noqa: E731
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    data = TensorDataset(x, y / 100)
    found = benchmark_methods(methods, net, data, x[:5], RECIPE, num_members=(1, 3), repeats=1, progress=False)
    assert [(row.method, row.members) for row in found.rows] == [(name, K) for K in (1, 3) for name in methods]
    assert all(row.fit_ratio > 0 and row.predict_ratio > 0 for row in found.rows)
    assert all((row.fit_mb is None) == (found.note != "") for row in found.rows)
    assert [found.row("plain", K).fit_ratio for K in (1, 3)] == [1.0, 1.0]
    sizes = [found.row("bootstrap", K).size_mb / found.row("plain", K).size_mb for K in (1, 3)]
    assert sizes == pytest.approx([1, 3])
    assert found.row("neuboots", 3).size_mb < 2 * found.row("plain", 3).size_mb
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert "bootstrap" in str(found)


def test_inputs_may_be_several() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.fc(torch.cat([a, b], 1))
            return out

    x = (rows(9, 2), rows(9, 2))
    data = TensorDataset(*x, rows(9))
    methods = {"plain": lambda K: Deterministic(nn.MSELoss())}
    found = benchmark_methods(methods, Two, data, x, RECIPE, num_members=(2,), repeats=1, memory=False, progress=False)
    assert (found.n, found.num_inputs) == (9, 9)


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"baseline": "none"}, "got baseline='none' and methods .'base', 'members'.; expected one of them"),
        ({"members": ()}, r"got members=\(\); expected different whole numbers"),
        ({"members": (0, 1)}, r"got members=\(0, 1\); expected different whole numbers"),
        ({"members": (2, 2)}, r"got members=\(2, 2\); expected different whole numbers"),
        ({"members": (1.5,)}, r"got members=\(1.5,\)"),
        ({"members": 1}, "got members=1; expected different whole numbers"),
        ({"repeats": 0}, "got repeats=0; expected a whole number, at least 1"),
        ({"repeats": 1.5}, "got repeats=1.5; expected a whole number"),
        ({"clock": lambda: 0.0}, "base took no time that the clock could measure"),
    ],
)
def test_bad_options_get_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ticking(Clock(), **options)


def test_folders_streams_and_fits_that_give_no_predictor_are_refused(tmp_path: Path) -> None:
    methods = {"plain": lambda K: Deterministic(nn.MSELoss())}
    with pytest.raises(ValueError, match="a second fit would find the first one's result"):
        benchmark_methods(methods, model, DATA, X, replace(RECIPE, folder=tmp_path), progress=False)

    for x in (X[:0], {}, DATA):
        with pytest.raises(ValueError, match="got no inputs x; expected a tensor of at least one row"):
            benchmark_methods(methods, model, DATA, x, RECIPE, progress=False)
    with pytest.raises(ValueError, match=r"got methods\['plain'\] of type Plain; expected a function of K .* lambda K"):
        benchmark_methods({"plain": Deterministic(nn.MSELoss())}, model, DATA, X, RECIPE, progress=False)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="got baseline='plain' and methods Plain; expected"):
        benchmark_methods(Deterministic(nn.MSELoss()), model, DATA, X, RECIPE, progress=False)  # type: ignore[arg-type]

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("read")

    with pytest.raises(ValueError, match="got a stream of unknown length"):
        benchmark_methods(methods, model, Endless(), X, RECIPE, progress=False)

    @dataclass(frozen=True)
    class Nothing:
        def fit(self, model: Any, data: Any, config: TrainingConfig) -> Any:
            return None

    with pytest.raises(ValueError, match="got a NoneType; expected a predictor"):
        benchmark_methods({"plain": lambda K: Nothing()}, model, DATA, X, RECIPE, progress=False)


def test_a_method_that_fails_is_named() -> None:
    @dataclass(frozen=True)
    class Failing:
        def fit(self, model: Any, data: Any, config: TrainingConfig) -> Any:
            raise RuntimeError("broken")

    methods: dict[str, Any] = {"plain": lambda K: Deterministic(nn.MSELoss()), "other": lambda K: Failing()}
    with pytest.raises(RuntimeError, match="^broken") as caught:
        benchmark_methods(methods, model, DATA, X, RECIPE, num_members=(3,), memory=False, progress=False)
    assert caught.value.__notes__ == ["this was 'other' at K = 3"]


def test_a_method_that_draws_from_torch_leaves_its_state() -> None:
    @dataclass(frozen=True)
    class Drawing(Ticking):
        def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
            torch.rand(3)
            return super().fit(model, data, config)

    clock = Clock()
    state = torch.get_rng_state()
    methods = {"plain": lambda K: Drawing(clock, 1.0)}
    benchmark_methods(methods, model, DATA, X, RECIPE, num_members=(1,), memory=False, clock=clock, progress=False)
    assert torch.equal(torch.get_rng_state(), state)


@forks
def test_what_the_parent_has_left_over_is_not_collected_by_the_process_that_measures(tmp_path: Path) -> None:
    """Its finaliser would run there and here: files would go twice, or too early."""

    class Left:
        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    gc.collect()
    gc.disable()
    try:
        left = Left()
        left.__dict__["itself"] = left
        del left
        assert measure_peak_memory(gc.collect) is not None
        assert not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [file.name for file in tmp_path.iterdir()] == [str(os.getpid())]
