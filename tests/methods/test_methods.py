"""Every method of the table on nets, data and calls beyond the contract's own."""

import copy
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _nets import TwoBranches
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from neuboots import TrainingConfig, load, save, split_gaussian
from neuboots.losses import GaussianNLL
from neuboots.methods import (
    METHODS,
    Deterministic,
    DeterministicPredictor,
    MethodInfo,
    NeuBootsPredictor,
    find_method,
    register,
)
from neuboots.methods._base import TASKS
from neuboots.nets import MLP, SmallCNN, resnet8
from neuboots.prediction import Moments, SampleStream, stream_forward_passes
from neuboots.testing import (
    MethodUnderTest,
    check_coherence,
    check_exact_moments,
    check_method,
    check_no_side_effects,
    check_resume,
    check_seeds,
)

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)
NETS = [name for name, entry in METHODS.items() if entry.needs_net]
REGRESSION = [name for name, entry in METHODS.items() if "regression" in entry.tasks]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(n: int = 50) -> TensorDataset:
    return TensorDataset(rows(n, 4), torch.arange(n) % 3)


X = rows(9, 4, seed=5)


# -- the table -----------------------------------------------------------------------------------------


def test_the_table_has_every_method_of_the_paper_and_ours() -> None:
    assert set(METHODS) == {
        *("plain", "neuboots", "standard-bootstrap", "bayesian-bootstrap", "deep-ensemble", "deep-ensemble-original"),
        *("mc-dropout", "gbs", "amortized-bootstrap", "batch-ensemble", "mimo", "gp", "sparse-gp", "swag", "lp-bnn"),
        *("laplace", "influence", "calibrated-neuboots"),
    }
    for name, entry in METHODS.items():
        assert entry.name == name
        assert entry.summary
        assert entry.reference or name == "plain"
        assert set(entry.tasks) <= set(TASKS)


def test_a_name_that_is_not_in_the_table_lists_those_that_are() -> None:
    with pytest.raises(ValueError, match="got the method 'bootstrap'; expected one of plain, neuboots"):
        find_method("bootstrap")


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="got the name 'plain', which another method has"):
        register(MethodInfo("plain", Deterministic, NeuBootsPredictor, "not it"))


