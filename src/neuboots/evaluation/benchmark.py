"""Cost of methods: training time, prediction time and peak memory, as ratios to a baseline in the same run.

    ratio(method, K) = min_r seconds_r(method, K) / min_r seconds_r(baseline, K)

Times on a shared machine vary from minute to minute. Hence every method is run once to warm up, then all of them
alternately, in a different order each round, and the minimum of each counts.

Memory is the peak of what the process holds beyond what it held before: tensors, scratch space and Python objects.
Training includes the net; prediction does not, as the predictor exists already (`size_mb`). On a GPU it is the peak of
torch's allocator.

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021 (section 3.2 and appendix B.2).
"""

import ctypes
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from neuboots._validation import ArgumentError, check_choice, check_int
from neuboots.evaluation._batching import check_predictor, format_table
from neuboots.evaluation._parallel import check_repeated_fit
from neuboots.head import count_rows
from neuboots.loading import check_length, preserve_rng_state
from neuboots.prediction import Method, Predictor
from neuboots.training import TrainingConfig, progress_bar

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PREDICTIONS_PER_FIT = 5  # predicting is short, and its minimum needs more runs
_MIN_BASELINE_MB = 1.0  # below, a ratio is dominated by page granularity
_NO_MEMORY = "memory was not measured: this needs Linux"


@dataclass(frozen=True)
class BenchmarkRow:
    """Cost of one method at one K; None means not measured.

    Attributes:
        method: Name of the method.
        num_members: Number of members, or of replicates, K.
        fit_seconds: Minimum time of training.
        predict_seconds: Minimum time of predicting K replicates at all inputs.
        fit_ratio: `fit_seconds` relative to the baseline at the same K.
        predict_ratio: `predict_seconds` relative to the baseline.
        size_mb: Size of the predictor's state.
        fit_mb: Peak memory of training, beyond what was held before.
        predict_mb: Peak memory of predicting.
        fit_mb_ratio: `fit_mb` relative to the baseline, None also if that is less than a megabyte.
        predict_mb_ratio: `predict_mb` relative to the baseline.
    """

    method: str
    num_members: int
    fit_seconds: float
    predict_seconds: float
    fit_ratio: float
    predict_ratio: float
    size_mb: float
    fit_mb: float | None = None
    predict_mb: float | None = None
    fit_mb_ratio: float | None = None
    predict_mb_ratio: float | None = None


@dataclass(frozen=True)
class BenchmarkResult:
    """Result of `benchmark_methods`; `print` shows a table for each quantity, with a column for each K.

    Attributes:
        rows: One row for each method and K.
        baseline: Name of the baseline.
        num_members: The values of K.
        repeats: Number of fits whose minimum counts.
        n: Number of training examples.
        num_inputs: Number of inputs predicted at.
        note: Why memory was not measured, if so.
    """

    rows: tuple[BenchmarkRow, ...]
    baseline: str
    num_members: tuple[int, ...]
    repeats: int
    n: int
    num_inputs: int
    note: str

    def row(self, method: str, num_members: int) -> BenchmarkRow:
        """Return the row of one method at one K."""
        for row in self.rows:
            if (row.method, row.num_members) == (method, num_members):
                return row
        raise ArgumentError("method", f"{method} at K = {num_members}", f"a method and one of K = {self.num_members}")

    def __str__(self) -> str:
        first = self.row(self.baseline, self.num_members[0])
        header = (
            f"n = {self.n:,} rows, N = {self.num_inputs:,} inputs, best of {self.repeats}; {self.baseline} at K = "
            f"{first.num_members}: {first.fit_seconds:.3g} s to train, {first.predict_seconds:.3g} s to predict"
        )
        parts = [header]
        methods = dict.fromkeys(row.method for row in self.rows)
        for title, name in (
            (f"training time, × {self.baseline}", "fit_ratio"),
            (f"prediction time of K replicates, × {self.baseline}", "predict_ratio"),
            ("peak memory of training, MB", "fit_mb"),
            ("peak memory of prediction, MB", "predict_mb"),
            ("size of the predictor, MB", "size_mb"),
        ):
            if any(getattr(row, name) is not None for row in self.rows):
                values = {m: {f"K = {K}": getattr(self.row(m, K), name) for K in self.num_members} for m in methods}
                parts.append(f"{title}\n{format_table([{'method': m} | by_k for m, by_k in values.items()])}")
        return "\n\n".join([*parts, self.note] if self.note else parts)


