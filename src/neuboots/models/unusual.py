"""How unlike the training rows is a new one?

    s(x) = √((φ(x) − μ)ᵀ Σ⁻¹ (φ(x) − μ)) / q,   q the distance that 99 % of the held-out rows stay below

The score does not ask the predictor: a net may be sure of an answer far away from all it has seen. Σ is the covariance
of the training rows' φ, shrunk towards a multiple of the identity (Ledoit and Wolf, A well-conditioned estimator for
large-dimensional covariance matrices, 2004); of many features only the variances are kept. Above 1 a row is unusual.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST = 512  # features whose covariances are kept
ROWS = 20_000  # of the training rows that the covariance is learned from
SHARE = 0.99


@dataclass(frozen=True, eq=False)
class Unusual:
    """μ, a factor L with L Lᵀ = Σ⁻¹ (a vector where Σ is diagonal), and q.

    >>> rows = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    >>> unusual = Unusual.learn(rows[:300], rows[300:])
    >>> near, far = unusual.score(torch.tensor([[0.5, 0.0], [20.0, 0.0]]))
    >>> bool(near < 1 < far)
    True
    """

    mean: Tensor  # (D,)
    factor: Tensor  # (D, D), or (D,)
    limit: float

    @classmethod
    def learn(cls, train: Tensor, held_out: Tensor) -> "Unusual":
        """From features of training rows (n, D), and of rows (m, D) that the features were not learned from."""
        from sklearn.covariance import ledoit_wolf

        rows = train[:: math.ceil(len(train) / ROWS)].double()
        mean = rows.mean(0)
        if rows.shape[1] > MOST or len(rows) < 3:
            variance = rows.var(0, correction=0)
            factor = (variance + 1e-3 * variance.mean() + 1e-12).rsqrt()
        else:
            covariance = torch.from_numpy(ledoit_wolf(np.asarray(rows))[0])
            ridge = 1e-6 * covariance.diagonal().mean() + 1e-12  # constant features
            inverse = torch.linalg.inv(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))
            factor = torch.linalg.cholesky((inverse + inverse.T) / 2)
        found = cls(mean.float(), factor.float().contiguous(), 1.0)  # in the layout that a file gives back
        distances = found.distance(held_out if len(held_out) else train)
        limit = float(np.quantile(distances, SHARE, method="higher"))
        return cls(found.mean, found.factor, limit if limit > 0 else 1.0)

    def distance(self, features: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
        away = features.float() - self.mean  # (N, D)
        scaled = away * self.factor if self.factor.ndim == 1 else away @ self.factor
        return np.asarray(scaled.norm(dim=1).double())

    def score(self, features: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """s for features (N, D): (N,). Above 1: further out than 99 % of the held-out rows."""
        return self.distance(features) / self.limit

    def state(self) -> dict[str, Tensor]:
        """As tensors, for a file."""
        return {"mean": self.mean, "factor": self.factor, "limit": torch.tensor(self.limit, dtype=torch.float64)}

    @classmethod
    def restore(cls, state: dict[str, Tensor]) -> "Unusual":
        return cls(state["mean"], state["factor"], float(state["limit"]))
