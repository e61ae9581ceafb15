"""A small transformer for text classification: token ids to the logits of one label per text.

    h ← h + attention(norm(h)),   h ← h + feed-forward(norm(h)),   φ = mean over tokens of norm(h)

Vaswani et al., Attention Is All You Need, NeurIPS 2017; pre-norm as in Xiong et al., On Layer Normalization in the
Transformer Architecture, ICML 2020. Token 0 is padding: it is masked in attention and in the mean, and positions count
real tokens only, so that an output depends on the text and not on its padding. All dropout is in `nn.Dropout` layers
on (N, T, width), where MC dropout finds it; attention weights are not dropped, since a T × T mask would depend on
the padding.
"""

import math

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError, check_choice
from neuboots.serialization import configurable


@configurable
class TextTransformer(nn.Module):
    """Embedding and positions, `depth` encoder blocks, the mean over real tokens and a linear head.

    Args:
        vocab_size: Number of token ids; 0 is padding.
        num_classes: Number of classes.
        width: Width of the embedding; the head reads D = width features.
        depth: Number of encoder blocks.
        heads: Number of attention heads.
        max_length: Maximum number of tokens of a text.
        dropout: Dropout rate.
        positions: "learned" or "sinusoidal".

    Example:
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
        check_choice("positions", positions, ("learned", "sinusoidal"))
        if width % heads:
            raise ArgumentError("width", width, f"a multiple of heads={heads}")
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_length, width) if positions == "learned" else Sinusoids(max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([EncoderBlock(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise linear layers after Glorot and Bengio, and embeddings with length about 1."""
        self.apply(_init)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (N, T) to logits (N, num_classes)."""
        real = ids != 0  # (N, T)
        if ids.device.type != "meta" and len(ids) and not bool(real.any(1).all()):
            raise ArgumentError("ids", "a text of padding (0) only", "at least one token per text")
        order = (real.cumsum(1) - 1).clamp_min(0)  # (N, T): position among the real tokens
        h = self.dropout(self.embedding(ids) + self.positions(order))  # (N, T, D)
        for block in self.blocks:
            h = block(h, real)
        counted = real[..., None].to(h.dtype)
        phi = (self.norm(h) * counted).sum(1) / counted.sum(1)  # (N, D)
        out: Tensor = self.head(phi)  # (N, C)
        return out


class EncoderBlock(nn.Module):
    """Self-attention, then a feed-forward layer of four times the width; each reads norm(h) and is added to h.

    Args:
        width: Width of the embedding.
        heads: Number of attention heads.
        dropout: Dropout rate.
    """

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
    """softmax(q kᵀ / √d) v in each head, over real tokens only, and a projection of the concatenated heads.

    Args:
        width: Width of the embedding.
        heads: Number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.values = nn.Linear(width, width), nn.Linear(width, width)
        self.keys = nn.Linear(width, width, bias=False)  # a bias would add the same to all scores of a query
        self.project = nn.Linear(width, width)

    def forward(self, h: Tensor, real: Tensor) -> Tensor:
        """Map (N, T, D) to (N, T, D)."""
        projected = (layer(h).unflatten(2, (self.heads, -1)) for layer in (self.queries, self.keys, self.values))
        q, k, v = (part.transpose(1, 2) for part in projected)  # (N, heads, T, d)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (N, heads, T, T)
        scores = scores.masked_fill(~real[:, None, None], -torch.inf)
        joined = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)  # (N, T, D)
        out: Tensor = self.project(joined)
        return out


class Sinusoids(nn.Module):
    """Sinusoidal positions: p[t, 2i] = sin(t / 10000^{2i/D}), p[t, 2i+1] = cos(t / 10000^{2i/D}).

    Args:
        max_length: Maximum number of tokens.
        width: Width of the embedding.

    Example:
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
    """Linear: Glorot and Bengio's uniform distribution, b = 0. Embeddings: N(0, 1/D), of length about 1."""
    if isinstance(layer, nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    elif isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=layer.embedding_dim**-0.5)
