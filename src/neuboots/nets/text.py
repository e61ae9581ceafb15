"""A small transformer for texts: token ids to the logits of one label a text.

    h ← h + attention(norm(h)),   h ← h + feed-forward(norm(h)),   φ = mean over tokens of norm(h)

Vaswani et al., Attention Is All You Need, NeurIPS 2017; normalised before each part as in Xiong et al., On Layer
Normalization in the Transformer Architecture, ICML 2020. Token 0 is padding: nobody attends to it, the mean leaves it
out, and positions count real tokens only, so that an output depends on the text and not on how it was padded. All
dropout is in `nn.Dropout` layers along (N, T, width), where MC dropout finds it; attention weights are not dropped,
since a mask of T × T would make a thinned net depend on the padding.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from neuboots.nets.mlp import check_choice, check_size


class TextTransformer(nn.Module):
    """Embedding and positions, `depth` encoder blocks, the mean over real tokens and a head.

    Ids are 0 for padding and 1 … vocab_size − 1 for tokens; a text has at most `max_length` of them. Positions are
    "learned" or "sinusoidal". The feature width D is `width`.

    >>> net = TextTransformer(1000, 2, width=32, depth=1)
    >>> net(torch.tensor([[5, 9, 2, 0, 0], [7, 7, 1, 3, 0]])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        *,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        max_length: int = 512,
        dropout: float = 0.1,
        positions: str = "learned",
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "num_classes": num_classes, "width": width, "depth": depth, "heads": heads}
        for name, size in {**sizes, "max_length": max_length}.items():
            check_size(name, size)
        check_choice("positions", positions, ("learned", "sinusoidal"))
        if width % heads:
            raise ValueError(f"width is {width} with {heads} heads; expected a multiple of heads: pass such a width")
        if type(dropout) not in (int, float) or not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is {dropout!r}; expected a rate in [0, 1): pass such a number")
        self.options: dict[str, Any] = {
            **sizes,
            "max_length": max_length,
            "dropout": dropout,
            "positions": positions,
        }
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_length, width) if positions == "learned" else Sinusoids(max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([EncoderBlock(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        self.apply(_init)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (N, T) to logits (N, num_classes)."""
        real = self._check(ids)  # (N, T)
        order = (real.cumsum(1) - 1).clamp_min(0)  # (N, T): the how-manieth real token each is
        h = self.dropout(self.embedding(ids) + self.positions(order))  # (N, T, D)
        for block in self.blocks:
            h = block(h, real)
        counted = real[..., None].to(h.dtype)
        phi = (self.norm(h) * counted).sum(1) / counted.sum(1)  # (N, D)
        out: Tensor = self.head(phi)  # (N, C)
        return out

    def _check(self, ids: Tensor) -> Tensor:
        """Which ids are tokens and not padding: (N, T)."""
        vocab_size, max_length = self.options["vocab_size"], self.options["max_length"]
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"the net got an input of shape {tuple(ids.shape)} and type {ids.dtype}; expected token ids (N, T) of "
                "torch.int64: turn texts into ids, padded with 0 to one length"
            )
        real = ids != 0
        if ids.device.type == "meta" or not len(ids):
            return real
        lengths = real.sum(1)
        if int(lengths.min()) < 1:
            row = int(lengths.argmin())
            raise ValueError(
                f"row {row} has no token, padding (0) alone; expected at least one: drop or fill such texts"
            )
        if int(lengths.max()) > max_length:
            raise ValueError(
                f"row {int(lengths.argmax())} has {int(lengths.max())} tokens; expected at most {max_length}: cut the "
                "texts, or build the net with a larger max_length"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"the ids go from {low} to {high}; expected 0 to {vocab_size - 1}: build the net with the "
                "vocab_size of the tokenizer"
            )
        return real


class EncoderBlock(nn.Module):
    """Self-attention, then a feed-forward layer of four times the width; each reads norm(h) and is added to h."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.attention_dropout = nn.Dropout(dropout)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, h: Tensor, real: Tensor) -> Tensor:
        """Map (N, T, D) to (N, T, D); only tokens where `real` (N, T) is true are attended to."""
        h = h + self.attention_dropout(self.attention(self.attention_norm(h), real))
        out: Tensor = h + self.feed_forward(h)
        return out


class SelfAttention(nn.Module):
    """softmax(q kᵀ / √d) v in each head, over real tokens only, and a projection of the joined heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.values = nn.Linear(width, width), nn.Linear(width, width)
        self.keys = nn.Linear(width, width, bias=False)  # a bias would add the same to all scores of a query
        self.project = nn.Linear(width, width)

    def forward(self, h: Tensor, real: Tensor) -> Tensor:
        """Map (N, T, D) to (N, T, D)."""
        q, k, v = (self._by_head(layer(h)) for layer in (self.queries, self.keys, self.values))  # (N, heads, T, d)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (N, heads, T, T)
        scores = scores.masked_fill(~real[:, None, None], -torch.inf)
        joined = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)  # (N, T, D)
        out: Tensor = self.project(joined)
        return out

    def _by_head(self, h: Tensor) -> Tensor:
        return h.reshape(*h.shape[:2], self.heads, h.shape[2] // self.heads).transpose(1, 2)

    def extra_repr(self) -> str:
        """Show the options in the printed net."""
        return f"heads={self.heads}"


class Sinusoids(nn.Module):
    """Positions that are not learned: p[t, 2i] = sin(t / 10000^{2i/D}), p[t, 2i+1] = cos(t / 10000^{2i/D}).

    >>> Sinusoids(10, 4)(torch.tensor([0])).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """

    table: Tensor

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))  # (⌈D/2⌉,)
        angles = torch.arange(max_length)[:, None] * rates  # (max_length, ⌈D/2⌉)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]  # (max_length, D)
        self.register_buffer("table", table, persistent=False)

    def forward(self, order: Tensor) -> Tensor:
        """Map positions (N, T) to (N, T, D)."""
        return self.table[order]


def _init(layer: nn.Module) -> None:
    """Linear: Glorot and Bengio's uniform law, b = 0. Embeddings: N(0, 1/D), so that a token has length about 1."""
    if isinstance(layer, nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    elif isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=layer.embedding_dim**-0.5)
