"""One file a method; each is a frozen dataclass of options whose `fit` ends in a Predictor."""

from neuboots.methods.adversarial_ensemble import AdversarialEnsemble
from neuboots.methods.amortized_bootstrap import AmortizedBootstrap, AmortizedBootstrapPredictor
from neuboots.methods.batch_ensemble import BatchEnsemble, BatchEnsemblePredictor
from neuboots.methods.bayesian_bootstrap import BayesianBootstrap
from neuboots.methods.deep_ensemble import DeepEnsemble
from neuboots.methods.dispersion import (
    CalibratedNeuBoots,
    CalibratedNeuBootsPredictor,
    Dispersion,
    calibrate_dispersion,
)
from neuboots.methods.gaussian_process import GaussianProcess, GaussianProcessPredictor
from neuboots.methods.gbs import GBS, GBSPredictor
from neuboots.methods.influence import InfluenceBootstrap, InfluencePredictor
from neuboots.methods.laplace import Laplace, LaplacePredictor
from neuboots.methods.lp_bnn import LPBNN, LPBNNPredictor
from neuboots.methods.mc_dropout import MCDropout, MCDropoutPredictor
from neuboots.methods.members import MembersPredictor
from neuboots.methods.mimo import MIMO, MIMOPredictor
from neuboots.methods.neuboots import NeuBoots, NeuBootsPredictor
from neuboots.methods.plain import Plain, PlainPredictor
from neuboots.methods.registry import METHODS, WRAPPERS, Entry, find, register
from neuboots.methods.scaling import ScaledPredictor, scale_std, scale_temperature
from neuboots.methods.sparse_gp import SparseGP, SparseGPPredictor
from neuboots.methods.standard_bootstrap import StandardBootstrap
from neuboots.methods.swag import SWAG, SWAGPredictor

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
register(
    Entry(
        "standard-bootstrap",
        StandardBootstrap,
        MembersPredictor,
        "K nets on data drawn with replacement",
        members=True,
        train_cost="O(LK)",
        reference="Efron, Annals of Statistics 1979",
    )
)
register(
    Entry(
        "bayesian-bootstrap",
        BayesianBootstrap,
        MembersPredictor,
        "K nets on data under random (Dirichlet) weights",
        members=True,
        train_cost="O(LK)",
        reference="Rubin, Annals of Statistics 1981; Newton and Raftery, JRSS B 1994",
    )
)
register(
    Entry(
        "deep-ensemble",
        DeepEnsemble,
        MembersPredictor,
        "K nets from other first weights and in another order of the data",
        members=True,
        train_cost="O(LK)",
        reference="Lakshminarayanan et al., NeurIPS 2017; Ashukha et al., ICLR 2020",
    )
)
register(
    Entry(
        "deep-ensemble-original",
        AdversarialEnsemble,
        MembersPredictor,
        "K nets with a proper scoring rule and adversarial training",
        members=True,
        train_cost="O(2LK)",
        reference="Lakshminarayanan et al., NeurIPS 2017",
    )
)
register(
    Entry(
        "gbs",
        GBS,
        GBSPredictor,
        "one net with the bootstrap weights as an input of every layer",
        reference="Shin, Wang and Liu, arXiv 2006.00767, 2020",
    )
)
register(
    Entry(
        "amortized-bootstrap",
        AmortizedBootstrap,
        AmortizedBootstrapPredictor,
        "a net that generates the parameters of nets, trained on K resampled data sets",
        train_cost="O(LK)",
        reference="Nalisnick and Smyth, ICML workshop on implicit models, 2017",
    )
)
register(
    Entry(
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
    Entry(
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
    Entry(
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
    Entry(
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
    Entry(
        "lp-bnn",
        LPBNN,
        LPBNNPredictor,
        "BatchEnsemble with factors drawn from a variational autoencoder in each layer",
        train_cost="O(LK)",
        reference="Franchi, Bursuc, Aldea, Dubuisson and Bloch, arXiv:2012.02818, 2020",
    )
)
register(
    Entry(
        "mc-dropout",
        MCDropout,
        MCDropoutPredictor,
        "one net with dropout that stays on: B thinned nets",
        predict_cost="O(LK); O(L + K) before the head only",
        reference="Gal and Ghahramani, ICML 2016",
    )
)
register(
    Entry(
        "laplace",
        Laplace,
        LaplacePredictor,
        "one net with a Gaussian over its head: B heads from one pass",
        predict_cost="O(L + K)",
        reference="MacKay, Neural Computation 1992; Daxberger et al., NeurIPS 2021",
    )
)
register(
    Entry(
        "influence",
        InfluenceBootstrap,
        InfluencePredictor,  # type: ignore[type-abstract]  # it restores one of its two forms
        "one net, and how other weights of its data would have moved it, to first order: B nets from one pass",
        predict_cost="O(L + K)",
        reference="Jaeckel, Bell Laboratories 1972; Giordano, Stephenson, Liu, Jordan and Broderick, AISTATS 2019",
    )
)
register(
    Entry(
        "swag",
        SWAG,
        SWAGPredictor,
        "one net with a Gaussian over all its weights, fitted to the last iterates: B nets",
        reference="Maddox et al., NeurIPS 2019",
    )
)
register(
    Entry(
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
    "GBS",
    "LPBNN",
    "METHODS",
    "MIMO",
    "SWAG",
    "WRAPPERS",
    "AdversarialEnsemble",
    "AmortizedBootstrap",
    "AmortizedBootstrapPredictor",
    "BatchEnsemble",
    "BatchEnsemblePredictor",
    "BayesianBootstrap",
    "CalibratedNeuBoots",
    "CalibratedNeuBootsPredictor",
    "DeepEnsemble",
    "Dispersion",
    "Entry",
    "GBSPredictor",
    "GaussianProcess",
    "GaussianProcessPredictor",
    "InfluenceBootstrap",
    "InfluencePredictor",
    "LPBNNPredictor",
    "Laplace",
    "LaplacePredictor",
    "MCDropout",
    "MCDropoutPredictor",
    "MIMOPredictor",
    "MembersPredictor",
    "NeuBoots",
    "NeuBootsPredictor",
    "Plain",
    "PlainPredictor",
    "SWAGPredictor",
    "ScaledPredictor",
    "SparseGP",
    "SparseGPPredictor",
    "StandardBootstrap",
    "calibrate_dispersion",
    "find",
    "register",
    "scale_std",
    "scale_temperature",
]
