"""The registry, custom methods, and every registered method on nets and data beyond the contract's own."""

import copy
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _artifacts import rewrite_artifact
from _nets import QUICK, Squeezed, TwoBranches, TwoInputs, class_data, noise, quick_options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import neuboots_paper.baselines  # noqa: F401  # registers four more methods
from neuboots import InfluenceBootstrap, Laplace, MCDropout, NeuBoots, load, save, split_gaussian
from neuboots._validation import ArgumentError
from neuboots.losses import GaussianNLL
from neuboots.methods import (
    METHODS,
    Deterministic,
    DeterministicPredictor,
    MethodInfo,
    create_method,
    find_method,
    list_methods,
    register,
)
from neuboots.methods._base import TASKS
from neuboots.nets import MLP, SmallCNN, resnet8
from neuboots.prediction import Moments, Predictor, SampleStream, stream_forward_passes
from neuboots.testing import (
    MethodUnderTest,
    check_coherence,
    check_exact_moments,
    check_method,
    check_no_side_effects,
    check_resume,
    check_seeds,
)
from neuboots.training import TrainingConfig
from neuboots.weights import Dirichlet

NETS = [name for name, info in METHODS.items() if info.needs_net]
X = noise(9, 4, seed=5)


# -- the registry --------------------------------------------------------------------------------------


def test_registry_has_all_methods_with_their_facts() -> None:
    assert set(list_methods()) == {
        *("deterministic", "neuboots", "standard-bootstrap", "bayesian-bootstrap", "deep-ensemble", "mc-dropout"),
        *("batch-ensemble", "mimo", "gp", "sparse-gp", "swag", "laplace", "influence", "calibrated-neuboots"),
        *("adversarial-deep-ensemble", "gbs", "amortized-bootstrap", "lp-bnn"),
    }
    assert set(list_methods()) - set(list_methods("segmentation")) == {"gp", "sparse-gp"}
    for name, info in METHODS.items():
        method = create_method(name)
        assert (info.name, type(method).info) == (name, info)
        assert info.summary
        assert info.reference or name == "deterministic"
        assert set(info.tasks) <= set(TASKS)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: find_method("bootstrap"), "method"),
        (lambda: create_method("bootstrap"), "method"),
        (lambda: list_methods("sorting"), "task"),
        (lambda: register("deterministic", predictor=DeterministicPredictor, summary="")(Deterministic), "name"),
        (lambda: register("scaled", predictor=DeterministicPredictor, summary="")(Deterministic), "name"),
    ],
)
def test_invalid_names_and_facts_raise(call: Any, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == argument


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.MSELoss()], ids=["labels", "numbers"])
def test_predictors_know_whether_outputs_are_independent(loss: nn.Module) -> None:
    """From the loss, in `fit` and in `from_trained`."""
    independent = isinstance(loss, nn.BCEWithLogitsLoss)
    data, net = TensorDataset(noise(20, 4), (noise(20, 3) > 0).float()), nn.Linear(4, 3)
    made = [Deterministic(loss).fit(net, data, QUICK)]
    made += [method(loss).from_trained(net, data) for method in (Laplace, InfluenceBootstrap)]
    for predictor in (*made, MCDropout(loss, where="head", head="0").from_trained(nn.Sequential(net), data)):
        assert predictor.independent is independent
        assert predictor.predict(X, 2).independent is independent


