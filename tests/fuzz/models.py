"""Saved folders: predictors, estimators and models of tables, images and masks, damaged or crafted.

A folder that was damaged after it was written predicts bit for bit what it did, or is an error. A crafted one, whose
content the library itself sealed, may be another model; it must not run code, hang, take memory, or write elsewhere.
"""

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuboots import DeepEnsemble, InfluenceBootstrap, NeuBoots, TrainingConfig, load, save
from neuboots.app.model import PredictionTable, load_model
from neuboots.estimators import NeuBootsClassifier, NeuBootsRegressor
from neuboots.nets import MLP
from neuboots.posthoc import TemperatureScaling
from neuboots.serialization import CONFIG, TENSORS, ArtifactError, write_artifact

from . import images, tables
from .driver import CORRECT, ERROR, FLAGGED, Area, Failure, Workspace, run_command
from .images import write_classes, write_pairs

# -- folders and what they predict ---------------------------------------------------------------------


class Saved(NamedTuple):
    """A saved folder, how it is used, and what it predicts."""

    folder: Path
    kind: str  # of the artifact
    use: Callable[[Path], dict[str, Any]]
    truth: dict[str, Any]
    data: Path | None  # for the command line


def use_predictor(folder: Path) -> dict[str, Any]:
    """Outputs of a predictor at fixed inputs."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    prediction = load(folder).predict(x, 4)
    return {"samples": prediction.samples.numpy(), "std": prediction.std.numpy()}


def use_estimator(cls: Any, folder: Path) -> dict[str, Any]:
    """Outputs of an estimator at fixed rows."""
    x, estimator = np.linspace(-1, 1, 12).reshape(3, 4), cls.load(folder)
    if cls is NeuBootsClassifier:
        return {"classes": estimator.predict(x), "probs": estimator.predict_proba(x)}
    mean, std = estimator.predict(x, return_std=True)
    return {"mean": mean, "std": std}


def use_model(data: Path, folder: Path) -> dict[str, Any]:
    """Predictions of a model for a file or folder."""
    model = load_model(folder)
    table = PredictionTable.concatenate([model.predict(batch, num_samples=4) for batch in model.read(data)])
    return table.columns


def prepare(folder: Path) -> list[Saved]:
    """Train and save one of each kind."""
    folder.mkdir(parents=True)
    saved = []
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=rng)
    classes, values = (x[:, 0] > 0).long(), x[:, :1] + 0.1 * torch.randn(40, 1, generator=rng)
    config, net = TrainingConfig(epochs=1, batch_size=20, progress=False), partial(MLP, 4, 2, widths=(8,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        neuboots = NeuBoots(num_blocks=8).fit(net, (x, classes), config)
        predictors = {
            "neuboots": neuboots,
            "ensemble": DeepEnsemble(num_members=2).fit(net, (x, classes), config),
            "influence": InfluenceBootstrap().fit(net, (x, classes), config),
            "scaled": TemperatureScaling(num_samples=4).fit(neuboots, (x, classes)),
        }
        for name, predictor in predictors.items():
            save(predictor, folder / name)
            saved.append((name, "predictor", use_predictor, None))
        for name, cls, y in (
            ("classifier", NeuBootsClassifier, classes),
            ("regressor", NeuBootsRegressor, values[:, 0]),
        ):
            estimator = cls(epochs=1, num_samples=4, random_state=0).fit(x.numpy(), y.numpy())
            estimator.save(folder / name)
            artifact = json.loads((folder / name / CONFIG).read_text(encoding="utf-8"))["kind"]
            saved.append((name, artifact, partial(use_estimator, cls), None))
        made = tables.prepare(folder / "tables")
        rows = tables.TableCase("", "", 7, 12, tables.Style(), (), None, 0, 0)
        data = tables.write_table(rows, folder / "rows.csv", plain=True).path
        for name, made_folder in made.folders.items():
            shutil.copytree(made_folder, folder / name)
            saved.append((name, "model", partial(use_model, data), data))
        vision = images.prepare(folder / "vision")
        classes_folder, pairs = write_classes(folder / "classes", 2, seed=0), write_pairs(folder / "pairs", 2, seed=0)
        shutil.copytree(vision.image_folder, folder / "images")
        shutil.copytree(vision.mask_folder, folder / "masks")
        for name, source in (("images", classes_folder), ("masks", pairs / "images")):
            saved.append((name, "model", partial(use_model, source), source))
        return [Saved(folder / name, kind, use, use(folder / name), data) for name, kind, use, data in saved]


# -- damage --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelCase:
    """Damage of a saved folder.

    Attributes:
        which: Which of the saved folders.
        damage: Kind of damage.
        sealed: Whether the library writes the changed content, with new checksums.
        command: Whether the command line reads it.
        at: Where.
        value: What with.
    """

    which: int
    damage: str
    sealed: bool
    command: bool
    at: int
    value: int


FILE_DAMAGE = ("flip", "flip", "truncate", "append", "empty", "missing", "link", "link loop", "link out", "fifo",
               "folder", "extra file", "extra pickle", "pickle", "swap", "deep json",
               "not utf-8", "socket", "unreadable")  # fmt: skip
JSON_DAMAGE = ("json value", "json value", "json delete", "json add", "json nest", "json huge")
TENSOR_DAMAGE = ("tensor missing", "tensor dtype", "tensor shape", "tensor nan", "tensor extra", "tensor swap",
                 "tensor empty", "tensor scale", "tensor large")  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, -1, 0, 1, 2, 10**9, 10**30, 1e308, -1.5, float("nan"), float("inf"), True, "", "x", "../../../etc/passwd",
    "os.system", "neuboots.__main__", "\x1b[31m", "=1+1", "<b>", [], {}, [[]], [None], [-1], [500_000_000], [1e9, 1e9],
    {"a": 1}, "x" * 100_000, [0] * 100_000, "\udc80", "builtins", [1, "a", None], [[[[[[]]]]]], 2**63, "NaN", "1",
)  # fmt: skip
CASES = st.builds(
    ModelCase,
    which=st.integers(0, 9),
    damage=st.sampled_from((*FILE_DAMAGE, *JSON_DAMAGE * 3, *TENSOR_DAMAGE * 2)),
    sealed=st.booleans(),
    command=st.integers(0, 3).map(lambda k: k == 0),
    at=st.integers(0, 1 << 24),
    value=st.integers(0, 1 << 16),
)


class _RunsCode:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.canary),)


def run(prepared: list[Saved], case: ModelCase, workspace: Workspace) -> str:
    """Damage a copy of a folder and use it."""
    saved = prepared[case.which % len(prepared)]
    folder = workspace.inputs / "model"
    shutil.copytree(saved.folder, folder)
    sealed = case.sealed and case.damage.startswith(("json", "tensor"))
    intact = damage_folder(folder, saved, prepared, case, workspace, sealed=sealed)
    if case.command and saved.data is not None:
        arguments = ["predict", str(folder), str(saved.data), "--num-samples", "4"]
        out = workspace.outputs / ("found" if saved.folder.name == "masks" else "found.jsonl")
        with workspace.guard(out.name):
            console = run_command(*arguments, "--out", str(out))
        if console.code and out.exists():
            raise Failure("leftovers", out.name)
        if console.code:
            return ERROR
        if saved.folder.name == "masks":
            return CORRECT
    with workspace.guard():
        found = saved.use(folder)
    same = found.keys() == saved.truth.keys() and all(
        np.array_equal(found[name], value, equal_nan=value.dtype.kind == "f") for name, value in saved.truth.items()
    )
    if not same and not sealed and not intact:
        raise Failure("wrong answer", f"a damaged folder ({case.damage}) predicts something else")
    for name, column in found.items():
        if saved.kind == "model" and column.dtype.kind == "f" and not np.isfinite(column).all():
            abstain = found.get("abstain")
            if abstain is None or not abstain[~np.isfinite(column).reshape(len(column), -1).all(1)].all():
                raise Failure("wrong answer", f"{name} is not finite, and nothing says so")
    return CORRECT if same else FLAGGED


def damage_folder(
    folder: Path, saved: Saved, prepared: list[Saved], case: ModelCase, workspace: Workspace, *, sealed: bool
) -> bool:
    """Damage the folder; return whether it may be a valid other model."""
    names = sorted(os.listdir(folder))
    file, damage = folder / names[case.at % len(names)], case.damage
    if damage.startswith("json"):
        _change_json(folder, saved, case, sealed)
    elif damage.startswith("tensor"):
        _change_tensors(folder, saved, case, sealed)
    elif damage in ("flip", "truncate", "append", "empty"):
        content = file.read_bytes()
        at = case.at % len(content)
        file.write_bytes({
            "flip": content[:at] + bytes([content[at] ^ (1 << case.value % 8)]) + content[at + 1 :],
            "truncate": content[:at],
            "append": content + bytes([case.value % 256]) * (1 + case.at % 100),
            "empty": b"",
        }[damage])  # fmt: skip
    elif damage == "missing":
        file.unlink()
    elif damage.startswith("link"):
        target = workspace.inputs / "moved"
        file.rename(target)
        file.symlink_to({"link": target, "link loop": file, "link out": Path("/etc/passwd")}[damage])
    elif damage in ("fifo", "folder", "socket"):
        file.unlink()
        {"fifo": os.mkfifo, "folder": os.mkdir, "socket": _make_socket}[damage](file)
    elif damage == "extra file":
        (folder / ("new.txt", "..evil", "model.bin", "\x1b[31m")[case.value % 4]).write_text("x", encoding="utf-8")
    elif damage in ("extra pickle", "pickle"):
        place = folder / "pytorch_model.bin" if damage == "extra pickle" else file
        if case.value % 2:
            place.write_bytes(pickle.dumps(_RunsCode(workspace.canary)))
        else:
            torch.save(_RunsCode(workspace.canary), place)
    elif damage == "swap":  # a file of another folder
        other = prepared[case.value % len(prepared)].folder / file.name
        if other.exists():
            shutil.copyfile(other, file)
        return other.exists() and other.parent == saved.folder
    elif damage == "deep json":
        text = ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 10_000_000)[
            case.value % 3
        ]
        (folder / CONFIG).write_text(text, encoding="utf-8")
    elif damage == "not utf-8":
        (folder / CONFIG).write_bytes((b"\xff\xfe", b"\xef\xbb\xbf{}", b"\0" * 100, b"{} {}")[case.value % 4])
    elif damage == "unreadable":
        file.chmod(0)
    return False


def _make_socket(path: Path) -> None:
    import socket

    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, each in items:
        found += _paths(each, (*path, key))
    return found


def _change_json(folder: Path, saved: Saved, case: ModelCase, sealed: bool) -> None:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for key in ("format", "version", "kind", "checksums", "files", "manifest") if sealed else ():
        config.pop(key, None)
    paths = _paths(config)
    path, value = paths[case.at % len(paths)], VALUES[case.value % len(VALUES)]
    parent: Any = config
    for key in path[:-1]:
        parent = parent[key]
    if case.damage == "json delete":
        del parent[path[-1]]
    elif case.damage == "json add":
        if isinstance(parent, list):
            parent.append(value)
        else:
            parent["extra"] = value
    elif case.damage == "json nest":
        for _ in range(1 + case.value % 900):
            parent[path[-1]] = [parent[path[-1]]]
    elif case.damage == "json huge":
        numbers = [p for p in paths if isinstance(_get(config, p), int) and not isinstance(_get(config, p), bool)]
        path = numbers[case.at % len(numbers)]
        parent = _get(config, path[:-1])
        parent[path[-1]] = (10**9, 2**31, 2**62, 10**19, 500_000_000)[case.value % 5]
    else:
        parent[path[-1]] = value
    if sealed:
        tensors = load_file(folder / TENSORS)
        shutil.rmtree(folder)
        _seal(folder, saved, config, tensors)
    else:
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _seal(folder: Path, saved: Saved, config: Any, tensors: dict[str, Tensor]) -> None:
    """Write what a stranger could write with the library; what it refuses to write is an error already."""
    try:
        write_artifact(folder, config, tensors, kind=saved.kind)
    except ValueError as error:
        raise ArtifactError(folder, f"it cannot be written ({error})") from error


def _get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _change_tensors(folder: Path, saved: Saved, case: ModelCase, sealed: bool) -> None:
    tensors: dict[str, Tensor] = load_file(folder / TENSORS)
    names = sorted(tensors)
    name, other = names[case.at % len(names)], names[(case.at + 1 + case.value) % len(names)]
    tensor, damage = tensors[name], case.damage
    if damage == "tensor missing":
        del tensors[name]
    elif damage == "tensor dtype":
        dtypes = torch.float16, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8, torch.complex64
        tensors[name] = tensor.to(dtypes[case.value % len(dtypes)])
    elif damage == "tensor shape":
        shapes = (
            tensor.flatten(),
            tensor[None],
            tensor[..., None],
            tensor.reshape(-1)[:1],
            tensor.T,
            tensor.new_zeros(0),
        )
        tensors[name] = shapes[case.value % len(shapes)].contiguous()
    elif damage == "tensor nan":
        values = float("nan"), float("inf"), -float("inf"), 3e38
        value = values[case.value % 4]
        tensors[name] = torch.full_like(tensor, value) if tensor.is_floating_point() else torch.full_like(tensor, -1)
        if case.value % 3 == 0 and tensor.is_floating_point():
            tensors[name] = tensor.clone()
            tensors[name].view(-1)[case.at % tensor.numel()] = value
    elif damage == "tensor extra":
        tensors[("extra", f"{name}.extra", "../x", "predictor.extra", "\x1b[31m")[case.value % 5]] = torch.zeros(3)
    elif damage == "tensor swap":
        tensors[name], tensors[other] = tensors[other], tensor
    elif damage == "tensor empty":
        tensors = {} if case.value % 2 else {name: torch.zeros(0, 2**40) for name in names}
    elif damage == "tensor scale":
        tensors[name] = tensor * (1e30, 0.0, -1.0, 1e-30)[case.value % 4] if tensor.is_floating_point() else tensor - 1
    elif damage == "tensor large":
        tensors[name] = torch.zeros(1 << 20, dtype=tensor.dtype)
    if sealed:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        for key in ("format", "version", "kind", "checksums", "files", "manifest"):
            config.pop(key, None)
        shutil.rmtree(folder)
        _seal(folder, saved, config, tensors)
    else:
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / TENSORS)


USUAL = [ModelCase(which, "none", sealed=False, command=True, at=0, value=0) for which in range(10)]
AREA = Area("model folders", 0.25, prepare, lambda prepared: CASES, run, USUAL)
