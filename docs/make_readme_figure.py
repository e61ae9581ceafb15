"""Draw docs/images/quickstart.png, the figure of the README: `python docs/make_readme_figure.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

from neuboots import InfluenceBootstrap, NeuBoots, TrainingConfig, residual_std

COLORS = ["#0072b2", "#d55e00", "#009e73"]


def make_net(inputs: int, outputs: int) -> nn.Module:
    """An MLP with two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def plot_classification(figure: plt.Figure, left: plt.Axes, right: plt.Axes) -> None:
    """Class regions and predictive entropy of NeuBoots on three clusters."""
    torch.manual_seed(0)
    centers = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    y = torch.arange(600) % 3
    x = centers[y] + torch.randn(600, 2)
    predictor = NeuBoots.paper().fit(make_net(2, 3), (x, y), TrainingConfig(epochs=60, progress=False))
    axis = torch.linspace(-6, 6, 200)
    grid = torch.cartesian_prod(axis, axis)
    p = predictor.summarize(grid, 100)
    colors = torch.tensor([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in COLORS])
    left.imshow((p.probs @ colors).view(200, 200, 3).transpose(0, 1), origin="lower", extent=(-6, 6, -6, 6), alpha=0.55)
    entropy = p.entropy.view(200, 200).T
    image = right.imshow(entropy, origin="lower", extent=(-6, 6, -6, 6), cmap="magma")
    figure.colorbar(image, ax=right, fraction=0.046, pad=0.04)
    for panel, title in ((left, "class probabilities"), (right, "predictive entropy (nats)")):
        panel.scatter(*x.T, s=5, c=[COLORS[k] for k in y], edgecolors="white", linewidths=0.2)
        panel.set(title=title, xticks=[], yticks=[])


def plot_regression(panel: plt.Axes) -> None:
    """Confidence band and prediction interval of the influence bootstrap on a noisy sine."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 160)[:, None]
    y = torch.sin(4 * x) + 0.15 * torch.randn(len(x), 1)
    train, held_out = (x[::2], y[::2]), (x[1::2], y[1::2])
    config = TrainingConfig(epochs=300, batch_size=40, progress=False)
    predictor = InfluenceBootstrap(loss=nn.MSELoss(), layers="all").fit(make_net(1, 1), train, config)
    grid = torch.linspace(-1.1, 1.1, 300)[:, None]
    p = predictor.predict(grid, 200)
    sigma = residual_std(predictor, *held_out)
    for (low, high), color, label in (
        (p.prediction_interval(0.95, noise_std=sigma), "#cfe3f1", "95 % prediction interval"),
        (p.interval(0.95), "#7fb3d5", "95 % confidence band"),
    ):
        panel.fill_between(grid[:, 0], low[:, 0], high[:, 0], color=color, label=label, linewidth=0)
    panel.plot(grid, p.mean, color=COLORS[0], label="mean")
    panel.plot(grid, torch.sin(4 * grid), color="black", linestyle=":", label="true function")
    panel.scatter(x, y, s=6, color="0.3")
    panel.set(title="regression", xlim=(-1.1, 1.1), ylim=(-2.2, 2.2))
    panel.legend(frameon=False, fontsize=8, loc="upper left")


def main() -> None:
    """Draw the three panels."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    plot_classification(figure, axes[0], axes[1])
    plot_regression(axes[2])
    path = Path(__file__).parent / "images" / "quickstart.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
