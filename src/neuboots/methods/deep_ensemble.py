"""Deep ensemble: K nets that differ in their first weights and in the order of their data.

    p(y | x) = 1/K Σ_k softmax f_{θ_k}(x)

Lakshminarayanan, Pritzel and Blundell, NeurIPS 2017; with the plain cross-entropy and without adversarial training,
as Ashukha, Lyzhov, Molchanov and Vetrov (Pitfalls of in-domain uncertainty estimation and ensembling in deep
learning, ICLR 2020) compare it. `AdversarialEnsemble` is the original.
"""

from dataclasses import dataclass
from typing import ClassVar

from neuboots.methods.members import MembersMethod


@dataclass(frozen=True)
class DeepEnsemble(MembersMethod):
    """K nets; `together` trains them side by side (None: where that is faster and gives the same).

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import Recipe
    >>> data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 3)
    >>> predictor = DeepEnsemble(num_members=3).fit(lambda: nn.Linear(2, 3), data, Recipe(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 3])
    """

    name: ClassVar[str] = "deep-ensemble"