NAN = float("nan")
INVALID: dict[str, dict[str, list[Any]]] = {
    "neuboots": {
        "loss": [nn.CrossEntropyLoss],  # a class, not an instance
        "weight_distribution": ["dirichlet", Dirichlet],
        "num_blocks": [0, 2.5],
        "resample": ["day"],
        "warmup": [-1],
        "link": ["log"],
    },
    "deep-ensemble": {"num_members": [0, 2.5, True], "vectorized": ["no"]},
    "batch-ensemble": {"init": ["ones"]},
    "mimo": {"input_repetition": [1.5], "batch_repetition": [0]},
    "mc-dropout": {"rate": [0.0, 1, True, NAN], "where": ["tail"], "granularity": ["row"], "head": [3, "fc"]},
    "swag": {
        "start": [1.0, -0.1, True],
        "rank": [1, 2.5],
        "scale": [0.0, "1"],
        "every": [0, True],
        "learning_rate": [0, float("inf")],
        "refresh_rows": [1, None],
    },
    "sparse-gp": {
        "loss": [nn.CrossEntropyLoss(), GaussianNLL()],
        "kernel": ["linear"],
        "steps": [0],
        "learning_rate": [-1.0],
        "num_inducing": [0],
    },
    "calibrated-neuboots": {
        "neuboots": ["paper", NeuBoots(nn.MSELoss())],
        "reference": ["jackknife"],
        "layers": [0],
        "num_members": [1],
        "num_inputs": [1],
    },
    "adversarial-deep-ensemble": {"epsilon": [0.0, -1.0, NAN, "a", True]},
    "gbs": {"num_blocks": [0], "weight_distribution": [Dirichlet], "resample": ["never"]},
    "lp-bnn": {"latent": [0, 2.5], "elbo_weight": [-1, NAN]},
    "amortized-bootstrap": {
        "num_resamples": [0],
        "resample_every": [0],
        "latent": [1.5],
        "hidden": [-1],
        "spread": [0],
    },
}


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [(method, name, value) for method, table in INVALID.items() for name, values in table.items() for value in values],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_invalid_options_raise(method: str, name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        create_method(method, **{name: value})
    assert error.value.name == name


# -- custom methods ------------------------------------------------------------------------------------


class NoisyPredictor(DeterministicPredictor):
    """The net plus a constant drawn for each replicate."""

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        output = next(super().stream(x, 1, seed=seed).chunks(1))[0]

        def run(b: int) -> Tensor:
            return output + self.draw(output, 1000 * seed + b)

        return stream_forward_passes(num_samples, run)

    def draw(self, output: Tensor, seed: int) -> Tensor:
        return torch.randn((), generator=torch.Generator().manual_seed(seed))

    def config(self) -> dict[str, Any]:
        return {"method": "noisy"}


class Noisy(Deterministic):
    predictor: type[DeterministicPredictor] = NoisyPredictor

    def fit(self, *args: Any, **options: Any) -> DeterministicPredictor:
        return self.predictor(super().fit(*args, **options).fitted)


@pytest.fixture
def noisy() -> Any:
    register("noisy", predictor=NoisyPredictor, summary="a net plus noise")(Noisy)
    yield METHODS["noisy"]
    del METHODS["noisy"]


def test_custom_method_passes_the_contract_and_is_loaded(noisy: MethodInfo, tmp_path: Path) -> None:
    check_method("noisy")
    predictor = create_method("noisy").fit(TwoBranches, class_data(), QUICK)
    save(predictor, tmp_path / "model")
    assert isinstance(load(tmp_path / "model", model=TwoBranches()), NoisyPredictor)


class GlobalSeed(NoisyPredictor):
    def draw(self, output: Tensor, seed: int) -> Tensor:
        return torch.randn(())


class NoisePerPosition(NoisyPredictor):
    def draw(self, output: Tensor, seed: int) -> Tensor:
        return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))


class WrongMoments(NoisyPredictor):
    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        stream = super().stream(x, num_samples, seed=seed)
        output = next(stream.chunks(1))[0]
        return replace(stream, moments=Moments(torch.full_like(output, 42.0), torch.full_like(output, 7.0)))


class Reseeding(NoisyPredictor):
    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        random.seed(seed)
        return super().stream(x, num_samples, seed=seed)


class InTrainingMode(NoisyPredictor):
    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        outputs = self.fitted.train()(x)
        return stream_forward_passes(num_samples, lambda b: outputs)


