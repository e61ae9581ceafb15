"""Identity: what results depend on, as a text, by which a folder of them is found again or refused.

    fingerprint(a) = fingerprint(b)  if results under the settings a are those under b, in any process

A function is known by its name, its code and all that the code refers to, down to the code of libraries, of which the
name is enough; a dataclass by its fields; a tensor by every byte; a net by its classes, options and weights; a data set
by its length, its targets if they are in memory, and some of its rows, lest a large one be read whole. What has no
other description is known by its repr without addresses in memory, which change between processes.

Units of work that know nothing of each other: in parallel, and each finished one kept.

    result[k] = run(unit[k]),   in any order, on any number of processes

A unit is a data set, a seed or a trial. With a folder, its result is written there as soon as it is known (aside, then
renamed), so that work that was cut short goes on with the units that are missing.

One method fitted again and again, with other seeds or on other rows: what is checked first, and what is kept.

mean ± t s / √T,   Student's interval of the mean over T fits
"""

import ctypes
import dis
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.hooks import RemovableHandle

from neuboots._io import read_json, write_json
from neuboots.loading import get_tensors, preserve_rng_state, seed_everything
from neuboots.prediction import Method
from neuboots.training import TrainingConfig, initialize_model, progress_bar

_CUT = 120  # characters of a text that are kept; a digest stands for the rest
_SHOWN = 80
_ROWS = 18  # rows of a data set that are read: the first, the last, and some between
_TOGETHER = 4096  # rows hashed at a time
_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has, hooks and the like
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (sysconfig.get_path("stdlib"), Path(torch.__file__).parents[1], Path(__file__).parents[1])
)


def fingerprint(**settings: Any) -> str:
    """The settings as a text: name=description for each, a long one cut, with a digest of the whole.

    Of a recipe, what changes no result is left out: progress, workers, folder, checkpoints, `on_epoch`.

    >>> a, b, c = (fingerprint(score=lambda x, k=k: k * x, n=3) for k in (1, 1, 2))
    >>> a == b != c
    True
    >>> fingerprint(n=3, names=("a", "b"))
    "n=3; names=('a', 'b')"
    """
    known = _Known()
    return "; ".join(f"{name}={known.text(value)}" for name, value in settings.items())


def make_reference_net(model: Callable[[], nn.Module] | None, seed: int) -> nn.Module | None:
    """One net, to know `model` by, having seen that the next is another one; None for a method without a net."""
    if model is None:
        return None
    first, second = initialize_model(model, seed), initialize_model(model, seed)
    if {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}:
        raise ValueError(
            "make_net() gave the same weights twice, so that each fit would go on with the net of the last; "
            "expected a new net at each call: build it inside make_net, or copy.deepcopy what is pretrained"
        )
    return first


