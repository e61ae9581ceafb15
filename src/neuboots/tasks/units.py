"""Units of work that know nothing of each other: in parallel, and each finished one kept.

    result[k] = run(unit[k]),   in any order, on any number of processes

A unit is a data set, a seed or a trial. With a folder, its result is written there as soon as it is known (aside, then
renamed), so that work that was cut short goes on with the units that are missing.
"""

import ctypes
import json
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from neuboots.progress import bar

_PDEATHSIG = 1  # of Linux' prctl
_WORK: Callable[[int], Any] | None = None  # what a forked process inherits: functions need not be picklable


def run_units(
    run: Callable[[int], Any],
    count: int,
    *,
    num_workers: int = 1,
    folder: Path | None = None,
    identity: str = "",
    known: Mapping[int, Any] | None = None,
    title: str = "working",
    progress: bool = True,
) -> list[Any]:
    """[run(0), …, run(count − 1)]; results are JSON: numbers, texts, lists and dicts of them.

    `num_workers` processes share the units; each computes with one thread. Where processes cannot be forked, or a GPU
    is in use, units run in turn. A folder whose units have another `identity` is refused. Units whose result is `known`
    are not run.

    >>> run_units(lambda k: {"square": k * k}, 3, progress=False)
    [{'square': 0}, {'square': 1}, {'square': 4}]
    """
    for name, value in (("num_workers", num_workers), ("count", count)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"got {name}={value!r}; expected a whole number, at least 1")
    results = {**_kept(folder, identity, count), **(known or {})}
    missing = [k for k in range(count) if k not in results]
    if missing:
        with suppress(ImportError):  # once here, and not in the first unit of every process
            import lightning_fabric  # noqa: F401
    work = partial(_done, run, folder)
    with bar(title, count, show=progress, done=len(results)) as advance:
        for k, result in _finished(work, missing, num_workers, folder):
            results[k] = result
            advance(title)
    return [results[k] for k in range(count)]


def _done(run: Callable[[int], Any], folder: Path | None, k: int) -> Any:
    """Unit k, written as soon as it is known by the process that did it; as JSON gives it back, kept or not."""
    found = run(k)
    try:
        result = json.loads(json.dumps(found))
    except TypeError as error:
        raise ValueError(
            f"the result of unit {k} is not JSON ({error}); expected numbers, texts, lists and dicts of them"
        ) from None
    if folder is not None:
        write_json(_file_of(folder, k), result)
    return result


def _file_of(folder: Path, k: int) -> Path:
    return Path(folder) / f"unit-{k:04d}.json"


def write_json(path: Path, value: Any) -> None:
    """As `write_text`, a value as JSON."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Written aside, then renamed: nobody ever sees half a file, nor an empty one after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:  # a full disk, an interrupt
        aside.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None where there is nothing, or nothing that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _kept(folder: Path | None, identity: str, count: int) -> dict[int, Any]:
    """The results of units that an earlier run finished; a damaged one is as good as missing."""
    if folder is None:
        return {}
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ValueError(f"got folder={str(folder)!r}, which is a file; expected a folder, or a name for a new one")
    named = Path(folder) / "units.json"
    if not named.exists():
        if any(Path(folder).glob("unit-*.json")):
            raise ValueError(f"{folder} holds units, but nothing says of what settings; expected a new folder")
        write_json(named, identity)
    elif read_json(named) != identity:
        raise ValueError(
            f"{folder} holds units of other settings; expected a new folder, or the settings that made them: "
            "give another folder"
        )
    found = {k: read_json(_file_of(folder, k)) for k in range(count)}
    return {k: result for k, result in found.items() if result is not None}


def _finished(
    work: Callable[[int], Any], units: Sequence[int], num_workers: int, folder: Path | None
) -> Iterator[tuple[int, Any]]:
    """(unit, result) as each is done."""
    if num_workers == 1 or len(units) < 2 or not can_fork():
        yield from ((k, work(k)) for k in units)
        return
    with _inherited(work):
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(min(num_workers, len(units)), context, initializer=_alone, initargs=(os.getpid(),))
        try:
            with warnings.catch_warnings():
                # Python warns of threads at a fork; a child that stays with one thread of torch is safe.
                warnings.simplefilter("ignore", DeprecationWarning)
                jobs = {pool.submit(_run_inherited, k): k for k in units}
            yield from _collected(jobs)
        except BrokenProcessPool:
            kept = "" if folder is None else f"; finished units are in {folder}"
            raise RuntimeError(
                "a worker process was killed, often for want of memory; expected it to live: use fewer num_workers, or "
                f"smaller units{kept}"
            ) from None
        except (KeyboardInterrupt, GeneratorExit):
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # what is finished is written; nobody waits for the rest
            raise
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
def _inherited(work: Callable[[int], Any]) -> Iterator[None]:
    global _WORK
    before, _WORK = _WORK, work
    try:
        yield
    finally:
        _WORK = before


def _alone(parent: int) -> None:
    """In a new process: one thread, and no life after its parent's, which a kill -9 would otherwise leave it."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died meanwhile
        os._exit(1)


def _run_inherited(k: int) -> Any:
    assert _WORK is not None, "set before the processes were forked"
    try:
        return _WORK(k)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"unit {k} failed: {type(error).__name__}: {error}") from None
        raise
