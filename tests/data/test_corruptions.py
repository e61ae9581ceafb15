"""Corruptions of images, compared with SciPy, Pillow and colorsys."""

import colorsys
import io

import numpy as np
import pytest
import scipy.ndimage
import torch
from _reference import standard_errors
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from neuboots._validation import ArgumentError
from neuboots.data.corruptions import CORRUPTIONS, ROTATION, CorruptedDataset, Corruption, rotate
from neuboots.data.dataset import Standardizer

LEVELS = [1, 2, 3, 4, 5]
NOISES = ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"]
ALL = list((CORRUPTIONS | ROTATION).values())


def pictures(channels: int = 3, size: int = 32, num: int = 60) -> Tensor:
    """Handwritten digits, enlarged, with a texture of single pixels: (num, channels, size, size) in [0, 1]."""
    small = torch.from_numpy(load_digits().images[: num * channels] / 16).float().view(num, channels, 8, 8)
    smooth = torch.nn.functional.interpolate(small, size=(size, size), mode="bilinear")
    texture = torch.rand(smooth.shape, generator=torch.Generator().manual_seed(0))
    return 0.7 * smooth.clamp(0, 1) + 0.2 * texture


@pytest.mark.parametrize("severity", LEVELS)
@pytest.mark.parametrize("name", NOISES)
def test_noise_has_moments_of_recipe(name: str, severity: int) -> None:
    """At x = ½, where next to nothing is clipped; 5 σ of the strongest noise are ½."""
    x = torch.full((40, 3, 32, 32), 0.5, dtype=torch.float64)
    level = CORRUPTIONS[name].levels[severity - 1]
    noise = (CORRUPTIONS[name](x, severity) - x).flatten().numpy()
    variance = {
        "gaussian_noise": level**2,
        "shot_noise": 0.5 / level,
        "impulse_noise": level / 4,  # ± ½ with probability `level`
        "speckle_noise": (0.5 * level) ** 2,
    }[name]
    comparisons = 2 * len(NOISES) * len(LEVELS)
    k = standard_errors(comparisons)
    assert abs(noise.mean()) < k * np.sqrt(variance / len(noise))
    error = np.sqrt(np.var((noise - noise.mean()) ** 2) / len(noise))  # of the sample variance
    assert abs(noise.var() - variance) < k * error


@pytest.mark.parametrize("severity", LEVELS)
def test_impulses_are_black_or_white_and_rest_is_untouched(severity: int) -> None:
    x = 0.25 + 0.5 * pictures()
    out = CORRUPTIONS["impulse_noise"](x, severity)
    changed = out != x
    assert set(out[changed].tolist()) == {0.0, 1.0}
    share, amount = float(changed.double().mean()), CORRUPTIONS["impulse_noise"].levels[severity - 1]
    assert abs(share - amount) < standard_errors(5) * np.sqrt(amount * (1 - amount) / x.numel())
    assert not (changed == changed[:, :1]).all(), "each channel is struck by itself"


@pytest.mark.parametrize("severity", LEVELS)
@pytest.mark.parametrize("channels", [1, 3])
def test_blur_is_scipys(channels: int, severity: int) -> None:
    """As scikit-image blurs: cut off at 4 σ, the border's value beyond it."""
    x = pictures(channels, 28, num=5).double()
    sigma = CORRUPTIONS["gaussian_blur"].levels[severity - 1]
    theirs = scipy.ndimage.gaussian_filter(x.numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4.0)
    np.testing.assert_allclose(CORRUPTIONS["gaussian_blur"](x, severity), theirs, atol=1e-12)


@pytest.mark.parametrize("severity", LEVELS)
def test_contrast_keeps_mean_of_each_channel(severity: int) -> None:
    x = pictures().double()
    out = CORRUPTIONS["contrast"](x, severity)
    factor = CORRUPTIONS["contrast"].levels[severity - 1]
    torch.testing.assert_close(out.mean((2, 3)), x.mean((2, 3)))
    torch.testing.assert_close(out.std((2, 3)), factor * x.std((2, 3)))


def by_colorsys(x: Tensor, severity: int, name: str) -> np.ndarray:
    """Pixel by pixel, by Python's own conversion."""
    level = CORRUPTIONS[name].levels[severity - 1]
    out = x.double().numpy().copy()
    for i, _, r, c in np.ndindex(len(x), 1, *x.shape[2:]):
        h, s, v = colorsys.rgb_to_hsv(*out[i, :, r, c])
        if name == "brightness":
            v = min(max(v + level, 0), 1)
        else:
            s = min(max(s * level[0] + level[1], 0), 1)
        out[i, :, r, c] = colorsys.hsv_to_rgb(h, s, v)
    return out


@pytest.mark.parametrize("severity", LEVELS)
@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_colors_change_in_hsv(name: str, severity: int) -> None:
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    x[0, :, :2] = 0  # black
    x[0, :, 2:4] = 0.6  # grey
    x[1, 1, :4] = 0  # pure colours
    x[1, :, 5] = 1  # white
    np.testing.assert_allclose(CORRUPTIONS[name](x, severity), by_colorsys(x, severity, name), atol=1e-12)


@pytest.mark.parametrize("severity", LEVELS)
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_pillows(channels: int, severity: int) -> None:
    x = pictures(channels, num=3)
    quality = CORRUPTIONS["jpeg"].levels[severity - 1]
    for image, out in zip(x, CORRUPTIONS["jpeg"](x, severity), strict=True):
        pixels = np.uint8(np.round(255 * image.numpy().transpose(1, 2, 0)))
        file = io.BytesIO()
        Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(file, "JPEG", quality=quality)
        theirs = np.asarray(Image.open(file)).reshape(32, 32, channels).transpose(2, 0, 1) / 255
        np.testing.assert_allclose(out, theirs, atol=1e-6)


