"""Uncertainty methods, one module each: a frozen dataclass of options whose `fit` returns a `Predictor`.

A module is imported when one of its classes is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from neuboots.methods._base import MethodInfo, create_method, find_method, list_methods, load_methods, register

if TYPE_CHECKING:
    from neuboots.methods._base import METHODS
    from neuboots.methods.batch_ensemble import BatchEnsemble
    from neuboots.methods.calibrated_neuboots import CalibratedNeuBoots, calibrate_dispersion
    from neuboots.methods.deterministic import Deterministic, DeterministicPredictor
    from neuboots.methods.ensembles import BayesianBootstrap, DeepEnsemble, StandardBootstrap
    from neuboots.methods.gaussian_process import GaussianProcess, SparseGP
    from neuboots.methods.influence import InfluenceBootstrap
    from neuboots.methods.laplace import Laplace
    from neuboots.methods.mc_dropout import MCDropout
    from neuboots.methods.mimo import MIMO
    from neuboots.methods.neuboots import NeuBoots, NeuBootsPredictor
    from neuboots.methods.swag import SWAG

_MODULES = {
    "batch_ensemble": ("BatchEnsemble",),
    "calibrated_neuboots": ("CalibratedNeuBoots", "calibrate_dispersion"),
    "deterministic": ("Deterministic", "DeterministicPredictor"),
    "ensembles": ("BayesianBootstrap", "DeepEnsemble", "StandardBootstrap"),
    "gaussian_process": ("GaussianProcess", "SparseGP"),
    "influence": ("InfluenceBootstrap",),
    "laplace": ("Laplace",),
    "mc_dropout": ("MCDropout",),
    "mimo": ("MIMO",),
    "neuboots": ("NeuBoots", "NeuBootsPredictor"),
    "swag": ("SWAG",),
}

__all__ = [
    "METHODS",
    "MIMO",
    "SWAG",
    "BatchEnsemble",
    "BayesianBootstrap",
    "CalibratedNeuBoots",
    "DeepEnsemble",
    "Deterministic",
    "DeterministicPredictor",
    "GaussianProcess",
    "InfluenceBootstrap",
    "Laplace",
    "MCDropout",
    "MethodInfo",
    "NeuBoots",
    "NeuBootsPredictor",
    "SparseGP",
    "StandardBootstrap",
    "calibrate_dispersion",
    "create_method",
    "find_method",
    "list_methods",
    "register",
]


def __getattr__(name: str) -> Any:
    if name == "METHODS":
        return load_methods()
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"neuboots.methods.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
