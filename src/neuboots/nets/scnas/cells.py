"""Cells: small directed graphs whose edges are operations, fixed or still to be chosen.

    h_j = Σ_{i<j} o_ij(h_i),   cell(x) = [h_1, …, h_M],   o_ij(h) = Σ_k z_ijk o_k(h),   z_ij ~ Gumbel-softmax(a_ij, τ)

In a searchable cell z is one-hot: one operation runs on each edge. Its gradient is that of the softmax at temperature τ
(straight-through), taken over the operations that are compared. Those not chosen run without a graph and leave their
output alone behind, so that a pass takes the memory of one architecture and that of the outputs compared.

E. Jang, S. Gu, B. Poole, Categorical reparameterization with Gumbel-softmax, ICLR 2017. C. Maddison, A. Mnih, Y. W.
Teh, The concrete distribution, ICLR 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuboots.nets.scnas.genotype import edges
from neuboots.nets.scnas.operations import OPERATIONS, Nothing, norm, operation


@dataclass(frozen=True)
class Choice:
    """An operation for an edge: its number, and where a gradient is wanted the gate z and the numbers compared."""

    index: int
    gate: Tensor | None = None  # (K,)
    compared: tuple[int, ...] = ()


def gumbels(size: Sequence[int], rng: torch.Generator) -> Tensor:
    """g = −log(−log u) for uniforms u, in double precision, in which neither logarithm ever meets 0.

    >>> gumbels((2, 3), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """
    u = torch.rand(*size, generator=rng, dtype=torch.float64, device=rng.device).clamp_min(1e-300)
    return -(-u.log()).log()


def gumbel_softmax(logits: Tensor, gumbel: Tensor, *, temperature: float) -> Tensor:
    """softmax((log p + g) / τ) with p = softmax(a) and Gumbel noise g: (…, K).

    Its largest entry is at k with probability p_k, at every temperature; as τ → 0 it becomes one-hot.

    >>> gumbel_softmax(torch.zeros(2), torch.tensor([1.0, 0.0]), temperature=0.01)
    tensor([1.0000e+00, 3.7835e-44])
    """
    return ((logits.log_softmax(-1) + gumbel.to(logits)) / temperature).softmax(-1)


def choose(logits: Tensor, gumbel: Tensor, *, temperature: float, compared: int | None = None) -> Choice:
    """One operation by Gumbel-softmax with a straight-through gradient: z = onehot(argmax s) + s − detach(s).

    The gradient runs over the `compared` likeliest operations of this draw (None: all), among which s is renormalised.

    >>> a = torch.zeros(3, requires_grad=True)
    >>> choice = choose(a, torch.tensor([0.2, 0.9, 0.1]), temperature=1.0)
    >>> choice.index, choice.gate.detach()
    (1, tensor([0., 1., 0.]))
    """
    soft = gumbel_softmax(logits, gumbel, temperature=temperature)
    kept = soft.topk(min(compared or len(soft), len(soft))).indices
    index = int(kept[0])
    share = torch.zeros_like(soft).index_copy(0, kept, soft[kept] / soft[kept].sum())
    hard = torch.zeros_like(soft)
    hard[index] = 1.0
    return Choice(index, hard + (share - share.detach()), tuple(kept.tolist()))


class MixedOperation(nn.Module):
    """o(h) = Σ_k z_k o_k(h) with z one-hot: all candidates of an edge, of which one runs.

    >>> edge = MixedOperation("same", 4)
    >>> edge(torch.ones(1, 4, 2, 2, 2), Choice(0)).any()  # the first candidate is "none"
    tensor(False)
    """

    def __init__(self, size: str, width: int) -> None:
        super().__init__()
        self.operations = nn.ModuleDict({name: operation(name, size, width) for name in OPERATIONS[size]})

    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        candidates = list(self.operations.values())
        out: Tensor = candidates[choice.index](x)
        if choice.gate is None or not choice.gate.requires_grad:
            return out
        out = out * choice.gate[choice.index]
        for k in choice.compared:
            if k != choice.index:
                with torch.no_grad():  # z_k is zero, so neither x nor the weights of o_k get any gradient
                    other = candidates[k](x)
                out = out + other * choice.gate[k]
        return out


class Cell(nn.Module):
    """cell(x) = [h_1, …, h_M], M·width channels: inputs are brought to `width` channels, nodes add up their edges.

    `rows[j]` holds the modules on the edges into node j: operations, or `MixedOperation`s, for which a forward takes
    one choice for each edge, in order.
    """

    def __init__(self, before: Sequence[int], width: int, rows: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv3d(channels, width, 1, bias=False), norm(width)) for channels in before
        )
        self.nodes = nn.ModuleList(nn.ModuleList(row) for row in rows)

    def forward(self, inputs: Sequence[Tensor], choices: Sequence[Choice] | None = None) -> Tensor:
        states = [bring(x) for bring, x in zip(self.inputs, inputs, strict=True)]
        left = None if choices is None else iter(choices)
        for row in self.nodes:
            terms = [
                edge(state) if left is None else edge(state, next(left))
                for edge, state in zip(row.children(), states, strict=True)
                if not isinstance(edge, Nothing)
            ]
            states.append(sum(terms[1:], terms[0]))
        return torch.cat(states[len(self.inputs) :], 1)


def fixed_cell(kind: str, before: Sequence[int], width: int, rows: Sequence[Sequence[str]]) -> Cell:
    """The cell that a genotype describes.

    >>> cell = fixed_cell("reduction", [2], 4, [["conv"], ["none", "identity"]])
    >>> cell([torch.zeros(1, 2, 6, 6, 6)]).shape
    torch.Size([1, 8, 3, 3, 3])
    """
    sizes = edges(kind, len(rows))
    named = [zip(*pair, strict=True) for pair in zip(rows, sizes, strict=True)]
    return Cell(before, width, [[operation(name, size, width) for name, size in row] for row in named])


def searchable_cell(kind: str, before: Sequence[int], width: int, nodes: int) -> Cell:
    """A cell with every candidate on every edge.

    >>> cell = searchable_cell("expansion", [2], 4, nodes=2)
    >>> cell([torch.zeros(1, 2, 3, 3, 3)], [Choice(1), Choice(1), Choice(2)]).shape
    torch.Size([1, 8, 6, 6, 6])
    """
    return Cell(before, width, [[MixedOperation(size, width) for size in row] for row in edges(kind, nodes)])
