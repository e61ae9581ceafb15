"""Audit: how close are generated replicates to the real bootstrap on this data?

A handful of nets is trained on re-weighted data, which is what a bootstrap is, and compared with a predictor at the
same inputs: the size of the spread, where it is large, its shape and its centre; and a verdict in a sentence.
"""

from neuboots.tasks.audit.comparison import audit, compare
from neuboots.tasks.audit.verdict import Audit, Finding

__all__ = ["Audit", "Finding", "audit", "compare"]
