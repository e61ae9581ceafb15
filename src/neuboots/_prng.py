"""Counter-based random numbers (splitmix64).

    uniform = mix(key + counter · golden ratio) / 2⁶⁴

A draw is a function of its name, such as (seed, "replicate", b): the same in any chunk, batch, process and machine,
without a state to save or send.
"""

import hashlib
import math
import operator

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """Return the 64-bit word as torch's int64, whose products wrap around as unsigned ones do."""
    return word - (1 << 64) if word >= 1 << 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def stable_hash(*parts: int | str) -> int:
    """Hash a name such as (seed, "epoch", 3) to 64 bits, the same on every machine.

    >>> stable_hash(0, "epoch", 3) == stable_hash(0, "epoch", 3) != stable_hash(0, "epoch", 4)
    True
    """
    name = tuple(part if isinstance(part, str) else operator.index(part) for part in parts)  # NumPy's integers too
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def derive_seed(*parts: int | str) -> int:
    """Derive a seed for torch, NumPy and Python from a name, 0 … 2⁶³ − 1.

    >>> 0 <= derive_seed(0, "trial", 3) < 2**63
    True
    """
    return stable_hash(*parts) & ((1 << 63) - 1)


def _shift(words: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's keeps the sign)."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix(words: Tensor) -> Tensor:
    """Scramble the bits of each word (splitmix64)."""
    words = (words ^ _shift(words, 30)) * _MIX_1
    words = (words ^ _shift(words, 27)) * _MIX_2
    return words ^ _shift(words, 31)


def derive_keys(ids: Tensor, *name: int | str) -> Tensor:
    """Derive one key per id from a name, as in `derive_keys(torch.arange(B), seed, "replicate")`.

    >>> a, b = derive_keys(torch.arange(4), 0, "replicate"), derive_keys(torch.tensor([2]), 0, "replicate")
    >>> bool(a[2] == b[0])
    True
    """
    return _mix(_mix(ids.to(torch.int64) * _GOLDEN) ^ stable_hash(*name))


def draw_uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Draw uniforms in (0, 1), in double precision, as a function of (key, counter)."""
    words = _mix(keys + (counters + 1) * _GOLDEN)
    return (_shift(words, 12).to(torch.float64) + 0.5) * 2.0**-52  # 52 bits: with 53 the last would round to 1


def draw_normal(keys: Tensor, size: int) -> Tensor:
    """Draw standard normals (Box and Muller), (num, size), in double precision; row k is a function of keys[k].

    >>> draw_normal(derive_keys(torch.arange(2), 0, "noise"), 3).shape
    torch.Size([2, 3])
    """
    pairs = torch.arange((size + 1) // 2, device=keys.device)
    radius = (-2.0 * draw_uniform(keys[:, None], 2 * pairs).log()).sqrt()
    angle = 2.0 * math.pi * draw_uniform(keys[:, None], 2 * pairs + 1)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1)[:, :size]


def draw_gamma(keys: Tensor, size: int, shape: float) -> Tensor:
    """Draw Gamma(shape, 1) (Marsaglia and Tsang 2000), (num, size); each element has its own stream of uniforms."""
    if shape == 1.0:
        return -draw_uniform(keys[:, None], torch.arange(size, device=keys.device)).log()
    boosted = shape if shape > 1.0 else shape + 1.0  # shapes below 1 come from shape + 1
    d = boosted - 1.0 / 3.0
    k = 1.0 / math.sqrt(9.0 * d)
    num = len(keys)
    key = keys[:, None].expand(num, size).reshape(-1)
    cell = torch.arange(size, device=keys.device).repeat(num)
    out = torch.empty(num * size, dtype=torch.float64, device=keys.device)
    pending = torch.arange(num * size, device=keys.device)
    trial = 1  # counters below `size` are reserved for the boost
    while len(pending):
        pending_keys, counters = key[pending], cell[pending] + trial * size
        u, angle, accept = (draw_uniform(pending_keys, counters + j * size) for j in range(3))
        normal = (-2.0 * u.log()).sqrt() * (2.0 * math.pi * angle).cos()
        v = (1.0 + k * normal) ** 3
        log_v = v.clamp_min(1e-300).log()
        accepted = (v > 0) & (accept.log() < 0.5 * normal**2 + d * (1.0 - v + log_v))
        out[pending[accepted]] = d * v[accepted]
        pending = pending[~accepted]
        trial += 3
    if shape < 1.0:
        out = out * draw_uniform(key, cell) ** (1.0 / shape)
    return out.reshape(num, size)


def hash_to_range(ids: Tensor, size: int, *name: int | str) -> Tensor:
    """Map each id to 0 … size − 1 by a hash under a name."""
    return _shift(derive_keys(ids, *name), 1) % size
