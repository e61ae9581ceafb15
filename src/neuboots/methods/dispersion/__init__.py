"""The dispersion of NeuBoots' law at prediction time, set so that its band is as wide as another one's.

    c:  mean over x of Var_α g(x, α) = mean over x of the other predictor's variance,   α ~ law of concentration c
    Var_α g(x, α) = (v_c − κ_c) Σ_s A_s(x)² + κ_c (Σ_s A_s(x))²,   A_s = what block s adds to the output

The paper takes c = 1. Nothing in eq. 3.1 says so: its band is multiplicative noise whose size falls with the number of
blocks S, that is, with the width of the net, while that of the bootstrap does not. One number sets the mean size right;
where the band is wide and where it is narrow stays as eq. 3.1 has it, and the correlation over x that is reported with
the number tells how far that is from the other predictor's.

The mean of the replicates stays. With the identity link it does not depend on c; with the exp link E exp(−α) does, and
α is shifted by what keeps it.
"""

from neuboots.methods.dispersion.calibration import CalibratedNeuBootsPredictor, Dispersion, calibrate_dispersion
from neuboots.methods.dispersion.method import CalibratedNeuBoots

__all__ = ["CalibratedNeuBoots", "CalibratedNeuBootsPredictor", "Dispersion", "calibrate_dispersion"]
