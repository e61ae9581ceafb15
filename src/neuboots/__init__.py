"""neuboots: honest bootstrap uncertainty for any PyTorch network, from one training run.

g(x, α) = M(F(x) ⊙ α): a bootstrap replicate of a net is a re-weighted last layer, so B replicates cost one
pass through the features and one matrix product (Neural Bootstrapper, NeurIPS 2021).
"""

from neuboots.batches import Batch, Indexed
from neuboots.generator import BootstrapGenerator
from neuboots.losses import (
    BinaryCrossEntropy,
    Brier,
    CrossEntropy,
    GaussianNLL,
    SquaredError,
    unmasked,
    weighted_loss,
)
from neuboots.methods import (
    GBS,
    LPBNN,
    METHODS,
    MIMO,
    SWAG,
    AdversarialEnsemble,
    AmortizedBootstrap,
    BatchEnsemble,
    BayesianBootstrap,
    DeepEnsemble,
    Entry,
    GaussianProcess,
    Laplace,
    MCDropout,
    NeuBoots,
    NeuBootsPredictor,
    Plain,
    PlainPredictor,
    SparseGP,
    StandardBootstrap,
    register,
    scale_std,
    scale_temperature,
)
from neuboots.methods.neuboots import make_blocks
from neuboots.prediction import Method, Moments, Prediction, Predictor, Summary
from neuboots.regression import residual_std, split_gaussian
from neuboots.saving import load, save
from neuboots.surgery import Split, head_candidates, split_head
from neuboots.training import EpochReport, Recipe, constant, cosine, train
from neuboots.weights import (
    BlockTable,
    Constant,
    Dirichlet,
    Exponential,
    HashedBlocks,
    Multinomial,
    WeightLaw,
    WeightPlan,
    assign_blocks,
    strata_of,
)

__version__ = "0.1.0"

__all__ = [
    "GBS",
    "LPBNN",
    "METHODS",
    "MIMO",
    "SWAG",
    "AdversarialEnsemble",
    "AmortizedBootstrap",
    "Batch",
    "BatchEnsemble",
    "BayesianBootstrap",
    "BinaryCrossEntropy",
    "BlockTable",
    "BootstrapGenerator",
    "Brier",
    "Constant",
    "CrossEntropy",
    "DeepEnsemble",
    "Dirichlet",
    "Entry",
    "EpochReport",
    "Exponential",
    "GaussianNLL",
    "GaussianProcess",
    "HashedBlocks",
    "Indexed",
    "Laplace",
    "MCDropout",
    "Method",
    "Moments",
    "Multinomial",
    "NeuBoots",
    "NeuBootsPredictor",
    "Plain",
    "PlainPredictor",
    "Prediction",
    "Predictor",
    "Recipe",
    "SparseGP",
    "Split",
    "SquaredError",
    "StandardBootstrap",
    "Summary",
    "WeightLaw",
    "WeightPlan",
    "assign_blocks",
    "constant",
    "cosine",
    "head_candidates",
    "load",
    "make_blocks",
    "register",
    "residual_std",
    "save",
    "scale_std",
    "scale_temperature",
    "split_gaussian",
    "split_head",
    "strata_of",
    "train",
    "unmasked",
    "weighted_loss",
]
