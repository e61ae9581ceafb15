"""Random crops, flips and cutout, compared with torch and kornia."""

import math
import random

import numpy as np
import pytest
import torch
from _reference import standard_errors
from torch import Tensor
from torch.nn import functional as F

from neuboots._validation import ArgumentError
from neuboots.data.augment import CropFlip, CropFlipCutout


def numbered(*shape: int) -> Tensor:
    """Every pixel has a number of its own, from 1 on: where it came from can be read off."""
    return torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).view(1, 1, *shape)


def found(crop: Tensor, H: int, W: int) -> tuple[int, int, bool]:
    """Where a crop (h, w) of numbered pixels begins, and whether it is mirrored: its first two pixels tell."""
    rows, columns = (crop > 0).nonzero().unbind(1)
    row, column = int(rows[0]), int(columns[0])
    r, c = divmod(int(crop[row, column]) - 1, W)
    mirrored = int(crop[row, column + 1]) < int(crop[row, column])
    return r - row, c - (crop.shape[1] - 1 - column if mirrored else column), mirrored


def within(counts: Tensor, shares: Tensor) -> bool:
    """Counts are those of draws with these chances, within standard errors."""
    n = counts.sum()
    errors = (n * shares * (1 - shares)).sqrt()
    return bool(((counts - n * shares).abs() <= standard_errors(counts.numel()) * errors).all())


def test_crop_and_flip_are_exact_against_kornia() -> None:
    from kornia.geometry.transform import crop_by_indices, hflip

    H, W, h, w, pad = 9, 7, 8, 6, 3
    both = torch.cat([numbered(H, W), torch.rand(1, 2, H, W, dtype=torch.float64)], 1).repeat(40, 1, 1, 1)
    both[:, 1:] = torch.rand(40, 2, H, W, dtype=torch.float64)
    x, y = CropFlipCutout((h, w), padding=pad)(both, torch.arange(40))
    assert y.tolist() == list(range(40))
    assert x.dtype == torch.float64
    flips = 0
    for image, crop in zip(both, x, strict=True):
        top, left, mirrored = found(crop[0], H, W)
        flips += mirrored
        x0, y0 = left + pad, top + pad
        corners = torch.tensor([[[x0, y0], [x0 + w - 1, y0], [x0 + w - 1, y0 + h - 1], [x0, y0 + h - 1]]])
        theirs = crop_by_indices(F.pad(image[None], [pad] * 4), corners.float())
        assert torch.equal(crop[None], hflip(theirs) if mirrored else theirs)
    assert 0 < flips < 40


def test_positions_and_flips_are_uniform_and_independent() -> None:
    H = W = 6
    pad, n = 2, 8_000
    x, _ = CropFlipCutout((H, W), padding=pad)(numbered(H, W).expand(n, -1, -1, -1), torch.zeros(n))
    places = torch.zeros(2 * pad + 1, 2 * pad + 1, 2)
    for crop in x[:, 0]:
        top, left, mirrored = found(crop, H, W)
        places[top + pad, left + pad, int(mirrored)] += 1
    assert within(places, torch.full_like(places, 1 / places.numel()))


def test_without_options_it_changes_nothing() -> None:
    x = torch.rand(5, 3, 8, 8)
    assert torch.equal(CropFlipCutout((8, 8), padding=0, flip=False)(x, torch.zeros(5))[0], x)
    same, labels = CropFlip((8, 8), flips=())(x, torch.arange(5))
    assert torch.equal(same, x)
    assert labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("side", [1, 2, 3, 4, 16])
