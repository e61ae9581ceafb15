"""Cost: training time, prediction time and peak memory of K replicates, as ratios to the plain net in the same run.

    ratio(method, K) = min_r seconds_r(method, K) / min_r seconds_r(plain, K)

Times on a machine that does other things as well vary from minute to minute. Hence every method is run once to warm up,
then all of them in turn, round after round, each round in another order, and the best of each counts.

Memory is the peak of what a process holds beyond what it held before, in a process of its own that was forked for the
purpose: everything counts, tensors, scratch space and what Python holds. Fitting includes the net; predicting does not,
since the predictor is there already: what it takes is `size_mb`. On a GPU the peak is that of torch's allocator.

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021 (section 3.2 and appendix B.2).
"""

import ctypes
import gc
import math
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._validation import check_int
from neuboots.evaluation._batching import check_predictor, format_table, is_input_batch, num_rows
from neuboots.evaluation._parallel import can_fork
from neuboots.loading import check_length, preserve_rng_state
from neuboots.prediction import Method, Predictor
from neuboots.training import TrainingConfig, progress_bar

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PREDICTIONS = 5  # for each fit: predicting is short, and its best needs more tries
_RESOLVED = 1.0  # megabytes; a ratio to less would be one of pages and of malloc's moods
_NO_MEMORY = "no memory: a process can be forked and its peak read on Linux alone, and only where no GPU is in use"
_MMAP_THRESHOLD = -3  # of mallopt
_BLOCK = 1 << 14  # bytes; larger blocks come from the system one by one


# -- the result ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkRow:
    """One method at one K: seconds are the best of several, megabytes the peak beyond what was there; None: unknown."""

    method: str
    members: int  # K
    fit_seconds: float
    predict_seconds: float  # of K replicates at all inputs
    fit_ratio: float  # to the baseline at the same K
    predict_ratio: float
    size_mb: float  # of what was learned
    fit_mb: float | None = None
    predict_mb: float | None = None
    fit_mb_ratio: float | None = None  # None also where the baseline needs less than a megabyte
    predict_mb_ratio: float | None = None


@dataclass(frozen=True)
class BenchmarkResult:
    """What `benchmark_methods` found: one row for each method and K; `print` shows a table for each figure, a column for each K."""

    rows: tuple[BenchmarkRow, ...]
    baseline: str
    members: tuple[int, ...]
    repeats: int
    n: int
    num_inputs: int
    note: str  # why there is no memory, if there is none

    def row(self, method: str, members: int) -> BenchmarkRow:
        """The row of one method at one K."""
        for row in self.rows:
            if (row.method, row.members) == (method, members):
                return row
        raise ValueError(f"got {method!r} at K = {members}; expected one of the methods and one of K = {self.members}")

    def __str__(self) -> str:
        first = self.row(self.baseline, self.members[0])
        header = (
            f"n = {self.n:,} rows, N = {self.num_inputs:,} inputs, best of {self.repeats}; {self.baseline} at K = "
            f"{first.members}: {first.fit_seconds:.3g} s to train, {first.predict_seconds:.3g} s to predict"
        )
        parts = [header]
        for title, name in (
            (f"training time, × {self.baseline}", "fit_ratio"),
            (f"prediction time of K replicates, × {self.baseline}", "predict_ratio"),
            ("peak memory of training, MB", "fit_mb"),
            ("peak memory of prediction, MB", "predict_mb"),
            ("size of what was learned, MB", "size_mb"),
        ):
            if any(getattr(row, name) is not None for row in self.rows):
                parts.append(f"{title}\n{self._by_members(name)}")
        return "\n\n".join([*parts, self.note] if self.note else parts)

    def _by_members(self, name: str) -> str:
        methods = dict.fromkeys(row.method for row in self.rows)
        figures = {method: {f"K = {K}": getattr(self.row(method, K), name) for K in self.members} for method in methods}
        return format_table([{"method": method} | by_k for method, by_k in figures.items()])


# -- the measurement -----------------------------------------------------------------------------------


