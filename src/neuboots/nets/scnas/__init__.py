"""SCNAS: a 3D U-net of cells, its search space, the stochastic search, and the net of what was found."""

from neuboots.nets.scnas.cells import Cell, Choice, MixedOperation, choose, gumbel_softmax, gumbels
from neuboots.nets.scnas.genotype import KINDS, Genotype, random_genotype
from neuboots.nets.scnas.net import FOUND, SCNAS, SuperNet
from neuboots.nets.scnas.operations import OPERATIONS
from neuboots.nets.scnas.searching import SearchResult, expected_loss, search

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
