"""Regression with a confidence band and prediction intervals: writes regression_band.png (or the file you name).

    python examples/regression_band.py [out.png]

Needs the extra `all`.
"""

import sys
from functools import partial

import matplotlib
import torch
from matplotlib import pyplot as plt
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots import NeuBoots, TrainingConfig, residual_std
from neuboots.nets import MLP


def truth(x: Tensor) -> Tensor:
    return torch.sin(3 * x) + 0.5 * x


def main(out: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(400, 1, generator=rng) - 2
    y = truth(x) + 0.2 * torch.randn(400, 1, generator=rng)
    train, held_out = TensorDataset(x[:300], y[:300]), (x[300:], y[300:])

    config = TrainingConfig(epochs=100, batch_size=50, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    model = partial(MLP, 1, 1, widths=(128, 128), activation="silu")
    predictor = NeuBoots.regression().fit(model, train, config)

    grid = torch.linspace(-3, 3, 301)[:, None]
    curve = predictor.predict(grid, 500)
    band = curve.interval(0.95)
    noise = residual_std(predictor, *held_out)
    around = curve.prediction_interval(0.95, noise_std=noise)

    covers = (band[0] <= truth(grid)) & (truth(grid) <= band[1])
    inside = covers[(grid >= -2) & (grid <= 2)].float().mean()
    print(f"noise: {float(noise):.3f} estimated, 0.2 true")
    print(f"the band covers the true function at {float(inside):.0%} of x in [-2, 2], the range of the data")

    matplotlib.use("Agg")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.fill_between(grid[:, 0], *(edge[:, 0] for edge in around), alpha=0.2, label="95 % prediction interval")
    axes.fill_between(grid[:, 0], *(edge[:, 0] for edge in band), alpha=0.5, label="95 % confidence band")
    axes.plot(grid, curve.mean, label="mean")
    axes.plot(grid, truth(grid), "k--", label="truth")
    axes.plot(x[:300], y[:300], "k.", markersize=2, label="training points")
    axes.legend()
    figure.savefig(out, dpi=120)
    print(f"plot: {out}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "regression_band.png")
