"""One file a method; each is a frozen dataclass of options whose `fit` ends in a Predictor."""

from neuboots.methods.adversarial_ensemble import AdversarialEnsemble
from neuboots.methods.bayesian_bootstrap import BayesianBootstrap
from neuboots.methods.deep_ensemble import DeepEnsemble
from neuboots.methods.members import MembersPredictor
from neuboots.methods.neuboots import NeuBoots, NeuBootsPredictor
from neuboots.methods.plain import Plain, PlainPredictor
from neuboots.methods.registry import METHODS, Entry, find, register
from neuboots.methods.standard_bootstrap import StandardBootstrap

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
        train_cost="O(LK), twice",
        reference="Lakshminarayanan et al., NeurIPS 2017",
    )
)

__all__ = ["METHODS", "Entry", "NeuBoots", "NeuBootsPredictor", "Plain", "PlainPredictor", "find", "register"]
