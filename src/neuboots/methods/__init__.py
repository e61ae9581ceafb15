"""Uncertainty methods, one module each: a frozen dataclass of options whose `fit` returns a `Predictor`.

A module is imported when one of its methods is first used.
"""

from typing import TYPE_CHECKING, Any

from neuboots._validation import lazy_exports
from neuboots.methods import _base
from neuboots.methods._base import MethodInfo as MethodInfo
from neuboots.methods._base import create_method as create_method
from neuboots.methods._base import find_method as find_method
from neuboots.methods._base import list_methods as list_methods
from neuboots.methods._base import register as register

if TYPE_CHECKING:
    from neuboots.methods._base import METHODS as METHODS
    from neuboots.methods.batch_ensemble import BatchEnsemble as BatchEnsemble
    from neuboots.methods.calibrated_neuboots import CalibratedNeuBoots as CalibratedNeuBoots
    from neuboots.methods.calibrated_neuboots import calibrate_dispersion as calibrate_dispersion
    from neuboots.methods.deterministic import Deterministic as Deterministic
    from neuboots.methods.deterministic import DeterministicPredictor as DeterministicPredictor
    from neuboots.methods.ensembles import BayesianBootstrap as BayesianBootstrap
    from neuboots.methods.ensembles import DeepEnsemble as DeepEnsemble
    from neuboots.methods.ensembles import StandardBootstrap as StandardBootstrap
    from neuboots.methods.gaussian_process import GaussianProcess as GaussianProcess
    from neuboots.methods.gaussian_process import SparseGP as SparseGP
    from neuboots.methods.influence import InfluenceBootstrap as InfluenceBootstrap
    from neuboots.methods.laplace import Laplace as Laplace
    from neuboots.methods.mc_dropout import MCDropout as MCDropout
    from neuboots.methods.mimo import MIMO as MIMO
    from neuboots.methods.neuboots import NeuBoots as NeuBoots
    from neuboots.methods.neuboots import NeuBootsPredictor as NeuBootsPredictor
    from neuboots.methods.swag import SWAG as SWAG

_import_name, __dir__ = lazy_exports(__name__, _base.MODULES)


def __getattr__(name: str) -> Any:
    if name == "METHODS":
        list_methods()  # imports all methods, which registers them
        return _base.METHODS
    return _import_name(name)
