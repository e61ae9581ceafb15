"""The adversarial deep ensemble: the sign step, its scale, and the objective."""

from functools import partial

import pytest
import torch
from _nets import QUICK, class_data, noise
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._validation import ArgumentError
from neuboots.loading import Batch
from neuboots.losses import BrierLoss, GaussianNLL
from neuboots.methods.ensembles import _EnsembleObjective
from neuboots.nets import MLP
from neuboots_paper.baselines import AdversarialDeepEnsemble
from neuboots_paper.baselines.adversarial_ensemble import apply_fgsm, compute_input_ranges


def test_step_has_the_sign_of_the_gradient_and_the_scale_of_each_column() -> None:
    net = MLP(4, 3, widths=(8,))
    x, y = noise(10, 4) * torch.tensor([1.0, 10.0, 100.0, 0.1]), torch.arange(10) % 3
    (ranges,) = compute_input_ranges(TensorDataset(x, y), QUICK)
    torch.testing.assert_close(ranges, x.amax(0) - x.amin(0))
    x.requires_grad_()
    value = nn.functional.cross_entropy(net(x), y)
    (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
    moved = apply_fgsm(value, x, step=[0.01 * ranges])
    torch.testing.assert_close(moved, (x + 0.01 * ranges * gradient.sign()).detach())
    assert not moved.requires_grad
    assert bool(nn.functional.cross_entropy(net(moved), y) > value)


def test_range_of_images_is_per_channel_over_all_batches() -> None:
    x = noise(40, 2, 3, 3) * torch.tensor([1.0, 5.0]).view(2, 1, 1)
    x[33, 1, 2, 2] = 900.0
    (ranges,) = compute_input_ranges(TensorDataset(x, torch.zeros(40)), QUICK)
    torch.testing.assert_close(ranges, (x.amax((0, 2, 3)) - x.amin((0, 2, 3))).view(2, 1, 1))


def test_objective_is_the_score_at_the_inputs_and_at_adversarial_inputs() -> None:
    net, x, y, loss = MLP(4, 3, widths=(8,)), noise(10, 4), torch.arange(10) % 3, BrierLoss()
    perturb = partial(apply_fgsm, step=[torch.tensor(0.5)])
    value = _EnsembleObjective(loss, None, perturb, stacked=False)(net, Batch(x, y, torch.arange(10)))
    inputs = x.clone().requires_grad_()
    moved = x + 0.5 * torch.autograd.grad(loss(net(inputs), y).mean(), inputs)[0].sign()
    torch.testing.assert_close(value, loss(net(x), y).mean() + loss(net(moved), y).mean())


def test_regression_predicts_mean_and_variance() -> None:
    x = noise(40, 4)
    method = AdversarialDeepEnsemble.regression(num_members=2)
    assert method.loss == GaussianNLL()
    predictor = method.fit(lambda: MLP(4, 2, widths=(8,)), (x, x.sum(1)), QUICK)
    assert predictor.predict(x, 2).samples.shape == (2, 40, 2)


def test_input_without_a_gradient_is_not_moved() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(x) * (mask > 0)

    data = TensorDataset(noise(50, 4), torch.ones(50, 1), torch.arange(50) % 3)
    predictor = AdversarialDeepEnsemble(num_members=2).fit(Masked, data, QUICK)
    assert predictor.predict((noise(5, 4), torch.ones(5, 1)), 2).samples.shape == (2, 5, 3)


def test_inputs_without_floating_point_tensors_raise() -> None:
    data = TensorDataset(torch.zeros(8, 3, dtype=torch.long), class_data(8).tensors[1])
    with pytest.raises(ArgumentError) as error:
        AdversarialDeepEnsemble(num_members=2).fit(lambda: nn.Embedding(2, 3), data, QUICK)
    assert error.value.name == "data"
