"""Small data sets for the smallest scale, made from what scikit-learn ships: no file, no download.

They stand in for the real sets so that every study can be run anywhere in seconds. What is measured on them says that
the code works, and nothing about the methods.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, draw_uniform
from neuboots.data import DatasetBundle, LazyDataset, Vocabulary, load_dataset
from neuboots.data.corruptions import rotate
from neuboots.data.dataset import TensorSource

VOID = 255


def rotated_digits(seed: int = 0, **options: Any) -> DatasetBundle:
    """Digits, each turned by an angle of its own."""
    upright = load_dataset("digits", seed=seed, **options)

    def turned(part: Dataset[Any]) -> LazyDataset:
        x, y = _tensors(part)
        angles = 360.0 * _uniforms(len(x), 1, seed)[:, 0]
        low = x.amin()  # the colour of paper, after normalisation
        span = (x.amax() - low).clamp(min=1e-6)
        return LazyDataset(TensorSource(rotate((x - low) / span, angles) * span + low, y))

    return replace(
        upright,
        name="toy/rotated_digits",
        train=turned(upright.train),
        validation=None if upright.validation is None else turned(upright.validation),
        test=turned(upright.test or upright.train),
        augmentation=None,
    )


def toy_masks(seed: int = 0, size: int = 32) -> DatasetBundle:
    """Digits of size × size pixels with noise; each pixel is paper, pale ink or dark ink, and void at the rim."""
    plain = load_dataset("digits", seed=seed)

    def masked(part: Dataset[Any], name: int) -> LazyDataset:
        x, _ = _tensors(part)
        x = interpolate(x, size=(size, size), mode="bilinear")[:120]
        labels = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        labels[:, 0] = VOID
        return LazyDataset(TensorSource(x + _uniforms(len(x), size * size, seed + name).view(x.shape) - 0.5, labels))

    return DatasetBundle(
        name="toy/masks",
        task="segmentation",
        train=masked(plain.train, 0),
        validation=None,
        test=masked(plain.test or plain.train, 1),
        channels=1,
        classes=("paper", "pale", "dark"),
        ignore_index=VOID,
    )


def toy_volumes(seed: int = 0, size: int = 16, n: int = 24) -> DatasetBundle:
    """Volumes of size³ voxels with noise; each holds a ball with a core: background, shell and core."""
    draws = _uniforms(n, 4, seed)
    grid = torch.stack(torch.meshgrid(*[torch.arange(size, dtype=torch.float32)] * 3, indexing="ij"))  # (3, D, H, W)
    centre = size * (0.35 + 0.3 * draws[:, :3]).view(n, 3, 1, 1, 1)
    distance = (grid - centre).norm(dim=1)  # (n, D, H, W)
    radius = size * (0.2 + 0.1 * draws[:, 3]).view(n, 1, 1, 1)
    labels = (distance < radius).long() + (distance < radius / 2).long()
    x = labels[:, None] + _uniforms(n, size**3, seed + 1).view(n, 1, size, size, size) - 0.5
    every = LazyDataset(TensorSource(x, labels))
    return DatasetBundle(
        name="toy/volumes",
        task="segmentation",
        train=every.take(range(n - n // 3)),
        validation=None,
        test=every.take(range(n - n // 3, n)),
        channels=1,
        classes=("background", "shell", "core"),
        ignore_index=VOID,
    )


def toy_reviews(seed: int = 0, n: int = 240) -> DatasetBundle:
    """Made-up opinions of four words, of which the third tells the class; one in eight says the opposite."""
    good, bad = ("good", "fine", "great", "clever"), ("bad", "dull", "poor", "clumsy")
    things, ends = ("film", "plot", "cast", "score"), ("indeed", "again", "throughout", "today")
    draws = _uniforms(n, 4, seed)
    labels = (draws[:, 0] > 0.5).long()
    texts = [
        f"the {things[int(4 * a)]} {(bad, good)[int(label)][int(4 * b)]} {ends[int(4 * c)]}"
        for label, (_, a, b, c) in zip(labels, draws.tolist(), strict=True)
    ]
    vocabulary = Vocabulary.from_texts(texts, min_count=1, length=8)
    flipped = labels ^ (draws[:, 1] < 0.125).long()
    every = LazyDataset(TensorSource(torch.stack([vocabulary.encode(text) for text in texts]), flipped))
    return DatasetBundle(
        name="toy/reviews",
        task="classification",
        train=every.take(range(n // 2)),
        validation=every.take(range(n // 2, 3 * n // 4)),
        test=every.take(range(3 * n // 4, n)),
        channels=vocabulary.size,
        classes=("negative", "positive"),
        vocabulary=vocabulary,
    )


TOY_DATASETS: dict[str, Callable[..., DatasetBundle]] = {
    "toy/rotated_digits": rotated_digits,
    "toy/masks": toy_masks,
    "toy/volumes": toy_volumes,
    "toy/reviews": toy_reviews,
}


def _tensors(part: Any) -> tuple[Tensor, Tensor]:
    """All rows of a small part: (n, C, *) and (n, …)."""
    xs, ys = zip(*part.__getitems__(range(len(part))), strict=True)
    return torch.stack(xs), torch.stack(ys)


def _uniforms(n: int, size: int, seed: int) -> Tensor:
    """(n, size) draws in [0, 1), named by the row."""
    return draw_uniform(derive_keys(torch.arange(n), seed, "shipped")[:, None], torch.arange(size)).float()
