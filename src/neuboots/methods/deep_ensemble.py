"""Deep ensemble: K nets that differ in their first weights and in the order of their data.

    p(y | x) = 1/K Σ_k softmax f_{θ_k}(x)

Lakshminarayanan, Pritzel and Blundell, NeurIPS 2017; with the plain cross-entropy and without adversarial training,
as Ashukha, Lyzhov, Molchanov and Vetrov (Pitfalls of in-domain uncertainty estimation and ensembling in deep
learning, ICLR 2020) compare it. `AdversarialEnsemble` is the original.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from neuboots.losses import CrossEntropy, Loss, check_loss
from neuboots.methods.members import MembersPredictor, check_members, fit_members
from neuboots.training import Recipe


@dataclass(frozen=True)
class DeepEnsemble:
    """K nets; `together` trains them side by side (None: where that is faster and gives the same).

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 3)
    >>> predictor = DeepEnsemble(num_members=3).fit(lambda: nn.Linear(2, 3), data, Recipe(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 3])
    """

    loss: Loss = field(default_factory=CrossEntropy)
    num_members: int = 5
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
        return fit_members(self, make_net, data, recipe, name="deep-ensemble", validation=validation)
