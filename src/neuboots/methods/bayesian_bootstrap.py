"""Random-weight (Bayesian) bootstrap: K nets, each on all data under smooth random weights.

    θ_k = argmin 1/n Σᵢ w_{ki} ℓ(f_θ(Xᵢ), yᵢ),   w_k ~ n × Dirichlet(1, …, 1)                        (eq. 2.3)

The weights are drawn over all n points at once, never inside a batch: no point is ever left out.

Rubin, The Bayesian bootstrap, Annals of Statistics 1981; Newton and Raftery, Approximate Bayesian inference with the
weighted likelihood bootstrap, JRSS B 1994.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from neuboots.losses import CrossEntropy, Loss, check_loss
from neuboots.methods.members import MembersPredictor, check_members, fit_members
from neuboots.training import Recipe
from neuboots.weights import Dirichlet


@dataclass(frozen=True)
class BayesianBootstrap:
    """K nets on re-weighted data; `together` trains them side by side (None: where that is faster and gives the same).

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import SquaredError
    >>> data = TensorDataset(torch.randn(8, 2), torch.randn(8))
    >>> method = BayesianBootstrap(SquaredError(), num_members=3)
    >>> predictor = method.fit(lambda: nn.Linear(2, 1), data, Recipe(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 1])
    """

    loss: Loss = field(default_factory=CrossEntropy)
    num_members: int = 20
    together: bool | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_members(self.num_members, self.together)

    def fit(
        self,
        make_net: Callable[[], nn.Module],
        data: Dataset[Any],
        recipe: Recipe,
        *,
        validation: Dataset[Any] | None = None,
    ) -> MembersPredictor:
        """Train K nets that `make_net()` gives, on (x, y) rows, as the recipe says."""
        law = Dirichlet()
        return fit_members(self, make_net, data, recipe, name="bayesian-bootstrap", law=law, validation=validation)
