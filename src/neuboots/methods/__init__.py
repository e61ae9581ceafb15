"""Uncertainty methods, one module each: a frozen dataclass of options whose `fit` returns a `Predictor`."""

from neuboots.methods._base import METHODS, WRAPPERS, MethodInfo, create_method, find_method, list_methods, register
from neuboots.methods.batch_ensemble import BatchEnsemble, BatchEnsemblePredictor
from neuboots.methods.calibrated_neuboots import (
    CalibratedNeuBoots,
    CalibratedNeuBootsPredictor,
    Dispersion,
    calibrate_dispersion,
)
from neuboots.methods.deterministic import Deterministic, DeterministicPredictor
from neuboots.methods.ensembles import BayesianBootstrap, DeepEnsemble, EnsemblePredictor, StandardBootstrap
from neuboots.methods.gaussian_process import GaussianProcess, GaussianProcessPredictor, SparseGP, SparseGPPredictor
from neuboots.methods.influence import InfluenceBootstrap, InfluencePredictor
from neuboots.methods.laplace import Laplace, LaplacePredictor
from neuboots.methods.mc_dropout import MCDropout, MCDropoutPredictor
from neuboots.methods.mimo import MIMO, MIMOPredictor
from neuboots.methods.neuboots import NeuBoots, NeuBootsPredictor
from neuboots.methods.swag import SWAG, SWAGPredictor
from neuboots.posthoc import ScaledPredictor

WRAPPERS["scaled"] = ScaledPredictor

__all__ = [
    "METHODS",
    "MIMO",
    "SWAG",
    "WRAPPERS",
    "BatchEnsemble",
    "BatchEnsemblePredictor",
    "BayesianBootstrap",
    "CalibratedNeuBoots",
    "CalibratedNeuBootsPredictor",
    "DeepEnsemble",
    "Deterministic",
    "DeterministicPredictor",
    "Dispersion",
    "EnsemblePredictor",
    "GaussianProcess",
    "GaussianProcessPredictor",
    "InfluenceBootstrap",
    "InfluencePredictor",
    "Laplace",
    "LaplacePredictor",
    "MCDropout",
    "MCDropoutPredictor",
    "MIMOPredictor",
    "MethodInfo",
    "NeuBoots",
    "NeuBootsPredictor",
    "SWAGPredictor",
    "ScaledPredictor",
    "SparseGP",
    "SparseGPPredictor",
    "StandardBootstrap",
    "calibrate_dispersion",
    "create_method",
    "find_method",
    "list_methods",
    "register",
]
