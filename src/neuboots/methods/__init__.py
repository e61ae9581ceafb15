"""One file a method; each is a frozen dataclass of options whose `fit` ends in a Predictor."""

from neuboots.methods.neuboots import NeuBoots, NeuBootsPredictor
from neuboots.methods.plain import Plain, PlainPredictor

PREDICTORS: dict[str, type[NeuBootsPredictor | PlainPredictor]] = {
    "neuboots": NeuBootsPredictor,
    "plain": PlainPredictor,
}

__all__ = ["PREDICTORS", "NeuBoots", "NeuBootsPredictor", "Plain", "PlainPredictor"]
