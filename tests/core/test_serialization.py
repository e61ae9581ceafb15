"""Saving and loading predictors and artifacts; damaged folders raise."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _artifacts import rewrite_artifact
from _nets import Tied, TwoBranches
from torch import nn

from neuboots import ArgumentError, load, save
from neuboots.methods import DeterministicPredictor, NeuBootsPredictor
from neuboots.methods.neuboots import BootstrapGenerator
from neuboots.nets import MLP
from neuboots.serialization import (
    ArtifactError,
    build_net,
    build_predictor,
    configurable,
    describe_predictor,
    read_artifact,
    write_artifact,
)
from neuboots.weights import Dirichlet, Exponential, Multinomial

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def predictor(net: nn.Module | None = None) -> NeuBootsPredictor:
    return NeuBootsPredictor(BootstrapGenerator((net or MLP(4, 2, widths=(8,))).eval(), num_blocks=5), Dirichlet(3.0))


@pytest.mark.parametrize("weight_distribution", [Dirichlet(2.5), Exponential(0.5), Multinomial()], ids=str)
@pytest.mark.parametrize("link", ["identity", "exp"])
def test_save_and_load_neuboots(weight_distribution: object, link: str, tmp_path: Path) -> None:
    g = BootstrapGenerator(MLP(4, 2, widths=(8,)).eval(), num_blocks=3, link=link)
    before = NeuBootsPredictor(g, weight_distribution)
    save(before, tmp_path / "model")
    after = load(tmp_path / "model")
    assert torch.equal(after.predict(X, 6, seed=2).samples, before.predict(X, 6, seed=2).samples)
    assert after.config() == before.config()
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_save_keeps_precision(tmp_path: Path) -> None:
    net = MLP(4, 2, widths=(8,)).double()
    save(DeterministicPredictor(net), tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.predict(X, 1).samples[0], net(X.double()))


def test_save_keeps_tied_weights(tmp_path: Path) -> None:
    before = predictor(Tied())
    save(before, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", model=Tied()).predict(X, 3).samples, before.predict(X, 3).samples)


def test_save_replaces_an_earlier_predictor(tmp_path: Path) -> None:
    save(predictor(), tmp_path / "model")
    second = predictor()
    save(second, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(X, 2).samples, second.predict(X, 2).samples)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_save_keeps_the_earlier_predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = predictor()
    save(first, tmp_path / "model")
    monkeypatch.setattr(json, "dumps", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(predictor(), tmp_path / "model")
    monkeypatch.undo()
    assert torch.equal(load(tmp_path / "model").predict(X, 2).samples, first.predict(X, 2).samples)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("names", [("thesis.tex",), ("config.json", "model.safetensors")], ids=["file", "transformers"])
def test_save_keeps_other_files(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text('{"model_type": "bert"}')
    with pytest.raises(FileExistsError):
        save(predictor(), tmp_path)
    assert all((tmp_path / name).read_text() == '{"model_type": "bert"}' for name in names)


def test_load_lists_weights_that_do_not_fit(tmp_path: Path) -> None:
    save(predictor(), tmp_path / "model")
    with pytest.raises(ArtifactError, match="head.weight"):
        load(tmp_path / "model", model=MLP(4, 2, widths=(9,)))
    with pytest.raises(ArtifactError, match="fc"):
        load(tmp_path / "model", model=TwoBranches())


def test_load_wrapped_and_bare_nets(tmp_path: Path) -> None:
    bare = predictor(nn.Linear(4, 3))
    save(bare, tmp_path / "bare")
    assert torch.equal(load(tmp_path / "bare", model=nn.Linear(4, 3)).predict(X, 2).samples, bare.predict(X, 2).samples)
    inner = predictor(TwoBranches())
    save(inner, tmp_path / "inner")
    again = load(tmp_path / "inner", model=nn.DataParallel(TwoBranches()))
    assert torch.equal(again.predict(X, 2).samples, inner.predict(X, 2).samples)


def test_wrong_argument_raises(tmp_path: Path) -> None:
    class Own:
        name = "own"

        def sample(self, keys: torch.Tensor, size: int) -> torch.Tensor:
            return torch.ones(len(keys), size)

    with pytest.raises(ArgumentError, match="weight_distribution"):
        save(NeuBootsPredictor(predictor().generator, Own()), tmp_path / "own")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="predictor"):
        save(MLP(4, 2), tmp_path / "net")  # type: ignore[arg-type]
    save(predictor(TwoBranches()), tmp_path / "model")
    with pytest.raises(ArgumentError, match="model"):
        load(tmp_path / "model", model=TwoBranches)  # type: ignore[arg-type]


def edit(folder: Path, **changes: object) -> None:
    rewrite_artifact(folder, lambda config, tensors: config.update(changes))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def nest(depth: int) -> bytes:
    return b'{"format": "neuboots", "a": ' + b"[" * depth + b"]" * depth + b"}"


def link(file: Path, target: str) -> None:
    file.unlink()
    file.symlink_to(target)


def replace_by(file: Path, make: Callable[[Path], object]) -> None:
    file.unlink()
    make(file)


CONFIGS = {
    "bytes": b"\xff\xfe",
    "list": b"[]",
    "other library": b'{"model_type": "bert"}',
    "version 2": b'{"format": "neuboots", "version": 2, "kind": "predictor"}',
    "deep": nest(100_000),
    "not a number": b'{"format": "neuboots", "version": NaN}',
    "infinity": b'{"format": "neuboots", "version": 1e400}',
    "huge integer": b'{"format": "neuboots", "version": ' + b"9" * 10_000 + b"}",
    "large integer": b'{"format": "neuboots", "version": 99999999999999999999}',
    "two keys": b'{"format": "neuboots", "version": 3, "version": 3}',
    "empty": b"",
}


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda folder, data=data: (folder / "config.json").write_bytes(data) for data in CONFIGS.values()),
        lambda folder: edit(folder, kind="estimator"),
        lambda folder: edit(folder, method="magic"),
        lambda folder: rewrite_artifact(folder, lambda config, tensors: config.pop("num_blocks")),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04pickle"),
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-40]),
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b"0"),
        lambda folder: (folder / "thesis.tex").touch(),
        lambda folder: (folder / "folder").mkdir(),
        *(
            lambda folder, name=name, make=make: replace_by(folder / name, make)
            for name in ("config.json", "model.safetensors", "manifest.json")
            for make in (
                os.mkfifo,
                os.mkdir,
                lambda file: file.symlink_to("/etc/passwd"),
                lambda file: file.symlink_to("/dev/zero"),
                lambda file: file.symlink_to(file),
                lambda file: [file.touch(), os.truncate(file, 1 << 42)],
            )
        ),
    ],
)
def test_load_damaged_folder_raises(damage: Callable[[Path], object], tmp_path: Path) -> None:
    save(predictor(), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ArtifactError, match="model") as caught:
        load(tmp_path / "model")
    assert len(str(caught.value)) < 1000
    assert "root" not in str(caught.value).removeprefix(f"cannot load {tmp_path}")


def test_every_flipped_bit_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(DeterministicPredictor(MLP(1, 1, widths=())), folder)
    for file in folder.iterdir():
        content = file.read_bytes()
        for bit in range(0, 8 * len(content), 83):
            flip(file, bit)
            with pytest.raises(ArtifactError):
                load(folder)
            file.write_bytes(content)
    load(folder)


def write_header(tensors: object, size: int) -> bytes:
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize(
    "content",
    [
        (1 << 62).to_bytes(8, "little"),
        write_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 4),
        write_header({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"}, 8),
        write_header({"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, 8),
        write_header({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}}, 8),
        write_header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, 8),
        write_header([], 0),
        nest(100_000),
        b"",
    ],
)
def test_crafted_tensors_raise(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetensors.torch.save", lambda tensors: content)
    save(predictor(), tmp_path / "model")
    with pytest.raises(ArtifactError):
        load(tmp_path / "model")


def test_files_of_file_managers_are_ignored(tmp_path: Path) -> None:
    for _ in range(2):
        save(predictor(), tmp_path / "model")
        (tmp_path / "model" / ".DS_Store").touch()
        load(tmp_path / "model")


def test_load_missing_files_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        load(tmp_path / "nothing")
    save(predictor(), tmp_path / "model")
    for name in ("model.safetensors", "config.json", "manifest.json"):
        save(predictor(), tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(ArtifactError, match=name):
            load(tmp_path / name)


def test_artifact_round_trip_with_nested_tensors(tmp_path: Path) -> None:
    inner = predictor()
    tensors = {"scale": X, **{f"predictor.{name}": value for name, value in inner.state_dict().items()}}
    config = {"predictor": describe_predictor(inner), "task": "regression"}
    write_artifact(tmp_path / "model", config, tensors, kind="estimator")
    artifact = read_artifact(tmp_path / "model", kind="estimator")
    assert torch.equal(artifact.tensors["scale"], X)
    again = build_predictor(artifact.config["predictor"], artifact.select("predictor."))
    assert torch.equal(again.predict(X, 3).samples, inner.predict(X, 3).samples)


def test_configurable_net_of_the_user_is_rebuilt(tmp_path: Path) -> None:
    @configurable
    class Wide(nn.Module):
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, width), nn.Linear(width, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).relu())

    before = predictor(Wide(width=9))
    before.save(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(X, 2).samples, before.predict(X, 2).samples)


def test_save_keeps_mixed_precisions(tmp_path: Path) -> None:
    """Its own tensors come back in the precision they were saved in, whatever else is saved beside them."""

    class Mixed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("exact", torch.full((2,), 1 / 3, dtype=torch.float64))

    first = Mixed()
    first.weight.data, first.bias.data = first.weight.data.double(), first.bias.data.half()
    save(DeterministicPredictor(first), tmp_path / "model")
    again = load(tmp_path / "model", model=Mixed()).module.state_dict()
    for name, tensor in first.state_dict().items():
        assert tensor.dtype == again[name].dtype
        assert torch.equal(tensor, again[name])


# -- values that are not finite ------------------------------------------------------------------------


class Masked(nn.Module):
    """A net with an attention mask of 0 and −∞ among its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x) + self.mask.softmax(1).sum(0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["head.weight", "norm.running_var", "mask"])
