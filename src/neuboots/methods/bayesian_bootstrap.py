"""Random-weight (Bayesian) bootstrap: K nets, each on all data under smooth random weights.

    θ_k = argmin 1/n Σᵢ w_{ki} ℓ(f_θ(Xᵢ), yᵢ),   w_k ~ n × Dirichlet(1, …, 1)                        (eq. 2.3)

The weights are drawn over all n points at once, never inside a batch: no point is ever left out.

Rubin, The Bayesian bootstrap, Annals of Statistics 1981; Newton and Raftery, Approximate Bayesian inference with the
weighted likelihood bootstrap, JRSS B 1994.
"""

from dataclasses import dataclass
from typing import ClassVar

from neuboots.methods.members import MembersMethod
from neuboots.weights import Dirichlet, WeightLaw


@dataclass(frozen=True)
class BayesianBootstrap(MembersMethod):
    """K nets on re-weighted data; `together` trains them side by side (None: where that is faster and gives the same).

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import Recipe, SquaredError
    >>> data = TensorDataset(torch.randn(8, 2), torch.randn(8))
    >>> method = BayesianBootstrap(SquaredError(), num_members=3)
    >>> predictor = method.fit(lambda: nn.Linear(2, 1), data, Recipe(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 1])
    """

    num_members: int = 20

    name: ClassVar[str] = "bayesian-bootstrap"
    law: ClassVar[WeightLaw | None] = Dirichlet()
