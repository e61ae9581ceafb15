"""What a search finds, as plain data: for each kind of cell, the operation on each edge of its graph.

    genotype[kind][j] = (operation on the edge from state 0 to node j, from state 1, …)

States are the cell's inputs, then its nodes 0, 1, … in their order. A genotype is made of dicts, lists and names, so it
goes through JSON unchanged.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from neuboots.nets.mlp import check_size
from neuboots.nets.scnas.operations import OPERATIONS

Genotype = dict[str, list[list[str]]]

# The four kinds of cells (Kim et al. 2019): how many inputs each has, and what its first operations do to the size.
KINDS: dict[str, tuple[int, str]] = {
    "encoder_normal": (1, "same"),
    "reduction": (1, "down"),
    "decoder_normal": (2, "same"),
    "expansion": (1, "up"),
}


def edges(kind: str, nodes: int) -> list[list[str]]:
    """What each edge does to the size, by node and then by the state it comes from.

    >>> edges("reduction", 2)
    [['down'], ['down', 'same']]
    """
    inputs, size = KINDS[kind]
    return [[size if i < inputs else "same" for i in range(inputs + j)] for j in range(nodes)]


def random_genotype(nodes: int = 2, *, seed: int) -> Genotype:
    """Cells whose operations are drawn at random, all candidates alike; a node without any input is drawn again.

    >>> random_genotype(1, seed=0)["decoder_normal"]
    [['none', 'conv']]
    """
    check_size("nodes", nodes)
    rng = torch.Generator().manual_seed(seed)

    def draw(sizes: Sequence[str]) -> list[str]:
        while True:
            picks = [int(torch.randint(len(OPERATIONS[size]), (), generator=rng)) for size in sizes]
            row = [list(OPERATIONS[size])[k] for size, k in zip(sizes, picks, strict=True)]
            if set(row) != {"none"}:
                return row

    return {kind: [draw(sizes) for sizes in edges(kind, nodes)] for kind in KINDS}


def checked(genotype: Any) -> Genotype:
    """A copy of the genotype in dicts and lists, or a sentence that says what is wrong with it."""
    if not isinstance(genotype, Mapping) or set(genotype) != set(KINDS):
        got = sorted(map(str, genotype)) if isinstance(genotype, Mapping) else type(genotype).__name__
        raise ValueError(
            f"the genotype has {got}; expected a dict with {', '.join(KINDS)}: pass what search(…) found, or FOUND"
        )
    return {kind: _checked_cell(kind, genotype[kind]) for kind in KINDS}


def _checked_cell(kind: str, rows: Any) -> list[list[str]]:
    if not _is_list(rows) or not rows or not all(_is_list(row) for row in rows):
        raise ValueError(
            f"the genotype's {kind} cell is {_shown(rows)}; expected a list of nodes, each a list with the name of an "
            "operation for every edge into it"
        )
    for j, (row, sizes) in enumerate(zip(rows, edges(kind, len(rows)), strict=True)):
        where = f"node {j} of the genotype's {kind} cell"
        if len(row) != len(sizes):
            raise ValueError(
                f"{where} has {len(row)} edges; expected {len(sizes)}, one from each input and each earlier node: "
                'write "none" for an edge that is not there'
            )
        for i, (name, size) in enumerate(zip(row, sizes, strict=True)):
            if not isinstance(name, str) or name not in OPERATIONS[size]:
                raise ValueError(
                    f"edge {i} of {where} is {_shown(name)}; expected one of {', '.join(OPERATIONS[size])}: "
                    "name one of these"
                )
        if set(row) == {"none"}:
            raise ValueError(f'{where} has no input; expected an operation other than "none" on at least one edge')
    return [list(row) for row in rows]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return f"of type {type(value).__name__}"
