"""Saving and loading: folders of JSON and safetensors, never pickle.

An artifact is a folder with `config.json`, `model.safetensors`, and the sizes and checksums of both in `manifest.json`.
It is written to a temporary folder, which then takes the place of the earlier one in one step.
"""

import copy
import errno
import functools
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from neuboots._validation import ArgumentError, check_types
from neuboots.head import find_not_finite, has_lazy_layers, unwrap_model
from neuboots.methods._base import find_predictor_class, find_saved_method
from neuboots.prediction import Predictor

if sys.platform != "win32":
    import fcntl

FORMAT = "neuboots"
VERSION = 3
CONFIG, TENSORS, MANIFEST = "config.json", "model.safetensors", "manifest.json"
_HEADER = ("format", "version", "kind")
_IGNORED = (".DS_Store", "Thumbs.db", "desktop.ini")  # file managers write them into every folder that they show
_MAX_JSON_BYTES = 1 << 26
_MAX_READS = 100  # of a folder that is replaced while it is read
_ALLOCATION_FACTOR, _MIN_ALLOCATION = 4, 1 << 16  # values that building a model may allocate at once
_CALL_FACTOR, _MIN_CALLS = 256, 1 << 16  # calls of torch functions while a model is built, by the number of tensors
_FACTORIES = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "new_empty", "new_full", "new_ones"),
    *("new_zeros", "ones", "rand", "randint", "randn", "randperm", "zeros"),
}
_MAX_NAME_BYTES = 240  # of a file; with a prefix at most 255

M = TypeVar("M", bound=type[nn.Module])