def test_a_wrapper_has_its_name_too() -> None:
    with pytest.raises(ValueError, match="got the name 'scaled', which another method has"):
        register(MethodInfo("scaled", Deterministic, DeterministicPredictor, "not it"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tasks": ("sorting",)}, "got tasks=.*; expected some of"),
        ({"tasks": ()}, "got tasks=.*; expected some of"),
        ({"predictor": Deterministic}, "got predictor=.*; expected a class derived from Predictor"),
        ({"make": None}, "got make=None; expected a class or function"),
    ],
)
def test_a_bad_line_is_refused(options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        MethodInfo(
            **({"name": "mine", "make": Deterministic, "predictor": DeterministicPredictor, "summary": ""} | options)
        )


# -- a method of one's own -----------------------------------------------------------------------------


class NoisyPredictor(DeterministicPredictor):
    """The net plus a constant drawn for each replicate."""

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        plain = next(super().stream(x, 1, seed=seed).chunks(1))[0]

        def run(b: int) -> Tensor:
            return plain + torch.randn((), generator=torch.Generator().manual_seed(1000 * seed + b))

        return stream_forward_passes(num_samples, run)

    def config(self) -> dict[str, Any]:
        return {"method": "noisy"}


class Noisy(Deterministic):
    predictor: type[DeterministicPredictor] = NoisyPredictor

    def fit(self, *args: Any, **options: Any) -> DeterministicPredictor:
        return self.predictor(super().fit(*args, **options).fitted)


@pytest.fixture
def noisy() -> Any:
    yield register(MethodInfo("noisy", Noisy, NoisyPredictor, "a plain net plus noise"))
    del METHODS["noisy"]


def test_a_method_of_ones_own_joins_with_one_line_and_keeps_the_contract(noisy: MethodInfo, tmp_path: Path) -> None:
    check_method("noisy")
    predictor = noisy.make().fit(TwoBranches, classes(), RECIPE)
    save(predictor, tmp_path / "model")
    assert isinstance(load(tmp_path / "model", model=TwoBranches()), NoisyPredictor)


class Forgetful(NoisyPredictor):
    """Draws from torch's global state: the seed governs nothing."""

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        plain = next(DeterministicPredictor.stream(self, x, 1, seed=seed).chunks(1))[0]
        return stream_forward_passes(num_samples, lambda b: plain + torch.randn(()))


class Incoherent(NoisyPredictor):
    """Noise that depends on where in the batch an input stands."""

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        plain = next(DeterministicPredictor.stream(self, x, 1, seed=seed).chunks(1))[0]

        def run(b: int) -> Tensor:
            return plain + torch.randn(plain.shape, generator=torch.Generator().manual_seed(1000 * seed + b))

        return stream_forward_passes(num_samples, run)


class Boastful(NoisyPredictor):
    """Says that it knows its moments."""

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        stream = super().stream(x, num_samples, seed=seed)
        output = next(stream.chunks(1))[0]
        moments = Moments(torch.full_like(output, 42.0), torch.full_like(output, 7.0))
        return replace(stream, moments=moments)


class Reseeding(NoisyPredictor):
    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        random.seed(seed)
        return super().stream(x, num_samples, seed=seed)


class Careless(NoisyPredictor):
    """Predicts in training mode: BatchNorm learns from what it is asked."""

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        self.fitted.train()
        outputs = self.fitted(x)
        return stream_forward_passes(num_samples, lambda b: outputs)


@pytest.mark.parametrize(
    ("predictor", "check"),
    [
        (Forgetful, check_seeds),
        (Incoherent, check_coherence),
        (Careless, check_no_side_effects),
        (Boastful, check_exact_moments),
        (Reseeding, check_no_side_effects),
    ],
)
def test_the_contract_finds_what_breaks_it(predictor: Any, check: Any) -> None:
    class Broken(Noisy):
        pass

    Broken.predictor = predictor
    with pytest.raises(AssertionError):
        check(MethodUnderTest(MethodInfo("broken", Broken, predictor, "")))


def test_a_method_that_does_not_resume_is_found() -> None:
    class FromTheStart(Noisy):
        def fit(self, model: Any, data: Any, config: TrainingConfig) -> DeterministicPredictor:
            return super().fit(model, data, replace(config, folder=None))

    with pytest.raises(AssertionError, match="nothing was found in the folder"):
        check_resume(MethodUnderTest(MethodInfo("broken", FromTheStart, NoisyPredictor, "")))


def test_a_broken_contract_is_named(noisy: MethodInfo) -> None:
    METHODS["noisy"] = replace(noisy, random=False, members=True)
    with pytest.raises(AssertionError, match="noisy breaks the contract"):
        check_method("noisy", loss=nn.MSELoss())
    METHODS["noisy"] = noisy


# -- nets, data and losses -----------------------------------------------------------------------------


class TwoInputs(TwoBranches):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a + b)


@pytest.mark.parametrize("name", NETS)
def test_several_inputs_and_validation_data(name: str) -> None:
    data = TensorDataset(rows(50, 4), rows(50, 4, seed=1), torch.arange(50) % 3)
    held_out = TensorDataset(*(tensor[:20] for tensor in data.tensors))
    reports: list[Any] = []
    config = TrainingConfig(epochs=2, batch_size=16, progress=False, on_epoch=reports.append)
    predictor = find_method(name).make().fit(TwoInputs, data, config, val_data=held_out)
    assert predictor.predict((X, X), 2).samples.shape == (2, 9, 3)
    assert reports
    assert all(report.val_metrics["loss"] > 0 and 0 <= report.val_metrics["error"] <= 1 for report in reports)


@pytest.mark.parametrize("name", NETS)
def test_lazy_layers(name: str) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))

    first = find_method(name).make().fit(lazy, classes(), RECIPE).predict(X, 2).samples
    torch.manual_seed(2)
    assert torch.equal(find_method(name).make().fit(lazy, classes(), RECIPE).predict(X, 2).samples, first)


