"""Saving and loading: folders of JSON and safetensors, never pickle.

An artifact is a folder with `config.json` and `model.safetensors`. It is written to a temporary folder that is then
renamed, so that a complete artifact is never replaced by an incomplete one.
"""

import copy
import functools
import inspect
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError
from neuboots.head import has_lazy_layers, unwrap_model
from neuboots.methods._base import find_predictor_class, find_saved_method
from neuboots.prediction import Predictor

FORMAT = "neuboots"
VERSION = 2
CONFIG, TENSORS = "config.json", "model.safetensors"

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


# -- predictors ----------------------------------------------------------------------------------------


def save(predictor: Predictor, folder: str | os.PathLike[str]) -> None:
    """Write a predictor to a folder; an earlier predictor there is replaced.

    Args:
        predictor: Fitted predictor.
        folder: Folder to write.

    Raises:
        ArgumentError: If the first argument is not a predictor, or has an option that cannot be saved.
        FileExistsError: If the folder holds other files.

    Example:
        >>> from tempfile import mkdtemp
        >>> from neuboots.methods import DeterministicPredictor
        >>> folder = Path(mkdtemp()) / "model"
        >>> save(DeterministicPredictor(nn.Linear(4, 2)), folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'model.safetensors']
    """
    if not isinstance(predictor, Predictor):
        raise ArgumentError("predictor", type(predictor), "a Predictor, as returned by fit")
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
    return build_predictor(artifact.config, artifact.tensors, model, path=artifact.folder)


def describe_predictor(predictor: Predictor) -> dict[str, Any]:
    """Return the config from which `build_predictor` rebuilds a predictor: method, options and net, as JSON.

    Args:
        predictor: Fitted predictor.

    Returns:
        The config.
    """
    return {**predictor.config(), "net": None if predictor.net is None else describe_net(predictor.net)}


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
    try:
        info, predictor_class = find_saved_method(config), find_predictor_class(config)
    except (KeyError, TypeError, ArgumentError) as error:
        raise ArtifactError(path, f"its method is not registered ({error})") from None
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentError("model", model, "an nn.Module")
    if not info.needs_net:
        if model is not None:
            raise ArgumentError("model", type(model), f"None, since {info.name!r} has no net")
        model = nn.Module()
    elif model is None:
        if config.get("net") is None:
            hint = "the saved config does not describe its net"
            raise ArgumentError("model", None, "a net of the saved architecture", hint=hint)
        model = build_net(config["net"], path=path)
    if has_lazy_layers(model):
        raise ArgumentError("model", type(model), "a net without lazy layers", hint="run it once before loading")
    try:
        predictor = predictor_class.from_config(config, unwrap_model(model).eval())
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(path, f"the config does not fit the net ({error})") from error
    _load_tensors_into(predictor.module, tensors, path)
    return predictor


def _load_tensors_into(net: nn.Module, tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Load the tensors into the net, in their own precision; raise ArtifactError if they do not fit."""
    # loading into another precision would round silently
    precisions = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(precisions) == 1:
        net.to(dtype=precisions.pop())
    for name, target in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        if name in tensors and target.is_floating_point():
            target.data = target.data.to(tensors[name].dtype)
    try:
        net.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise ArtifactError(path, f"the weights do not fit the net ({error})") from error


# -- nets that are rebuilt from their options ----------------------------------------------------------

_NETS: dict[str, type[nn.Module]] = {}


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
    try:
        module = description.get("module", "neuboots.nets.mlp")
        if str(module).startswith(("neuboots.", "neuboots_paper.")):
            import_module(module)  # registers the class
        return _NETS[description["net"]](**description["options"])
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(path, f"no net can be built from {description!r} ({error!r})") from error


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
    """
    from safetensors.torch import save_file

    header = {"format": FORMAT, "version": VERSION, "kind": kind}
    with atomic_folder(folder, _artifact_files(folder), "an artifact of neuboots") as temporary:
        # clones, since safetensors rejects tensors that share memory (tied weights)
        stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(stored, temporary / TENSORS)
        text = json.dumps({**header, **config}, indent=2) + "\n"
        (temporary / CONFIG).write_text(text, encoding="utf-8")


def read_artifact(folder: str | os.PathLike[str], *, kind: str) -> Artifact:
    """Read an artifact.

    Args:
        folder: Folder written by `write_artifact`.
        kind: Expected kind.

    Returns:
        Its config and tensors.

    Raises:
        FileNotFoundError: If there is no artifact.
        ArtifactError: If it is damaged, or of another kind or version.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict) or config.get("format") != FORMAT:
            raise ArtifactError(path, f"{CONFIG} was not written by neuboots")
        if config.get("version") != VERSION:
            raise ArtifactError(path, f"it has version {config.get('version')}, expected {VERSION}")
        if config.get("kind") != kind:
            raise ArtifactError(path, f"it is a {config.get('kind')}, expected a {kind}")
        return Artifact(path, config, load_file(path / TENSORS))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{error.filename or path / TENSORS} does not exist; expected a saved {kind}") from None
    except ArtifactError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(path, f"a file is damaged ({error})") from error


def check_artifact_folder(folder: str | os.PathLike[str]) -> None:
    """Raise FileExistsError if `write_artifact` could not write to this folder; for a check before long work.

    Args:
        folder: The folder.
    """
    _check_replaceable(Path(folder), _artifact_files(folder), "an artifact of neuboots")


def _artifact_files(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Files that may be replaced: none if the config is that of another library, which may use the same names."""
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8")).get("format") == FORMAT:
            return CONFIG, TENSORS
    return ()


@contextmanager
def atomic_folder(folder: str | os.PathLike[str], names: Collection[str], what: str) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` as a whole on exit; on an error nothing changes.

    Args:
        folder: Folder to replace.
        names: Files that an existing folder may hold; others are not deleted.
        what: What such a folder is, for the error message.

    Yields:
        The temporary folder.

    Raises:
        FileExistsError: If the existing folder holds other files.
    """
    target = Path(folder).resolve()  # a link stays one
    _check_replaceable(target, names, what)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if target.exists():
            old = temporary.with_name(temporary.name + ".old")
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except BaseException:  # including KeyboardInterrupt
                os.rename(old, target)
                raise
            shutil.rmtree(old)
        else:
            os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(target: Path, names: Collection[str], what: str) -> None:
    """Raise FileExistsError if the folder holds other files than these, or contains the working directory."""
    if target.exists() and not (target.is_dir() and {path.name for path in target.iterdir()} <= {*names}):
        raise FileExistsError(f"{target} exists and is not {what}: choose another name")
    if Path.cwd().is_relative_to(target.resolve()):
        raise FileExistsError(f"{target} contains the working directory: choose another name")


# -- files ---------------------------------------------------------------------------------------------


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary path of the same suffix, whose file replaces `path` at the end; on failure nothing changes.

    Args:
        path: The file.

    Yields:
        Path of the temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".part-{os.getpid()}-{path.name}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