@pytest.mark.parametrize(
    ("predictor", "check"),
    [
        (GlobalSeed, check_seeds),
        (NoisePerPosition, check_coherence),
        (InTrainingMode, check_no_side_effects),
        (WrongMoments, check_exact_moments),
        (Reseeding, check_no_side_effects),
    ],
)
def test_contract_detects_broken_predictors(predictor: Any, check: Any) -> None:
    broken = type("Broken", (Noisy,), {"predictor": predictor})
    with pytest.raises(AssertionError):
        check(MethodUnderTest(MethodInfo("broken", broken, predictor, "")))


def test_contract_detects_a_method_that_does_not_resume() -> None:
    class FromTheStart(Noisy):
        def fit(self, model: Any, data: Any, config: TrainingConfig) -> DeterministicPredictor:  # type: ignore[override]
            return super().fit(model, data, replace(config, folder=None))

    with pytest.raises(AssertionError):
        check_resume(MethodUnderTest(MethodInfo("broken", FromTheStart, NoisyPredictor, "")))


def test_contract_names_the_method_that_fails(noisy: MethodInfo) -> None:
    METHODS["noisy"] = replace(noisy, make=type("Broken", (Noisy,), {"predictor": WrongMoments}))
    with pytest.raises(AssertionError, match="noisy"):
        check_method("noisy", loss=nn.MSELoss())


# -- every method --------------------------------------------------------------------------------------


def create(name: str, **options: Any) -> Any:
    return create_method(name, **quick_options(name), **options)


@pytest.mark.parametrize("name", NETS)
def test_module_arrays_and_loader_train_as_factory_and_data_set(name: str) -> None:
    data = class_data()
    method = create(name)
    expected = method.fit(lambda: MLP(4, 3, widths=(8,)), data, QUICK).predict(X, 2).samples
    arrays = tuple(np.asarray(tensor) for tensor in data.tensors)
    loader = DataLoader(data, batch_size=16)
    for inputs in (arrays, loader):
        predictor = method.fit(lambda: MLP(4, 3, widths=(8,)), inputs, QUICK)
        torch.testing.assert_close(predictor.predict(X, 2).samples, expected)
    net = MLP(4, 3, widths=(8,))
    layers = [type(module) for module in net.modules()]
    assert method.fit(net, data, QUICK).predict(X, 2).samples.shape == (2, 9, 3)
    assert [type(module) for module in net.modules()] == layers  # layers are replaced in a copy


@pytest.mark.parametrize("name", NETS)
def test_several_inputs_and_validation_data(name: str) -> None:
    data = TensorDataset(noise(50, 4), noise(50, 4, seed=1), torch.arange(50) % 3)
    val_data = TensorDataset(*(tensor[:20] for tensor in data.tensors))
    reports: list[Any] = []
    config = replace(QUICK, on_epoch=reports.append)
    predictor = create(name).fit(TwoInputs, data, config, val_data=val_data)
    assert predictor.predict((X, X), 2).samples.shape == (2, 9, 3)
    assert reports
    assert all(report.val_metrics["loss"] > 0 and 0 <= report.val_metrics["error"] <= 1 for report in reports)


@pytest.mark.parametrize("name", NETS)
def test_lazy_layers_are_initialised_by_the_seed(name: str) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))

    first = create(name).fit(lazy, class_data(), QUICK).predict(X, 2).samples
    torch.manual_seed(2)
    assert torch.equal(create(name).fit(lazy, class_data(), QUICK).predict(X, 2).samples, first)


@pytest.mark.parametrize("name", list_methods("regression"))
def test_regression_losses_and_outputs_without_an_axis(name: str) -> None:
    x = noise(40, 4)
    data = TensorDataset(x, x.sum(1) + 0.1 * noise(40, seed=1))
    predictor = create(name, loss=nn.MSELoss()).fit(Squeezed, data, QUICK)
    assert predictor.predict(X, 3).samples.shape == (3, 9, 1)
    if find_method(name).needs_net:
        predictor = create(name, loss=GaussianNLL()).fit(lambda: MLP(4, 2, widths=(16,)), data, QUICK)
        band, noise_std = split_gaussian(predictor.predict(X, 4))
        assert band.samples.shape == (4, 9, 1)
        assert bool((noise_std > 0).all())


