"""Baselines that only the paper's comparison needs: importing this package registers them as methods."""

from neuboots_paper.baselines.adversarial_ensemble import AdversarialDeepEnsemble
from neuboots_paper.baselines.amortized_bootstrap import AmortizedBootstrap, AmortizedBootstrapPredictor
from neuboots_paper.baselines.gbs import GBS, GBSPredictor
from neuboots_paper.baselines.lp_bnn import LPBNN, LPBNNPredictor

__all__ = [
    "GBS",
    "LPBNN",
    "AdversarialDeepEnsemble",
    "AmortizedBootstrap",
    "AmortizedBootstrapPredictor",
    "GBSPredictor",
    "LPBNNPredictor",
]
