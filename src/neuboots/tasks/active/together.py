"""Rows chosen together: the k whose outputs vary most over replicates, each in its own way.

    argmax over A of log det(I + K_A / ε),   K(x, x') = Σ_c cov_b(p_bc(x), p_bc(x'))

Once a row is chosen, a copy of it has almost no variance left. The choice is greedy, which reaches at least 1 − 1/e of
the best, since the objective is monotone and submodular.

Kirsch, van Amersfoort and Gal, BatchBALD, NeurIPS 2019; Kirsch, Black-box batch active learning for regression, TMLR
2023 (the determinant of the replicates' covariance); Mahabadi, Indyk, Oveis Gharan and Rezaei, Composable core-sets for
determinant maximization, ICML 2019 (the k best of each part hold a set almost as good as the best of the whole).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from neuboots.keys import draw_keys, hashed, uniforms
from neuboots.prediction import Prediction, Predictor
from neuboots.progress import bar
from neuboots.tasks.active.strategies import variance

_WIDTH = 1024  # numbers kept of a row; more are hashed into as many
_RIDGE = 1e-6  # ε, as a share of the largest variance in the pool


def vectors_of(prediction: Prediction, seed: int) -> Tensor:
    """v(x) with v(x)·v(x') ≈ Σ_c cov_b(z_bc(x), z_bc(x')), and = for x = x': (N, at most 1024).

    Longer vectors are hashed: each number is added to one of 1024 sums, which keeps inner products on average, without
    the usual random signs since they sum to 0 (Weinberger et al., Feature hashing for large scale multitask learning,
    ICML 2009).
    """
    samples = prediction.samples
    vectors = (samples - samples.mean(0)).movedim(1, 0).flatten(1)  # (N, B·C·*)
    length = vectors.shape[1]
    if length > _WIDTH:
        where = hashed(torch.arange(length), _WIDTH, seed, "cell").to(vectors.device)
        vectors = vectors.new_zeros(len(vectors), _WIDTH).index_add_(1, where, vectors)
    norms = torch.linalg.vector_norm(vectors, dim=1).clamp_min(torch.finfo(vectors.dtype).tiny)
    scale: Tensor = variance(prediction).sqrt() / norms
    return vectors * scale[:, None]


def chosen_together(
    view: Predictor, inputs: Iterator[Any], k: int, num_samples: int, seed: int, size: int, *, progress: bool
) -> tuple[Tensor, Tensor, int]:
    """k row numbers, the variance left as each was chosen, and how many rows there are in all: (k,), (k,), N.

    Whenever `size` rows are held, the k that are best together stay: what is good in the whole is good in its part.
    """
    rows = torch.zeros(0, dtype=torch.int64)
    vectors, total = torch.zeros(0, 0), 0
    for x in inputs:
        prediction = view.predict(x, num_samples, seed=seed)
        check_numbers(prediction.mean)
        new = vectors_of(prediction, seed).cpu()
        rows = torch.cat([rows, torch.arange(total, total + len(new))])
        vectors = torch.cat([vectors, new]) if total else new
        total += len(new)
        while len(rows) > size:
            stay, _ = spread_out(vectors[:size], k, drawn(rows[:size], seed, "tie"), progress=False)
            stay = torch.cat([stay, torch.arange(size, len(rows))])
            rows, vectors = rows[stay], vectors[stay]
    check_pool(k, total)
    places, scores = spread_out(vectors, k, drawn(rows, seed, "tie"), progress=progress)
    return rows[places], scores, total


def spread_out(vectors: Tensor, k: int, ties: Tensor, *, progress: bool) -> tuple[Tensor, Tensor]:
    """Greedily argmax log det(I + V_A V_Aᵀ / ε): places (k,), and the variance left as each was chosen (k,).

    The variance left in row i is ε vᵢᵀ (ε I + Σ_{a ∈ A} v_a v_aᵀ)⁻¹ vᵢ; a copy of a chosen row has less than ε left.
    The inverse is updated by Sherman and Morrison's rule. Among equals the one with the least of `ties` comes first.
    """
    order = ties.argsort()
    vectors = vectors[order].double()  # (M, D)
    largest = float(vectors.square().sum(1).max())
    vectors = vectors / largest**0.5 if largest > 0 else vectors
    inverse = torch.eye(vectors.shape[1], dtype=vectors.dtype) / _RIDGE  # (D, D)
    left = vectors.square().sum(1)  # (M,)
    places, scores = [], []
    with bar("choosing rows", k, show=progress) as advance:
        for _ in range(k):
            place = int(left.argmax())
            places.append(place)
            scores.append(largest * float(left[place]))
            direction = inverse @ vectors[place]  # (D,)
            along = vectors @ direction  # (M,)
            scale = 1 + along[place]
            left = (left - _RIDGE * along.square() / scale).clamp_min(0)
            left[places] = -1.0
            inverse -= torch.outer(direction, direction) / scale
            advance("choosing rows")
    return order[places], torch.tensor(scores, dtype=torch.float64)


def drawn(rows: Tensor, *name: int | str) -> Tensor:
    """A uniform number for each row, a function of its number and the name: (N,)."""
    keys = draw_keys(rows, *name)
    return uniforms(keys, torch.zeros_like(keys))


def check_pool(k: int, total: int) -> None:
    if k > total:
        raise ValueError(f"got k={k} for a pool of {total} rows; expected at most {total}")


def check_numbers(outputs: Tensor) -> None:
    bad = int((~outputs.isfinite()).flatten(1).any(1).sum())
    if bad:
        raise ValueError(
            f"the predictor gave NaN or infinite outputs for {bad} of {len(outputs)} rows; expected numbers: look for "
            "a training that went astray"
        )
