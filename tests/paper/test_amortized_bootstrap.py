"""Amortized bootstrap: parameters generated from noise, trained on resampled data sets."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import QUICK, ZOO, Case, Squeezed, TokenData, Tokens, class_data, make, noise
from _reference import least_squares, sandwich
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import IterableDataset, TensorDataset

from neuboots import TrainingConfig, load, save
from neuboots._validation import ArgumentError
from neuboots.head import compute_output, unwrap_model
from neuboots.loading import Batch
from neuboots_paper.baselines.amortized_bootstrap import AmortizedBootstrap, ImplicitModel, draw_noise


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def compute_theta(model: ImplicitModel, xi: Tensor) -> dict[str, Tensor]:
    """θ₀ + Σ_h A_h tanh(W ξ + b)_h, one hidden unit after another."""
    hidden = [float(torch.tanh(w @ xi.float() + b)) for w, b in zip(model.W.detach(), model.b.detach(), strict=True)]
    theta = dict(model.net.named_parameters())
    return {
        name: theta[name].detach() + sum(h * column for h, column in zip(hidden, A.detach(), strict=True))
        for name, A in zip(model.names, model.A, strict=True)
    }


# -- the implicit model --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in ZOO if case.name != "compiled body"], ids=lambda case: case.name)
def test_output_is_that_of_a_net_with_the_generated_parameters(case: Case) -> None:
    net = unwrap_model(make(case))
    expected = compute_output(net, case.x)
    model = ImplicitModel(net, latent=3, hidden=4)
    torch.testing.assert_close(model(case.x, torch.zeros(3)), expected)  # b = 0 initially, so that f(0) = θ₀
    xi = noise(3, seed=5).double()
    output = model(case.x, xi)
    assert not torch.allclose(output, expected)
    explicit = unwrap_model(make(case))
    explicit.load_state_dict(compute_theta(model, xi), strict=False)
    torch.testing.assert_close(output, compute_output(explicit, case.x))


def test_initial_standard_deviation_is_relative_to_each_tensor() -> None:
    model = ImplicitModel(small_net(), latent=20, hidden=200, spread=0.1)
    thetas = [model.generate_parameters(xi) for xi in draw_noise(torch.arange(200), 20, 0, "test")]
    for name, parameter in model.net.named_parameters():
        std = torch.stack([theta[name] for theta in thetas]).std(0).square().mean().sqrt()
        expected = 0.1 * 0.628 * parameter.square().mean().sqrt()  # √E tanh(N(0, 1))² = 0.628
        torch.testing.assert_close(std, expected, rtol=0.15, atol=1e-9)


def test_gradients_reach_every_part_of_phi() -> None:
    model = ImplicitModel(small_net(), latent=3, hidden=4)
    model(noise(8, 4), noise(3)).square().mean().backward()
    parameters = dict(model.named_parameters())
    assert {"W", "b", "A.0", "net.0.weight"} < parameters.keys()
    # BatchNorm removes a bias before it: it has no gradient in any net
    without = [name for name, p in parameters.items() if p.grad is None or float(p.grad.abs().max()) < 1e-8]
    assert set(without) <= {"net.0.bias", "A.1"}


def test_tied_weights_are_generated_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    model = ImplicitModel(net, latent=3, hidden=4)
    theta = compute_theta(model, torch.ones(3))
    assert "2.weight" not in theta
    expected = functional_call(net, {**theta, "2.weight": theta["0.weight"]}, (noise(5, 4),))
    torch.testing.assert_close(model(noise(5, 4), torch.ones(3)), expected)


# -- training ------------------------------------------------------------------------------------------


def test_objective_is_the_loss_on_the_resampled_data_sets() -> None:
    method, data = AmortizedBootstrap(num_resamples=3, latent=2), class_data()
    model = ImplicitModel(small_net(), latent=2, hidden=4).eval()
    counts = method.draw_resamples(0, 50, seed=7)
    assert counts.shape == (3, 50)
    assert counts.sum(1).tolist() == [50] * 3
    index = torch.arange(50).flip(0)
    x, y = (tensor[index] for tensor in data.tensors)
    with torch.no_grad():
        value = method.compute_objective(model, Batch(x, y, index, step=4), counts, seed=7)
        total = 0.0
        for k, xi in enumerate(draw_noise(torch.arange(3), 2, 7, "step", 4)):
            rows = torch.arange(50).repeat_interleave(counts[k].long())  # data set k
            outputs = functional_call(model.net, compute_theta(model, xi), (data.tensors[0][rows],))
            total += float(nn.functional.cross_entropy(outputs, data.tensors[1][rows]))
    assert float(value) == pytest.approx(total / 3, rel=1e-5)


def test_data_sets_last_for_some_epochs_and_noise_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    steps: list[Tensor] = []
    draw_resamples, forward = AmortizedBootstrap.draw_resamples, ImplicitModel.forward

    def record_round(method: AmortizedBootstrap, number: int, n: int, *, seed: int) -> Tensor:
        rounds.append(number)
        return draw_resamples(method, number, n, seed=seed)

    def record_noise(model: ImplicitModel, x: Any, xi: Tensor) -> Tensor:
        steps.append(xi)
        return forward(model, x, xi)

    monkeypatch.setattr(AmortizedBootstrap, "draw_resamples", record_round)
    monkeypatch.setattr(ImplicitModel, "forward", record_noise)
    method = AmortizedBootstrap(num_resamples=2, resample_every=3)
    method.fit(small_net, class_data(), TrainingConfig(epochs=7, batch_size=25, progress=False))
    assert rounds == [0, 0, 0, 1, 1, 1, 2]
    assert len(torch.unique(torch.stack(steps), dim=0)) == 7 * 2 * 2  # epochs, steps, data sets
    assert not torch.equal(draw_resamples(method, 0, 50, seed=0), draw_resamples(method, 1, 50, seed=0))


def test_linear_model_has_the_right_mean_and_loses_its_variance() -> None:
    """ξ is independent of the resampled data, so that the variance only shrinks."""
    x = noise(60, 2)
    y = x @ torch.tensor([1.0, -2.0]) + 0.5 + noise(60, seed=1)
    X, target = np.column_stack([x, np.ones(60)]).astype(float), y.double().numpy()
    solution, errors = least_squares(X, target, np.ones(60)), np.sqrt(np.diag(sandwich(X, target)))
    stds = []
    for epochs in (10, 400):
        adam = partial(torch.optim.Adam, lr=0.05)
        config = TrainingConfig(epochs=epochs, batch_size=60, optimizer=adam, progress=False)
        method = AmortizedBootstrap(loss=nn.MSELoss(), spread=1.0)
        predictor = method.fit(lambda: nn.Linear(2, 1), (x, y), config)
        thetas = [predictor.model.generate_parameters(predictor.noise(b)) for b in range(300)]
        theta = torch.stack([torch.cat([t["weight"][0], t["bias"]]) for t in thetas]).detach().numpy()
        stds.append(theta.std(0))
    assert bool((np.abs(theta.mean(0) - solution) < errors).all())
    assert bool((stds[1] < 0.5 * stds[0]).all())
    assert bool((stds[1] < 0.5 * errors).all())


def test_buffers_and_frozen_parameters_are_shared(tmp_path: Path) -> None:
    def factory() -> nn.Module:
        net = small_net()
        net[0].weight.requires_grad_(False)
        return net

    predictor = AmortizedBootstrap(num_resamples=2).fit(factory, class_data(), QUICK)
    assert int(predictor.net[1].num_batches_tracked) == 2 * 2 * 4  # data sets, epochs, steps
    theta = predictor.model.generate_parameters(torch.ones(10))
    assert not {"0.weight", "1.running_mean"} & theta.keys()
    save(predictor, tmp_path / "model")
    x = noise(6, 4, seed=3)
    samples = predictor.predict(x, 3, seed=9).samples
    assert torch.equal(load(tmp_path / "model", model=small_net()).predict(x, 3, seed=9).samples, samples)
    for b in range(3):
        theta = compute_theta(predictor.model, predictor.noise(b, seed=9))
        torch.testing.assert_close(samples[b], functional_call(predictor.net, theta, (x,)))


@pytest.mark.parametrize(
    ("factory", "data", "loss", "shape"),
    [
        (Squeezed, TensorDataset(noise(50, 4), noise(50, seed=1)), nn.MSELoss(), (3, 1)),
        (lambda: nn.DataParallel(small_net()), class_data(), nn.CrossEntropyLoss(), (3, 3)),
        (Tokens, TokenData(), nn.CrossEntropyLoss(), (3, 3, 7)),
    ],
    ids=["squeezed", "data parallel", "keywords"],
)
def test_any_net_is_trained(factory: Any, data: Any, loss: Any, shape: tuple[int, ...]) -> None:
    predictor = AmortizedBootstrap(loss=loss, num_resamples=2).fit(factory, data, QUICK, val_data=data)
    x = torch.utils.data.default_collate([data[i][0] for i in range(3)])
    assert predictor.predict(x, 2).samples.shape == (2, *shape)


def test_invalid_data_and_nets_raise() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from zip(*class_data().tensors, strict=True)

    with pytest.raises(ArgumentError) as error:
        AmortizedBootstrap().fit(small_net, Stream(), TrainingConfig(steps_per_epoch=2, progress=False))
    assert error.value.name == "data"
    body = torch.compile(nn.Sequential(nn.Linear(4, 8)), backend="eager")
    for net in (nn.ReLU(), nn.Sequential(body, nn.Linear(8, 3))):
        with pytest.raises(ArgumentError):
            ImplicitModel(net, latent=2, hidden=2)
