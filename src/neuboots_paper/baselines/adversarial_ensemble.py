"""Deep ensemble as first published: a proper scoring rule and adversarial training.

    θ_k = argmin Σᵢ ℓ(f_θ(Xᵢ), yᵢ) + ℓ(f_θ(X′ᵢ), yᵢ),   X′ᵢ = Xᵢ + ε r ⊙ sign(∂ℓ/∂Xᵢ)

with r the range of the training inputs, per column (per channel for images), and ε = 0.01. The scoring rule is the
Brier score for classification and the Gaussian likelihood for regression, where the net outputs a mean and a
log-variance.

Lakshminarayanan, Pritzel and Blundell, Simple and scalable predictive uncertainty estimation using deep ensembles,
NeurIPS 2017, algorithm 1. The sign step: Goodfellow, Shlens and Szegedy, ICLR 2015.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from neuboots._validation import ArgumentError, check_positive
from neuboots.head import float_tensors, map_float_tensors
from neuboots.losses import BrierLoss, GaussianNLL, Loss
from neuboots.methods._base import iterate_batches, register
from neuboots.methods.ensembles import EnsembleMethod, EnsemblePredictor, Perturbation
from neuboots.training import TrainingConfig


def apply_fgsm(value: Tensor, x: Any, *, step: list[Tensor]) -> Any:
    """Return x + ε sign(∂value/∂x), the fast gradient sign method, with one ε for each tensor of x."""
    gradients = torch.autograd.grad(value, float_tensors(x), retain_graph=True, allow_unused=True)
    pairs = zip(gradients, step, strict=True)
    moves = iter([0.0 if gradient is None else gradient.sign() * eps.to(gradient) for gradient, eps in pairs])
    return map_float_tensors(lambda part: (part + next(moves)).detach(), x)


def compute_input_ranges(data: Dataset[Any], config: TrainingConfig) -> list[Tensor]:
    """Compute max − min over the data per column (N, D) or channel (N, C, *), in a shape that broadcasts to inputs."""
    minima: list[Tensor] = []
    maxima: list[Tensor] = []
    for batch in iterate_batches(data, config):
        parts = [part.float() for part in float_tensors(batch.x)]
        if not parts:
            raise ArgumentError("data", data, "inputs with a floating-point tensor", hint="use deep-ensemble")
        axes = [[axis for axis in range(part.ndim) if axis != 1] for part in parts]
        low = [part.amin(axis, keepdim=True)[0] for part, axis in zip(parts, axes, strict=True)]
        high = [part.amax(axis, keepdim=True)[0] for part, axis in zip(parts, axes, strict=True)]
        minima = low if not minima else list(map(torch.minimum, minima, low))
        maxima = high if not maxima else list(map(torch.maximum, maxima, high))
    return [high - low for low, high in zip(minima, maxima, strict=True)]  # (D,) or (C, 1, …)


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
    """K nets trained on their data and on adversarial examples.

    Args:
        loss: Proper scoring rule.
        num_members: Number of nets K.
        vectorized: Whether to train the nets together; None decides by the net.
        epsilon: Size of the adversarial step as a fraction of the range of the inputs.

    Example:
        >>> from neuboots import TrainingConfig
        >>> data = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> method = AdversarialDeepEnsemble(num_members=3)
        >>> predictor = method.fit(torch.nn.Linear(2, 3), data, TrainingConfig(epochs=1, progress=False))
        >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
        torch.Size([3, 1, 3])
    """

    loss: Loss = field(default_factory=BrierLoss)
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("epsilon", self.epsilon)

    @classmethod
    def regression(cls, **options: Any) -> "AdversarialDeepEnsemble":
        """Return the method with the Gaussian likelihood, for nets with 2k outputs (means, log-variances).

        Args:
            **options: Further options.
        """
        return cls(loss=GaussianNLL(), **options)

    def _make_perturbation(self, data: Dataset[Any], config: TrainingConfig) -> Perturbation | None:
        return partial(apply_fgsm, step=[self.epsilon * part for part in compute_input_ranges(data, config)])