@pytest.mark.parametrize("name", NETS)
def test_one_logit_and_ignored_labels(name: str) -> None:
    data = TensorDataset(noise(40, 4), (noise(40, 1, seed=1) > 0).float())
    method = create(name, loss=nn.BCEWithLogitsLoss())
    assert method.fit(lambda: MLP(4, 1, widths=(8,)), data, QUICK).predict(X, 3).probs.shape == (9, 2)
    method = create(name, loss=nn.CrossEntropyLoss(ignore_index=2))
    samples = method.fit(TwoBranches, class_data(), QUICK).predict(X, 2).samples
    assert bool(torch.isfinite(samples).all())


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("make", [lambda: resnet8(3), lambda: SmallCNN(3, 3, widths=(4, 8))], ids=["resnet", "cnn"])
def test_library_nets_with_batch_norm_are_rebuilt_by_load(name: str, make: Any, tmp_path: Path) -> None:
    data = TensorDataset(noise(12, 3, 8, 8), torch.arange(12) % 3)
    predictor = create(name).fit(make, data, replace(QUICK, batch_size=6))
    x = noise(3, 3, 8, 8, seed=1)
    samples = predictor.predict(x, 3).samples
    torch.testing.assert_close(predictor.predict(x[1:2], 3).samples, samples[:, 1:2], rtol=1e-3, atol=1e-4)
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(x, 3).samples, samples)


@pytest.mark.parametrize("name", METHODS)
def test_double_precision_and_gradients_of_the_input(name: str) -> None:
    x = noise(40, 4).double()
    config = TrainingConfig(epochs=1, batch_size=16, precision="64-true", progress=False)
    method = create(name, loss=nn.MSELoss())
    predictor = method.fit(lambda: MLP(4, 1, widths=(8,)).double(), TensorDataset(x, x.sum(1)), config)
    inputs = x[:3].clone().requires_grad_()
    samples = predictor.predict(inputs, 2).samples
    assert (samples.shape, samples.dtype) == ((2, 3, 1), torch.float64)
    samples.sum().backward()
    assert inputs.grad is not None
    assert bool((inputs.grad != 0).any())


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def describe(net: nn.Module) -> list[Any]:
    """Bits of the tensors, modes, hooks and attributes of every module, and the state of every random generator."""
    attributes = [
        (name, module.training, key, id(value), *map(id, value.values() if isinstance(value, dict) else ()))
        for name, module in net.named_modules()
        for key, value in vars(module).items()
    ]
    tensors = [tensor.detach().numpy().tobytes() for tensor in (*net.parameters(), *net.buffers())]
    generators = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
    return [*attributes, tensors, *generators]


def run_calls(predictor: Any, number: int) -> list[Tensor]:
    """Call `number`: other inputs, seeds, numbers of replicates and results than those of its neighbours."""
    x, size, seed = noise(3 + number % 3, 4, seed=number), 2 + number % 4, number % 3
    if number % 3 == 0:
        found = predictor.summarize(x, size, seed=seed)
        return [found.mean, found.std, found.probs, found.expected_entropy]
    if number % 3 == 1 and hasattr(predictor, "moments"):
        found = predictor.moments(x)
        return [found.mean, found.std]
    return [predictor.predict(x, size, seed=seed).samples]


def assert_threads_agree(predictor: Predictor, *nets: nn.Module, training: bool = True, calls: int = 4) -> None:
    """8 threads without copies of their own answer as one thread does, and change nothing of the nets."""
    single = copy.deepcopy(predictor)
    expected = [run_calls(single, number) for number in range(12)]
    nets = (predictor.module, *nets)
    for net in nets:
        net.train(training)
    before, start = list(map(describe, nets)), threading.Barrier(8)

    def run(thread: int) -> bool:
        start.wait()
        numbers = [(thread + k) % len(expected) for k in range(calls)]
        return all(all(map(torch.equal, run_calls(predictor, n), expected[n])) for n in numbers)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))
    assert list(map(describe, nets)) == before


