"""Parallel jobs on joblib whose results are cached on disk, and the fingerprint of the settings they depend on.

    results[k] = job(k),   k = 0 … count − 1, in any order and on any joblib backend

With a folder, each result is written to a JSON file of its own as soon as it is known, so that interrupted work resumes
with the missing jobs. The folder also stores a fingerprint of the settings; a run with other settings is rejected.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuboots._fingerprint import describe, hash_description
from neuboots._validation import ArgumentError, check_fraction, check_int, check_memory
from neuboots.serialization import read_json, write_json
from neuboots.training import TrainingConfig, initialize_model, progress_bar


def run_jobs(
    job: Callable[[int], Any],
    count: int,
    *,
    num_workers: int = 1,
    folder: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    description: str = "running",
    progress: bool = True,
) -> list[Any]:
    """Run job(0), …, job(count − 1) and return their results in this order.

    Jobs run on joblib: its default backend starts local processes, each with one torch thread, and
    `with joblib.parallel_config(backend="dask")` around the call selects another one.

    Args:
        job: Function of the job's number. Its result must be JSON: numbers, strings, lists and dicts of them.
        count: Number of jobs.
        num_workers: Number of jobs at a time.
        folder: Folder for the results, one JSON file each; jobs whose file exists are not run. A damaged file is
            written anew.
        settings: All settings that results depend on. A folder with the fingerprint of others is rejected.
        description: Text of the progress bar.
        progress: Whether to show a progress bar.

    Returns:
        The results as JSON gives them back.

    Raises:
        ArgumentError: If the folder holds results of other settings.
        TypeError: If a result is not JSON.

    Example:
        >>> run_jobs(lambda k: {"square": k * k}, 3, progress=False)
        [{'square': 0}, {'square': 1}, {'square': 4}]
    """
    from joblib import Parallel, delayed

    check_int("num_workers", num_workers, minimum=1)
    check_memory(description, count, 1_000 * count, hint="use fewer")
    files: list[Path | None] = [None] * count
    if folder is not None:
        _check_key(Path(folder), fingerprint(**(settings or {})))
        files = [Path(folder) / f"job-{k:04d}.json" for k in range(count)]
    num_missing = sum(file is None or read_json(file) is None for file in files)
    workers = Parallel(n_jobs=max(1, min(num_workers, num_missing)), return_as="generator")
    results = []
    with progress_bar(description, count, enabled=progress) as advance:
        for result in workers(delayed(_run_job)(job, k, file, os.getpid()) for k, file in enumerate(files)):
            results.append(result)
            advance(description)
    return results


def _run_job(job: Callable[[int], Any], k: int, file: Path | None, parent: int) -> Any:
    """Result of one job, written by the process that computes it."""
    if os.getpid() != parent:
        torch.set_num_threads(1)
    return cached_result(file, lambda _: json.loads(json.dumps(job(k))))


def _check_key(folder: Path, key: str) -> None:
    """Store the key in a new folder; reject a folder with another one."""
    stored = folder / "key.json"
    if not stored.exists() and not any(folder.glob("job-*.json")):
        write_json(stored, key)
    if read_json(stored) != key:
        raise ArgumentError("folder", str(folder), "a new folder, or one of a run with the same settings")


def cached_result(file: Path | None, compute: Callable[[Path | None], Any]) -> Any:
    """Read the JSON file, or compute(checkpoint folder) and write it; the checkpoints beside it are then deleted."""
    if file is None:
        return compute(None)
    checkpoints = file.with_suffix("")
    if (result := read_json(file)) is None:
        result = compute(checkpoints)
        write_json(file, result)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return result


# -- fingerprint ---------------------------------------------------------------------------------------


def fingerprint(**settings: Any) -> str:
    """Hash of everything that results depend on, equal in every process.

    Arrays, tensors and weights are hashed whole, functions by their code, the variables they capture and the globals
    they read, nets also by their attributes, data sets that are not in memory by their length, targets and some rows.
    Fields of a `TrainingConfig` that change no result are ignored: progress, workers, folder, checkpoints, callbacks.

    Args:
        **settings: The settings by name.

    Returns:
        A hexadecimal hash.

    Example:
        >>> a, b, c = (fingerprint(score=lambda x, k=k: k * x, n=3) for k in (1, 1, 2))
        >>> a == b != c
        True
    """
    return hash_description(describe(settings))


# -- repeated fits -------------------------------------------------------------------------------------


def check_repeated_fit(config: TrainingConfig, test_data: Any) -> None:
    """Reject what several fits cannot share: a checkpoint folder, and test data that can be read only once."""
    if config.folder is not None:
        raise ArgumentError("config", config.folder, "folder=None, as all fits would share the folder")
    if isinstance(test_data, Iterator):
        raise ArgumentError("test_data", type(test_data).__name__, "a data set or loader, which can be read repeatedly")


def student_t_interval(values: Tensor, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Student's t interval of the mean over the first axis, mean ± t s / √T: (*,) each.

    Args:
        values: Values of T repetitions: (T, *).
        level: Confidence level.

    Returns:
        Lower and upper end.

    Raises:
        ArgumentError: If there is one value, or the level is not between 0 and 1.

    Example:
        >>> low, high = student_t_interval(torch.tensor([0.4, 0.5, 0.6]))
        >>> round(float(low), 3), round(float(high), 3)
        (0.252, 0.748)
    """
    from scipy.stats import t

    if len(values) < 2:
        raise ArgumentError("values", len(values), "at least 2 repetitions")
    check_fraction("level", level)
    half = float(t.ppf((1 + level) / 2, len(values) - 1)) * values.std(0) / len(values) ** 0.5
    return values.mean(0) - half, values.mean(0) + half


def make_reference_net(model: Callable[[], nn.Module] | nn.Module | None, seed: int) -> nn.Module | None:
    """Make a net for the fingerprint; reject a function that returns the same net twice, as fits would share it."""
    if model is None or isinstance(model, nn.Module):
        return model
    first, second = initialize_model(model, seed), initialize_model(model, seed)
    if {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}:
        raise ArgumentError("model", "the same weights twice", "a new net at each call", hint="build it inside model")
    return first
