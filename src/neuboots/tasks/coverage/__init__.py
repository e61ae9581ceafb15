"""Coverage: how often does a band of level 95 % hold the true regression function? The check of figure 2.

    coverage(x) = 1/R Σ_r 1[ low_r(x) ≤ f(x) ≤ high_r(x) ],   y = f(X) + ε,   R data sets drawn anew

Nobody knows f on real data; here it is ours. The band is that of the regression function f, not of a new y.
"""

from neuboots.tasks.coverage.check import coverage
from neuboots.tasks.coverage.result import Band, Coverage
from neuboots.tasks.coverage.truth import FUNCTIONS, Truth, gaussian, normal, uniform

__all__ = ["FUNCTIONS", "Band", "Coverage", "Truth", "coverage", "gaussian", "normal", "uniform"]