def fit_quickly(name: str) -> Any:
    """A predictor of a net with BatchNorm and dropout, or of a Gaussian process."""
    data = TensorDataset(noise(40, 4), torch.arange(40) % 3 if find_method(name).needs_net else noise(40))
    return create(name).fit(batch_norm_net, data, QUICK)


def forbid_global_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where a setting of all threads would be changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        import gpytorch

    def forbid(*args: Any, **options: Any) -> None:
        raise AssertionError("a setting of all threads is changed")

    places: list[tuple[Any, str]] = [(warnings.catch_warnings, "__enter__"), (torch.compiler, "set_stance")]
    places += [(torch.backends.mha, "set_fastpath_enabled"), (gpytorch.settings._feature_flag, "__enter__")]
    places += [(module, "seed") for module in (random, np.random)] + [(torch, "set_rng_state")]
    for owner, name in places:
        monkeypatch.setattr(owner, name, forbid)


@pytest.mark.parametrize("name", METHODS)
def test_threads_predict_the_same_and_do_not_change_the_net(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = fit_quickly(name)
    with monkeypatch.context() as patches:
        forbid_global_settings(patches)
        for number in range(3):
            run_calls(copy.deepcopy(predictor), number)
    assert_threads_agree(predictor)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_threads_make_many_calls(name: str) -> None:
    predictor = fit_quickly(name)
    for training in (True, False):
        assert_threads_agree(copy.deepcopy(predictor), training=training, calls=200)


def test_thread_copies_are_freed_without_the_garbage_collector() -> None:
    predictor = NeuBoots().fit(batch_norm_net, class_data(), QUICK)
    net = weakref.ref(predictor.net)
    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(predictor.predict, [X, X]))
            predictor.predict(X)
            del predictor
            assert net() is None  # also while the threads live
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["influence", "gp"])
def test_predictor_is_copied_saved_and_trained_while_threads_predict(name: str, tmp_path: Path) -> None:
    predictor, stop = fit_quickly(name), threading.Event()
    expected = run_calls(copy.deepcopy(predictor), 2)

    def predict(number: int) -> bool:
        same = True
        while not stop.is_set():
            same &= all(map(torch.equal, run_calls(copy.copy(predictor) if number else predictor, 2), expected))
        return same

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(predict, range(2))
        try:
            for _ in range(5):
                save(predictor, tmp_path / "model")
                copies = [copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))]
                assert all(all(map(torch.equal, run_calls(each, 2), expected)) for each in copies)
        finally:
            stop.set()
        assert all(found)


def test_net_trains_while_threads_predict_as_it_does_alone() -> None:
    def train(net: nn.Module) -> list[Any]:
        torch.manual_seed(0)  # of dropout
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X), torch.arange(9) % 3).backward()
            optimizer.step()
        return [tensor.detach().clone() for tensor in (*net.parameters(), *net.buffers())]

    net, stop = batch_norm_net(), threading.Event()
    expected = train(copy.deepcopy(net))
    predictor = DeterministicPredictor(net)

    def predict(number: int) -> bool:
        finite = True
        while not stop.is_set():
            finite &= bool(predictor.predict(X, 2).samples.isfinite().all())
        return finite

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(predict, range(2))
        try:
            trained = train(net)
        finally:
            stop.set()
        assert all(found)
    assert all(map(torch.equal, trained, expected))
    assert all(module.training for module in net.modules())