def test_values_that_are_not_finite_are_neither_saved_nor_loaded(name: str, value: float, tmp_path: Path) -> None:
    net = Masked().eval()
    save(DeterministicPredictor(net), tmp_path / "model")
    assert load(tmp_path / "model", model=Masked()).predict(X, 1).samples.isfinite().all()

    def change(config: object, tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][0] = value

    rewrite_artifact(tmp_path / "model", change)
    net.state_dict()[name][0] = value
    if value == -torch.inf and name != "head.weight":  # buffers may mask with −∞
        load(tmp_path / "model", model=Masked())
        save(DeterministicPredictor(net), tmp_path / "other")
        return
    with pytest.raises(ArtifactError):
        load(tmp_path / "model", model=Masked())
    with pytest.raises(FloatingPointError):
        save(DeterministicPredictor(net), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    save(DeterministicPredictor(MLP(4, 2, widths=(8,))), tmp_path / "model")
    before = torch.get_rng_state()
    load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_config_cannot_run_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["neuboots", "--version"])
    for module in ("neuboots.__main__", "neuboots_paper.__main__", "neuboots.cli", "os", "neuboots.nets..os", None, 1):
        assert build_net({"net": "MLP", "module": module, "options": {"in_features": 4, "out_features": 2}}) is not None