class _Known:
    """Texts by the objects they describe: each is looked at once, and what contains itself comes to an end."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[Any, str]] = {}  # with the object, whose id would else be given to another

    def text(self, value: Any) -> str:
        if id(value) not in self.texts:
            self.texts[id(value)] = value, "itself"
            self.texts[id(value)] = value, _cut(self._described(value))
        return self.texts[id(value)][1]

    def _described(self, value: Any) -> str:
        match value:
            case np.generic():
                return repr(value.item())
            case Tensor() | np.ndarray():
                return self._array(value)
            case Mapping():
                return f"{{{', '.join(sorted(f'{self.text(key)}: {self.text(value[key])}' for key in value))}}}"
            case set() | frozenset():
                return f"{{{', '.join(sorted(map(self.text, value)))}}}"  # the order depends on the process
            case str() | bytes() | range():
                return repr(value)
            case Sequence():
                return f"({', '.join(map(self.text, value))})"
            case ModuleType():
                return value.__name__
            case CodeType():
                return self._call(value.co_name, value.co_code, value.co_names, value.co_consts)
            case CellType():
                return self.text(_inside(value))
            case partial():
                return self._call("partial", value.func, value.args, value.keywords)
            case MethodType():
                return self._call("method", value.__self__, value.__func__)
            case staticmethod() | classmethod():
                return self._call(type(value).__name__, value.__func__)
            case property():
                return self._call("property", value.fget)
            case cached_property():
                return self._call("property", value.func)
            case FunctionType():
                return self._function(value)
            case type():
                return self._class(value)
            case nn.Module():
                return self._module(value)
            case DataLoader():
                return self._loader(value)
            case IterableDataset():
                return self._call(self.text(type(value)), *_read(value, None))
            case RemovableHandle():
                return "hook"  # its number counts the hooks of the process
            case TrainingConfig():
                same = replace(value, progress=False, num_workers=0, folder=None, checkpoint_steps=None, on_epoch=None)
                return self._fields(same)
        return self._object(value)

    def _call(self, name: str, *parts: Any) -> str:
        return f"{name}({', '.join(map(self.text, parts))})"

    def _array(self, array: Any, places: Tensor | None = None) -> str:
        """Shape, type, and a hash of every byte, of these rows or of all."""
        if isinstance(array, UninitializedBuffer | UninitializedParameter):
            return "a tensor to come"
        if isinstance(array, np.ndarray) and array.dtype.hasobject:
            return self._call("array", array.shape, array.tolist())
        parts = [array] if places is None else (array[rows] for rows in torch.split(places, _TOGETHER))
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(_bytes(part))
        shape = (*array.shape,) if places is None else (len(places), *array.shape[1:])
        return f"{str(array.dtype).removeprefix('torch.')}{shape}#{digest.hexdigest()}"

    def _function(self, function: FunctionType) -> str:
        """Code, defaults, and what it refers to: variables around it, and global ones."""
        parts: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__closure__, function.__dict__]
        if not _is_library(function.__module__):
            everywhere = function.__globals__
            named = {name: everywhere[name] for name in _names(function.__code__) if name in everywhere}
            parts += [function.__code__, named]
        return self._call(_name(function), *parts)

    def _class(self, kind: type) -> str:
        """All that its body defines, and its bases."""
        if _is_library(kind.__module__):
            return _name(kind)
        body = {
            name: value
            for name, value in vars(kind).items()
            if isinstance(value, FunctionType) or not (name.startswith("__") and name.endswith("__"))
        }
        return self._call(_name(kind), body, kind.__bases__)

    def _module(self, module: nn.Module) -> str:
        """Each module in it: class, options, weights and buffers."""
        parts = [
            (
                name,
                type(part),
                {option: value for option, value in vars(part).items() if option not in _OF_MODULES},
                dict(part.named_parameters(recurse=False)),
                dict(part.named_buffers(recurse=False)),
            )
            for name, part in module.named_modules()
        ]
        return self._call(_name(type(module)), *parts)

    def _loader(self, loader: DataLoader[Any]) -> str:
        """Its data set, the rows that it gives of it, and how it puts them together."""
        order = loader.batch_sampler if loader.batch_size is None else loader.sampler
        dropped = loader.batch_size if loader.drop_last else None
        return self._call("DataLoader", loader.dataset, order, dropped, loader.collate_fn)

    def _rows(self, data: Any) -> str:
        """Length, targets in memory, and some rows; all of what is in tensors."""
        n = len(data)
        tensors, places = get_tensors(data)
        if tensors is not None:
            return f"{n} rows({', '.join(self._array(tensor, places) for tensor in tensors)})"
        whole = data
        parts: list[Any] = []
        while isinstance(whole, Subset):
            parts.append(np.asarray(whole.indices))
            whole = whole.dataset
        parts.append(_as_array(getattr(whole, "targets", None)))
        some = torch.linspace(0, n - 1, min(n, _ROWS)).round().long().tolist()
        return self._call(f"{n} rows of {_name(type(whole))}", *parts, *_read(data, some))

    def _fields(self, value: Any) -> str:
        """A dataclass; fields that do not count in comparing two do not count here."""
        named = {field.name: getattr(value, field.name, None) for field in fields(value) if field.compare}
        texts = (f"{name}={self.text(part)}" for name, part in named.items())
        return f"{self.text(type(value))}({', '.join(texts)})"

    def _object(self, value: Any) -> str:
        kind: Any = type(value)
        if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
            return self._rows(value)
        if is_dataclass(value):
            return self._fields(value)
        if kind.__repr__ is object.__repr__:
            return self._call(self.text(kind), getattr(value, "__dict__", {}))
        shown = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
        return shown if _is_library(kind.__module__) else f"{self.text(kind)} {shown}"


def _cut(text: str) -> str:
    if len(text) <= _CUT:
        return text
    return f"{text[:_SHOWN]}…#{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _names(code: CodeType) -> list[str]:
    """Names of global variables in the code and in the functions that it makes."""
    mine = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part))
    return sorted(mine.union(inner))


def _inside(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_library(module: str | None) -> bool:
    """Whether this is code that its name and version stand for, and not the caller's own."""
    if module is None or module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return module in sys.builtin_module_names if file is None else file.startswith(_LIBRARIES)