@pytest.mark.parametrize("name", METHODS)
def test_weights_and_statistics_that_are_not_finite_are_refused(name: str, tmp_path: Path) -> None:
    predictor = fit_quickly(name)
    tensors = {key: tensor for key, tensor in predictor.state_dict().items() if tensor.is_floating_point()}
    for number, key in enumerate([*tensors][:: max(1, len(tensors) // 3)]):
        if tensors[key].numel() and tensors[key].ndim:
            before = tensors[key].clone()
            tensors[key].view(-1)[-1] = torch.inf if number % 2 else torch.nan
            with pytest.raises(FloatingPointError):
                save(predictor, tmp_path / "model")
            tensors[key].copy_(before)
    save(predictor, tmp_path / "model")


class BlowUp(torch.optim.SGD):
    """Its last step makes the weights infinite, though every loss was finite."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        loss = super().step(closure)
        if self.steps == 6:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(torch.inf)
        return loss


@pytest.mark.parametrize("name", ["neuboots", "deterministic", "mc-dropout", "influence", "swag"])
def test_fit_that_ends_in_infinite_weights_raises(name: str) -> None:
    config = replace(QUICK, optimizer=lambda parameters: BlowUp(parameters, 0.1))
    with pytest.raises((FloatingPointError, ValueError), match="NaN"):
        create(name).fit(batch_norm_net, class_data(40), config)


@pytest.mark.parametrize("name", ["influence", "laplace", "mc-dropout"])
def test_net_with_weights_that_are_not_finite_is_refused(name: str) -> None:
    net = batch_norm_net()
    net[1].running_mean[0] = torch.nan  # type: ignore[index, union-attr]
    with pytest.raises(ArgumentError) as error:
        create(name).from_trained(net, class_data())
    assert error.value.name == "model"


POST_HOC = [InfluenceBootstrap(), InfluenceBootstrap(layers="all"), Laplace(), MCDropout()]


@pytest.mark.parametrize("method", POST_HOC, ids=lambda method: f"{method.info.name}-{getattr(method, 'layers', '')}")
def test_net_is_called_and_forked_while_threads_predict(method: Any) -> None:
    net, x = batch_norm_net().eval(), noise(5, 4)
    predictor = method.from_trained(net, TensorDataset(noise(40, 4), torch.arange(40) % 3))
    output, expected, stop = net(x), predictor.predict(x, 3).samples, threading.Event()

    def predict(number: int) -> bool:
        same = True
        while not stop.is_set():
            same &= torch.equal(predictor.predict(x, 3).samples, expected)
        return same

    with ThreadPoolExecutor(3) as pool:
        found = pool.map(predict, range(3))
        try:
            assert all(torch.equal(net(x), output) for _ in range(100))
            for _ in range(3):
                if (child := os.fork()) == 0:  # no thread but this one survives in the child
                    signal.alarm(60)  # ends the child if it waits for a lock of another thread
                    os._exit(not torch.equal(predictor.predict(x, 3).samples, expected))
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
        assert all(found)


@pytest.mark.parametrize("name", ["influence", "laplace", "mc-dropout"])
def test_from_trained_leaves_a_net_in_training_mode_alone(name: str) -> None:
    data, net = TensorDataset(noise(40, 4), torch.arange(40) % 3), batch_norm_net()
    method = create(name)
    predictor = method.from_trained(net, data)
    assert all(module.training for module in net.modules())
    assert_threads_agree(predictor, net)


@pytest.mark.parametrize("name", METHODS)
def test_invalid_data_raise(name: str) -> None:
    method = create(name, loss=nn.MSELoss())
    with pytest.raises(ValueError, match="expected"):
        method.fit(lambda: nn.Linear(4, 1), TensorDataset(X[:0], X[:0, :1]), QUICK)
    x = noise(40, 4)
    x[7, 2] = torch.nan
    with pytest.raises((ValueError, FloatingPointError), match=r"NaN|nan"):
        method.fit(lambda: MLP(4, 1, widths=(8,)), TensorDataset(x, noise(40)), QUICK)
    if find_method(name).needs_net:
        with pytest.raises(ValueError, match="label"):
            create(name).fit(TwoBranches, TensorDataset(X, torch.arange(9)), QUICK)


@pytest.mark.parametrize("name", METHODS)
def test_saved_predictor_of_another_net_or_method_is_rejected(name: str, tmp_path: Path) -> None:
    subject = MethodUnderTest(find_method(name), quick_options(name))
    twin = copy.deepcopy(subject.predictor)
    assert torch.equal(twin.predict(subject.x, 2).samples, subject.predictor.predict(subject.x, 2).samples)
    save(subject.predictor, tmp_path / "model")
    if subject.info.needs_net:
        with pytest.raises(ValueError, match="cannot load"):
            load(tmp_path / "model", model=MLP(4, 3, widths=(5,)))
    options = set(subject.predictor.config()) - {"method"}
    rewrite_artifact(tmp_path / "model", lambda config, tensors: [config.pop(name) for name in options])
    if options:
        with pytest.raises(ValueError, match="cannot load"):
            load(tmp_path / "model", model=subject.case.model() if subject.info.needs_net else None)


SCRIPT = """
import sys, torch
from pathlib import Path
import neuboots
import neuboots_paper.baselines
from neuboots.methods import METHODS
from neuboots.testing import MethodUnderTest
for name, info in METHODS.items():
    subject = MethodUnderTest(info)
    model = subject.case.model() if info.needs_net else None
    predictor = neuboots.load(Path(sys.argv[1]) / name, model=model)
    torch.save(predictor.predict(subject.x, 5, seed=2).samples, Path(sys.argv[1]) / f"{name}.pt")
"""


@pytest.mark.slow
def test_another_process_draws_the_same_replicates(tmp_path: Path) -> None:
    subjects = {name: MethodUnderTest(info) for name, info in METHODS.items()}
    for name, subject in subjects.items():
        save(subject.predictor, tmp_path / name)
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True)
    for name, subject in subjects.items():
        samples = torch.load(tmp_path / f"{name}.pt")
        assert torch.equal(samples, subject.predictor.predict(subject.x, 5, seed=2).samples), name


class ImagesOfSeveralSizes(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = noise(1, 6 + i, 5 + 2 * i, seed=i)
        return x, (x[0] > 0).long()


@pytest.mark.parametrize("name", [name for name in list_methods("segmentation") if name != "swag"])
def test_images_of_several_sizes_train_one_by_one(name: str) -> None:
    def make_net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    predictor = create(name).fit(make_net, ImagesOfSeveralSizes(), replace(QUICK, epochs=1, batch_size=1))
    x, _ = ImagesOfSeveralSizes()[3]
    assert predictor.predict(x[None], 2).samples.shape == (2, 1, 2, *x.shape[1:])


def test_row_weights_are_functions_of_both_seeds() -> None:
    x, y = class_data(30).tensors
    arrays = x.numpy(), y.numpy()
    method, config = NeuBoots(num_blocks=6), replace(QUICK, seed=0)
    predictor = method.fit(lambda: MLP(4, 3, widths=(8,)), (x, y), config)
    weights = method.row_weights(predictor, arrays, 5)
    assert weights is not None
    assert weights.shape == (5, 30)
    assert len(weights[0].unique()) == 6  # a weight for each block
    torch.testing.assert_close(weights, method.row_weights(predictor, (x, y), 5, seed=0, fit_seed=0), rtol=0, atol=0)
    for seeds in ({"seed": 1}, {"fit_seed": 1}):
        assert not torch.equal(weights, method.row_weights(predictor, (x, y), 5, **seeds))  # type: ignore[arg-type]
    single = Deterministic()
    assert single.row_weights(single.fit(lambda: MLP(4, 3), (x, y), config), (x, y), 5) is None
    with pytest.raises(ArgumentError, match=r"num_samples=0; expected an integer, at least 1"):
        method.row_weights(predictor, (x, y), 0)
    assert method.row_weights(predictor, (x, y), 1).shape == (1, 30)  # type: ignore[union-attr]
