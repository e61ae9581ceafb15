"""neuboots: bootstrap uncertainty for any PyTorch network, from one training run.

g(x, α) = M(F(x) ⊙ α): a bootstrap replicate of a net is a re-weighted last layer, so that B replicates cost one forward
pass through the features and one matrix product (Neural Bootstrapper, NeurIPS 2021).
"""

from typing import TYPE_CHECKING

from neuboots._validation import ArgumentError, lazy_exports

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
        create_method,
        list_methods,
    )
    from neuboots.prediction import Method, Prediction, Predictor, Summary, residual_std, split_gaussian
    from neuboots.serialization import load, save
    from neuboots.training import TrainingConfig

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

_MODULES = {
    "prediction": ("Method", "Prediction", "Predictor", "Summary", "residual_std", "split_gaussian"),
    "serialization": ("load", "save"),
    "training": ("TrainingConfig",),
    "methods": __all__,
}
# torch is imported with the first name that is used: the command line starts, and can be interrupted, before
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