class Squeezed(nn.Module):
    """A regression net that returns (N,), with its head in the middle of the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


@pytest.mark.parametrize("name", REGRESSION)
def test_outputs_without_an_axis_get_one(name: str) -> None:
    x = rows(40, 4)
    predictor = find_method(name).make(loss=nn.MSELoss()).fit(Squeezed, TensorDataset(x, x.sum(1)), RECIPE)
    assert predictor.predict(X, 3).samples.shape == (3, 9, 1)


@pytest.mark.parametrize("name", [name for name in NETS if "regression" in METHODS[name].tasks])
def test_gaussian_heads(name: str) -> None:
    x = rows(60, 4)
    data = TensorDataset(x, x.sum(1) + 0.1 * rows(60, seed=1))
    predictor = find_method(name).make(loss=GaussianNLL()).fit(lambda: MLP(4, 2, widths=(16,)), data, RECIPE)
    band, noise = split_gaussian(predictor.predict(X, 4))
    assert band.samples.shape == (4, 9, 1)
    assert bool((noise > 0).all())


@pytest.mark.parametrize("name", NETS)
def test_one_logit_and_a_loss_of_torchs_own(name: str) -> None:
    x = rows(40, 4)
    data = TensorDataset(x, (x[:, :1] > 0).float())
    predictor = find_method(name).make(loss=nn.BCEWithLogitsLoss()).fit(lambda: MLP(4, 1, widths=(8,)), data, RECIPE)
    assert predictor.predict(X, 3).probs.shape == (9, 2)
    method = find_method(name).make(loss=nn.CrossEntropyLoss(reduction="none"))
    assert method.fit(TwoBranches, classes(), RECIPE).predict(X, 2).samples.shape == (2, 9, 3)


class Read(Dataset[Any]):
    """Rows read one by one, with noise drawn at each reading, targets as Python numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return rows(4, seed=i) + 0.1 * torch.randn(4), i % 3


@pytest.mark.parametrize("name", NETS)
def test_rows_that_are_read_and_augmented(name: str) -> None:
    first, second = (find_method(name).make().fit(TwoBranches, Read(), RECIPE) for _ in range(2))
    assert torch.equal(first.predict(X, 3).samples, second.predict(X, 3).samples)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("make", [lambda: resnet8(3), lambda: SmallCNN(3, 3, widths=(4, 8))], ids=["resnet", "cnn"])
def test_convolutions_with_batchnorm(name: str, make: Any, tmp_path: Path) -> None:
    """Nets of the library are rebuilt by `load_dataset` without being given again."""
    data = TensorDataset(rows(12, 3, 16, 16), torch.arange(12) % 3)
    predictor = find_method(name).make().fit(make, data, TrainingConfig(epochs=2, batch_size=6, progress=False))
    x = rows(3, 3, 16, 16, seed=1)
    samples = predictor.predict(x, 3).samples
    torch.testing.assert_close(predictor.predict(x[1:2], 3).samples, samples[:, 1:2], rtol=1e-3, atol=1e-4)
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(x, 3).samples, samples)


@pytest.mark.parametrize("name", METHODS)
def test_double_precision(name: str) -> None:
    x = rows(40, 4).double()
    config = TrainingConfig(epochs=1, batch_size=16, precision="64-true", progress=False)
    method = find_method(name).make(loss=nn.MSELoss())
    predictor = method.fit(lambda: MLP(4, 1, widths=(8,)).double(), TensorDataset(x, x.sum(1)), config)
    samples = predictor.predict(x[:3], 2).samples
    assert samples.shape == (2, 3, 1)
    assert samples.dtype == torch.float64


@pytest.mark.parametrize("name", METHODS)
def test_gradients_flow_to_the_input_when_asked(name: str) -> None:
    entry = find_method(name)
    subject = MethodUnderTest(entry)
    x = subject.x.clone().requires_grad_()
    subject.predictor.predict(x, 3).samples.sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


# -- bad data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_no_rows(name: str) -> None:
    method = find_method(name).make(loss=nn.MSELoss())
    with pytest.raises(ValueError, match="n = 0 rows"):
        method.fit(lambda: nn.Linear(4, 1), TensorDataset(X[:0], X[:0, :1]), RECIPE)


