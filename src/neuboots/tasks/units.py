"""Units of work that know nothing of each other: in parallel, and each finished one kept.

    result[k] = run(unit[k]),   in any order, on any number of processes

A unit is a data set, a seed or a trial. With a folder, its result is written there as soon as it is known (aside, then
renamed), so that work that was cut short goes on with the units that are missing.
"""

import json
import multiprocessing
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from neuboots.progress import bar

_RUN: Callable[[int], Any] | None = None  # what a forked process inherits: functions need not be picklable


def run_units(
    run: Callable[[int], Any],
    count: int,
    *,
    num_workers: int = 1,
    folder: Path | None = None,
    identity: str = "",
    title: str = "working",
    progress: bool = True,
) -> list[Any]:
    """[run(0), …, run(count − 1)]; results are JSON: numbers, texts, lists and dicts of them.

    `num_workers` processes share the units; each computes with one thread. Where processes cannot be forked, or a GPU
    is in use, units run in turn. A folder whose units have another `identity` is refused.

    >>> run_units(lambda k: {"square": k * k}, 3, progress=False)
    [{'square': 0}, {'square': 1}, {'square': 4}]
    """
    if num_workers < 1:
        raise ValueError(f"got num_workers={num_workers}; expected at least 1")
    if count < 1:
        raise ValueError(f"got {count} units of work; expected at least 1")
    results = _kept(folder, identity, count)
    missing = [k for k in range(count) if k not in results]
    with bar(title, count, show=progress, done=len(results)) as advance:
        for k, result in _finished(run, missing, num_workers):
            results[k] = result
            if folder is not None:
                write_json(Path(folder) / f"unit-{k:04d}.json", result)
            advance(title)
    return [results[k] for k in range(count)]


def described(*settings: Any) -> str:
    """What results depend on, for `identity`: their repr, without addresses in memory, which change between runs.

    >>> described([1, "a"], lambda: 0)
    "[1, 'a'] <function <lambda>>"
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(map(repr, settings)))


def write_json(path: Path, value: Any) -> None:
    """Written aside, then renamed: nobody ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(value), encoding="utf-8")
    aside.replace(path)


def _kept(folder: Path | None, identity: str, count: int) -> dict[int, Any]:
    """The results of units that an earlier run finished."""
    if folder is None:
        return {}
    named = Path(folder) / "units.json"
    if not named.exists():
        write_json(named, identity)
    elif json.loads(named.read_text(encoding="utf-8")) != identity:
        raise ValueError(
            f"{folder} holds units of other settings; expected a new folder, or the settings that made them: "
            "give another folder"
        )
    files = {k: Path(folder) / f"unit-{k:04d}.json" for k in range(count)}
    return {k: json.loads(file.read_text(encoding="utf-8")) for k, file in files.items() if file.exists()}


def _finished(run: Callable[[int], Any], units: Sequence[int], num_workers: int) -> Iterator[tuple[int, Any]]:
    """(unit, result) as each is done."""
    if num_workers == 1 or len(units) < 2 or not can_fork():
        yield from ((k, run(k)) for k in units)
        return
    with _inherited(run):
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(min(num_workers, len(units)), context, initializer=_alone)
        try:
            with warnings.catch_warnings():
                # Python warns of threads at a fork; a child that stays with one thread of torch is safe.
                warnings.simplefilter("ignore", DeprecationWarning)
                jobs = {pool.submit(_run_inherited, k): k for k in units}
            yield from _collected(jobs)
        finally:
            pool.shutdown(cancel_futures=True)


def _collected(jobs: dict[Future[Any], int]) -> Iterator[tuple[int, Any]]:
    """As each is done. After a failure no new unit begins, but those under way end and are kept."""
    failure: BaseException | None = None
    for job in as_completed(jobs):
        if job.cancelled():
            continue
        if (error := job.exception()) is None:
            yield jobs[job], job.result()
        elif failure is None:
            failure = error
            for other in jobs:
                other.cancel()
    if failure is not None:
        raise failure


def can_fork() -> bool:
    """Forking is safe where no GPU is in use; macOS' own libraries do not stand it."""
    return sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@contextmanager
def _inherited(run: Callable[[int], Any]) -> Iterator[None]:
    global _RUN
    before, _RUN = _RUN, run
    try:
        yield
    finally:
        _RUN = before


def _alone() -> None:
    torch.set_num_threads(1)


def _run_inherited(k: int) -> Any:
    assert _RUN is not None, "set before the processes were forked"
    return _RUN(k)
