"""scikit-learn estimators around any method: X and y in, predictions with honest intervals out.

regressor = NeuBootsRegressor().fit(X, y)
low, high = regressor.predict_interval(X_new, level=0.95)
"""

from neuboots.estimators.classifier import NeuBootsClassifier
from neuboots.estimators.regressor import Forecast, NeuBootsRegressor

__all__ = ["Forecast", "NeuBootsClassifier", "NeuBootsRegressor"]
