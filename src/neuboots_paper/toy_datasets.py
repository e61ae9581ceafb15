"""Toy datasets of the scale `smoke`, made from scikit-learn's data without files or downloads.

They replace the real datasets, so that every study can be tested anywhere in seconds; the results say nothing about the
methods.
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

IGNORE_INDEX = 255


def rotated_digits(seed: int = 0, **options: Any) -> DatasetBundle:
    """Digits, each rotated by a random angle."""
    upright = load_dataset("digits", seed=seed, **options)

    def rotate_split(split: Dataset[Any]) -> LazyDataset:
        x, y = _tensors(split)
        angles = 360.0 * _uniforms(len(x), 1, seed)[:, 0]
        low = x.amin()  # background after standardization
        span = (x.amax() - low).clamp(min=1e-6)
        return LazyDataset(TensorSource(rotate((x - low) / span, angles) * span + low, y))

    return replace(
        upright,
        name="toy/rotated_digits",
        train=rotate_split(upright.train),
        validation=None if upright.validation is None else rotate_split(upright.validation),
        test=rotate_split(upright.test or upright.train),
        augmentation=None,
    )


def toy_masks(seed: int = 0, size: int = 32) -> DatasetBundle:
    """Noisy digits of size × size pixels; each pixel is paper, pale or dark ink, and ignored in the first row."""
    plain = load_dataset("digits", seed=seed)

    def make_masks(split: Dataset[Any], offset: int) -> LazyDataset:
        x, _ = _tensors(split)
        x = interpolate(x, size=(size, size), mode="bilinear")[:120]
        labels = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
        labels[:, 0] = IGNORE_INDEX
        return LazyDataset(TensorSource(x + _uniforms(len(x), size * size, seed + offset).view(x.shape) - 0.5, labels))

    return DatasetBundle(
        name="toy/masks",
        task="segmentation",
        train=make_masks(plain.train, 0),
        validation=None,
        test=make_masks(plain.test or plain.train, 1),
        channels=1,
        classes=("paper", "pale", "dark"),
        ignore_index=IGNORE_INDEX,
    )


def toy_volumes(seed: int = 0, size: int = 16, n: int = 24) -> DatasetBundle:
    """Noisy volumes of size³ voxels with a ball each: background, shell and core."""
    draws = _uniforms(n, 4, seed)
    grid = torch.stack(torch.meshgrid(*[torch.arange(size, dtype=torch.float32)] * 3, indexing="ij"))  # (3, D, H, W)
    centre = size * (0.35 + 0.3 * draws[:, :3]).view(n, 3, 1, 1, 1)
    distance = (grid - centre).norm(dim=1)  # (n, D, H, W)
    radius = size * (0.2 + 0.1 * draws[:, 3]).view(n, 1, 1, 1)
    labels = (distance < radius).long() + (distance < radius / 2).long()
    x = labels[:, None] + _uniforms(n, size**3, seed + 1).view(n, 1, size, size, size) - 0.5
    rows = LazyDataset(TensorSource(x, labels))
    return DatasetBundle(
        name="toy/volumes",
        task="segmentation",
        train=rows.take(range(n - n // 3)),
        validation=None,
        test=rows.take(range(n - n // 3, n)),
        channels=1,
        classes=("background", "shell", "core"),
        ignore_index=IGNORE_INDEX,
    )


def toy_reviews(seed: int = 0, n: int = 240) -> DatasetBundle:
    """Synthetic reviews of four words, of which the third determines the class; one label in eight is flipped."""
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
    rows = LazyDataset(TensorSource(torch.stack([vocabulary.encode(text) for text in texts]), flipped))
    return DatasetBundle(
        name="toy/reviews",
        task="classification",
        train=rows.take(range(n // 2)),
        validation=rows.take(range(n // 2, 3 * n // 4)),
        test=rows.take(range(3 * n // 4, n)),
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


def _tensors(split: Any) -> tuple[Tensor, Tensor]:
    """All rows of a small split: (n, C, *) and (n, …)."""
    xs, ys = zip(*split.__getitems__(range(len(split))), strict=True)
    return torch.stack(xs), torch.stack(ys)


def _uniforms(n: int, size: int, seed: int) -> Tensor:
    """Uniform draws in [0, 1), keyed by the row: (n, size)."""
    return draw_uniform(derive_keys(torch.arange(n), seed, "shipped")[:, None], torch.arange(size)).float()
