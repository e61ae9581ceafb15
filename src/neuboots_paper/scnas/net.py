"""SCNAS: a 3D U-net of searched cells, its supernet, and the genotype that describes the cells (Kim et al. 2019).

    x → stem → [normal → reduction]ᴸ⁻¹ → normal → [expansion → normal]ᴸ⁻¹ → head,   with skips between equal sizes
    h_j = Σ_{i<j} o_ij(h_i),   cell(x) = [h_1, …, h_M],   o_ij(h) = Σ_k z_ijk o_k(h),   z_ij ~ Gumbel-softmax(a_ij, τ)

Encoder and decoder alternate normal cells with reduction or expansion cells; all cells of one kind have the same graph
and operations, with weights of their own. A reduction cell halves the volume and doubles the width, an expansion cell
does the opposite; a normal cell of the decoder also reads the encoder's normal cell of the same size. A convolution is
ReLU, convolution and GroupNorm (DARTS has BatchNorm, which needs larger batches than volumes allow).

A genotype holds genotype[kind][j] = (operation on the edge from state 0 to node j, from state 1, …), where states are
the inputs of the cell, then its nodes. In the supernet z is one-hot, so that one operation runs on each edge. Its
gradient is that of the softmax at temperature τ (straight-through) over the operations that are compared; the others
run without a graph, so that a pass needs the memory of one architecture and of the outputs compared.

The paper's candidate operations, numbers of cells and nodes, schedules and cells were not available. They are replaced
by those of DARTS and SNAS for volumes: two nodes per cell, whose outputs are concatenated, the candidates in
`OPERATIONS`, and one normal cell per size.

S. Kim, I. Kim, S. Lim, W. Baek, C. Kim, H. Cho, B. Yoon, T. Kim, Scalable neural architecture search for 3D medical
image segmentation, MICCAI 2019 (arXiv 1906.05956). H. Liu, K. Simonyan, Y. Yang, DARTS: differentiable architecture
search, ICLR 2019. S. Xie, H. Zheng, C. Liu, L. Lin, SNAS: stochastic neural architecture search, ICLR 2019. E. Jang, S.
Gu, B. Poole, Categorical reparameterization with Gumbel-softmax, ICLR 2017.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuboots._validation import ArgumentError, check_choice, check_int
from neuboots.nets.unet import check_grid, crop_to_size, num_groups, pad_to_multiple
from neuboots.serialization import configurable

Genotype = dict[str, list[list[str]]]

# The four kinds of cells (Kim et al. 2019): number of inputs, and change of size by the first operations.
KINDS: dict[str, tuple[int, str]] = {
    "encoder_normal": (1, "same"),
    "reduction": (1, "down"),
    "decoder_normal": (2, "same"),
    "expansion": (1, "up"),
}


def edges(kind: str, nodes: int) -> list[list[str]]:
    """Change of size by each edge, by node and then by the state it comes from.

    >>> edges("reduction", 2)
    [['down'], ['down', 'same']]
    """
    inputs, size = KINDS[kind]
    return [[size if i < inputs else "same" for i in range(inputs + j)] for j in range(nodes)]


def random_genotype(nodes: int = 2, *, seed: int) -> Genotype:
    """Genotype with uniformly random operations; a node without any input is drawn again.

    >>> random_genotype(1, seed=0)["decoder_normal"]
    [['none', 'conv']]
    """
    check_int("nodes", nodes, minimum=1)
    rng = torch.Generator().manual_seed(seed)

    def draw(sizes: Sequence[str]) -> list[str]:
        while True:
            picks = [int(torch.randint(len(OPERATIONS[size]), (), generator=rng)) for size in sizes]
            row = [list(OPERATIONS[size])[k] for size, k in zip(sizes, picks, strict=True)]
            if set(row) != {"none"}:
                return row

    return {kind: [draw(sizes) for sizes in edges(kind, nodes)] for kind in KINDS}


def check_genotype(genotype: Any) -> Genotype:
    """Return a copy of the genotype in dicts and lists; raise ArgumentError if it is invalid."""
    if not isinstance(genotype, Mapping) or set(genotype) != set(KINDS):
        got = sorted(map(str, genotype)) if isinstance(genotype, Mapping) else type(genotype).__name__
        raise ArgumentError(
            "genotype", got, f"a dict with {', '.join(KINDS)}", hint="pass the result of search, or FOUND"
        )
    return {kind: _check_cell(kind, genotype[kind]) for kind in KINDS}


def _check_cell(kind: str, rows: Any) -> list[list[str]]:
    name = f"genotype[{kind!r}]"
    if not _is_list(rows) or not rows or not all(_is_list(row) for row in rows):
        raise ArgumentError(name, rows, "a list of nodes, each a list with an operation for every edge into it")
    for j, row in enumerate(rows):
        if len(row) != KINDS[kind][0] + j:
            raise ArgumentError(
                f"{name}[{j}]", row, f"{KINDS[kind][0] + j} edges, one from each input and earlier node"
            )
    for j, (row, sizes) in enumerate(zip(rows, edges(kind, len(rows)), strict=True)):
        node = f"{name}[{j}]"
        for i, (operation, size) in enumerate(zip(row, sizes, strict=True)):
            check_choice(f"{node}[{i}]", operation, OPERATIONS[size])
        if set(row) == {"none"}:
            raise ArgumentError(node, row, 'an operation other than "none" on at least one edge')
    return [list(row) for row in rows]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


Make = Callable[[int], nn.Module]


class ZeroOperation(nn.Module):
    """h ↦ 0, with the size of any other operation of the edge."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        # ⌈size/2⌉ where volumes are halved, as a convolution of stride 2 gives it
        return x.new_zeros(*x.shape[:2], *(-int(-size * self.scale // 1) for size in x.shape[2:]))

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class Upsample(nn.Module):
    """Twice the size, by trilinear interpolation."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=2.0, mode="trilinear", align_corners=False)


class AveragePool(nn.Module):
    """Mean over the 3×3×3 neighbours inside the volume; torch's own rejects smaller volumes."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        total, count = (
            functional.avg_pool3d(functional.pad(part, (1,) * 6), 3, self.stride)
            for part in (x, x.new_ones(1, 1, *x.shape[2:]))
        )
        return total / count

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


class VolumeNorm(nn.GroupNorm):
    """GroupNorm that accepts a single value per group, which torch's rejects."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:].numel() == self.num_groups:
            x = x - x  # each value is its own mean; a rounding error would be divided by √ε
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def make_norm(width: int) -> VolumeNorm:
    return VolumeNorm(num_groups(width), width)


def _conv(width: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    layer = nn.Conv3d(width, width, 3, stride, padding=dilation, dilation=dilation, bias=False)
    return nn.Sequential(nn.ReLU(), layer, make_norm(width))


def _separable(width: int, *, stride: int = 1) -> nn.Sequential:
    """One filter a channel, then a 1×1×1 convolution over the channels."""
    depthwise = nn.Conv3d(width, width, 3, stride, padding=1, groups=width, bias=False)
    return nn.Sequential(nn.ReLU(), depthwise, nn.Conv3d(width, width, 1, bias=False), make_norm(width))


def _transposed(width: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.ConvTranspose3d(width, width, 2, 2, bias=False), make_norm(width))


OPERATIONS: dict[str, dict[str, Make]] = {
    "same": {
        "none": lambda width: ZeroOperation(1.0),
        "identity": lambda width: nn.Identity(),
        "conv": _conv,
        "dilated_conv": lambda width: _conv(width, dilation=2),
        "separable_conv": _separable,
        "average_pool": lambda width: AveragePool(1),
        "max_pool": lambda width: nn.MaxPool3d(3, 1, 1),
    },
    "down": {
        "none": lambda width: ZeroOperation(0.5),
        "conv": lambda width: _conv(width, stride=2),
        "dilated_conv": lambda width: _conv(width, stride=2, dilation=2),
        "separable_conv": lambda width: _separable(width, stride=2),
        "average_pool": lambda width: AveragePool(2),
        "max_pool": lambda width: nn.MaxPool3d(3, 2, 1),
    },
    "up": {
        "none": lambda width: ZeroOperation(2.0),
        "interpolation": lambda width: Upsample(),
        "interpolation_conv": lambda width: nn.Sequential(Upsample(), _conv(width)),
        "interpolation_separable_conv": lambda width: nn.Sequential(Upsample(), _separable(width)),
        "transposed_conv": _transposed,
    },
}


def make_operation(name: str, size: str, width: int) -> nn.Module:
    """The operation of this name on an edge that keeps ("same"), halves ("down") or doubles ("up") the size.

    >>> make_operation("max_pool", "down", 8)(torch.zeros(1, 8, 6, 6, 6)).shape
    torch.Size([1, 8, 3, 3, 3])
    """
    return OPERATIONS[size][name](width)


@dataclass(frozen=True)
class Choice:
    """Operation of an edge: its index and, for a gradient, the gate z and the indices compared."""

    index: int
    gate: Tensor | None = None  # (K,)
    compared: tuple[int, ...] = ()


def draw_gumbel(size: Sequence[int], rng: torch.Generator) -> Tensor:
    """g = −log(−log u) for uniforms u, in double precision, in which neither logarithm ever meets 0.

    >>> draw_gumbel((2, 3), torch.Generator().manual_seed(0)).shape
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


def choose(logits: Tensor, gumbel: Tensor, *, temperature: float, num_compared: int | None = None) -> Choice:
    """One operation by Gumbel-softmax with a straight-through gradient: z = onehot(argmax s) + s − detach(s).

    The gradient runs over the `num_compared` most probable operations of this draw.

    >>> a = torch.zeros(3, requires_grad=True)
    >>> choice = choose(a, torch.tensor([0.2, 0.9, 0.1]), temperature=1.0)
    >>> choice.index, choice.gate.detach()
    (1, tensor([0., 1., 0.]))
    """
    soft = gumbel_softmax(logits, gumbel, temperature=temperature)
    kept = soft.topk(min(num_compared or len(soft), len(soft))).indices
    index = int(kept[0])
    fraction = torch.zeros_like(soft).index_copy(0, kept, soft[kept] / soft[kept].sum())
    hard = torch.zeros_like(soft)
    hard[index] = 1.0
    return Choice(index, hard + (fraction - fraction.detach()), tuple(kept.tolist()))


class MixedOperation(nn.Module):
    """o(h) = Σ_k z_k o_k(h) with z one-hot: all candidates of an edge, of which one runs.

    >>> edge = MixedOperation("same", 4)
    >>> edge(torch.ones(1, 4, 2, 2, 2), Choice(0)).any()  # the first candidate is "none"
    tensor(False)
    """

    def __init__(self, size: str, width: int) -> None:
        super().__init__()
        self.operations = nn.ModuleDict({name: make_operation(name, size, width) for name in OPERATIONS[size]})

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


class SearchCell(nn.Module):
    """cell(x) = [h_1, …, h_M], M·width channels: inputs are brought to `width` channels, nodes add up their edges.

    `rows[j]` holds the modules on the edges into node j: operations, or `MixedOperation`s, for which a forward takes
    one choice for each edge, in order.
    """

    def __init__(self, before: Sequence[int], width: int, rows: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv3d(channels, width, 1, bias=False), make_norm(width)) for channels in before
        )
        self.nodes = nn.ModuleList(nn.ModuleList(row) for row in rows)

    def forward(self, inputs: Sequence[Tensor], choices: Sequence[Choice] | None = None) -> Tensor:
        states = [bring(x) for bring, x in zip(self.inputs, inputs, strict=True)]
        left = None if choices is None else iter(choices)
        for row in self.nodes:
            terms = [
                edge(state) if left is None else edge(state, next(left))
                for edge, state in zip(row.children(), states, strict=True)
                if not isinstance(edge, ZeroOperation)
            ]
            states.append(sum(terms[1:], terms[0]))
        return torch.cat(states[len(self.inputs) :], 1)


def fixed_cell(kind: str, before: Sequence[int], width: int, rows: Sequence[Sequence[str]]) -> SearchCell:
    """The cell that a genotype describes.

    >>> cell = fixed_cell("reduction", [2], 4, [["conv"], ["none", "identity"]])
    >>> cell([torch.zeros(1, 2, 6, 6, 6)]).shape
    torch.Size([1, 8, 3, 3, 3])
    """
    sizes = edges(kind, len(rows))
    named = [zip(*pair, strict=True) for pair in zip(rows, sizes, strict=True)]
    return SearchCell(before, width, [[make_operation(name, size, width) for name, size in row] for row in named])


def searchable_cell(kind: str, before: Sequence[int], width: int, nodes: int) -> SearchCell:
    """A cell with every candidate on every edge.

    >>> cell = searchable_cell("expansion", [2], 4, nodes=2)
    >>> cell([torch.zeros(1, 2, 3, 3, 3)], [Choice(1), Choice(1), Choice(2)]).shape
    torch.Size([1, 8, 6, 6, 6])
    """
    return SearchCell(before, width, [[MixedOperation(size, width) for size in row] for row in edges(kind, nodes)])


# Not the published cells, which were not available: the result of `neuboots scnas --seeds 0` on noisy hollow balls.
FOUND: Genotype = {
    "encoder_normal": [["separable_conv"], ["conv", "separable_conv"]],
    "reduction": [["max_pool"], ["max_pool", "separable_conv"]],
    "decoder_normal": [["conv", "dilated_conv"], ["dilated_conv", "identity", "separable_conv"]],
    "expansion": [["interpolation"], ["interpolation", "separable_conv"]],
}

Choices = Mapping[str, Sequence[Choice]]  # for each kind of cell, one for each edge


class CellNet(nn.Module):
    """A U-net of cells, which `make_cell(kind, channels of the inputs, width)` creates."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        width: int,
        levels: int,
        nodes: Mapping[str, int],
        make_cell: Callable[[str, Sequence[int], int], SearchCell],
    ) -> None:
        super().__init__()
        check_int("in_channels", in_channels, minimum=1)
        check_int("num_classes", num_classes, minimum=1)
        check_int("width", width, minimum=1)
        check_int("levels", levels, minimum=1)
        self.in_channels, self.levels = in_channels, levels
        self.stem = nn.Sequential(nn.Conv3d(in_channels, width, 3, padding=1, bias=False), make_norm(width))
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        skips: list[int] = []
        channels = width

        def add(part: nn.ModuleList, kind: str, before: Sequence[int], level: int) -> int:
            part.append(make_cell(kind, before, width << level))
            return nodes[kind] * (width << level)

        for level in range(levels):
            if level:
                channels = add(self.encoder, "reduction", [channels], level)
            channels = add(self.encoder, "encoder_normal", [channels], level)
            skips.append(channels)
        for level in reversed(range(levels - 1)):
            channels = add(self.decoder, "expansion", [channels], level)
            channels = add(self.decoder, "decoder_normal", [channels, skips[level]], level)
        self.finish = nn.Sequential(make_norm(channels), nn.ReLU())
        self.head = nn.Conv3d(channels, num_classes, 1)

    def run(self, x: Tensor, choices: Choices | None = None) -> Tensor:
        """Map volumes (N, in_channels, D, H, W) to logits (N, num_classes, D, H, W)."""
        check_grid(x, self.in_channels, 3)

        def chosen(kind: str) -> Sequence[Choice] | None:
            return None if choices is None else choices[kind]

        h = self.stem(pad_to_multiple(x, 2 ** (self.levels - 1)))
        skips = []
        for k, cell in enumerate(self.encoder):
            h = cell([h], chosen("reduction" if k % 2 else "encoder_normal"))
            if k % 2 == 0:
                skips.append(h)
        skips.pop()  # the deepest cell has no skip connection
        for k, cell in enumerate(self.decoder):
            h = cell([h, skips.pop()], chosen("decoder_normal")) if k % 2 else cell([h], chosen("expansion"))
        phi = crop_to_size(self.finish(h), x.shape[2:])  # (N, D, *)
        out: Tensor = self.head(phi)  # (N, C, *)
        return out


@configurable
class SCNAS(CellNet):
    """The net of a genotype: fixed cells, `levels` sizes, `width` channels a node at full size; D = nodes · width.

    >>> net = SCNAS(1, 3, width=4, levels=2)
    >>> net(torch.zeros(2, 1, 7, 6, 5)).shape
    torch.Size([2, 3, 7, 6, 5])
    >>> net.head
    Conv3d(8, 3, kernel_size=(1, 1, 1), stride=(1, 1, 1))

    The default genotype is `FOUND`: not the published one, but one that the search here found (see there).
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        genotype: Mapping[str, Sequence[Sequence[str]]] = FOUND,
        width: int = 16,
        levels: int = 4,
    ) -> None:
        cells = check_genotype(genotype)

        def make_cell(kind: str, before: Sequence[int], width: int) -> SearchCell:
            return fixed_cell(kind, before, width, cells[kind])

        nodes = {kind: len(rows) for kind, rows in cells.items()}
        super().__init__(in_channels, num_classes, width, levels, nodes, make_cell)

    def forward(self, x: Tensor) -> Tensor:
        """Map volumes (N, in_channels, D, H, W) to logits (N, num_classes, D, H, W)."""
        return self.run(x)


