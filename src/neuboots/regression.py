"""Regression: the noise around the regression function, which no number of replicates removes.

y = f(x) + ε,   ε ~ (0, σ²)
"""

from typing import Any

import torch
from torch import Tensor

from neuboots.prediction import Moments, Prediction, Predictor


def split_gaussian(prediction: Prediction) -> tuple[Prediction, Tensor]:
    """A Gaussian head's outputs (μ₁…μ_k, log σ²₁…log σ²_k) as a Prediction of μ and the noise std σ: (N, k, *).

    σ² is the mean over replicates of exp(log σ²).

    >>> mean, noise = split_gaussian(Prediction(torch.zeros(3, 5, 2)))
    >>> mean.samples.shape, noise[0].tolist()
    (torch.Size([3, 5, 1]), [1.0])
    """
    outputs = prediction.samples.shape[2]
    if outputs % 2:
        raise ValueError(f"got {outputs} outputs; expected an even number: k means, then k logarithms of variances")
    k = outputs // 2
    means, log_variances = torch.split(prediction.samples, k, dim=2)
    moments = prediction.moments
    if moments is not None:
        moments = Moments(moments.mean[:, :k], moments.std[:, :k])
    return Prediction(means, moments), log_variances.exp().mean(0).sqrt()


def residual_std(predictor: Predictor, x: Any, y: Tensor) -> Tensor:
    """σ̂ = √(mean (y − E f(x))²), one for each output: (C,). Use data that the net was not trained on."""
    if y.numel() == 0:
        raise ValueError("got no targets; expected at least one held-out point")
    mean = predictor.summarize(x, 100).mean
    if y.shape[:1] != mean.shape[:1] or y.squeeze().shape != mean.squeeze().shape:
        raise ValueError(f"got targets of shape {tuple(y.shape)}; expected {tuple(mean.shape)}, as the net's outputs")
    squares = (y.reshape(mean.shape).to(mean) - mean).square()
    return squares.movedim(1, -1).flatten(0, -2).mean(0).sqrt()
