"""A family of laws from narrow to wide with one mean factor E h(α), that of the training.

    t ≥ t₀:  concentration e^t          t < t₀:  the widest concentration, stretched: s α + δ,  s = e^(t₀ − t)

Concentration alone goes only so far: positive weights of a fixed sum are at most one block at a time. Below 0.1 (with
the exp link, below the concentration at which exp(−α) varies most) weights are stretched instead, and may be negative.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from neuboots.weights import Dirichlet, Link, WeightLaw, link_moments

_LEAST = 0.1  # of the concentration: below, nearly all of the weight is in a few blocks
_MOST = {"identity": 1e9, "exp": 1e4}  # above, the variance of float32 replicates, or of exp(−α), is rounding
_STRETCH = 1e3


@dataclass(frozen=True)
class Stretched:
    """s α + δ, with α of another law.

    >>> from neuboots.weights import Exponential
    >>> Stretched(Exponential(4.0), 2.0, -1.0).covariance(10)  # s² / c
    (1.0, 0.0)
    """

    law: WeightLaw
    scale: float
    shift: float
    name = "stretched"

    @property
    def concentration(self) -> float:
        return cast(float, cast(Any, self.law).concentration)

    def sample(self, keys: Tensor, size: int) -> Tensor:
        return self.scale * self.law.sample(keys, size) + self.shift

    def covariance(self, size: int) -> tuple[float, float]:
        v, c = self.law.covariance(size)
        return self.scale**2 * v, self.scale**2 * c

    def laplace(self, t: float, parts: int, size: int) -> float:
        return math.exp(-t * self.shift * min(parts, size)) * self.law.laplace(t * self.scale, parts, size)


def inner(law: WeightLaw) -> WeightLaw:
    """The law inside any stretching."""
    return law.law if isinstance(law, Stretched) else law


@dataclass(frozen=True)
class Family:
    """The laws of another dispersion than this one; a law without a concentration gives way to a Dirichlet."""

    law: WeightLaw  # that of the training
    link: Link
    size: int  # S

    def __call__(self, t: float) -> WeightLaw:
        """The law at t: the larger, the narrower."""
        return self._law(math.exp(max(t, self._turn)), math.exp(max(0.0, self._turn - t)))

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest t."""
        return self._turn - math.log(_STRETCH), math.log(_MOST[self.link])

    @cached_property
    def _mean(self) -> float:
        return link_moments(self.law, self.link, self.size)[0]

    @cached_property
    def _turn(self) -> float:
        """log of the least concentration: with the exp link, that at which the factor varies most beside its mean."""
        if self.link == "identity":
            return math.log(_LEAST)

        def relative(log_c: float) -> float:
            mean, v, c = link_moments(self._law(math.exp(log_c), 1.0), self.link, self.size)
            return (v - c) / mean**2

        grid = torch.linspace(math.log(_LEAST), math.log(10.0), 61, dtype=torch.float64)
        return float(max(grid.tolist(), key=relative))

    def _law(self, concentration: float, scale: float) -> WeightLaw:
        base: Any = inner(self.law)
        other: WeightLaw
        try:
            other = replace(base, concentration=concentration)
        except TypeError:  # a law that has none
            other = Dirichlet(concentration)
        if self.link == "identity":
            return other if scale == 1.0 else Stretched(other, scale, 1.0 - scale)
        free = Stretched(other, scale, 0.0)
        return Stretched(other, scale, math.log(link_moments(free, self.link, self.size)[0] / self._mean))
