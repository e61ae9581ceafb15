"""SCNAS: a 3D U-net made of searched cells (Kim et al. 2019).

    x → stem → [normal → reduction]ᴸ⁻¹ → normal → [expansion → normal]ᴸ⁻¹ → head,   with skips between equal sizes

Encoder and decoder alternate normal cells with reduction or expansion cells; all cells of one kind have the same graph
and the same operations, with weights of their own. A reduction cell halves the volume and doubles the width, an
expansion cell undoes both; a normal cell of the decoder reads the expansion cell before it and, as its second input,
the normal cell of the encoder of the same size.

What is known of the paper here is this: the four kinds of cells, that they make up a 3D U-Net, and that connections and
operations are searched by stochastic sampling with a Gumbel-softmax relaxation. Its candidate operations, numbers of
cells and nodes, schedules and found cells were not at hand; in their place stand those of DARTS and SNAS, for volumes:
two nodes a cell, whose outputs are concatenated, candidates as in `operations`, and one normal cell a size.

S. Kim, I. Kim, S. Lim, W. Baek, C. Kim, H. Cho, B. Yoon, T. Kim, Scalable neural architecture search for 3D medical
image segmentation, MICCAI 2019 (arXiv 1906.05956). H. Liu, K. Simonyan, Y. Yang, DARTS: differentiable architecture
search, ICLR 2019. S. Xie, H. Zheng, C. Liu, L. Lin, SNAS: stochastic neural architecture search, ICLR 2019.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from neuboots.nets.mlp import check_size
from neuboots.nets.scnas.cells import Cell, Choice, choose, fixed_cell, gumbels, searchable_cell
from neuboots.nets.scnas.genotype import KINDS, Genotype, checked, edges
from neuboots.nets.scnas.operations import OPERATIONS, norm
from neuboots.nets.unet import check_grid, crop, pad_to_multiple

# Not the published cells, which were not at hand: what `neuboots scnas --seeds 0` found on its noisy hollow balls.
FOUND: Genotype = {
    "encoder_normal": [["separable_conv"], ["conv", "separable_conv"]],
    "reduction": [["max_pool"], ["max_pool", "separable_conv"]],
    "decoder_normal": [["conv", "dilated_conv"], ["dilated_conv", "identity", "separable_conv"]],
    "expansion": [["interpolation"], ["interpolation", "separable_conv"]],
}

Choices = Mapping[str, Sequence[Choice]]  # for each kind of cell, one for each edge


class CellNet(nn.Module):
    """The U of cells: `make_cell(kind, channels of the inputs, width)` says what a cell is."""

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        width: int,
        levels: int,
        nodes: Mapping[str, int],
        make_cell: Callable[[str, Sequence[int], int], Cell],
    ) -> None:
        super().__init__()
        check_size("in_channels", in_channels)
        check_size("num_classes", num_classes)
        check_size("width", width)
        check_size("levels", levels)
        self.in_channels, self.levels = in_channels, levels
        self.stem = nn.Sequential(nn.Conv3d(in_channels, width, 3, padding=1, bias=False), norm(width))
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
        self.finish = nn.Sequential(norm(channels), nn.ReLU())
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
        skips.pop()  # the deepest cell goes on, not across
        for k, cell in enumerate(self.decoder):
            h = cell([h, skips.pop()], chosen("decoder_normal")) if k % 2 else cell([h], chosen("expansion"))
        phi = crop(self.finish(h), x.shape[2:])  # (N, D, *)
        out: Tensor = self.head(phi)  # (N, C, *)
        return out


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
        cells = checked(genotype)

        def make_cell(kind: str, before: Sequence[int], width: int) -> Cell:
            return fixed_cell(kind, before, width, cells[kind])

        nodes = {kind: len(rows) for kind, rows in cells.items()}
        super().__init__(in_channels, num_classes, width, levels, nodes, make_cell)
        self.options: dict[str, Any] = {
            "in_channels": in_channels,
            "num_classes": num_classes,
            "genotype": cells,
            "width": width,
            "levels": levels,
        }

    def forward(self, x: Tensor) -> Tensor:
        """Map volumes (N, in_channels, D, H, W) to logits (N, num_classes, D, H, W)."""
        return self.run(x)


class SuperNet(CellNet):
    """All architectures at once: every cell holds every candidate, and `logits[kind]` says how likely each one is.

        p(architecture) = Π_edges softmax(a_edge),   one a for each edge of a kind, shared by all its cells

    A forward takes the choices of one architecture, as `sample` draws them or `pick` reads them from a genotype.

    >>> net = SuperNet(1, 3, width=4, levels=2)
    >>> choices = net.sample(torch.Generator().manual_seed(0))
    >>> net(torch.zeros(2, 1, 7, 6, 5), choices).shape
    torch.Size([2, 3, 7, 6, 5])
    """

    def __init__(self, in_channels: int, num_classes: int, *, width: int = 8, levels: int = 3, nodes: int = 2) -> None:
        check_size("nodes", nodes)

        def make_cell(kind: str, before: Sequence[int], width: int) -> Cell:
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
        """What the operations learn."""
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("logits.")]

    @property
    def architecture(self) -> list[nn.Parameter]:
        """What the search learns: a vector for each edge of each kind of cell."""
        return list(self.logits.parameters())

    def sample(
        self, rng: torch.Generator, *, temperature: float = 1.0, compared: int | None = None, uniform: bool = False
    ) -> dict[str, list[Choice]]:
        """One architecture from p, or of random cells (`uniform`), its gates ready for a gradient."""

        def drawn(a: Tensor) -> Choice:
            logits = torch.zeros_like(a) if uniform else a
            return choose(logits, gumbels((len(a),), rng), temperature=temperature, compared=compared)

        return {kind: [drawn(a) for a in self.logits[kind]] for kind in KINDS}

    def pick(self, genotype: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, list[Choice]]:
        """The choices that make the supernet the net of a genotype."""
        rows = checked(genotype)
        for kind, sizes in self.sizes.items():
            if len(rows[kind]) != len(sizes):
                raise ValueError(
                    f"the genotype's {kind} cell has {len(rows[kind])} nodes; expected {len(sizes)}, as the supernet "
                    "has: build it with so many nodes, or give another genotype"
                )
        return {
            kind: [
                Choice(list(OPERATIONS[size]).index(name))
                for row, sizes in zip(rows[kind], self.sizes[kind], strict=True)
                for name, size in zip(row, sizes, strict=True)
            ]
            for kind in KINDS
        }

    def probabilities(self) -> dict[str, list[dict[str, float]]]:
        """How likely each candidate is, for each edge of each kind of cell."""
        return {
            kind: [
                dict(zip(OPERATIONS[size], a.detach().softmax(0).tolist(), strict=True))
                for a, size in zip(self.logits[kind], [size for row in rows for size in row], strict=True)
            ]
            for kind, rows in self.sizes.items()
        }

    def genotype(self) -> Genotype:
        """The likeliest operation on each edge; a node that none would reach keeps its likeliest real one."""
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
