"""config.json + model.safetensors, written aside; what does not fit is said in one sentence."""

import json
from pathlib import Path

import pytest
import torch
from _nets import TwoBranches
from torch import nn

from neuboots import load, save
from neuboots.generator import BootstrapGenerator
from neuboots.methods import DeterministicPredictor, NeuBootsPredictor
from neuboots.nets import MLP, SmallCNN, resnet8
from neuboots.weights import Dirichlet, Exponential, Multinomial

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def predictor(net: nn.Module | None = None) -> NeuBootsPredictor:
    return NeuBootsPredictor(BootstrapGenerator((net or MLP(4, 2, widths=(8,))).eval(), num_blocks=5), Dirichlet(3.0))


@pytest.mark.parametrize("weight_distribution", [Dirichlet(2.5), Exponential(0.5), Multinomial()], ids=str)
@pytest.mark.parametrize("link", ["identity", "exp"])
def test_everything_that_makes_the_replicates_is_kept(weight_distribution: object, link: str, tmp_path: Path) -> None:
    g = BootstrapGenerator(MLP(4, 2, widths=(8,)).eval(), num_blocks=3, link=link)
    before = NeuBootsPredictor(g, weight_distribution)
    save(before, tmp_path / "model")
    after = load(tmp_path / "model")
    assert torch.equal(after.predict(X, 6, seed=2).samples, before.predict(X, 6, seed=2).samples)
    assert after.config() == before.config()
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("make", [lambda: SmallCNN(1, 3), lambda: resnet8(3, 1)])
def test_our_nets_are_rebuilt(make: object, tmp_path: Path) -> None:
    net = make().eval()  # type: ignore[operator]
    x = torch.randn(2, 1, 8, 8)
    save(DeterministicPredictor(net), tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(x, 1).samples[0], net(x))


def test_precision_is_kept(tmp_path: Path) -> None:
    net = MLP(4, 2, widths=(8,)).double()
    save(DeterministicPredictor(net), tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.predict(X, 1).samples[0], net(X.double()))


def test_tied_weights_are_kept(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 4)
            self.head.weight = self.body.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).relu())

    before = predictor(Tied())
    save(before, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", model=Tied()).predict(X, 3).samples, before.predict(X, 3).samples)


def test_a_second_save_replaces_the_first_as_a_whole(tmp_path: Path) -> None:
    save(predictor(), tmp_path / "model")
    second = predictor()
    save(second, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(X, 2).samples, second.predict(X, 2).samples)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failing_save_leaves_the_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = predictor()
    save(first, tmp_path / "model")
    monkeypatch.setattr(json, "dumps", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(predictor(), tmp_path / "model")
    monkeypatch.undo()
    assert torch.equal(load(tmp_path / "model").predict(X, 2).samples, first.predict(X, 2).samples)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="exists and is not a saved predictor"):
        save(predictor(), tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_net_of_your_own_must_be_given(tmp_path: Path) -> None:
    save(predictor(TwoBranches()), tmp_path / "model")
    with pytest.raises(ValueError, match=r"not one of neuboots.nets.*load\(folder, net=MyNet\(\)\)"):
        load(tmp_path / "model")
    assert load(tmp_path / "model", model=TwoBranches()).predict(X, 2).samples.shape == (2, 3, 3)


def test_weights_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    save(predictor(), tmp_path / "model")
    with pytest.raises(ValueError, match=r"do not fit the net \(.*head.weight \(2, 8\) for \(2, 9\)"):
        load(tmp_path / "model", model=MLP(4, 2, widths=(9,)))
    with pytest.raises(ValueError, match=r"do not fit the net \(missing: fc.bias.*not in the net: "):
        load(tmp_path / "model", model=TwoBranches())


def test_wrapped_and_bare_nets_load_back(tmp_path: Path) -> None:
    bare = predictor(nn.Linear(4, 3))
    save(bare, tmp_path / "bare")
    assert torch.equal(load(tmp_path / "bare", model=nn.Linear(4, 3)).predict(X, 2).samples, bare.predict(X, 2).samples)
    inner = predictor(TwoBranches())
    save(inner, tmp_path / "inner")
    again = load(tmp_path / "inner", model=nn.DataParallel(TwoBranches()))
    assert torch.equal(again.predict(X, 2).samples, inner.predict(X, 2).samples)


def test_more_bad_calls(tmp_path: Path) -> None:
    class Own:
        name = "own"

        def sample(self, keys: torch.Tensor, size: int) -> torch.Tensor:
            return torch.ones(len(keys), size)

    with pytest.raises(ValueError, match="only these can be saved"):
        save(NeuBootsPredictor(predictor().generator, Own()), tmp_path / "own")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got a MLP; expected a predictor"):
        save(MLP(4, 2), tmp_path / "net")  # type: ignore[arg-type]
    save(predictor(TwoBranches()), tmp_path / "model")
    with pytest.raises(ValueError, match=r"expected an nn.Module, such as MyNet\(\)"):
        load(tmp_path / "model", model=TwoBranches)  # type: ignore[arg-type]


def _damage(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", b"\xff\xfe", "cannot be read as JSON"),
        ("config.json", b"[]", "is not a neuboots config"),
        ("config.json", b'{"format": "other"}', "is not a neuboots config"),
        ("config.json", b'{"format": "neuboots", "net": null, "version": 99}', "has version 99; expected 1"),
        (
            "config.json",
            b'{"format": "neuboots", "net": null, "version": 1, "method": "magic"}',
            "names the method 'magic'",
        ),
        ("model.safetensors", b"", "truncated, damaged or foreign"),
        ("model.safetensors", b"\x80\x04pickle", "truncated, damaged or foreign"),
    ],
)
def test_damaged_files_get_one_sentence(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    save(predictor(), tmp_path / "model")
    _damage(tmp_path / "model", name, content)
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path / "model")


def test_truncated_weights_get_one_sentence(tmp_path: Path) -> None:
    save(predictor(), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="truncated, damaged or foreign"):
        load(tmp_path / "model")


def test_a_config_with_a_hole_gets_one_sentence(tmp_path: Path) -> None:
    save(predictor(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["law"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not fit the net, or is damaged"):
        load(tmp_path / "model")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a folder written by neuboots.save"):
        load(tmp_path / "nothing")
    save(predictor(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected it beside config.json"):
        load(tmp_path / "model")


def test_a_half_precision_net_with_figures_in_double_keeps_both(tmp_path: Path) -> None:
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
