"""Segmentation with a net that computes at half the resolution, upsamples and returns {"out": …}.

python examples/segmentation.py
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import NeuBoots, TrainingConfig

IGNORE_INDEX = 255  # label of pixels that are ignored


class HalfNet(nn.Module):
    """Convolutions, a 1×1 head at half the resolution, and bilinear upsampling after it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.head(self.body(x))
        return {"out": F.interpolate(z, size=x.shape[-2:], mode="bilinear", align_corners=False)}


def squares(n: int, rng: torch.Generator, size: int = 24) -> tuple[Tensor, Tensor]:
    """Noisy images of one bright square each; its first row and column are ignored."""
    corner = torch.randint(2, size - 10, (n, 2), generator=rng)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    down, right = rows - corner[:, :1, None], columns - corner[:, 1:, None]  # (n, size, size)
    labels = ((down >= 0) & (down < 8) & (right >= 0) & (right < 8)).long()
    x = labels[:, None] + 0.7 * torch.randn(n, 1, size, size, generator=rng)
    return x, labels.masked_fill((down == 0) | (right == 0), IGNORE_INDEX)


def main() -> None:
    rng = torch.Generator().manual_seed(0)
    config = TrainingConfig(epochs=10, batch_size=32, optimizer=partial(torch.optim.AdamW, lr=3e-3))
    method = NeuBoots(loss=nn.CrossEntropyLoss(ignore_index=IGNORE_INDEX))
    predictor = method.fit(HalfNet, TensorDataset(*squares(400, rng)), config)

    x, y = squares(100, rng)
    maps = predictor.summarize(x, 100)  # memory does not grow with the 100
    known = y != IGNORE_INDEX
    wrong = (maps.labels != y) & known
    print(f"probabilities {tuple(maps.probs.shape)}, entropy map {tuple(maps.entropy.shape)}")
    print(f"pixel error {float(wrong.sum() / known.sum()):.1%}")
    for name, where in {"right": known & ~wrong, "wrong": wrong}.items():
        print(f"mean mutual information where {name}: {float(maps.mutual_information[where].mean()):.5f} nats")


if __name__ == "__main__":
    main()
