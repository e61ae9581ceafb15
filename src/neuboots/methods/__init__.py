"""One file a method; each is a frozen dataclass of options whose `fit` ends in a Predictor."""

from neuboots.methods.neuboots import NeuBoots, NeuBootsPredictor
from neuboots.methods.plain import Plain, PlainPredictor
from neuboots.methods.registry import METHODS, Entry, find, register

register(
    Entry(
        "plain",
        Plain,
        PlainPredictor,
        "the net itself: B equal samples",
        random=False,
        predict_cost="O(L)",
    )
)
register(
    Entry(
        "neuboots",
        NeuBoots,
        NeuBootsPredictor,
        "one net whose head is re-weighted: B bootstrapped nets from one pass",
        predict_cost="O(L + K)",
        reference="Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021",
    )
)

__all__ = ["METHODS", "Entry", "NeuBoots", "NeuBootsPredictor", "Plain", "PlainPredictor", "find", "register"]
