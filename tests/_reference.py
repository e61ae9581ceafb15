"""Slow, obvious implementations that the fast ones are compared with."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import scipy.stats

# -- tolerances ----------------------------------------------------------------------------------------


def standard_errors(comparisons: int, false_alarm: float = 1e-3) -> float:
    """k such that right code strays more than k standard errors anywhere, in all these comparisons together,
    for one seed in a thousand (Bonferroni, two-sided, normal).

    >>> round(standard_errors(1), 2), round(standard_errors(1000), 2)
    (3.29, 4.89)
    """
    return float(scipy.stats.norm.isf(false_alarm / (2 * comparisons)))


def p_value(comparisons: int, false_alarm: float = 1e-3) -> float:
    """The least p-value allowed to any one of these tests, so that all pass for 999 seeds in a thousand."""
    return false_alarm / comparisons


# -- keys ----------------------------------------------------------------------------------------------

_WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, in whole numbers: the first words of a seed."""
    state, words = seed & _WORD, []
    for _ in range(count):
        state = (state + GOLDEN) & _WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
        words.append(z ^ (z >> 31))
    return words


def as_int64(word: int) -> int:
    """The 64 bits read with a sign."""
    return word - (1 << 64) if word >> 63 else word


def gamma(key: int, cell: int, size: int, shape: float) -> float:
    """Gamma(shape, 1) by Marsaglia and Tsang: cell takes the words cell, cell + size, cell + 2·size, … of the key."""
    words = splitmix64(key, 60 * size)[cell::size]
    u = iter([((word >> 12) + 0.5) / 2**52 for word in words])
    boost = next(u)
    if shape == 1:
        return -math.log(boost)
    if shape < 1:
        factor, shape = boost ** (1 / shape), shape + 1
    else:
        factor = 1.0
    d = shape - 1 / 3
    while True:
        radius, angle, accept = next(u), next(u), next(u)
        x = math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)
        v = (1 + x / math.sqrt(9 * d)) ** 3
        if v > 0 and math.log(accept) < x * x / 2 + d - d * v + d * math.log(v):
            return factor * d * v


# -- prediction ----------------------------------------------------------------------------------------


def entropy(p: Sequence[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def softmax(z: Sequence[float]) -> list[float]:
    """Over the classes; one number is the logit of the second of two classes."""
    z = [0.0, *z] if len(z) == 1 else list(z)
    weights = [math.exp(x - max(z)) for x in z]
    return [w / sum(weights) for w in weights]


def figures(samples: np.ndarray, *, independent: bool = False) -> dict[str, np.ndarray]:
    """Every figure of samples (B, N, C, *), one input and pixel after another; of classes, or of independent labels."""
    B, N, _, *pixels = samples.shape
    found: dict[str, np.ndarray] = {}
    for at in itertools.product(range(N), *map(range, pixels)):
        columns = [[float(v) for v in samples[(b, at[0], slice(None), *at[1:])]] for b in range(B)]  # B lists of C
        each = [[1 / (1 + math.exp(-v)) for v in z] if independent else softmax(z) for z in columns]
        probs = [sum(p) / B for p in zip(*each, strict=True)]
        mean = [sum(z) / B for z in zip(*columns, strict=True)]
        squares = [sum((v - m) ** 2 for v in z) for z, m in zip(zip(*columns, strict=True), mean, strict=True)]

        def uncertainty(p: list[float]) -> float:
            return sum(entropy([1 - q, q]) for q in p) if independent else entropy(p)

        expected_entropy = sum(map(uncertainty, each)) / B
        values = {
            "mean": mean,
            "std": [math.sqrt(s / (B - 1)) if B > 1 else 0.0 for s in squares],
            "probs": probs,
            "labels": [int(q > 0.5) for q in probs] if independent else probs.index(max(probs)),
            "confidence": [max(q, 1 - q) for q in probs] if independent else max(probs),
            "entropy": uncertainty(probs),
            "expected_entropy": expected_entropy,
            "mutual_information": uncertainty(probs) - expected_entropy,
        }
        for name, value in values.items():
            several = isinstance(value, list)
            if name not in found:
                found[name] = np.zeros((N, len(value), *pixels) if several else (N, *pixels))
            found[name][(at[0], slice(None), *at[1:]) if several else at] = value
    return found


# -- statistics ----------------------------------------------------------------------------------------


def least_squares(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """θ̂ = (Xᵀ W X)⁻¹ Xᵀ W y: X (n, p), y (n,), w (n,)."""
    return np.linalg.solve(X.T @ (w[:, None] * X), X.T @ (w * y))


def sandwich(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """White's covariance of θ̂ (HC0): (XᵀX)⁻¹ Xᵀ diag(e²) X (XᵀX)⁻¹, e the residuals: (p, p)."""
    residuals = y - X @ least_squares(X, y, np.ones(len(y)))
    bread = np.linalg.inv(X.T @ X)
    return bread @ (X.T * residuals**2) @ X @ bread
