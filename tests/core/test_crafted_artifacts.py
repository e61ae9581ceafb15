"""Artifacts of every kind with one thing changed and a right manifest: each is refused with one error."""

import copy
import random
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import QUICK, quick_options
from PIL import Image
from torch import Tensor

import neuboots_paper.baselines  # noqa: F401  # registers four more methods
from neuboots import ArgumentError, InfluenceBootstrap, nets, save
from neuboots.app import load_model
from neuboots.app import model as app_model
from neuboots.app._images import ImagePreprocessing
from neuboots.app.images import fit_images
from neuboots.app.masks import fit_masks
from neuboots.app.tabular import fit_table
from neuboots.estimators import NeuBootsClassifier, NeuBootsRegressor
from neuboots.methods import DeterministicPredictor, MCDropout, create_method, find_method, list_methods
from neuboots.nets import MLP
from neuboots.posthoc import StdScaling, TemperatureScaling
from neuboots.serialization import (
    Artifact,
    ArtifactError,
    build_predictor,
    describe_predictor,
    parse_json,
    read_artifact,
)
from neuboots.testing import MethodUnderTest
from neuboots_paper.scnas.net import SCNAS

FREE = {  # keys whose values are notes, or whose content is not part of the model
    *("card", "loss_curve_", "validation_curve_", "feature_names_in_", "method", "band_error_", "classes_"),
    *("net", "size", "dtypes", "inputs", "refit", "std_scale", "batch_size", "dispersion", "first"),
}
MAX_CASES = 80  # of one kind of artifact
VALUES: tuple[Any, ...] = ([], {}, "x", True, -1, 0, 1.5, 5 * 10**8, 10**18, [[[]]], "__main__", ["x", 3], {"x": 1})


def make_predictor(name: str, folder: Path) -> None:
    MethodUnderTest(find_method(name), quick_options(name)).predictor.save(folder)


def make_mlp(folder: Path, wrap: bool = False) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = (x, (x[:, 0] > 0).long())
    predictor: Any = create_method("neuboots").fit(lambda: MLP(3, 2, widths=(5,)), data, QUICK)
    (TemperatureScaling().fit(predictor, data) if wrap else predictor).save(folder)


def make_tangent(folder: Path) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    method = InfluenceBootstrap(torch.nn.MSELoss(), layers="all")
    save(method.fit(lambda: MLP(3, 1, widths=(5,)), (x, x[:, :1]), QUICK), folder)


def make_std_scaling(folder: Path) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    predictor = MCDropout(loss=torch.nn.MSELoss()).fit(lambda: MLP(3, 1, widths=(5,)), (x, x[:, :1]), QUICK)
    StdScaling().fit(predictor, (x, x[:, :1])).save(folder)


def make_estimator(kind: str, folder: Path) -> None:
    X = np.random.default_rng(0).normal(size=(80, 3))
    options: dict[str, Any] = {"epochs": 2, "random_state": 0, "widths": (5,)}
    if kind == "classifier":
        NeuBootsClassifier(**options).fit(X, np.where(X[:, 0] > 0, "yes", "no")).save(folder)
    else:
        NeuBootsRegressor(**options).fit(X, X[:, 0]).save(folder)


def make_table(kind: str, folder: Path) -> None:
    rng = np.random.default_rng(0)
    file = folder.with_suffix(".csv")
    rows = []
    for number, letter in zip(rng.normal(size=300), rng.choice([*"uv"], 300), strict=True):
        rows.append(f"{number:.4f},{letter},{('yes', 'no')[int(number > 0)] if kind == 'classes' else number}")
    file.write_text("a,b,y\n" + "\n".join(rows) + "\n", encoding="utf-8")
    fit_table(file, "y", epochs=2, progress=False).save(folder)


def make_pictures(kind: str, folder: Path) -> None:
    rng, root = np.random.default_rng(0), folder.with_suffix(".files")
    for k in range(24):
        pixels = rng.integers(0, 256, (32, 32, 3)).astype(np.uint8)
        names = [f"{'ab'[k % 2]}/{k}.png"] if kind == "images" else [f"images/{k}.png", f"masks/{k}.png"]
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels if "masks" not in name else (pixels[..., 0] > 99).astype(np.uint8)).save(root / name)
    (fit_images if kind == "images" else fit_masks)(root, epochs=1, num_samples=2, progress=False).save(folder)