class ArtifactError(ValueError):
    """A saved artifact cannot be read: it is damaged, of another kind, or of another version.

    Args:
        path: Folder of the artifact.
        reason: What is wrong with it.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path, self.reason = Path(path), reason
        super().__init__(f"cannot load {path}: {reason}")

    def __reduce__(self) -> Any:
        return ArtifactError, (self.path, self.reason)


# -- predictors ----------------------------------------------------------------------------------------


def save(predictor: Predictor, folder: str | os.PathLike[str]) -> None:
    """Write a predictor to a folder; an earlier predictor there is replaced.

    Args:
        predictor: Fitted predictor.
        folder: Folder to write.

    Raises:
        ArgumentError: If the first argument is not a predictor, or has an option that cannot be saved.
        FloatingPointError: If a weight or statistic is NaN or infinite.
        FileExistsError: If the folder holds other files.

    Example:
        >>> from tempfile import mkdtemp
        >>> from neuboots.methods import DeterministicPredictor
        >>> folder = Path(mkdtemp()) / "model"
        >>> save(DeterministicPredictor(nn.Linear(4, 2)), folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'manifest.json', 'model.safetensors']
    """
    if not isinstance(predictor, Predictor):
        raise ArgumentError("predictor", type(predictor), "a Predictor, as returned by fit")
    if (name := predictor.find_not_finite()) is not None:
        raise FloatingPointError(f"{name!r} has NaN or infinite values, so that the model is not saved")
    write_artifact(folder, describe_predictor(predictor), predictor.state_dict(), kind="predictor")


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Predictor:
    """Load a predictor.

    Args:
        folder: Folder written by `save`.
        model: Net of the saved architecture. Not needed for the nets of `neuboots.nets` and other `configurable`
            classes, which are built from their saved options.

    Returns:
        The predictor.

    Raises:
        FileNotFoundError: If there is no such folder.
        ArtifactError: If the folder is damaged, or its weights do not fit the model.
        ArgumentError: If `model` is missing or not needed.

    Example:
        >>> from tempfile import mkdtemp
        >>> from neuboots.methods import DeterministicPredictor
        >>> from neuboots.nets import MLP
        >>> folder = Path(mkdtemp()) / "model"
        >>> save(DeterministicPredictor(MLP(4, 2)), folder)
        >>> load(folder).net.head
        Linear(in_features=500, out_features=2, bias=True)
    """
    artifact = read_artifact(folder, kind="predictor")
    config = {key: value for key, value in artifact.config.items() if key not in _HEADER}
    return build_predictor(config, artifact.tensors, model, path=artifact.folder)


def describe_predictor(predictor: Predictor) -> dict[str, Any]:
    """Return the config from which `build_predictor` rebuilds a predictor: method, options and net, as JSON.

    Args:
        predictor: Fitted predictor.

    Returns:
        The config.
    """
    counts = Counter(_float_types(predictor.state_dict()).values())
    dtypes = {"*": counts.most_common(1)[0][0]} if counts else {}
    others = {name: dtype for name, dtype in _float_types(predictor.state_dict()).items() if dtype != dtypes["*"]}
    net = None if predictor.net is None else describe_net(predictor.net)
    independent = {"independent": True} if predictor.independent else {}
    return {**predictor.config(), **independent, "net": net, "dtypes": dtypes | others}


def _float_types(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    floats = {name: tensor.dtype for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    return {name: str(d).removeprefix("torch.") for name, d in floats.items() if d.is_floating_point or d.is_complex}


def build_predictor(
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module | None = None,
    *,
    path: str | os.PathLike[str] = "the predictor",
) -> Predictor:
    """Rebuild a predictor from its config and tensors.

    Args:
        config: Config from `describe_predictor`.
        tensors: Its `state_dict()`.
        model: Net of the saved architecture, if the config does not describe it.
        path: Where the config comes from, for error messages.

    Returns:
        The predictor.

    Raises:
        ArtifactError: If config, tensors and model do not fit together.
        ArgumentError: If `model` is missing or not needed.
    """
    with reading(path):
        info, predictor_class = find_saved_method(config), find_predictor_class(config)
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentError("model", model, "an nn.Module")
    if not info.needs_net:
        if model is not None:
            raise ArgumentError("model", type(model), f"None, since {info.name!r} has no net")
    elif model is None and config.get("net") is None:
        hint = "the saved config does not describe its net"
        raise ArgumentError("model", None, "a net of the saved architecture", hint=hint)
    if model is not None and has_lazy_layers(model):
        raise ArgumentError("model", type(model), "a net without lazy layers", hint="run it once before loading")
    described = model is None
    with reading(path), _AllocationLimit(tensors):
        net = nn.Module() if not info.needs_net else build_net(config["net"], path=path) if model is None else model
        predictor = predictor_class.from_config(config, unwrap_model(net).eval())
        if config.get("independent"):
            predictor = predictor.as_independent()
        dtypes = check_types("predictor", config, {"dtypes": dict[str, str]})["dtypes"]
        _load_tensors_into(predictor.module, tensors, dtypes)
    if (name := predictor.find_not_finite()) is not None:
        raise ArtifactError(path, f"{name!r:.80} has NaN or infinite values")
    found = json.loads(json.dumps(describe_predictor(predictor)))
    check_same(found, config if described else config | {"net": found["net"]}, path)
    return predictor


def _load_tensors_into(net: nn.Module, tensors: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> None:
    """Load the tensors into the net in their own precision; raise ValueError if names, shapes or types do not fit."""
    # loading into another precision would round silently
    targets = dict([*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)])
    for name in _float_types(targets):
        if name in tensors:
            targets[name].data = targets[name].data.to(getattr(torch, dtypes.get(name, dtypes["*"])))
    expected = {name: (value.dtype, value.shape) for name, value in net.state_dict().items()}
    check_tensors(tensors, expected)
    net.load_state_dict(dict(tensors))


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.dtype, Sequence[int | None]]]
) -> None:
    """Raise ValueError unless the tensors have exactly these names, types and shapes, where None is any size.

    Args:
        tensors: Tensors by name.
        expected: Type and shape by name.

    Example:
        >>> check_tensors({"mean": torch.zeros(3)}, {"mean": (torch.float32, (None,))})
    """
    problems = [f"{name!r:.80} is missing" for name in expected if name not in tensors]
    problems += [f"{name!r:.80} is not part of the model" for name in tensors if name not in expected]
    for name in expected.keys() & tensors.keys():
        tensor, (dtype, shape) = tensors[name], expected[name]
        fits = len(shape) == tensor.ndim and all(size in (None, n) for size, n in zip(shape, tensor.shape, strict=True))
        if not fits or tensor.dtype != dtype:
            sizes = tuple("any" if size is None else size for size in shape)
            problems.append(f"{name!r:.80} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {sizes}")
    if problems:
        raise ValueError(f"the tensors do not fit: {'; '.join(problems[:5])}")


def check_same(found: Any, stored: Any, path: str | os.PathLike[str], where: str = "config") -> None:
    """Raise ArtifactError unless the config of a loaded object is the one that was read: all of it was understood.

    Args:
        found: Config of the loaded object.
        stored: Config that was read.
        path: Where it comes from.
        where: Name of the config in the error.
    """
    if isinstance(found, dict) and isinstance(stored, dict):
        for key in [*found, *(key for key in stored if key not in found)]:
            if key not in stored or key not in found:
                raise ArtifactError(path, f"{where}.{key!s:.80} {'is missing' if key in found else 'is unknown'}")
            check_same(found[key], stored[key], path, f"{where}.{key!s:.80}")
    elif json.dumps(found) != json.dumps(stored):
        raise ArtifactError(path, f"{where} is {stored!r:.80}, which does not fit the model ({found!r:.80})")


def check_restored(artifact: "Artifact", config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ArtifactError unless an object that was rebuilt from an artifact is described by the same artifact.

    Args:
        artifact: The artifact.
        config: Config of the rebuilt object, without the keys that `write_artifact` adds.
        tensors: Tensors of the rebuilt object.
    """
    stored = {key: value for key, value in artifact.config.items() if key not in _HEADER}
    check_same(json.loads(json.dumps(config)), stored, artifact.folder)
    with reading(artifact.folder):
        check_tensors(artifact.tensors, {name: (value.dtype, value.shape) for name, value in tensors.items()})


