"""Standard bootstrap: K nets, each on a data set drawn with replacement.

    θ_k = argmin 1/n Σᵢ w_{ki} ℓ(f_θ(Xᵢ), yᵢ),   w_k ~ Multinomial(n; 1/n, …, 1/n)                        (eq. 2.2)

The weights are drawn over all n points at once, never inside a batch: wᵢ counts how often point i was drawn.

Efron, Bootstrap methods: another look at the jackknife, Annals of Statistics 1979.
"""

from dataclasses import dataclass
from typing import ClassVar

from neuboots.methods.members import MembersMethod
from neuboots.weights import Multinomial, WeightLaw


@dataclass(frozen=True)
class StandardBootstrap(MembersMethod):
    """K nets on resampled data; `together` trains them side by side (None: where that is faster and gives the same).

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import Recipe, SquaredError
    >>> data = TensorDataset(torch.randn(8, 2), torch.randn(8))
    >>> method = StandardBootstrap(SquaredError(), num_members=3)
    >>> predictor = method.fit(lambda: nn.Linear(2, 1), data, Recipe(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 1])
    """

    num_members: int = 20

    name: ClassVar[str] = "standard-bootstrap"
    law: ClassVar[WeightLaw | None] = Multinomial()