def benchmark_methods(
    methods: Mapping[str, Callable[[int], Method]],
    model: Callable[[], nn.Module],
    data: Dataset[Any],
    x: Any,
    config: TrainingConfig,
    *,
    baseline: str = "plain",
    num_members: Sequence[int] = (1, 2, 5),
    repeats: int = 3,
    memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = True,
) -> BenchmarkResult:
    """Fit each method on the data and predict K replicates at x, for each K: what do they cost beside the baseline?

    `methods` maps a name to a function of K that gives the method: its number of members, where it has members, is K;
    for others K is the number of replicates asked for. `clock` gives the time in seconds.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import DeepEnsemble, Deterministic, SquaredError
    >>> x = torch.randn(64, 4)
    >>> data, config = TensorDataset(x, x.sum(1)), TrainingConfig(epochs=1, progress=False)
    >>> loss = SquaredError()
    >>> methods = {"plain": lambda K: Deterministic(loss), "ensemble": lambda K: DeepEnsemble(loss, num_members=K)}
    >>> found = benchmark_methods(
    ...     methods, lambda: nn.Linear(4, 1), data, x, config, num_members=(1, 2), repeats=1, progress=False
    ... )
    >>> [(row.method, row.members) for row in found.rows]
    [('plain', 1), ('ensemble', 1), ('plain', 2), ('ensemble', 2)]
    >>> found.row("plain", 2).fit_ratio
    1.0
    """
    n = _check(methods, baseline, num_members, repeats, data, x, config)
    config = replace(config, progress=False)
    steps = len(num_members) * len(methods) * (1 + repeats + 2 * memory)
    with preserve_rng_state(), progress_bar("cost", steps, enabled=progress) as advance:

        def at(K: int) -> list[BenchmarkRow]:
            fits = {name: partial(make(K).fit, model, data, config) for name, make in methods.items()}
            predictors: dict[str, Predictor] = {}
            for name, fit in fits.items():
                check_predictor(predictor := _noted(fit, name, K))
                predictors[name] = predictor
                predictor.predict(x, K)
                advance(f"{name}, K = {K}, warming up")
            predictions = {name: partial(predictor.predict, x, K) for name, predictor in predictors.items()}
            fit_seconds = _best(fits, repeats, clock, lambda name: advance(f"{name}, K = {K}, training"))
            predict_seconds = _best(predictions, repeats * _PREDICTIONS, clock, lambda name: None)
            peaks: dict[str, list[float | None]] = {}
            for name, predictor in predictors.items() if memory else ():
                peaks[name] = []
                for work in (fits[name], predictions[name]):
                    peaks[name].append(measure_peak_memory(work, gpu=_on_gpu(predictor)))
                    advance(f"{name}, K = {K}, memory")
            return _rows(K, baseline, predictors, fit_seconds, predict_seconds, peaks)

        rows = tuple(row for K in num_members for row in at(K))
    note = _NO_MEMORY if memory and any(row.fit_mb is None for row in rows) else ""
    return BenchmarkResult(rows, baseline, tuple(num_members), repeats, n, num_rows(x), note)


def _noted(fit: Callable[[], Predictor], name: str, members: int) -> Predictor:
    """Whoever fails is named."""
    try:
        return fit()
    except Exception as error:
        error.add_note(f"this was {name!r} at K = {members}")
        raise


def _check(
    methods: Mapping[str, Any],
    baseline: str,
    members: Any,
    repeats: Any,
    data: Dataset[Any],
    x: Any,
    config: TrainingConfig,
) -> int:
    """n, or a sentence."""
    if not isinstance(methods, Mapping) or baseline not in methods:
        got = list(methods) if isinstance(methods, Mapping) else type(methods).__name__
        raise ValueError(
            f'got baseline={baseline!r} and methods {got}; expected one of them, such as "plain": lambda K: Plain(loss)'
        )
    for name, make in methods.items():
        if hasattr(make, "fit") or not callable(make):
            raise ValueError(
                f"got methods[{name!r}] of type {type(make).__name__}; expected a function of K that gives the method: "
                "lambda K: Plain(loss)"
            )
    known = isinstance(members, Sequence) and all(isinstance(K, int) and K > 0 for K in members)
    if not known or not members or len(set(members)) < len(members):
        raise ValueError(f"got members={members!r}; expected different whole numbers K ≥ 1, such as (1, 2, 5)")
    check_int("repeats", repeats, minimum=1)
    if not is_input_batch(x) or num_rows(x) == 0:
        raise ValueError("got no inputs x; expected a tensor of at least one row, or a tuple or dict of them")
    if config.folder is not None:
        raise ValueError(
            "got a recipe with a folder, where a second fit would find the first one's result; expected none, so that "
            "every fit is a whole one"
        )
    return check_length(data)


def _best(
    works: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float], done: Callable[[str], None]
) -> dict[str, float]:
    """The least seconds of each, over rounds that begin with another one each time, forwards and backwards."""
    names = list(works)
    best = dict.fromkeys(names, math.inf)
    for i in range(repeats):
        turned = names[i % len(names) :] + names[: i % len(names)]
        for name in turned if i % 2 == 0 else reversed(turned):
            began = clock()
            works[name]()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            best[name] = min(best[name], clock() - began)
            done(name)
    return best