@contextmanager
def reading(path: str | os.PathLike[str], *, argument: str = "") -> Iterator[None]:
    """Report whatever the config and tensors of a stranger raise as an ArtifactError.

    Args:
        path: Where they come from.
        argument: Argument of the caller, whose errors are not the artifact's.

    Yields:
        Nothing.
    """
    try:
        yield
    except ArtifactError:
        raise
    except Exception as error:
        if isinstance(error, ArgumentError) and error.name == argument:
            raise
        raise ArtifactError(path, f"it is damaged ({type(error).__name__}: {error!s:.500})") from error


class _AllocationLimit(TorchFunctionMode):
    """Limits what is allocated in this thread to a multiple of the stored tensors, before it is allocated.

    Layers without values of their own take memory, too: the number of calls is limited by the number of tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        stored = sum(tensor.numel() + 1 for tensor in tensors.values())
        self.largest = _ALLOCATION_FACTOR * stored + _MIN_ALLOCATION
        self.left = 64 * self.largest
        self.calls = _CALL_FACTOR * len(tensors) + _MIN_CALLS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FACTORIES:
            options = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory", "device")}
            self._check(func(*args, **options, device="meta").numel())
        elif len(shapes := [value.shape for value in args if isinstance(value, Tensor)]) > 1:
            with suppress(RuntimeError):
                self._check(math.prod(torch.broadcast_shapes(*shapes)))  # type: ignore[no-untyped-call]
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):  # an error in a function that ends no_grad would leave it on
            self.left -= result.numel()
            self.calls -= 1
            self._check(0)
        return result

    def _check(self, size: int) -> None:
        if size > self.largest or self.left < 0 or self.calls < 0:
            raise ValueError("it asks for a net that is much larger than the stored tensors")


# -- nets that are rebuilt from their options ----------------------------------------------------------

_NETS: dict[str, type[nn.Module]] = {}
_NET_MODULE = re.compile(r"(neuboots\.nets|neuboots_paper)(\.[a-z]\w*)+")  # others may run commands when imported


def configurable(cls: M) -> M:
    """Register a class of nets that can be rebuilt from its constructor arguments, as a class decorator.

    The arguments, which must be JSON values, are stored in `options`; predictors around such a net are loaded without
    passing a model.

    Args:
        cls: Subclass of `nn.Module`.

    Returns:
        The same class.

    Example:
        >>> @configurable
        ... class Scale(nn.Module):
        ...     def __init__(self, factor=2.0):
        ...         super().__init__()
        >>> describe_net(Scale())["options"]
        {'factor': 2.0}
    """
    init = cls.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self) is cls and "options" not in vars(self):
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            options = list(bound.arguments.items())[1:]
            cast(Any, self).options = {
                name: list(value) if isinstance(value, tuple) else value for name, value in options
            }

    cls.__init__ = wrapped  # type: ignore[method-assign]
    _NETS[cls.__name__] = cls
    return cls


def describe_net(net: nn.Module) -> dict[str, Any] | None:
    """Return the class and options of a `configurable` net; None for another net, or one whose layers were changed.

    Args:
        net: The net.

    Returns:
        The description, or None.

    Example:
        >>> from neuboots.nets import SmallCNN
        >>> describe_net(SmallCNN(1, 10))["options"]
        {'in_channels': 1, 'out_features': 10, 'widths': [32, 64, 128]}
        >>> describe_net(nn.Linear(4, 2)) is None
        True
    """
    name = type(net).__name__
    if _NETS.get(name) is not type(net):
        return None
    options = copy.deepcopy(cast(Any, net).options)
    description = {"net": name, "module": type(net).__module__, "options": options}
    # a twin without weights shows whether the layers are those that the options give
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        twin = build_net(description)
    return description if repr(twin) == repr(net) else None


def build_net(description: Mapping[str, Any], *, path: str | os.PathLike[str] = "the net") -> nn.Module:
    """Return the net that `describe_net` described, with new weights.

    Args:
        description: What `describe_net` returned.
        path: Where the description comes from, for error messages.

    Returns:
        The net.

    Raises:
        ArtifactError: If the class is not registered, or the options do not fit.

    Example:
        >>> build_net({"net": "MLP", "options": {"in_features": 4, "out_features": 2}}).head
        Linear(in_features=500, out_features=2, bias=True)
    """
    with reading(path):
        module = description.get("module", "neuboots.nets.mlp")
        if _NET_MODULE.fullmatch(str(module)):
            import_module(module)  # registers the class
        net_class, options = _NETS[description["net"]], description["options"]
        hints: dict[str, Any] = {}
        with suppress(NameError):  # of types that are imported for a type checker only
            hints = {key: hint for key, hint in get_type_hints(net_class.__init__).items() if key in options}
        with torch.random.fork_rng(devices=[]):
            net: nn.Module = net_class(**check_types("net", options, hints))
    return net


# -- artifacts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Artifact:
    """Content of an artifact folder.

    Attributes:
        folder: The folder.
        config: Content of `config.json`.
        tensors: Content of `model.safetensors`.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def select(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with the prefix, without it."""
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}


def write_artifact(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    kind: str,
) -> None:
    """Write an artifact, replacing an earlier one as a whole.

    Args:
        folder: Folder to write.
        config: JSON values, without the keys "format", "version" and "kind".
        tensors: Tensors by name; an object that contains another prefixes the other's names, as in "predictor.weight".
        kind: Kind of the object, such as "predictor".

    Raises:
        FileExistsError: If the folder holds files that are no artifact.
        FloatingPointError: If a tensor has NaN or infinite values.
    """
    if (bad := _find_not_finite(tensors, kind)) is not None:
        raise FloatingPointError(f"{bad!r} has NaN or infinite values, so that the model is not saved")
    from safetensors.torch import save

    text = json.dumps({"format": FORMAT, "version": VERSION, "kind": kind, **config}, indent=2, allow_nan=False) + "\n"
    # clones, since safetensors rejects tensors that share memory (tied weights)
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    files = {CONFIG: text.encode(), TENSORS: save(stored)}
    if len(files[CONFIG]) > _MAX_JSON_BYTES:
        raise ArgumentError("config", f"{len(files[CONFIG]):,} bytes of JSON", f"at most {_MAX_JSON_BYTES:,}")
    with atomic_folder(folder, _artifact_files, "an artifact of neuboots") as temporary:
        for name, content in [*files.items(), (MANIFEST, _make_manifest(files))]:
            (temporary / name).write_bytes(content)


def _make_manifest(files: Mapping[str, bytes]) -> bytes:
    """The one text that describes these files: a manifest that differs in any byte is damaged."""
    facts = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return (json.dumps({"format": FORMAT, "version": VERSION, "files": facts}, indent=2) + "\n").encode()


def read_artifact(folder: str | os.PathLike[str], *, kind: str) -> Artifact:
    """Read an artifact, all files of one version even while another process replaces it.

    Args:
        folder: Folder written by `write_artifact`.
        kind: Expected kind.

    Returns:
        Its config and tensors.

    Raises:
        FileNotFoundError: If there is no artifact.
        ArtifactError: If it is damaged, has missing or other files, or is of another kind or version.
    """
    from safetensors.torch import load

    path = Path(folder)
    files = _read_files(path, kind)
    config = _parse_config(path, files[CONFIG])
    if config.get("kind") != kind:
        raise ArtifactError(path, f"it is a {config.get('kind')!r:.40}, expected a {kind}")
    try:
        tensors = load(files[TENSORS])
    except Exception as error:  # of several kinds, by what is wrong with the header
        raise ArtifactError(path, f"{TENSORS} is damaged ({type(error).__name__}: {error!s:.200})") from error
    if (bad := _find_not_finite(tensors, kind)) is not None:
        raise ArtifactError(path, f"{bad!r:.80} has NaN or infinite values")
    return Artifact(path, config, tensors)


def _find_not_finite(tensors: Mapping[str, Tensor], kind: str) -> str | None:
    """The name of a tensor that is not finite; whether one of a predictor is a parameter is known to the net only."""
    others = [name for name in tensors if kind != "predictor" and "predictor." not in name]
    return find_not_finite(tensors, others)


def _read_files(path: Path, kind: str) -> dict[str, bytes]:
    """Content of the files of an artifact, which are those of its manifest."""
    for _ in range(_MAX_READS):
        _recover_folder(_follow_links(path))
        folder = None
        try:
            # the folder itself stays the same when another one takes its place
            if os.open in os.supports_dir_fd:
                folder = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
            return _read_version(path, folder)
        except (OSError, ArtifactError) as error:
            with suppress(OSError):
                if folder is not None and not os.path.samestat(os.fstat(folder), path.stat()):
                    continue
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                raise FileNotFoundError(f"{path / CONFIG} does not exist; expected a saved {kind}") from None
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(path, f"it cannot be read ({error.strerror})") from error
        finally:
            if folder is not None:
                os.close(folder)
    raise ArtifactError(path, "it is replaced again and again by other processes")


def _read_version(path: Path, folder: int | None) -> dict[str, bytes]:
    names = {*os.listdir(path if folder is None else folder)} - {*_IGNORED}
    expected = {CONFIG, TENSORS, MANIFEST}
    if not names & {CONFIG, MANIFEST}:
        raise FileNotFoundError
    if CONFIG in names:  # other libraries have such files as well, and other versions other files
        config = _parse_config(path, _read_file(path, folder, CONFIG))
        if config.get("version") != VERSION:
            raise ArtifactError(path, f"it has version {config.get('version')!r:.40}, expected {VERSION}")
    if names != expected:
        listed = [f"{name!r:.80} is missing" for name in sorted(expected - names)]
        listed += [f"{name!r:.80} is not part of it" for name in sorted(names - expected)]
        raise ArtifactError(path, "; ".join(listed[:3]))
    files = {name: _read_file(path, folder, name) for name in (MANIFEST, CONFIG, TENSORS)}
    manifest = files.pop(MANIFEST)
    if manifest != _make_manifest(files):
        stated = [name for name, data in files.items() if hashlib.sha256(data).hexdigest().encode() not in manifest]
        raise ArtifactError(path, f"{' and '.join(stated) or MANIFEST} is damaged: the checksum differs")
    return files


def _read_file(path: Path, folder: int | None, name: str) -> bytes:
    """Content of a regular file of an artifact; nothing else is read."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path / name if folder is None else name, flags, dir_fd=folder)
    except OSError as error:
        raise ArtifactError(path, f"{name} cannot be opened as a regular file ({error.strerror})") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(path, f"{name} is not a regular file")
        limit = _memory_bytes() if name == TENSORS else _MAX_JSON_BYTES
        if status.st_size > limit:
            raise ArtifactError(path, f"{name} has {status.st_size:,} bytes, expected at most {limit:,}")
        return file.read(status.st_size)


def _memory_bytes() -> int:
    """Memory of this machine, which no file of tensors can exceed."""
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize


def _parse_config(path: Path, data: bytes) -> dict[str, Any]:
    """Config of an artifact."""
    try:
        config = parse_json(data)
    except ValueError as error:
        raise ArtifactError(path, f"{CONFIG} is damaged ({error!s:.200})") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ArtifactError(path, f"{CONFIG} was not written by neuboots")
    return config


def parse_json(data: bytes) -> Any:
    """Parse JSON from an unknown source.

    Args:
        data: JSON in UTF-8.

    Returns:
        The value.

    Raises:
        ValueError: If it is not JSON, is nested too deeply, repeats a key, or has a number that is not finite or an
            integer that does not fit in 64 bits.

    Example:
        >>> parse_json(b'{"a": [1, 2.5, null]}')
        {'a': [1, 2.5, None]}
    """

    def parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            raise ValueError("a key occurs twice")
        return value

    def parse_number(text: str) -> int | float:
        is_integer = text.lstrip("-").isdigit()
        value = int(text) if is_integer and len(text) <= 21 else math.inf if is_integer else float(text)
        if not abs(value) < (1 << 64 if is_integer else math.inf):
            raise ValueError(f"the number {text:.40} is out of range")
        return value

    def reject(text: str) -> None:
        raise ValueError(f"{text} is not a number")

    options: dict[str, Any] = {"parse_int": parse_number, "parse_float": parse_number, "parse_constant": reject}
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=parse_object, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_artifact_folder(folder: str | os.PathLike[str]) -> None:
    """Raise FileExistsError if `write_artifact` could not write to this folder; for a check before long work.

    Args:
        folder: The folder.
    """
    _check_replaceable(_follow_links(folder), _artifact_files, "an artifact of neuboots")


def _artifact_files(folder: Path) -> tuple[str, ...]:
    """Files that may be replaced: none if the config is that of another library, which may use the same names."""
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("format") == FORMAT:
            return CONFIG, TENSORS, MANIFEST, *_IGNORED
    return ()


# -- files and folders that are replaced as a whole ----------------------------------------------------
#
# A new version is written to a locked file or folder beside the target. Its name follows from the target: writers
# take turns, and the next one finds what a killed one left. A lock ends with its process.

_Owned = Callable[[Path], Collection[str]]


@contextmanager
def atomic_folder(folder: str | os.PathLike[str], owned: _Owned, what: str) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` as a whole on exit; on an error nothing changes.

    Another writer of the same folder waits. If the process is killed, the folder has its earlier or its new content.

    Args:
        folder: Folder to replace.
        owned: Function that returns the names that an existing folder may hold; others are not deleted.
        what: What such a folder is, for the error message.

    Yields:
        The temporary folder.

    Raises:
        FileExistsError: If the existing folder holds other files.
        OSError: If it cannot be written.
    """
    target = _follow_links(folder)
    _check_replaceable(target, owned, what)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = _sibling(target, "part"), _sibling(target, "old")
    with _locked(temporary, target, is_folder=True):
        try:
            _remove_leftovers(target, temporary, old)
            yield temporary
            for path, _, names in os.walk(temporary):
                for name in [*names, "."]:
                    _flush(Path(path, name))
            _check_replaceable(target, owned, what)
            if target.exists():
                shutil.copymode(target, temporary)
                with _locked(target, target, is_folder=True):  # it will be at the temporary path until it is deleted
                    if not _exchange(temporary, target):
                        os.rename(target, old)
                        os.rename(temporary, target)
                        temporary = old
                    shutil.rmtree(temporary)
            else:
                os.rename(temporary, target)
        except BaseException:  # including KeyboardInterrupt
            if old.exists() and not target.exists():
                os.rename(old, target)
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    _flush(target.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary path of the same suffix, whose file replaces `path` at the end; on failure nothing changes.

    Another writer of the same file waits. If the process is killed, the file has its earlier or its new content.

    Args:
        path: The file.

    Yields:
        Path of the temporary file, which is empty.

    Raises:
        OSError: If it cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(path, "part")
    with _locked(temporary, path, is_folder=False):
        try:
            os.truncate(temporary, 0)
            mode = stat.S_IMODE((path if path.exists() else temporary).stat().st_mode)
            yield temporary
            os.chmod(temporary, mode)  # of a file that its writer made for the user alone
            _flush(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    _flush(path.parent)


def _follow_links(path: str | os.PathLike[str]) -> Path:
    """The path that a link leads to: a link stays one."""
    return Path(os.path.realpath(path))


def _check_replaceable(target: Path, owned: _Owned, what: str) -> None:
    """Raise FileExistsError if the folder holds other files than these, or contains the working directory."""
    if os.path.lexists(target) and not (
        target.is_dir() and {path.name for path in target.iterdir()} <= {*owned(target)}
    ):
        raise FileExistsError(f"{target} exists and is not {what}: choose another name")
    with suppress(FileNotFoundError):  # the working directory was deleted
        if Path.cwd().is_relative_to(target):
            raise FileExistsError(f"{target} contains the working directory: choose another name")


def _sibling(target: Path, kind: str) -> Path:
    """A hidden name beside the target with the same suffix, for a name of any length."""
    name = target.name
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest() + target.suffix[-16:]
    return target.with_name(f".{kind}-{name}")


@contextmanager
def _locked(path: Path, target: Path, *, is_folder: bool, wait: bool = True) -> Iterator[None]:
    """Create or open a file or folder, and hold its lock; an error names the target."""
    try:
        while (descriptor := _acquire(path, is_folder, wait)) is None:
            pass
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    try:
        yield
    finally:
        if sys.platform != "win32":
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also of copies in forked processes
            os.close(descriptor)


def _acquire(path: Path, is_folder: bool, wait: bool) -> int | None:
    """Descriptor with the lock; None if the path was moved or deleted meanwhile. There are no such locks on Windows."""
    if is_folder:
        with suppress(FileExistsError):
            path.mkdir()
    if sys.platform == "win32":
        if not is_folder:
            path.touch()
        return -1
    flags = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        if is_folder and path.parent.is_dir():  # its writer has finished since it was found
            return None
        raise
    held = False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # a network drive without locks
                raise
        with suppress(FileNotFoundError):
            held = os.path.samestat(os.fstat(descriptor), path.lstat())
    finally:
        if not held:
            os.close(descriptor)
    return descriptor if held else None


def _remove_leftovers(target: Path, temporary: Path, old: Path) -> None:
    """Remove what a killed writer left, whose lock is held; undo the first of its two renames."""
    if old.exists() and target.exists():
        shutil.rmtree(old)
    elif old.exists():
        os.rename(old, target)
    for path in temporary.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _recover_folder(target: Path) -> None:
    """Remove what a killed writer of a folder left, if no writer is at work and the place can be written."""
    temporary, old = _sibling(target, "part"), _sibling(target, "old")
    if not (old.exists() or temporary.exists()):
        return
    wait = old.exists() and not target.exists()
    with suppress(OSError), _locked(temporary, target, is_folder=True, wait=wait):
        _remove_leftovers(target, temporary, old)
        temporary.rmdir()


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    import ctypes

    paths, at = (os.fsencode(first), os.fsencode(second)), ctypes.c_int(-100)  # AT_FDCWD
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "linux":
            failed = libc.renameat2(at, paths[0], at, paths[1], ctypes.c_uint(2))  # RENAME_EXCHANGE
        else:
            failed = libc.renamex_np(*paths, ctypes.c_uint(2))  # RENAME_SWAP, macOS
    except (AttributeError, TypeError):  # no such function
        return False
    number = ctypes.get_errno()
    if failed and number not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(second))
    return not failed


def _flush(path: Path) -> None:
    """Write a file or the entries of a folder to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, so that no reader sees an incomplete one.

    Args:
        path: The file.
        text: Its content.
    """
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically.

    Args:
        path: The file.
        value: The value.
    """
    write_text(path, json.dumps(value))


def read_json(path: Path) -> Any:
    """Return the value that `write_json` wrote.

    Args:
        path: The file.

    Returns:
        The value; None if there is no such file, or it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
