"""SCNAS: a 3D U-net of searched cells, its search space, and the stochastic search."""

from neuboots_paper.scnas.net import FOUND, SCNAS, Genotype, SuperNet, random_genotype
from neuboots_paper.scnas.search import SearchResult, expected_loss, search

__all__ = ["FOUND", "SCNAS", "Genotype", "SearchResult", "SuperNet", "expected_loss", "random_genotype", "search"]