def _rows(
    K: int,
    baseline: str,
    predictors: Mapping[str, Predictor],
    fit_seconds: Mapping[str, float],
    predict_seconds: Mapping[str, float],
    peaks: Mapping[str, Sequence[float | None]],
) -> list[BenchmarkRow]:
    if min(fit_seconds[baseline], predict_seconds[baseline]) <= 0:
        raise ValueError(f"{baseline} took no time that the clock could measure; expected more rows or epochs")
    rows = []
    for name, predictor in predictors.items():
        (fit_mb, predict_mb), plain = (peaks.get(who, (None, None)) for who in (name, baseline))
        rows.append(
            BenchmarkRow(
                method=name,
                members=K,
                fit_seconds=fit_seconds[name],
                predict_seconds=predict_seconds[name],
                fit_ratio=fit_seconds[name] / fit_seconds[baseline],
                predict_ratio=predict_seconds[name] / predict_seconds[baseline],
                size_mb=sum(map(_bytes, predictor.state_dict().values())) / 2**20,
                fit_mb=fit_mb,
                predict_mb=predict_mb,
                fit_mb_ratio=_memory_ratio(fit_mb, plain[0]),
                predict_mb_ratio=_memory_ratio(predict_mb, plain[1]),
            )
        )
    return rows


def _memory_ratio(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or theirs is None or theirs < _RESOLVED else mine / theirs


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- memory --------------------------------------------------------------------------------------------


def _on_gpu(predictor: Predictor) -> bool:
    return any(tensor.is_cuda for tensor in predictor.state_dict().values())


def measure_peak_memory(work: Callable[[], Any], *, gpu: bool = False) -> float | None:
    """The most that the work holds at once beyond what was there before, in megabytes; None where nobody can tell.

    On the CPU the work is done twice, to warm up and to look, in a process of its own with one thread; what it returns
    is lost.

    >>> peak = measure_peak_memory(lambda: torch.ones(2**22))  # 16 MB
    >>> peak is None or 14 < peak < 20
    True
    """
    if gpu:
        return _peak_on_gpu(work)
    if not can_fork() or not _STATUS.exists():
        return None
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(work, there))
    with warnings.catch_warnings():
        # Python warns of threads at a fork; a child that stays with one thread of torch is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = "the process ended without a word: is there enough memory?"
    finally:
        process.join()
    if isinstance(found, str):
        raise RuntimeError(f"the work failed in the process that measures its memory:\n{found}")
    peak: float | None = found
    return peak


def _measure(work: Callable[[], Any], out: Connection) -> None:
    """In the forked process: the peak, None where the kernel does not tell, or what went wrong."""
    try:
        torch.set_num_threads(1)
        gc.freeze()  # what the parent has left over is not ours to collect: its finalisers would run twice
        work()  # a forked process finds the pages of programs and libraries anew as it comes to them: now it has them
        gc.collect()
        _fill_holes()
        before = _resident("VmRSS")
        try:
            _FORGET.write_text("5")  # the highest so far is forgotten
        except OSError:
            out.send(None)
            return
        kept = work()
        out.send((_resident("VmHWM") - before) / 2**20)
        del kept
    except BaseException:
        out.send(traceback.format_exc())


class _MallocInfo(ctypes.Structure):
    """What malloc says of itself: only `hblks`, blocks from the system, and `fordblks`, free bytes, are used."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _fill_holes() -> None:
    """Whatever is needed from here on comes from the system and goes back to it: old holes would hide or blow it up.

    Malloc hands out what was freed before it asks the system, large blocks included. So these holes are taken,
    untouched, from the largest down, each size until a block comes from the system.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return  # another malloc, which has its own ways
    libc.mallinfo2.restype, libc.malloc.restype = _MallocInfo, ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    libc.mallopt(_MMAP_THRESHOLD, _BLOCK)
    size = 1 << 30
    while size >= _BLOCK:
        for _ in range(libc.mallinfo2().fordblks // size):
            before, block = libc.mallinfo2().hblks, libc.malloc(size)
            if block is None or libc.mallinfo2().hblks > before:
                libc.free(block)
                break
        size //= 2


def _resident(field: str) -> int:
    """Bytes now (VmRSS) or at the highest (VmHWM)."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def _peak_on_gpu(work: Callable[[], Any]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del kept
    return peak