def _bytes(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).tobytes()
    dense = array.detach().cpu().to_dense() if array.layout != torch.strided else array.detach().cpu()
    return dense.resolve_conj().contiguous().flatten().view(torch.uint8).numpy()


def _as_array(targets: Any) -> Any:
    """A list as one array, which is hashed at once, where its elements are alike."""
    try:
        return np.asarray(targets) if isinstance(targets, list) else targets
    except ValueError:
        return targets


def _read(data: Any, rows: list[int] | None) -> list[Any]:
    """These rows, or the first of a stream, augmented as by one seed."""
    with preserve_rng_state():
        seed_everything(0, "identity")
        return list(islice(data, _ROWS)) if rows is None else [data[i] for i in rows]


_PDEATHSIG = 1  # of Linux' prctl
_WORK: Callable[[int], Any] | None = None  # what a forked process inherits: functions need not be picklable


def run_jobs(
    job: Callable[[int], Any],
    count: int,
    *,
    num_workers: int = 1,
    folder: Path | None = None,
    key: str = "",
    known: Mapping[int, Any] | None = None,
    description: str = "working",
    progress: bool = True,
) -> list[Any]:
    """[run(0), …, run(count − 1)]; results are JSON: numbers, texts, lists and dicts of them.

    `num_workers` processes share the units; each computes with one thread. Where processes cannot be forked, or a GPU
    is in use, units run in turn. A folder whose units have another `identity` is refused. Units whose result is `known`
    are not run.

    >>> run_jobs(lambda k: {"square": k * k}, 3, progress=False)
    [{'square': 0}, {'square': 1}, {'square': 4}]
    """
    for name, value in (("num_workers", num_workers), ("count", count)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"got {name}={value!r}; expected a whole number, at least 1")
    results = {**_kept(folder, key, count), **(known or {})}
    missing = [k for k in range(count) if k not in results]
    if missing:
        with suppress(ImportError):  # once here, and not in the first unit of every process
            import lightning_fabric  # noqa: F401
    work = partial(_done, job, folder)
    with progress_bar(description, count, enabled=progress, done=len(results)) as advance:
        for k, result in _finished(work, missing, num_workers, folder):
            results[k] = result
            advance(description)
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


def check_repeated_fit(method: Method, config: TrainingConfig, test: Any, *, task: str) -> None:
    """Whether the task can fit, and measure on the test rows, more than once, or a sentence."""
    if isinstance(method, type):
        raise ValueError(f"got the class {method.__name__}; expected an object of it: {method.__name__}()")
    if not hasattr(method, "fit"):
        raise ValueError(f"got method of type {type(method).__name__}; expected a method such as NeuBoots()")
    if not isinstance(config, TrainingConfig):
        raise ValueError(f"got recipe of type {type(config).__name__}; expected a Recipe, such as Recipe(epochs=30)")
    if config.folder is not None:
        raise ValueError(f"got a recipe with a folder, which all fits would share; expected {task}(folder=…)")
    if isinstance(test, Iterator):
        raise ValueError(
            f"got test rows of type {type(test).__name__}, which can be read once; expected a data set or a loader, "
            "since every fit is measured on them"
        )


def cached_result(file: Path | None, fit: Callable[[Path | None], dict[str, Any]]) -> dict[str, Any]:
    """What fit(folder) gives, as JSON in a file, or what an earlier call has left there.

    The folder is for the checkpoints of the fit under way; it stands beside the file, and goes when that is written.
    """
    if file is None:
        return fit(None)
    checkpoints = file.with_suffix("")
    result: dict[str, Any] | None = read_json(file)
    if result is None:
        result = fit(checkpoints)
        write_json(file, result)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return result


def student_t_interval(values: Tensor, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """mean ± t s / √T over the first axis: (*,) each.

    >>> import torch
    >>> low, high = student_t_interval(torch.tensor([0.4, 0.5, 0.6]))
    >>> round(float(low), 3), round(float(high), 3)
    (0.252, 0.748)
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"got {count} value, which has no spread; expected at least 2")
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level={level}; expected a number between 0 and 1, such as 0.95")
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, count - 1)) * values.std(0) / count**0.5
    return values.mean(0) - half, values.mean(0) + half
