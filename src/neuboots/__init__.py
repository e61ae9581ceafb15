"""neuboots: bootstrap uncertainty for any PyTorch network, from one training run.

g(x, α) = M(F(x) ⊙ α): a bootstrap replicate of a net is a re-weighted last layer, so that B replicates cost one forward
pass through the features and one matrix product (Neural Bootstrapper, NeurIPS 2021).
"""

from typing import TYPE_CHECKING

from neuboots._validation import ArgumentError, lazy_exports
from neuboots.methods import create_method, list_methods
from neuboots.prediction import Method, Prediction, Predictor, Summary, residual_std, split_gaussian
from neuboots.serialization import load, save
from neuboots.training import TrainingConfig

if TYPE_CHECKING:
    from neuboots.methods import (
        MIMO,
        SWAG,
        BatchEnsemble,
        BayesianBootstrap,
        CalibratedNeuBoots,
        DeepEnsemble,
        Deterministic,
        GaussianProcess,
        InfluenceBootstrap,
        Laplace,
        MCDropout,
        NeuBoots,
        SparseGP,
        StandardBootstrap,
    )

__version__ = "0.1.0"

__all__ = [
    "MIMO",
    "SWAG",
    "ArgumentError",
    "BatchEnsemble",
    "BayesianBootstrap",
    "CalibratedNeuBoots",
    "DeepEnsemble",
    "Deterministic",
    "GaussianProcess",
    "InfluenceBootstrap",
    "Laplace",
    "MCDropout",
    "Method",
    "NeuBoots",
    "Prediction",
    "Predictor",
    "SparseGP",
    "StandardBootstrap",
    "Summary",
    "TrainingConfig",
    "create_method",
    "list_methods",
    "load",
    "residual_std",
    "save",
    "split_gaussian",
]

__getattr__, __dir__ = lazy_exports(__name__, {"methods": __all__})  # imports a method when it is first used
