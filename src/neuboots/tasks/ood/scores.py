"""Detectors that read their score off the predictive distribution, with nothing to fit.

    −max_c p_c,   H(p),   I = H(p) − 1/B Σ_b H(p_b),   −T log Σ_c exp(f̄_c / T),   mean_c std_b f_b,c

where p = 1/B Σ_b softmax f_b(x) and f̄ = 1/B Σ_b f_b(x). The score of an image whose pixels are classified is the mean
over its pixels.

Hendrycks and Gimpel, A baseline for detecting misclassified and out-of-distribution examples in neural networks, ICLR
2017 (maximum softmax); Liu, Wang, Owens and Li, Energy-based out-of-distribution detection, NeurIPS 2020.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from neuboots.tasks.inputs import per_input
from neuboots.tasks.ood.detector import Detector, precise


@dataclass(frozen=True, eq=False)
class MaxSoftmax(Detector):
    """s = −max_c p_c: the baseline.

    >>> import torch
    >>> from neuboots import PlainPredictor
    >>> detector = MaxSoftmax(PlainPredictor(torch.nn.Identity()))  # the inputs are the logits
    >>> print(detector.evaluate(3 * torch.eye(2), torch.zeros(2, 2), progress=False))
    positive class: in-distribution (2 in, 2 out)
    AUROC               1.0000
    AUPR-in             1.0000
    AUPR-out            1.0000
    TNR at 95 % TPR     1.0000
    FPR at 95 % TPR     0.0000
    detection accuracy  1.0000
    """

    def scores(self, x: Any) -> Tensor:
        return per_input(-self._summary(x).confidence)


@dataclass(frozen=True, eq=False)
class Entropy(Detector):
    """s = H(p), the entropy of the predictive distribution, in nats.

    >>> import torch
    >>> from neuboots import PlainPredictor
    >>> Entropy(PlainPredictor(torch.nn.Identity())).score(torch.zeros(1, 4), progress=False)  # log 4
    tensor([1.3863])
    """

    def scores(self, x: Any) -> Tensor:
        return per_input(self._summary(x).entropy)


@dataclass(frozen=True, eq=False)
class MutualInformation(Detector):
    """s = H(p) − 1/B Σ_b H(p_b): how far the replicates disagree, in nats.

    >>> import torch
    >>> from neuboots import PlainPredictor
    >>> MutualInformation(PlainPredictor(torch.nn.Identity())).score(torch.zeros(1, 4), progress=False)  # equal ones
    tensor([0.])
    """

    def scores(self, x: Any) -> Tensor:
        return per_input(self._summary(x).mutual_information)


@dataclass(frozen=True, eq=False)
class Spread(Detector):
    """s = mean over the outputs of their standard deviation over the replicates; for regression too.

    >>> import torch
    >>> from neuboots import PlainPredictor
    >>> Spread(PlainPredictor(torch.nn.Identity())).score(torch.ones(1, 4), progress=False)  # equal replicates
    tensor([0.])
    """

    def scores(self, x: Any) -> Tensor:
        return per_input(self._summary(x).std.mean(1))


@dataclass(frozen=True, eq=False, kw_only=True)
class Energy(Detector):
    """s = −T log Σ_c exp(f̄_c / T), the free energy at the mean logits f̄.

    At the mean, not averaged over replicates: log Σ exp is convex, so replicates that disagree raise the energy, as
    they should, and where a method knows its exact mean it is free of the noise of B draws.

    >>> import torch
    >>> from neuboots import PlainPredictor
    >>> detector = Energy(PlainPredictor(torch.nn.Identity()))
    >>> detector.score(torch.tensor([[5.0, 0.0], [0.1, 0.0]]), progress=False)  # −log(e⁵ + 1), −log(e^0.1 + 1)
    tensor([-5.0067, -0.7444], dtype=torch.float64)
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)

    def scores(self, x: Any) -> Tensor:
        logits = precise(self._summary(x).mean)  # (N, C, *)
        if logits.shape[1] == 1:
            raise ValueError(
                "got a net with one output, whose energy depends on which class it stands for; expected a logit for "
                "each class: take MaxSoftmax or Entropy"
            )
        return per_input(-self.temperature * (logits / self.temperature).logsumexp(1))


def check_temperature(temperature: float) -> None:
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not 0 < temperature < math.inf:
        raise ValueError(f"got temperature={temperature!r}; expected a positive number")
