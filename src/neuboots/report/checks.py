"""Checks of claims: whether measurements support a claim, contradict it, or leave it open."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Result of checking a claim.

    Args:
        claim: The claim.
        holds: Whether it holds; None if the data are too few to tell.
        evidence: The values that decided.
    """

    claim: str
    holds: bool | None
    evidence: str

    @property
    def outcome(self) -> str:
        """The result in words."""
        return {True: "holds", False: "does NOT hold", None: "not resolved"}[self.holds]

    def __str__(self) -> str:
        return f"{self.outcome}: {self.claim} ({self.evidence})"


def decide(supported: bool, contradicted: bool) -> bool | None:
    """Return True, False or None for a claim that the data support, contradict, or leave open.

    Args:
        supported: Whether the data support the claim.
        contradicted: Whether they contradict it.

    Returns:
        The outcome.
    """
    return True if supported else False if contradicted else None


def wilson_interval(proportion: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion among `count` examples.

    Args:
        proportion: Observed proportion.
        count: Number of examples.

    Returns:
        Lower and upper limit.

    Example:
        >>> [round(end, 3) for end in wilson_interval(0.0, 10)], [round(end, 3) for end in wilson_interval(0.5, 1000)]
        ([0.0, 0.278], [0.469, 0.531])
    """
    z = 1.96
    center = (proportion + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(proportion * (1 - proportion) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return max(0.0, center - half), min(1.0, center + half)
