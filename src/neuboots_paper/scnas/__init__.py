"""SCNAS: a 3D U-net of cells, its search space, the stochastic search, and the net of what was found."""

from neuboots_paper.scnas.net import (
    FOUND,
    KINDS,
    OPERATIONS,
    SCNAS,
    Cell,
    Choice,
    Genotype,
    MixedOperation,
    SuperNet,
    choose,
    gumbel_softmax,
    gumbels,
    random_genotype,
)
from neuboots_paper.scnas.search import SearchResult, expected_loss, search

__all__ = [
    "FOUND",
    "KINDS",
    "OPERATIONS",
    "SCNAS",
    "Cell",
    "Choice",
    "Genotype",
    "MixedOperation",
    "SearchResult",
    "SuperNet",
    "choose",
    "expected_loss",
    "gumbel_softmax",
    "gumbels",
    "random_genotype",
    "search",
]
