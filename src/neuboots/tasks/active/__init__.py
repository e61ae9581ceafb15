"""Active learning: which rows should be labelled next, and what do labels chosen so come to?

    next rows = argmax over A ⊂ pool, |A| = k, of Σ_{x ∈ A} score(x)

`next_to_label` is the single step that a person with unlabelled data needs, `active_learning` the whole loop of the
paper's section 4.2, `STRATEGIES` the ways to choose.
"""

from neuboots.tasks.active.choice import Choice, next_to_label
from neuboots.tasks.active.loop import ActiveLearning, active_learning
from neuboots.tasks.active.strategies import STRATEGIES, Kind, Score

__all__ = ["STRATEGIES", "ActiveLearning", "Choice", "Kind", "Score", "active_learning", "next_to_label"]