def test_cutout_is_square_around_any_pixel_cut_off_at_border(side: int) -> None:
    h, w, n, fill = 5, 6, 6_000, (2.0, 3.0)
    x, _ = CropFlipCutout((h, w), padding=0, flip=False, cutout=side, fill=fill)(torch.rand(n, 2, h, w), torch.zeros(n))
    cut = x > 1
    assert torch.equal(cut[:, 0], cut[:, 1])
    assert bool((x[:, 0][cut[:, 0]] == 2).all())
    assert bool((x[:, 1][cut[:, 1]] == 3).all())
    covering = torch.zeros(h, w, dtype=torch.float64)  # of how many centres the square covers each pixel
    shapes = set()
    for row in range(h):
        for column in range(w):
            square = torch.zeros(h, w, dtype=torch.bool)
            top, left = row - side // 2, column - side // 2
            square[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = True
            covering += square
            shapes.add(tuple(square.flatten().tolist()))
    assert {tuple(mask.flatten().tolist()) for mask in cut[:, 0]} == shapes
    chance = covering / (h * w)
    errors = (n * chance * (1 - chance)).sqrt()
    assert bool(((cut[:, 0].sum(0) - n * chance).abs() <= standard_errors(h * w) * errors + 1e-9).all())


def test_random_state_of_torch_governs_it_and_no_other_is_touched() -> None:
    x, masks = torch.rand(16, 3, 12, 12), torch.randint(3, (16, 12, 12))
    for augment, y in [
        (CropFlipCutout((12, 12), cutout=4), masks[:, 0, 0]),
        (CropFlip((8, 8), scale=(0.5, 2.0)), masks),
    ]:
        python, numpy = random.getstate(), np.random.get_state()[1].copy()
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(augment(x, y)[0])
        assert random.getstate() == python
        assert bool((np.random.get_state()[1] == numpy).all())
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])
        one = augment(x[:1].expand(16, -1, -1, -1), y[:1].expand(16, *y.shape[1:]))[0]
        assert len({image.numpy().tobytes() for image in one}) > 8  # every image of a batch has draws of its own


@pytest.mark.parametrize("shape", [(14,), (13, 17), (9, 8, 11)])
@pytest.mark.parametrize("larger", [0.6, 1.7])
def test_masks_move_with_their_images(shape: tuple[int, ...], larger: float) -> None:
    """Each mask counts its image's pixels: without resizing, the pair stays a pair, pixel by pixel."""
    x = torch.rand(30, 1, *shape) + 1
    masks = (x[:, 0] * 10_000).long()
    size = tuple(max(1, round(larger * s)) for s in shape)
    new, moved = CropFlip(size, flips=tuple(range(len(shape))), fill=(-1.0,), ignore_index=-7)(x, masks)
    assert new.shape == (30, 1, *size)
    assert moved.shape == (30, *size)
    inside = moved != -7
    assert torch.equal(inside, new[:, 0] != -1)
    assert torch.equal(moved[inside], (new[:, 0][inside] * 10_000).long())
    assert inside.flatten(1).sum(1).unique().tolist() == [math.prod(map(min, shape, size))]


def test_flips_go_along_named_axes_alone() -> None:
    n, shape = 1_500, (2, 3, 4)
    x = numbered(*shape).expand(n, -1, -1, -1, -1)
    new, _ = CropFlip(shape, flips=(0, -1))(x, torch.zeros(n, *shape, dtype=torch.int64))
    counts = torch.zeros(4)
    for k, axes in enumerate([[], [0], [2], [0, 2]]):
        image = numbered(*shape)[0, 0].flip(axes)
        counts[k] = (new[:, 0] == image).flatten(1).all(1).sum()
    assert int(counts.sum()) == n
    assert within(counts, torch.full((4,), 0.25))


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.0, 1.3, 2.0])
def test_resizing_is_torchs_own(factor: float) -> None:
    x, masks = torch.rand(1, 3, 20, 14, dtype=torch.float64), torch.randint(9, (1, 20, 14))
    size = (round(20 * factor), round(14 * factor))
    new, moved = CropFlip(size, scale=(factor, factor), flips=())(x, masks)
    assert torch.allclose(new, F.interpolate(x, size, mode="bilinear", align_corners=False), rtol=0, atol=1e-12)
    nearest = F.interpolate(masks[:, None].double(), size, mode="nearest-exact")
    assert torch.equal(moved, nearest[:, 0].long())


