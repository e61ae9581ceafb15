"""NeuBoots in your own training loop: three lines more than plain PyTorch.

python examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from neuboots import NeuBoots
from neuboots.loading import IndexedDataset
from neuboots.losses import weighted_mean
from neuboots.methods import NeuBootsPredictor


def moons(n: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two interleaved half circles with noise."""
    y = torch.arange(n) % 2
    angle = torch.pi * torch.rand(n, generator=rng)
    x = torch.stack([angle.cos() + y, angle.sin() * (1 - 2 * y) + 0.5 * y], 1)
    return x + 0.15 * torch.randn(n, 2, generator=rng), y


def main() -> None:
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    x, y = moons(1000, rng)
    data = TensorDataset(x, y)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    method = NeuBoots()
    generator = method.make_generator(net)
    schedule = method.make_schedule(generator, data)

    optimizer = torch.optim.AdamW(generator.parameters(), lr=3e-3)
    loader = DataLoader(IndexedDataset(data), batch_size=100, shuffle=True)
    for epoch in range(30):
        weights = schedule.at_epoch(epoch)  # 1: the draws of this epoch
        for inputs, labels, index in loader:
            alpha, w = weights(index)  # 2: α for the net, w for the loss
            losses = F.cross_entropy(generator(inputs, alpha), labels, reduction="none")
            loss = weighted_mean(losses, w)  # 3: the mean of wᵢ ℓᵢ
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    predictor = NeuBootsPredictor(generator, method.weight_distribution)
    test_x, test_y = moons(1000, rng)
    p = predictor.predict(test_x, 100)
    print(f"test error {float((p.labels != test_y).float().mean()):.1%}")
    right = p.labels == test_y
    for name, rows in {"right": right, "wrong": ~right}.items():
        print(f"mean entropy where {name}: {float(p.entropy[rows].mean()):.3f} nats, {int(rows.sum())} points")


if __name__ == "__main__":
    main()
