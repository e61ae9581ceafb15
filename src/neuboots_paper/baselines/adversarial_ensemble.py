"""The original deep ensemble: a proper scoring rule and adversarial training.

    θ_k = argmin Σᵢ ℓ(f_θ(Xᵢ), yᵢ) + ℓ(f_θ(X′ᵢ), yᵢ),   X′ᵢ = Xᵢ + ε r ⊙ sign(∂ℓ/∂Xᵢ)

with r the range of the inputs in the training data, column by column (channel by channel for images), and ε = 0.01.
The scoring rule is the Brier score for classes and the Gaussian likelihood for regression, where the net gives a mean
and a log-variance.

Lakshminarayanan, Pritzel and Blundell, Simple and scalable predictive uncertainty estimation using deep ensembles,
NeurIPS 2017, algorithm 1. The sign step: Goodfellow, Shlens and Szegedy, ICLR 2015.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from neuboots._pytree import map_float_tensors
from neuboots.loading import EpochLoader, preserve_rng_state
from neuboots.losses import BrierLoss, GaussianNLL, Loss
from neuboots.methods._base import register
from neuboots.methods.ensembles import EnsembleMethod, EnsemblePredictor, Perturbation
from neuboots.training import TrainingConfig


def _floats(x: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_float_tensors(lambda part: found.append(part) or part, x)  # type: ignore[func-returns-value]
    return found


def apply_fgsm(value: Tensor, x: Any, *, step: list[Tensor]) -> Any:
    """x + ε sign(∂value/∂x): the fast gradient sign method, with ε for each input on its own scale."""
    gradients = torch.autograd.grad(value, _floats(x), retain_graph=True, allow_unused=True)  # a mask has none
    pairs = zip(gradients, step, strict=True)
    moves = iter([0.0 if gradient is None else gradient.sign() * eps.to(gradient) for gradient, eps in pairs])
    return map_float_tensors(lambda part: (part + next(moves)).detach(), x)


def compute_input_ranges(data: Dataset[Any], config: TrainingConfig) -> list[Tensor]:
    """max − min over the data of each column (N, D) or channel (N, C, *), shaped to multiply inputs; read once."""
    loader = EpochLoader(
        data,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=False,
        num_workers=config.num_workers,
        steps_per_epoch=config.steps_per_epoch,
    )
    lows: list[Tensor] = []
    highs: list[Tensor] = []
    with preserve_rng_state():
        for _, batch, _ in loader.epoch(0):
            parts = [part.float() for part in _floats(batch.x)]
            if not parts:
                raise ValueError(
                    "got inputs without a floating-point tensor; expected numbers that adversarial training can move: "
                    "take deep-ensemble instead"
                )
            axes = [[axis for axis in range(part.ndim) if axis != 1] for part in parts]
            low = [part.amin(axis, keepdim=True)[0] for part, axis in zip(parts, axes, strict=True)]
            high = [part.amax(axis, keepdim=True)[0] for part, axis in zip(parts, axes, strict=True)]
            lows = low if not lows else list(map(torch.minimum, lows, low))
            highs = high if not highs else list(map(torch.maximum, highs, high))
    return [high - low for low, high in zip(lows, highs, strict=True)]  # (D,) or (C, 1, …)


@register(
    "adversarial-deep-ensemble",
    predictor=EnsemblePredictor,
    summary="K nets with a proper scoring rule and adversarial training",
    members=True,
    train_cost="O(2LK)",
    reference="Lakshminarayanan et al., NeurIPS 2017",
)
@dataclass(frozen=True)
class AdversarialDeepEnsemble(EnsembleMethod):
    """K nets trained on their data and on its adversarial twin, `epsilon` of the inputs' range away.

    `AdversarialDeepEnsemble.regression()` takes the Gaussian likelihood, for nets with 2k outputs (means, log-variances).

    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 3)
    >>> method = AdversarialDeepEnsemble(num_members=3)
    >>> predictor = method.fit(lambda: nn.Linear(2, 3), data, TrainingConfig(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 3])
    """

    loss: Loss = field(default_factory=BrierLoss)
    epsilon: float = 0.01

    name: ClassVar[str] = "adversarial-deep-ensemble"

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.epsilon, int | float) and not isinstance(self.epsilon, bool)
        if not (number and 0 < self.epsilon < float("inf")):
            raise ValueError(f"got epsilon={self.epsilon!r}; expected a positive fraction of the inputs' range")

    @classmethod
    def regression(cls, **options: Any) -> "AdversarialDeepEnsemble":
        """The scoring rule for continuous targets: the Gaussian likelihood."""
        return cls(loss=GaussianNLL(), **options)

    def make_perturbation(self, data: Dataset[Any], config: TrainingConfig) -> Perturbation | None:
        """FGSM, `epsilon` of the inputs' range in these data."""
        return partial(apply_fgsm, step=[self.epsilon * part for part in compute_input_ranges(data, config)])
