"""Data sets behind one interface, corruptions of images, and imbalanced training sets."""

from neuboots.data.imbalance import exponential_counts, long_tailed
from neuboots.data.parts import Part, Stream
from neuboots.data.sets import DataSet, Normalisation

__all__ = ["DataSet", "Normalisation", "Part", "Stream", "exponential_counts", "long_tailed"]