@pytest.mark.parametrize("name", METHODS)
def test_nan_in_the_training_data(name: str) -> None:
    x = rows(40, 4)
    x[7, 2] = torch.nan
    method = find_method(name).make(loss=nn.MSELoss())
    with pytest.raises((ValueError, FloatingPointError), match="NaN|nan"):
        method.fit(lambda: MLP(4, 1, widths=(8,)), TensorDataset(x, rows(40)), RECIPE)


@pytest.mark.parametrize("name", NETS)
def test_labels_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match="got label [3-8] for a net with 3 outputs; expected 0 … 2"):
        find_method(name).make().fit(TwoBranches, TensorDataset(X, torch.arange(9)), RECIPE)


@pytest.mark.parametrize("name", NETS)
def test_a_net_in_place_of_a_function(name: str) -> None:
    with pytest.raises(ValueError, match="got a net; expected a function that makes one"):
        find_method(name).make().fit(TwoBranches(), classes(), RECIPE)


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_predictor_of_another_method_or_net_is_refused(name: str, tmp_path: Path) -> None:
    entry = find_method(name)
    save(MethodUnderTest(entry).predictor, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    if entry.needs_net:
        with pytest.raises(ValueError, match="fit"):
            load(tmp_path / "model", model=MLP(4, 3, widths=(5,)))
    path.write_text(json.dumps({key: config[key] for key in ("format", "version", "method", "net")}))
    if len(config) > 4:  # the method has options
        with pytest.raises(ValueError, match="does not fit the net, or is damaged"):
            load(tmp_path / "model", model=MethodUnderTest(entry).case.model() if entry.needs_net else None)


# -- another process -----------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import neuboots
from neuboots.testing import Subject
from neuboots.methods import METHODS, find
for name in METHODS:
    subject = Subject(find(name))
    net = subject.case.make_net() if subject.info.needs_net else None
    predictor = neuboots.load(Path(sys.argv[1]) / name, net=net)
    torch.save(predictor.predict(subject.x, 5, seed=2).samples, Path(sys.argv[1]) / f"{name}.pt")
"""


def test_another_process_draws_the_same_replicates(tmp_path: Path) -> None:
    subjects = {name: MethodUnderTest(find_method(name)) for name in METHODS}
    for name, subject in subjects.items():
        save(subject.predictor, tmp_path / name)
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent)], check=True)
    for name, subject in subjects.items():
        found = torch.load(tmp_path / f"{name}.pt")
        assert torch.equal(found, subject.predictor.predict(subject.x, 5, seed=2).samples), name


def test_a_predictor_may_be_copied() -> None:
    for name in METHODS:
        subject = MethodUnderTest(find_method(name))
        twin = copy.deepcopy(subject.predictor)
        assert torch.equal(twin.predict(subject.x, 2).samples, subject.predictor.predict(subject.x, 2).samples), name


def test_labels_that_do_not_count_are_ignored_by_every_loss() -> None:
    loss = nn.CrossEntropyLoss(ignore_index=2)
    for name in NETS:
        predictor = find_method(name).make(loss=loss).fit(TwoBranches, classes(), RECIPE)
        assert bool(torch.isfinite(predictor.predict(X, 2).samples).all()), name


class Growing(Dataset[Any]):
    """Images of several sizes, which train one by one."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(i)
        x = torch.randn(1, 6 + i, 5 + 2 * i, generator=rng)
        return x, (x[0] > 0).long()


ONE_BY_ONE = [name for name, entry in METHODS.items() if "segmentation" in entry.tasks and name != "swag"]


@pytest.mark.parametrize("name", ONE_BY_ONE)  # SWAG runs rows together for BatchNorm
def test_images_of_several_sizes_train_one_by_one(name: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    config = TrainingConfig(epochs=1, batch_size=1, progress=False)
    predictor = METHODS[name].make().fit(model, Growing(), config)
    x, _ = Growing()[3]
    assert predictor.predict(x[None], 2).samples.shape == (2, 1, 2, *x.shape[1:])
