"""Helpers for tests of the influence bootstrap of a head: data in double precision, linear and logistic regression."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import InfluenceBootstrap, TrainingConfig
from neuboots.methods.influence import HeadPredictor

CONFIG = TrainingConfig(epochs=2, batch_size=16, progress=False)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bootstrap(net: nn.Module, x: Any, y: Tensor, config: TrainingConfig = CONFIG, **options: Any) -> HeadPredictor:
    predictor = InfluenceBootstrap(**options).make_predictor(net, TensorDataset(x, y), config)
    assert isinstance(predictor, HeadPredictor)
    return predictor


def make_net(make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().double().eval()


def make_mlp(activation: Callable[[], nn.Module], outputs: int = 2) -> nn.Sequential:
    layers = nn.Linear(4, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, outputs)
    return nn.Sequential(*layers)


def linear(theta: np.ndarray) -> nn.Linear:
    """A Linear layer with these weights (C, D̃), the last column its bias."""
    net = nn.Linear(theta.shape[1] - 1, len(theta)).double()
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(theta[:, :-1].copy()))
        net.bias.copy_(torch.from_numpy(theta[:, -1].copy()))
    return net


def with_ones(x: Tensor) -> np.ndarray:
    return np.concatenate([x.numpy(), np.ones((len(x), 1))], 1)


X, NEW = randn(40, 3), randn(6, 3, seed=7)
PHI, NEW_PHI = with_ones(X), with_ones(NEW)


def weighted_least_squares(y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """argmin Σ wᵢ |yᵢ − θφ̃ᵢ|²: (C, D̃)."""
    return np.linalg.lstsq(PHI * np.sqrt(w)[:, None], y * np.sqrt(w)[:, None], rcond=None)[0].T


def least_squares(outputs: int) -> tuple[nn.Linear, Tensor]:
    """A fitted net and its targets."""
    y = randn(40, outputs, seed=1) * (1 + X[:, :1].abs()) + X[:, 1:2]
    return linear(weighted_least_squares(y.numpy(), np.ones(40))), y


def logistic(y: np.ndarray, w: np.ndarray, ridge: float = 0.0, center: np.ndarray | None = None) -> np.ndarray:
    """Weighted logistic regression by Newton's method, ridge around a center: (D̃,)."""
    theta = np.zeros(4)
    center = np.zeros(4) if center is None else center
    for _ in range(60):
        p = 1 / (1 + np.exp(-PHI @ theta))
        H = (PHI * (w * p * (1 - p))[:, None]).T @ PHI + ridge * np.eye(4)
        theta = theta - np.linalg.solve(H, PHI.T @ (w * (p - y)) + ridge * (theta - center))
    return theta


LABELS = (X[:, 0] + 0.8 * randn(40, seed=4) > 0.2).long()
CLASSES = torch.arange(40) % 2
THETA = logistic(LABELS.numpy(), np.ones(40))
PIXELS = randn(4, 3, 2, 2, seed=5)
