"""neuboots: honest bootstrap uncertainty for any PyTorch network, from one training run.

g(x, α) = M(F(x) ⊙ α): a bootstrap replicate of a net is a re-weighted last layer, so B replicates cost one
pass through the features and one matrix product (Neural Bootstrapper, NeurIPS 2021).
"""

from neuboots.generator import BootstrapGenerator
from neuboots.head import HeadSplit, find_head_candidates, split_head
from neuboots.loading import Batch, IndexedDataset
from neuboots.losses import BrierLoss, GaussianNLL, valid_mask, weighted_mean
from neuboots.methods import (
    METHODS,
    MIMO,
    SWAG,
    BatchEnsemble,
    BayesianBootstrap,
    DeepEnsemble,
    Deterministic,
    DeterministicPredictor,
    GaussianProcess,
    InfluenceBootstrap,
    InfluencePredictor,
    Laplace,
    MCDropout,
    MethodInfo,
    NeuBoots,
    NeuBootsPredictor,
    SparseGP,
    StandardBootstrap,
    register,
)
from neuboots.methods.neuboots import make_blocks
from neuboots.prediction import Method, Moments, Prediction, Predictor, Summary, residual_std, split_gaussian
from neuboots.serialization import load, save
from neuboots.training import EpochReport, TrainingConfig, constant_schedule, cosine_schedule, train
from neuboots.weights import (
    BlockTable,
    Constant,
    Dirichlet,
    Exponential,
    HashedBlocks,
    Multinomial,
    WeightDistribution,
    WeightSchedule,
    assign_blocks,
    compute_strata,
)

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "MIMO",
    "SWAG",
    "AdversarialDeepEnsemble",
    "Batch",
    "BatchEnsemble",
    "BayesianBootstrap",
    "BlockTable",
    "BootstrapGenerator",
    "BrierLoss",
    "Constant",
    "DeepEnsemble",
    "Deterministic",
    "DeterministicPredictor",
    "Dirichlet",
    "EpochReport",
    "Exponential",
    "GaussianNLL",
    "GaussianProcess",
    "HashedBlocks",
    "HeadSplit",
    "IndexedDataset",
    "InfluenceBootstrap",
    "InfluencePredictor",
    "Laplace",
    "MCDropout",
    "Method",
    "MethodInfo",
    "Moments",
    "Multinomial",
    "NeuBoots",
    "NeuBootsPredictor",
    "Prediction",
    "Predictor",
    "SparseGP",
    "StandardBootstrap",
    "Summary",
    "TrainingConfig",
    "WeightDistribution",
    "WeightSchedule",
    "assign_blocks",
    "compute_strata",
    "constant_schedule",
    "cosine_schedule",
    "find_head_candidates",
    "load",
    "make_blocks",
    "register",
    "residual_std",
    "save",
    "split_gaussian",
    "split_head",
    "train",
    "valid_mask",
    "weighted_mean",
]
