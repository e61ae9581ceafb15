"""Estimators with the interface of scikit-learn around any method, with calibrated probabilities and intervals.

regressor = NeuBootsRegressor().fit(X, y)
low, high = regressor.predict_interval(X_new, level=0.95)
"""

from neuboots.estimators.classifier import NeuBootsClassifier
from neuboots.estimators.regressor import Forecast, NeuBootsRegressor

__all__ = ["Forecast", "NeuBootsClassifier", "NeuBootsRegressor"]
