"""One file a method; each is a frozen dataclass of options whose `fit` ends in a Predictor."""

from neuboots.methods._base import METHODS, WRAPPERS, MethodEntry, find_method, register
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
from neuboots.posthoc import ScaledPredictor, scale_std, scale_temperature

register(
    MethodEntry(
        "plain",
        Deterministic,
        DeterministicPredictor,
        "the net itself: B equal samples",
        random=False,
        predict_cost="O(L)",
    )
)
register(
    MethodEntry(
        "neuboots",
        NeuBoots,
        NeuBootsPredictor,
        "one net whose head is re-weighted: B bootstrapped nets from one pass",
        predict_cost="O(L + K)",
        reference="Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021",
    )
)
register(
    MethodEntry(
        "standard-bootstrap",
        StandardBootstrap,
        EnsemblePredictor,
        "K nets on data drawn with replacement",
        members=True,
        train_cost="O(LK)",
        reference="Efron, Annals of Statistics 1979",
    )
)
register(
    MethodEntry(
        "bayesian-bootstrap",
        BayesianBootstrap,
        EnsemblePredictor,
        "K nets on data under random (Dirichlet) weights",
        members=True,
        train_cost="O(LK)",
        reference="Rubin, Annals of Statistics 1981; Newton and Raftery, JRSS B 1994",
    )
)
register(
    MethodEntry(
        "deep-ensemble",
        DeepEnsemble,
        EnsemblePredictor,
        "K nets from other first weights and in another order of the data",
        members=True,
        train_cost="O(LK)",
        reference="Lakshminarayanan et al., NeurIPS 2017; Ashukha et al., ICLR 2020",
    )
)
register(
    MethodEntry(
        "gp",
        GaussianProcess,
        GaussianProcessPredictor,
        "exact Gaussian process regression, for n up to 5,000",
        tasks=("regression",),
        needs_net=False,
        train_cost="O(n³)",
        predict_cost="O(n²)",
        reference="Rasmussen and Williams, MIT Press 2006; samples: Wilson et al., ICML 2020",
    )
)
register(
    MethodEntry(
        "sparse-gp",
        SparseGP,
        SparseGPPredictor,
        "Gaussian process regression through m learned points (FITC)",
        tasks=("regression",),
        needs_net=False,
        train_cost="O(nm²)",
        predict_cost="O(m²)",
        reference="Snelson and Ghahramani, NeurIPS 18, 2006",
    )
)
register(
    MethodEntry(
        "batch-ensemble",
        BatchEnsemble,
        BatchEnsemblePredictor,
        "K members of one net that differ by rank-one factors of its weights",
        members=True,
        train_cost="O(LK)",
        reference="Wen, Tran and Ba, ICLR 2020",
    )
)
register(
    MethodEntry(
        "mimo",
        MIMO,
        MIMOPredictor,
        "one net with K inputs and K heads: K subnetworks from one pass",
        members=True,
        train_cost="O(L + 2K)",
        predict_cost="O(L + 2K)",
        reference="Havasi et al., ICLR 2021",
    )
)
register(
    MethodEntry(
        "mc-dropout",
        MCDropout,
        MCDropoutPredictor,
        "one net with dropout that stays on: B thinned nets",
        predict_cost="O(LK); O(L + K) before the head only",
        reference="Gal and Ghahramani, ICML 2016",
    )
)
register(
    MethodEntry(
        "laplace",
        Laplace,
        LaplacePredictor,
        "one net with a Gaussian over its head: B heads from one pass",
        predict_cost="O(L + K)",
        reference="MacKay, Neural Computation 1992; Daxberger et al., NeurIPS 2021",
    )
)
register(
    MethodEntry(
        "influence",
        InfluenceBootstrap,
        InfluencePredictor,  # type: ignore[type-abstract]  # it restores one of its two forms
        "one net, and how other weights of its data would have moved it, to first order: B nets from one pass",
        predict_cost="O(L + K)",
        reference="Jaeckel, Bell Laboratories 1972; Giordano, Stephenson, Liu, Jordan and Broderick, AISTATS 2019",
    )
)
register(
    MethodEntry(
        "swag",
        SWAG,
        SWAGPredictor,
        "one net with a Gaussian over all its weights, fitted to the last iterates: B nets",
        reference="Maddox et al., NeurIPS 2019",
    )
)
register(
    MethodEntry(
        "calibrated-neuboots",
        CalibratedNeuBoots,
        CalibratedNeuBootsPredictor,
        "NeuBoots whose law has the dispersion of the influence bootstrap, or of true replicates",
        predict_cost="O(L + K)",
        reference="Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021",
    )
)

WRAPPERS["scaled"] = ScaledPredictor

__all__ = [
    "METHODS",
    "MIMO",
    "SWAG",
    "WRAPPERS",
    "AdversarialDeepEnsemble",
    "BatchEnsemble",
    "BatchEnsemblePredictor",
    "BayesianBootstrap",
    "CalibratedNeuBoots",
    "CalibratedNeuBootsPredictor",
    "DeepEnsemble",
    "Dispersion",
    "MethodEntry",
    "GaussianProcess",
    "GaussianProcessPredictor",
    "InfluenceBootstrap",
    "InfluencePredictor",
    "Laplace",
    "LaplacePredictor",
    "MCDropout",
    "MCDropoutPredictor",
    "MIMOPredictor",
    "EnsemblePredictor",
    "NeuBoots",
    "NeuBootsPredictor",
    "Deterministic",
    "DeterministicPredictor",
    "SWAGPredictor",
    "ScaledPredictor",
    "SparseGP",
    "SparseGPPredictor",
    "StandardBootstrap",
    "calibrate_dispersion",
    "find_method",
    "register",
    "scale_std",
    "scale_temperature",
]