def test_places_of_crops_and_of_smaller_images_are_uniform() -> None:
    n = 2_000
    x = numbered(6).expand(n, -1, -1)
    cropped, _ = CropFlip((4,), flips=())(x, torch.zeros(n, 6, dtype=torch.int64))
    starts = cropped[:, 0, 0].long().bincount(minlength=4)[1:].double()  # the pixel that came first: 1, 2 or 3
    assert within(starts, torch.full((3,), 1 / 3))
    framed, _ = CropFlip((8,), flips=())(x, torch.zeros(n, 6, dtype=torch.int64))
    starts = (framed[:, 0] == 1).int().argmax(1).bincount(minlength=3).double()
    assert within(starts, torch.full((3,), 1 / 3))


EACH = [
    CropFlipCutout((6, 6), cutout=2, fill=(0.1, 0.2, 0.3)),
    CropFlip((6, 6), scale=(0.5, 2.0), fill=(0.1, 0.2, 0.3), ignore_index=11),
]


@pytest.mark.parametrize("augment", EACH, ids=lambda augment: type(augment).__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_type_input_and_gradient(augment: CropFlip | CropFlipCutout, dtype: torch.dtype) -> None:
    x = torch.rand(4, 3, 6, 6).to(dtype).requires_grad_()
    before = x.detach().clone()
    new, y = augment(x, torch.arange(4))
    assert new.dtype == dtype
    assert not new.requires_grad
    assert torch.equal(x.detach(), before)
    assert y.tolist() == [0, 1, 2, 3]
    assert augment(x[:0], torch.zeros(0))[0].shape == (0, 3, 6, 6)
    strided = torch.rand(4, 6, 6, 3).movedim(-1, 1).to(dtype)  # channels last
    torch.manual_seed(3)
    first = augment(strided, torch.arange(4))[0]
    torch.manual_seed(3)
    assert torch.equal(first, augment(strided.contiguous(), torch.arange(4))[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: CropFlipCutout((8,)),
        lambda: CropFlipCutout(8),
        lambda: CropFlipCutout((8, 0)),
        lambda: CropFlipCutout((8, 8.5)),
        lambda: CropFlipCutout((8, 8), padding=-1),
        lambda: CropFlipCutout((8, 8), cutout=-2),
        lambda: CropFlip((8, 8), scale=(2.0, 0.5)),
        lambda: CropFlip((8, 8), scale=(0.0, 1.0)),
        lambda: CropFlip((8, 8), flips=(2,)),
        lambda: CropFlip((8, 8), flips=(-3,)),
        lambda: CropFlip((8, 8, 8, 8)),
    ],
)
def test_options_are_rejected(make: object) -> None:
    with pytest.raises(ArgumentError):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("augment", "x", "y"),
    [
        (EACH[0], torch.rand(2, 3, 6), torch.zeros(2)),
        (EACH[0], torch.zeros(2, 3, 6, 6, dtype=torch.uint8), torch.zeros(2)),
        (EACH[0], torch.rand(2, 3, 6, 6), torch.zeros(3)),
        (EACH[0], torch.rand(2, 3, 6, 6), torch.zeros(2, 6, 6)),
        (EACH[0], torch.rand(2, 1, 6, 6), torch.zeros(2)),
        (CropFlipCutout((16, 16)), torch.rand(2, 1, 6, 6), torch.zeros(2)),
        (EACH[1], torch.rand(2, 3, 6, 6), torch.zeros(2, 6, 5)),
        (EACH[1], torch.rand(2, 3, 6, 0), torch.zeros(2, 6, 0)),
    ],
)
def test_inputs_that_do_not_match(augment: CropFlip | CropFlipCutout, x: Tensor, y: Tensor) -> None:
    with pytest.raises(ArgumentError):
        augment(x, y)
