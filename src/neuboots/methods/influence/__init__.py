"""The influence bootstrap: how a trained net would have moved under other weights of its data, to first order.

    θ(w) − θ̂ ≈ H⁻¹ Σᵢ (wᵢ − 1) Jᵢᵀ(−∂ℓᵢ/∂z),   H = Σᵢ Jᵢᵀ Λᵢ Jᵢ + λI
    f_w(x) = f̂(x) + J(x) (θ(w) − θ̂)

One plain training (or a pretrained net, untouched) and a pass over its data; then replicates are linear in the weights,
as in eq. 3.1, but follow the data. Λ is the Hessian of the loss in the outputs.

Jaeckel, The infinitesimal jackknife, Bell Laboratories 1972; Giordano, Stephenson, Liu, Jordan and Broderick, A Swiss
army infinitesimal jackknife, AISTATS 2019. Leverage: MacKinnon and White, Some heteroskedasticity-consistent covariance
matrix estimators with improved finite sample properties, Journal of Econometrics 1985 (HC3).
"""

from neuboots.methods.influence.method import InfluenceBootstrap
from neuboots.methods.influence.predictor import InfluencePredictor

__all__ = ["InfluenceBootstrap", "InfluencePredictor"]
