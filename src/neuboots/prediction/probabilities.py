"""Class probabilities of replicates, their entropy, and the sums of both over a chunk.

p = softmax z,   H(p) = −Σ_c p_c log p_c
"""

import torch
from torch import Tensor

# Replicates held at once while sums are gathered. A constant, and one that B = 10 fills twice: from then on no
# chunk needs more memory than the one before.
CHUNK = 5
SMALL = 1 << 18  # bytes; below this more replicates at once cost no memory worth saving
LARGE = 1 << 26  # bytes of replicates in flight while predicting


def class_probabilities(outputs: Tensor, axis: int, *, out: Tensor | None = None) -> Tensor:
    """softmax over the class axis, at least in single precision: what replicates disagree by is less than half
    precision tells apart. A single output is one logit of the second of two classes."""
    dtype = single_precision(outputs.dtype)
    if outputs.shape[axis] == 1:
        outputs = outputs.to(dtype)
        return torch.cat([(-outputs).sigmoid(), outputs.sigmoid()], axis, out=out)
    return torch.softmax(outputs, axis, dtype=dtype, out=out)


def single_precision(dtype: torch.dtype) -> torch.dtype:
    """At least single precision: a sum of many replicates in half precision stops growing."""
    return torch.promote_types(dtype, torch.float32)


def entropy_of(probs: Tensor, axis: int, *, scratch: Tensor | None = None) -> Tensor:
    """H(p) = −Σ_c p_c log p_c, in nats."""
    tiny = torch.finfo(probs.dtype).tiny  # p = 0 adds 0, not NaN
    return -torch.clamp_min(probs, tiny, out=scratch).log_().mul_(probs).sum(axis)


def class_sums(part: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_b p_b and Σ_b H(p_b) over a part of the replicates: (N, C, *), (N, *)."""
    p = class_probabilities(part, 2)
    return p.sum(0), entropy_of(p, 2).sum(0)


def in_parts(samples: Tensor) -> tuple[Tensor, ...]:
    """All at once where replicates are small, else one by one: each step makes several copies of its part."""
    return torch.split(samples, len(samples) if bytes_of(samples[0]) <= SMALL else 1)


def summary_chunk(replicate_bytes: int) -> int:
    few = min(CHUNK, max(1, LARGE // (2 * replicate_bytes)))
    return max(few, SMALL // replicate_bytes)


def bytes_of(tensor: Tensor) -> int:
    return max(1, tensor.numel() * tensor.element_size())
