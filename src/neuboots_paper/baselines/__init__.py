"""Baselines that only the paper's comparison needs: importing this package registers them as methods."""

from neuboots.methods import EnsemblePredictor, MethodEntry, register
from neuboots_paper.baselines.adversarial_ensemble import AdversarialDeepEnsemble
from neuboots_paper.baselines.amortized_bootstrap import AmortizedBootstrap, AmortizedBootstrapPredictor
from neuboots_paper.baselines.gbs import GBS, GBSPredictor
from neuboots_paper.baselines.lp_bnn import LPBNN, LPBNNPredictor

register(
    MethodEntry(
        "deep-ensemble-original",
        AdversarialDeepEnsemble,
        EnsemblePredictor,
        "K nets with a proper scoring rule and adversarial training",
        members=True,
        train_cost="O(2LK)",
        reference="Lakshminarayanan et al., NeurIPS 2017",
    )
)
register(
    MethodEntry(
        "gbs",
        GBS,
        GBSPredictor,
        "one net with the bootstrap weights as an input of every layer",
        reference="Shin, Wang and Liu, arXiv 2006.00767, 2020",
    )
)
register(
    MethodEntry(
        "amortized-bootstrap",
        AmortizedBootstrap,
        AmortizedBootstrapPredictor,
        "a net that generates the parameters of nets, trained on K resampled data sets",
        train_cost="O(LK)",
        reference="Nalisnick and Smyth, ICML workshop on implicit models, 2017",
    )
)
register(
    MethodEntry(
        "lp-bnn",
        LPBNN,
        LPBNNPredictor,
        "BatchEnsemble with factors drawn from a variational autoencoder in each layer",
        train_cost="O(LK)",
        reference="Franchi, Bursuc, Aldea, Dubuisson and Bloch, arXiv:2012.02818, 2020",
    )
)

__all__ = [
    "GBS",
    "LPBNN",
    "AdversarialDeepEnsemble",
    "AmortizedBootstrap",
    "AmortizedBootstrapPredictor",
    "GBSPredictor",
    "LPBNNPredictor",
]