MAKERS: dict[str, Callable[[Path], object]] = {
    **{name: lambda folder, name=name: make_predictor(name, folder) for name in list_methods()},  # type: ignore[misc]
    "mlp": make_mlp,
    "temperature": lambda folder: make_mlp(folder, wrap=True),
    "std scale": make_std_scaling,
    "tangent": make_tangent,
    **{name: lambda folder, name=name: make_estimator(name, folder) for name in ("classifier", "regressor")},  # type: ignore[misc]
    **{name: lambda folder, name=name: make_table(name, folder) for name in ("classes", "numbers")},  # type: ignore[misc]
    **{name: lambda folder, name=name: make_pictures(name, folder) for name in ("images", "masks")},  # type: ignore[misc]
}


@pytest.fixture(scope="module", params=MAKERS)
def content(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("artifacts") / request.param
    MAKERS[request.param](folder)
    kind = parse_json((folder / "config.json").read_bytes())["kind"]
    return read_artifact(folder, kind=kind)


def restore(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load it as `load`, `load_model` and `load` of an estimator do after they have read the files."""
    artifact = copy.deepcopy(artifact)
    kind, config = artifact.config["kind"], artifact.config
    if kind == "model":
        monkeypatch.setattr(app_model, "read_artifact", lambda folder, kind: artifact)
        load_model(artifact.folder)
    elif kind == "estimator":
        names = {"NeuBootsClassifier": NeuBootsClassifier}
        names.get(str(config.get("estimator")), NeuBootsRegressor).from_artifact(artifact)  # type: ignore[arg-type]
    else:
        config = {key: value for key, value in config.items() if key not in ("format", "version", "kind")}
        info = find_method(artifact.folder.name) if artifact.folder.name in list_methods() else None
        model = MethodUnderTest(info).case.model() if info is not None and info.needs_net else None
        build_predictor(config, artifact.tensors, model, path=artifact.folder)


def attempt(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> ArtifactError | None:
    """The error with which an artifact is refused."""
    try:
        restore(artifact, monkeypatch)
    except ArtifactError as error:
        return error
    except ArgumentError as error:
        if error.name == "model":  # nothing describes the net
            return ArtifactError(artifact.folder, str(error))
        raise
    return None


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys on the way to each value of a JSON object, with the first entry of each list."""
    for key in tree if isinstance(tree, dict) else range(min(1, len(tree))) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from places(tree[key], (*path, key))


def inside(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def is_free(path: tuple[Any, ...]) -> bool:
    return not {*path}.isdisjoint(FREE)


def changed(artifact: Artifact, path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> Artifact:
    config = copy.deepcopy(artifact.config)
    change(inside(config, path[:-1]), path[-1])
    return Artifact(artifact.folder, config, artifact.tensors)


def json_type(value: Any) -> Any:
    return float if type(value) in (int, float, type(None)) else type(value)  # None: without a limit


@pytest.mark.slow
def test_changed_configs_are_refused(content: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    restore(content, monkeypatch)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted, cases = [], list[tuple[Any, Any, str, Any]]()
    for path in [path for path in places(content.config) if path[0] not in ("format", "version", "kind")]:
        value = inside(content.config, path)
        changes: list[tuple[Any, Any]] = [
            ("another", other) for other in VALUES if other != value or type(other) is not type(value)
        ]
        changes += [("none", None)] if value is not None and path[-1] != "head" else []
        changes += [("missing", None)] if isinstance(path[-1], str) else []
        changes += [("extra", None)] if isinstance(value, dict) else []
        cases += [(path, value, what, other) for what, other in changes]
    for path, value, what, other in random.Random(0).sample(cases, min(len(cases), MAX_CASES)):

        def change(parent: Any, key: Any, what: str = what, other: Any = other) -> None:
            if what == "missing":
                del parent[key]
            elif what == "extra":
                parent[key]["unknown"] = 1
            else:
                parent[key] = other

        error = attempt(changed(content, path, change), monkeypatch)
        if error is None and not is_free(path) and (what != "another" or json_type(other) is not json_type(value)):
            accepted.append((".".join(map(str, path)), value, what, other))
        assert error is None or len(str(error)) < 2000
    assert accepted == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20  # KiB


@pytest.mark.slow
def test_changed_tensors_are_refused(content: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    restore(content, monkeypatch)
    changes: dict[str, Callable[[Tensor], Tensor | None]] = {
        "missing": lambda tensor: None,
        "one more row": lambda tensor: torch.cat([tensor, tensor[:1]]) if tensor.ndim else tensor[None],
        "one more axis": lambda tensor: tensor[None],
        "integers": lambda tensor: tensor.to(torch.int16),
        "half": lambda tensor: tensor.half(),
        "another precision": lambda tensor: tensor.double() if tensor.dtype != torch.float64 else tensor.float(),
    }
    cases = [(name, what) for name in content.tensors for what in changes]
    for name, what in random.Random(0).sample(cases, min(len(cases), MAX_CASES)):
        if name.endswith(("held_out_", "ood.means")) and what == "one more row":
            continue  # as many as the training had rows, or centers
        if name.endswith("classes_") and what in ("integers", "half", "another precision"):
            continue  # labels of the user, of any type
        tensors = {key: value for key, value in content.tensors.items() if key != name}
        if (other := changes[what](content.tensors[name])) is not None:
            tensors[name] = other
        error = attempt(Artifact(content.folder, content.config, tensors), monkeypatch)
        assert isinstance(error, ArtifactError), f"{name} with {what} was accepted"
    for prefix in ("", "predictor.", "ood.", "fitted.", "estimator.", "estimator.fitted.", "estimator.predictor."):
        tensors = content.tensors | {f"{prefix}more_": torch.zeros(2)}
        with pytest.raises(ArtifactError):
            restore(Artifact(content.folder, content.config, tensors), monkeypatch)


NETS: dict[str, Callable[[], torch.nn.Module]] = {
    "MLP": lambda: MLP(3, 2, widths=(4, 4)),
    "SmallCNN": lambda: nets.SmallCNN(1, 2, widths=(4,)),
    "ResNet": lambda: nets.resnet8(2),
    "DenseNet": lambda: nets.DenseNet(2, growth=4, blocks=(1, 1)),
    "DeepLabV3": lambda: nets.small_deeplab(2),
    "UResNet": lambda: nets.UResNet(1, 2, widths=(4, 8)),
    "TextTransformer": lambda: nets.TextTransformer(9, 2, width=8, depth=1, heads=2, max_length=9),
    "SCNAS": lambda: SCNAS(1, 2, width=4, levels=2),
}


def test_every_net_has_a_case() -> None:
    assert {name for name in nets.__all__ if isinstance(getattr(nets, name), type)} <= set(NETS)


@pytest.mark.parametrize(
    "name", [name if name == "MLP" else pytest.param(name, marks=pytest.mark.slow) for name in NETS]
)
def test_a_net_of_huge_size_is_refused_before_it_fills_the_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = DeterministicPredictor(NETS[name]())
    artifact = Artifact(Path(name), describe_predictor(predictor) | {"kind": "predictor"}, predictor.state_dict())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in [path for path in places(artifact.config) if path[:2] == ("net", "options")]:
        if type(inside(artifact.config, path)) is int:
            attempt(changed(artifact, path, lambda parent, key: parent.__setitem__(key, 5 * 10**8)), monkeypatch)
        elif isinstance(inside(artifact.config, path), list):
            attempt(changed(artifact, path, lambda parent, key: parent[key].extend(10**5 * parent[key])), monkeypatch)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 19  # KiB
    assert torch.is_grad_enabled()


INPUTS: list[Any] = [
    [1, {"type": "collections.defaultdict", "context": {"default_factory_module": "unittest.__main__"}}],
    {"type": "builtins.dict", "context": '{"__enum__": true, "fqn": "unittest.__main__:main"}', "children_spec": []},
    {"tuple": []},
    {"tuple": [None, None]},
    {"set": [None]},
    {"list": {"a": None}},
    {"tuple": [None], "list": [None]},
    "[1]",
]


@pytest.mark.parametrize("structure", INPUTS)
def test_inputs_of_another_structure_are_refused(
    structure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a config names is imported."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    method = InfluenceBootstrap(torch.nn.MSELoss(), layers="all", ridge=1.0)
    save(method.from_trained(MLP(3, 1, widths=(4,)), (x, x[:, :1])), tmp_path / "model")
    artifact = read_artifact(tmp_path / "model", kind="predictor")
    restore(artifact, monkeypatch)
    error = attempt(Artifact(artifact.folder, artifact.config | {"inputs": structure}, artifact.tensors), monkeypatch)
    assert error is not None
    for name, value in (("outputs", 2), ("ridge", -1.0), ("degrees_of_freedom", -1.0)):
        assert attempt(Artifact(artifact.folder, artifact.config | {name: value}, artifact.tensors), monkeypatch)
    assert "unittest.__main__" not in sys.modules


def test_no_module_reads_structures_of_torch() -> None:
    """`treespec_loads` imports modules that its text names."""
    source = Path(nets.__file__).resolve().parents[2]
    assert not [file for file in source.rglob("*.py") if "treespec_loads" in file.read_text(encoding="utf-8")]


def test_images_of_huge_size_are_refused() -> None:
    with pytest.raises(ArgumentError, match="size"):
        ImagePreprocessing.from_config({"channels": 3, "size": [200_000, 200_000]})
    assert ImagePreprocessing.from_config({"channels": 3, "size": [64, 96]}).size == (64, 96)