class SuperNet(CellNet):
    """Supernet of all architectures: every cell holds every candidate, with the architecture parameters `logits[kind]`.

        p(architecture) = Π_edges softmax(a_edge),   one a for each edge of a kind, shared by all its cells

    A forward takes the choices of one architecture, as `sample` draws them or `pick` reads them from a genotype.

    >>> net = SuperNet(1, 3, width=4, levels=2)
    >>> choices = net.sample(torch.Generator().manual_seed(0))
    >>> net(torch.zeros(2, 1, 7, 6, 5), choices).shape
    torch.Size([2, 3, 7, 6, 5])
    """

    def __init__(self, in_channels: int, num_classes: int, *, width: int = 8, levels: int = 3, nodes: int = 2) -> None:
        check_int("nodes", nodes, minimum=1)

        def make_cell(kind: str, before: Sequence[int], width: int) -> SearchCell:
            return searchable_cell(kind, before, width, nodes)

        super().__init__(in_channels, num_classes, width, levels, dict.fromkeys(KINDS, nodes), make_cell)
        self.sizes = {kind: edges(kind, nodes) for kind in KINDS}
        self.logits = nn.ParameterDict(
            {
                kind: nn.ParameterList(torch.zeros(len(OPERATIONS[size])) for row in rows for size in row)
                for kind, rows in self.sizes.items()
            }
        )

    def forward(self, x: Tensor, choices: Choices) -> Tensor:
        """Map volumes (N, in_channels, D, H, W) to the logits (N, num_classes, D, H, W) of one architecture."""
        return self.run(x, choices)

    @property
    def weights(self) -> list[nn.Parameter]:
        """Weights of the operations."""
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("logits.")]

    @property
    def architecture(self) -> list[nn.Parameter]:
        """Architecture parameters: a vector for each edge of each kind of cell."""
        return list(self.logits.parameters())

    def sample(
        self, rng: torch.Generator, *, temperature: float = 1.0, num_compared: int | None = None, uniform: bool = False
    ) -> dict[str, list[Choice]]:
        """Draw an architecture from p, or uniformly; its gates have the straight-through gradient."""

        def draw(a: Tensor) -> Choice:
            logits = torch.zeros_like(a) if uniform else a
            return choose(logits, draw_gumbel((len(a),), rng), temperature=temperature, num_compared=num_compared)

        return {kind: [draw(a) for a in self.logits[kind]] for kind in KINDS}

    def pick(self, genotype: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, list[Choice]]:
        """Choices with which the supernet equals the net of a genotype."""
        rows = check_genotype(genotype)
        for kind, sizes in self.sizes.items():
            if len(rows[kind]) != len(sizes):
                raise ArgumentError(f"genotype[{kind!r}]", rows[kind], f"{len(sizes)} nodes, as the supernet has")
        return {
            kind: [
                Choice(list(OPERATIONS[size]).index(name))
                for row, sizes in zip(rows[kind], self.sizes[kind], strict=True)
                for name, size in zip(row, sizes, strict=True)
            ]
            for kind in KINDS
        }

    def probabilities(self) -> dict[str, list[dict[str, float]]]:
        """Probability of each candidate, for each edge of each kind of cell."""
        return {
            kind: [
                dict(zip(OPERATIONS[size], a.detach().softmax(0).tolist(), strict=True))
                for a, size in zip(self.logits[kind], [size for row in rows for size in row], strict=True)
            ]
            for kind, rows in self.sizes.items()
        }

    def genotype(self) -> Genotype:
        """Most probable operation of each edge; a node without input gets its most probable real operation."""
        found: Genotype = {}
        for kind, tables in self.probabilities().items():
            left = iter(tables)
            found[kind] = [_best_row([next(left) for _ in sizes]) for sizes in self.sizes[kind]]
        return found


def _best_row(tables: Sequence[Mapping[str, float]]) -> list[str]:
    row = [max(table, key=lambda name: table[name]) for table in tables]
    if set(row) == {"none"}:
        real = [(p, i, name) for i, table in enumerate(tables) for name, p in table.items() if name != "none"]
        _, i, name = max(real)
        row[i] = name
    return row
