"""The amortized bootstrap: parameters made from noise, trained on resampled data sets."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import ZOO, Case, Squeezed, Tokens, make
from _reference import least_squares, sandwich
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from neuboots.head import call_net, extract_output, unwrap_model
from neuboots.loading import Batch
from neuboots.nets import MLP
from neuboots.serialization import load, save
from neuboots.training import EpochReport, TrainingConfig
from neuboots_paper.baselines.amortized_bootstrap import (
    AmortizedBootstrap,
    AmortizedBootstrapPredictor,
    ImplicitModel,
    draw_noise,
)

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes() -> TensorDataset:
    return TensorDataset(rows(50, 4), torch.arange(50) % 3)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def theta_by_hand(model: ImplicitModel, xi: Tensor) -> dict[str, Tensor]:
    """θ₀ + Σ_h A_h tanh(W ξ + b)_h, one hidden unit after another."""
    hidden = [float(torch.tanh(w @ xi.float() + b)) for w, b in zip(model.W.detach(), model.b.detach(), strict=True)]
    own = dict(model.net.named_parameters())
    return {
        name: own[name].detach() + sum(h * column for h, column in zip(hidden, A.detach(), strict=True))
        for name, A in zip(model.names, model.A, strict=True)
    }


# -- the implicit model --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in ZOO if case.name != "compiled body"], ids=lambda case: case.name)
def test_the_output_is_that_of_a_net_with_those_parameters(case: Case) -> None:
    net = unwrap_model(make(case))
    plain = extract_output(call_net(net, case.x))
    model = ImplicitModel(net, latent=3, hidden=4)
    torch.testing.assert_close(model(case.x, torch.zeros(3)), plain)  # b = 0 at first, so f(0) = θ₀
    xi = rows(3, seed=5).double()
    output = model(case.x, xi)
    assert not torch.allclose(output, plain)
    explicit = unwrap_model(make(case))
    explicit.load_state_dict(theta_by_hand(model, xi), strict=False)
    torch.testing.assert_close(output, extract_output(call_net(explicit, case.x)))


def test_parameters_stray_by_their_own_size() -> None:
    model = ImplicitModel(small_net(), latent=20, hidden=200, spread=0.1)
    drawn = [model.generate_parameters(xi) for xi in draw_noise(torch.arange(200), 20, 0, "test")]
    for name, parameter in model.net.named_parameters():
        spread = torch.stack([theta[name] for theta in drawn]).std(0).square().mean().sqrt()
        expected = 0.1 * 0.628 * parameter.square().mean().sqrt()  # √E tanh(N(0, 1))² = 0.628
        torch.testing.assert_close(spread, expected, rtol=0.15, atol=1e-9)


def test_gradients_reach_every_part_of_phi() -> None:
    model = ImplicitModel(small_net(), latent=3, hidden=4)
    model(rows(8, 4), rows(3)).square().mean().backward()
    parts = dict(model.named_parameters())
    assert {"W", "b", "A.0", "net.0.weight"} < parts.keys()
    # a bias before BatchNorm is taken away again: nothing reaches it, in any net
    silent = [name for name, p in parts.items() if p.grad is None or float(p.grad.abs().max()) < 1e-8]
    assert set(silent) <= {"net.0.bias", "A.1"}


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    model = ImplicitModel(net, latent=3, hidden=4)
    xi = torch.ones(3)
    theta = theta_by_hand(model, xi)
    assert "2.weight" not in theta
    expected = functional_call(net, {**theta, "2.weight": theta["0.weight"]}, (rows(5, 4),))
    torch.testing.assert_close(model(rows(5, 4), xi), expected)


# -- training ------------------------------------------------------------------------------------------


def test_the_objective_is_the_loss_on_the_resampled_data_sets() -> None:
    """Rows repeated as often as they were drawn, each data set with a net of its own."""
    method = AmortizedBootstrap(num_resamples=3, latent=2)
    data = classes()
    model = ImplicitModel(small_net(), latent=2, hidden=4).eval()
    counts = method.draw_resamples(0, 50, seed=7)
    assert counts.shape == (3, 50)
    assert counts.sum(1).tolist() == [50] * 3
    index = torch.arange(50).flip(0)
    x, y = (tensor[index] for tensor in data.tensors)
    with torch.no_grad():
        value = method.objective(model, Batch(x, y, index, step=4), counts, seed=7)
        total = 0.0
        for k, xi in enumerate(draw_noise(torch.arange(3), 2, 7, "step", 4)):
            drawn = torch.arange(50).repeat_interleave(counts[k].long())  # data set k
            outputs = functional_call(model.net, theta_by_hand(model, xi), (data.tensors[0][drawn],))
            total += float(nn.functional.cross_entropy(outputs, data.tensors[1][drawn]))
    assert float(value) == pytest.approx(total / 3, rel=1e-5)


def test_data_sets_are_kept_for_some_epochs_and_noise_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    steps: list[Tensor] = []
    resamples, forward = AmortizedBootstrap.draw_resamples, ImplicitModel.forward

    def record(method: AmortizedBootstrap, number: int, n: int, *, seed: int) -> Tensor:
        rounds.append(number)
        return resamples(method, number, n, seed=seed)

    def watch(model: ImplicitModel, x: Any, xi: Tensor) -> Tensor:
        steps.append(xi)
        return forward(model, x, xi)

    monkeypatch.setattr(AmortizedBootstrap, "resamples", record)
    monkeypatch.setattr(ImplicitModel, "forward", watch)
    method = AmortizedBootstrap(num_resamples=2, resample_every=3)
    method.fit(small_net, classes(), TrainingConfig(epochs=7, batch_size=25, progress=False))
    assert rounds == [0, 0, 0, 1, 1, 1, 2]
    assert len(torch.unique(torch.stack(steps), dim=0)) == 7 * 2 * 2  # epochs, steps, data sets
    assert not torch.equal(resamples(method, 0, 50, seed=0), resamples(method, 1, 50, seed=0))


def linear_model() -> tuple[TensorDataset, np.ndarray, np.ndarray]:
    """Data, the least-squares solution and its standard errors."""
    x = rows(60, 2)
    y = x @ torch.tensor([1.0, -2.0]) + 0.5 + rows(60, seed=1)
    X = np.column_stack([x, np.ones(60)]).astype(float)
    target = y.double().numpy()
    return TensorDataset(x, y), least_squares(X, target, np.ones(60)), np.sqrt(np.diag(sandwich(X, target)))


def test_on_a_linear_model_the_mean_is_right_and_the_spread_is_lost() -> None:
    """The finding in the docstring: ξ is independent of the resampled data, so spread only shrinks."""
    data, solution, errors = linear_model()
    method = AmortizedBootstrap(loss=nn.MSELoss(), spread=1.0)
    spreads = []
    for epochs in (10, 400):
        config = TrainingConfig(
            epochs=epochs, batch_size=60, optimizer=partial(torch.optim.Adam, lr=0.05), progress=False
        )
        predictor = method.fit(lambda: nn.Linear(2, 1), data, config)
        drawn = [predictor.model.generate_parameters(predictor.noise(b)) for b in range(300)]
        theta = torch.stack([torch.cat([t["weight"][0], t["bias"]]) for t in drawn]).detach().numpy()
        spreads.append(theta.std(0))
    assert bool((np.abs(theta.mean(0) - solution) < errors).all())
    assert bool((spreads[1] < 0.5 * spreads[0]).all())
    assert bool((spreads[1] < 0.5 * errors).all())


def test_buffers_are_shared_and_learned() -> None:
    predictor = AmortizedBootstrap(num_resamples=2).fit(small_net, classes(), RECIPE)
    norm = predictor.net[1]
    assert int(norm.num_batches_tracked) == 2 * 2 * 4  # data sets, epochs, steps
    assert not any("1.running_mean" in theta for theta in predictor.model.generate_parameters(torch.ones(10)))


def test_frozen_parameters_are_the_same_for_all(tmp_path: Path) -> None:
    def model() -> nn.Module:
        net = small_net()
        net[0].weight.requires_grad_(False)
        return net

    predictor = AmortizedBootstrap().fit(model, classes(), RECIPE)
    assert "0.weight" not in predictor.model.generate_parameters(torch.ones(10))
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model", model=small_net())
    x = rows(6, 4, seed=3)
    assert torch.equal(again.predict(x, 4).samples, predictor.predict(x, 4).samples)


# -- prediction ----------------------------------------------------------------------------------------


def test_replicate_b_is_a_pass_with_its_own_parameters() -> None:
    predictor = AmortizedBootstrap(num_resamples=2).fit(small_net, classes(), RECIPE)
    x = rows(6, 4, seed=3)
    samples = predictor.predict(x, 3, seed=9).samples
    for b in range(3):
        theta = theta_by_hand(predictor.model, predictor.noise(b, seed=9))
        torch.testing.assert_close(samples[b], functional_call(predictor.net, theta, (x,)))


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.randint(0, 11, (7,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "scale": torch.ones(1, 1)}, ids % 3


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(outputs.mT, targets)


@pytest.mark.parametrize(
    ("model", "data", "loss", "shape"),
    [
        (Squeezed, TensorDataset(rows(50, 4), rows(50, seed=1)), nn.MSELoss(), (3, 1)),
        (
            lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)),
            classes(),
            nn.CrossEntropyLoss(),
            (3, 3),
        ),
        (lambda: nn.DataParallel(small_net()), classes(), nn.CrossEntropyLoss(reduction="none"), (3, 3)),
        (Tokens, Sentences(), token_loss, (3, 7, 3)),
    ],
    ids=["squeezed", "lazy", "data parallel", "keywords"],
)
def test_any_net(model: Any, data: Any, loss: Any, shape: tuple[int, ...]) -> None:
    method = AmortizedBootstrap(loss=loss, num_resamples=2)
    predictor = method.fit(model, data, RECIPE, val_data=data)
    x = torch.utils.data.default_collate([data[i][0] for i in range(3)])
    assert predictor.predict(x, 2).samples.shape == (2, *shape)


def test_a_net_of_the_library_is_rebuilt(tmp_path: Path) -> None:
    predictor = AmortizedBootstrap(hidden=3).fit(lambda: MLP(4, 3, widths=(8,)), classes(), RECIPE)
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model")
    assert isinstance(again, AmortizedBootstrapPredictor)
    x = rows(6, 4, seed=3)
    assert torch.equal(again.predict(x, 4).samples, predictor.predict(x, 4).samples)


def test_a_fit_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    def stop(report: EpochReport) -> None:
        if report.epoch == 1:
            raise RuntimeError("cut short")

    fit = partial(AmortizedBootstrap(num_resamples=2).fit, small_net, classes())
    whole = fit(TrainingConfig(epochs=4, batch_size=16, progress=False))
    with pytest.raises(RuntimeError, match="cut short"):
        fit(TrainingConfig(epochs=4, batch_size=16, progress=False, folder=tmp_path, on_epoch=stop))
    resumed = fit(TrainingConfig(epochs=4, batch_size=16, progress=False, folder=tmp_path))
    x = rows(6, 4, seed=3)
    assert torch.equal(whole.predict(x, 3).samples, resumed.predict(x, 3).samples)


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_resamples": 0}, "got num_resamples=0; expected a whole number ≥ 1"),
        ({"resample_every": 0}, "got resample_every=0; expected a whole number ≥ 1"),
        ({"latent": 1.5}, "got latent=1.5; expected a whole number ≥ 1"),
        ({"hidden": -1}, "got hidden=-1; expected a whole number ≥ 1"),
        ({"spread": 0.0}, "got spread=0.0; expected a positive number"),
        ({"loss": nn.CrossEntropyLoss}, "expected a function of .outputs, targets."),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AmortizedBootstrap(**options)


def test_data_and_nets_that_cannot_be_taken() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from zip(*classes().tensors, strict=True)

    with pytest.raises(ValueError, match="got a stream; expected a data set of known length"):
        AmortizedBootstrap().fit(small_net, Endless(), TrainingConfig(steps_per_epoch=2, progress=False))
    with pytest.raises(ValueError, match="no parameters to generate; expected at least one with requires_grad"):
        ImplicitModel(nn.ReLU(), latent=2, hidden=2)
    body = torch.compile(nn.Sequential(nn.Linear(4, 8)), backend="eager")
    with pytest.raises(ValueError, match="parts of the net are compiled.*expected a net that is not"):
        ImplicitModel(nn.Sequential(body, nn.Linear(8, 3)), latent=2, hidden=2)
