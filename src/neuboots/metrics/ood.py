"""How well does a score tell two kinds of input apart, such as in- and out-of-distribution?

The caller states the positive class by name, since figures depend on it: the paper counts the
in-distribution inputs as positive, other libraries the out-of-distribution ones.
"""

import torch
from torch import Tensor


def auroc(scores: Tensor, *, positive: Tensor) -> Tensor:
    """P(s⁺ > s⁻) + ½ P(s⁺ = s⁻): the chance that a positive input outscores a negative one.

    `positive` is True where an input is of the positive class. Counting a tie as one half gives
    the Mann–Whitney statistic with mid-ranks, without a loop over pairs.

    >>> confidence = torch.tensor([0.9, 0.6, 0.6, 0.4])
    >>> in_distribution = torch.tensor([True, True, False, False])
    >>> auroc(confidence, positive=in_distribution)
    tensor(0.8750, dtype=torch.float64)
    """
    if positive.dtype != torch.bool or scores.shape != positive.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)} and positive {tuple(positive.shape)} of "
            f"{positive.dtype}; expected one shape and torch.bool: pass a mask such as labels == 1"
        )
    ours = scores[positive]  # (n⁺,)
    theirs = scores[~positive].sort().values  # (n⁻,)
    if len(ours) == 0 or len(theirs) == 0:
        raise ValueError(
            f"positive marks {len(ours)} of {scores.numel()} scores; expected some of both "
            "classes: pass positive and negative inputs together"
        )
    if scores.isnan().any():
        raise ValueError(
            f"scores has {int(scores.isnan().sum())} NaN among {scores.numel()}; expected numbers: "
            "check the net's outputs"
        )
    below = torch.searchsorted(theirs, ours)  # (n⁺,) how many s⁻ < s⁺
    not_above = torch.searchsorted(theirs, ours, right=True)  # (n⁺,) how many s⁻ ≤ s⁺
    return (below + not_above).double().mean() / (2 * len(theirs))
