"""Class probabilities of replicates, their entropy, and the sums of both over a chunk.

p = softmax z,   H(p) = −Σ_c p_c log p_c
"""

import torch
from torch import Tensor

# Replicates held at once while sums are gathered. A constant, and one that B = 10 fills twice: from then on no
# chunk needs more memory than the one before.
MAX_CHUNK_SAMPLES = 5
SMALL_BYTES = 1 << 18  # bytes; below this more replicates at once cost no memory worth saving
MAX_BYTES_IN_FLIGHT = 1 << 26  # bytes of replicates in flight while predicting


def class_probabilities(outputs: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """softmax over the class axis, at least in single precision: what replicates disagree by is less than half
    precision tells apart. A single output is one logit of the second of two classes."""
    dtype = at_least_float32(outputs.dtype)
    if outputs.shape[dim] == 1:
        outputs = outputs.to(dtype)
        return torch.cat([(-outputs).sigmoid(), outputs.sigmoid()], dim, out=out)
    return torch.softmax(outputs, dim, dtype=dtype, out=out)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """At least single precision: a sum of many replicates in half precision stops growing."""
    return torch.promote_types(dtype, torch.float32)


def categorical_entropy(probs: Tensor, dim: int, *, scratch: Tensor | None = None) -> Tensor:
    """H(p) = −Σ_c p_c log p_c, in nats."""
    tiny = torch.finfo(probs.dtype).tiny  # p = 0 adds 0, not NaN
    return -torch.clamp_min(probs, tiny, out=scratch).log_().mul_(probs).sum(dim)


def sum_probs_and_entropy(part: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_b p_b and Σ_b H(p_b) over a part of the replicates: (N, C, *), (N, *)."""
    p = class_probabilities(part, 2)
    return p.sum(0), categorical_entropy(p, 2).sum(0)


def split_samples(samples: Tensor) -> tuple[Tensor, ...]:
    """All at once where replicates are small, else one by one: each step makes several copies of its part."""
    return torch.split(samples, len(samples) if num_bytes(samples[0]) <= SMALL_BYTES else 1)


def summary_chunk_size(replicate_bytes: int) -> int:
    few = min(MAX_CHUNK_SAMPLES, max(1, MAX_BYTES_IN_FLIGHT // (2 * replicate_bytes)))
    return max(few, SMALL_BYTES // replicate_bytes)


def num_bytes(tensor: Tensor) -> int:
    return max(1, tensor.numel() * tensor.element_size())


def sample_std(samples: Tensor) -> Tensor:
    """Over the first axis, with B − 1 in the denominator; zero for a single one, and for none at all."""
    return samples.std(0) if len(samples) > 1 and samples.numel() else torch.zeros_like(samples[0])