@pytest.mark.parametrize("severity", LEVELS)
@pytest.mark.parametrize("shape", [(28, 28), (32, 32), (80, 80), (20, 33), (5, 1)])
def test_pixelate_is_pillows(shape: tuple[int, int], severity: int) -> None:
    x = torch.rand(2, 1, *shape, generator=torch.Generator().manual_seed(0))
    height, width = shape
    factor = CORRUPTIONS["pixelate"].levels[severity - 1]
    small = max(1, int(width * factor)), max(1, int(height * factor))
    for image, out in zip(x, CORRUPTIONS["pixelate"](x, severity), strict=True):
        whole = Image.fromarray(image[0].numpy())
        theirs = whole.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.BOX)
        np.testing.assert_allclose(out[0], np.asarray(theirs), atol=1e-6)


@pytest.mark.parametrize("degrees", [0, 15, -37.5, 90, 180, 300])
@pytest.mark.parametrize("shape", [(28, 28), (20, 33)])
def test_rotation_is_scipys(shape: tuple[int, int], degrees: float) -> None:
    x = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(0)).double()
    options = {"axes": (3, 2), "reshape": False, "order": 1, "mode": "grid-constant"}
    theirs = scipy.ndimage.rotate(x.numpy(), degrees, **options)
    np.testing.assert_allclose(rotate(x, degrees), theirs, atol=1e-9)


def test_each_image_may_have_its_own_angle() -> None:
    images = pictures(3, 20, 5)
    degrees = torch.tensor([0.0, 17.5, 90.0, -200.0, 359.0])
    together = rotate(images, degrees)
    alone = [rotate(image[None], float(angle))[0] for image, angle in zip(images, degrees, strict=True)]
    assert torch.equal(together, torch.stack(alone))
    assert rotate(images[:0], degrees[:0]).shape == (0, 3, 20, 20)
    for wrong in (degrees[:3], torch.tensor([1.0, 2.0, 3.0, 4.0, torch.nan]), float("nan")):
        with pytest.raises(ArgumentError):
            rotate(images, wrong)


@pytest.mark.parametrize("corruption", ALL, ids=lambda corruption: corruption.name)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_images_in_images_out(corruption: Corruption, shape: tuple[int, ...]) -> None:
    x = pictures(shape[0], shape[1], num=4)
    x[0], x[1] = 0.0, 1.0
    before, random_state = x.clone(), torch.get_rng_state()
    for severity in LEVELS:
        out = corruption(x, severity, seed=3)
        assert out.shape == x.shape
        assert out.dtype == x.dtype
        assert bool(((out >= 0) & (out <= 1)).all()), "NaN would fail too"
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert corruption(x[:0], 1).shape == (0, *shape)


@pytest.mark.parametrize("corruption", ALL, ids=lambda corruption: corruption.name)
def test_image_is_corrupted_by_its_name_alone(corruption: Corruption) -> None:
    """Whatever the batch around it, and the order."""
    x = pictures(num=6)
    out = corruption(x, 4, seed=7)
    order = torch.tensor([4, 0, 5])
    torch.testing.assert_close(corruption(x[order], 4, seed=7, index=order), out[order], rtol=0, atol=1e-6)
    assert torch.equal(corruption(x, 4, seed=7), out)


@pytest.mark.parametrize("name", ["shot_noise", "jpeg"])
def test_corrupted_data_set_is_corruption_of_whole(name: str) -> None:
    x, y = pictures(num=7), torch.arange(7)
    standardizer = Standardizer((0.5,) * x.shape[1], (0.5,) * x.shape[1])
    clean = TensorDataset(standardizer(x), y)
    data = CorruptedDataset(clean, CORRUPTIONS[name], 2, seed=5, standardizer=standardizer)
    batches = list(DataLoader(data, batch_size=3))
    torch.testing.assert_close(torch.cat([part for part, _ in batches]), 2 * CORRUPTIONS[name](x, 2, seed=5) - 1)
    assert torch.cat([labels for _, labels in batches]).tolist() == y.tolist()
    assert len(data) == len(list(iter(data))) == 7
    with pytest.raises(IndexError):
        data[-1]


@pytest.mark.parametrize(
    "images",
    [
        torch.rand(3, 32, 32),
        torch.rand(2, 4, 8, 8),
        np.zeros((1, 1, 8, 8)),
        torch.rand(2, 3, 0, 8),
        torch.zeros(1, 1, 8, 8, dtype=torch.uint8),
        2 * torch.ones(1, 1, 8, 8),
        torch.full((1, 1, 8, 8), float("nan")),
    ],
)
def test_invalid_images(images: Tensor) -> None:
    with pytest.raises(ArgumentError):
        CORRUPTIONS["jpeg"](images, 1)
    with pytest.raises(ArgumentError):
        rotate(images, 10)


def test_invalid_indices_and_seeds() -> None:
    indices, seeds = (torch.arange(2), torch.arange(3.0)), (0.5, "0", True, None)
    for options in (*({"index": index} for index in indices), *({"seed": seed} for seed in seeds)):
        with pytest.raises(ArgumentError):
            CORRUPTIONS["gaussian_noise"](pictures(num=3), 1, **options)


def test_invalid_data_set() -> None:
    data = TensorDataset(pictures(num=2), torch.arange(2))
    for severity, seed in ((6, 0), ("high", 0), (1, 0.5)):
        with pytest.raises(ArgumentError):
            CorruptedDataset(data, CORRUPTIONS["jpeg"], severity, seed=seed)[0]
    rows = [(Image.fromarray(np.zeros((8, 8), np.uint8)), 0)]
    with pytest.raises(TypeError):
        CorruptedDataset(rows, CORRUPTIONS["jpeg"], 1)[0]