def benchmark_methods(
    methods: Mapping[str, Callable[[int], Method]],
    model: Callable[[], nn.Module],
    data: Dataset[Any],
    x: Any,
    config: TrainingConfig,
    *,
    baseline: str = "deterministic",
    num_members: Sequence[int] = (1, 2, 5),
    repeats: int = 3,
    memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = True,
) -> BenchmarkResult:
    """Measure the cost of fitting methods and of predicting K replicates, relative to a baseline.

    Args:
        methods: For each name, a function of K that returns the method: with K members, if it has members.
        model: Function that makes a net.
        data: Training data.
        x: Inputs to predict at: a tensor, or a tuple or dict of tensors.
        config: Training options, without a folder.
        baseline: Name of the baseline among the methods.
        num_members: Values of K.
        repeats: Number of fits whose minimum counts.
        memory: Whether to measure peak memory, which repeats the work.
        clock: Function that returns the time in seconds.
        progress: Whether to show a progress bar.

    Returns:
        Times, memory and ratios of every method at every K.

    Raises:
        ArgumentError: If the baseline is not among the methods, or the config has a folder, where the second fit would
            resume the first.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots import DeepEnsemble, Deterministic
        >>> x = torch.randn(64, 4)
        >>> data, config = TensorDataset(x, (x.sum(1) > 0).long()), TrainingConfig(epochs=1, progress=False)
        >>> methods = {"deterministic": lambda K: Deterministic(), "ensemble": lambda K: DeepEnsemble(num_members=K)}
        >>> result = benchmark_methods(
        ...     methods, lambda: nn.Linear(4, 2), data, x, config, num_members=(1, 2), repeats=1, progress=False
        ... )
        >>> [(row.method, row.num_members) for row in result.rows]
        [('deterministic', 1), ('ensemble', 1), ('deterministic', 2), ('ensemble', 2)]
    """
    check_choice("baseline", baseline, tuple(methods))
    check_int("repeats", repeats, minimum=1)
    n = check_length(data)
    check_repeated_fit(config, None)
    config = replace(config, progress=False)
    steps = len(num_members) * len(methods) * (1 + repeats + memory)
    with preserve_rng_state(), progress_bar("benchmark", steps, enabled=progress) as advance:

        def measure(K: int) -> list[BenchmarkRow]:
            fits = {name: partial(make(K).fit, model, data, config) for name, make in methods.items()}
            predictors: dict[str, Predictor] = {}
            for name, fit in fits.items():
                check_predictor(predictor := fit())
                predictors[name] = predictor
                predictors[name].predict(x, K)
                advance(f"{name}, K = {K}, warm-up")
            predictions = {name: partial(predictor.predict, x, K) for name, predictor in predictors.items()}
            fit_seconds = _min_seconds(fits, repeats, clock, lambda name: advance(f"{name}, K = {K}, training"))
            predict_seconds = _min_seconds(predictions, repeats * _PREDICTIONS_PER_FIT, clock, lambda name: None)
            peaks: dict[str, tuple[float | None, float | None]] = dict.fromkeys(methods, (None, None))
            for name, predictor in predictors.items() if memory else ():
                gpu = any(tensor.is_cuda for tensor in predictor.state_dict().values())
                fit_mb, predict_mb = (measure_peak_memory(work[name], gpu=gpu) for work in (fits, predictions))
                peaks[name] = fit_mb, predict_mb
                advance(f"{name}, K = {K}, memory")
            return [
                BenchmarkRow(
                    method=name,
                    num_members=K,
                    fit_seconds=fit_seconds[name],
                    predict_seconds=predict_seconds[name],
                    fit_ratio=fit_seconds[name] / fit_seconds[baseline],
                    predict_ratio=predict_seconds[name] / predict_seconds[baseline],
                    size_mb=sum(t.numel() * t.element_size() for t in predictor.state_dict().values()) / 2**20,
                    fit_mb=peaks[name][0],
                    predict_mb=peaks[name][1],
                    fit_mb_ratio=_memory_ratio(peaks[name][0], peaks[baseline][0]),
                    predict_mb_ratio=_memory_ratio(peaks[name][1], peaks[baseline][1]),
                )
                for name, predictor in predictors.items()
            ]

        rows = tuple(row for K in num_members for row in measure(K))
    note = _NO_MEMORY if memory and any(row.fit_mb is None for row in rows) else ""
    return BenchmarkResult(rows, baseline, tuple(num_members), repeats, n, count_rows(x), note)


def _min_seconds(
    works: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float], done: Callable[[str], None]
) -> dict[str, float]:
    """Minimum time of each, over rounds that start with another one each time, forwards and backwards."""
    names = list(works)
    best = dict.fromkeys(names, math.inf)
    for i in range(repeats):
        rotated = names[i % len(names) :] + names[: i % len(names)]
        for name in rotated if i % 2 == 0 else reversed(rotated):
            start = clock()
            works[name]()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            best[name] = min(best[name], clock() - start)
            done(name)
    return best


def _memory_ratio(mine: float | None, baseline: float | None) -> float | None:
    return None if mine is None or baseline is None or baseline < _MIN_BASELINE_MB else mine / baseline


# -- memory --------------------------------------------------------------------------------------------


def measure_peak_memory(work: Callable[[], Any], *, gpu: bool = False) -> float | None:
    """Measure the most memory that a function holds at once, beyond what was held before, in megabytes.

    Args:
        work: The function. On the CPU it runs twice, to warm up and to be measured.
        gpu: Whether to read the peak of torch's CUDA allocator instead.

    Returns:
        Megabytes, or None if the system does not report the peak, which Linux does.

    Example:
        >>> peak = measure_peak_memory(lambda: torch.ones(2**22))  # 16 MB
        >>> peak is None or 14 < peak < 20
        True
    """
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        work()  # loads the pages of programs and libraries
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system: reusing it would not be seen
            _CLEAR_REFS.write_text("5")  # resets the peak
        except (AttributeError, OSError, TypeError):
            return None
        before = _read_status("VmRSS")
        kept = work()
        peak = _read_status("VmHWM")
    del kept
    return (peak - before) / 2**20


def _read_status(field: str) -> int:
    """Resident bytes now (VmRSS) or at the peak (VmHWM)."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])
