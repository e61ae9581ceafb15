"""Label and uncertainty maps of images and volumes, by sliding windows, in memory that does not grow with B.

    p = 1/B Σ_b softmax f_b(x),   H(p),   H(p) − 1/B Σ_b H(p_b),   mean_c std_b f_b,c        at each pixel

Large images go through the net window by window. The values of a pixel come from the one window in which it is deepest,

    owner(p) = argmax_k depth_k(p),   depth_k(p) = min distance from p to a border of window k inside the image;

the rest of each window is context. So replicate b is one function of the image, at each pixel. A blend, the mean of a
pixel over the windows that contain it, would be another function, whose entropy and mutual information need the
replicates of all those windows at once.

If half the overlap is at least the net's receptive field to one side, and windows start on the grid of its strides, the
maps equal those of one pass over the whole image. If replicates drop single pixels, as MC dropout does by default,
masks depend on the position in the window: the distribution of the maps is the same, the draw another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from neuboots._validation import ArgumentError, check_fraction, check_int
from neuboots.evaluation._batching import check_predictor, exclusive_probs
from neuboots.head import check_inputs
from neuboots.prediction import Predictor, Summary
from neuboots.training import progress_bar

Window = int | Sequence[int] | None


# -- windows -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A window of an image, and the pixels that are taken from it.

    Attributes:
        window: Slices of the window.
        kept: Slices of the pixels that are taken from it, in the image.
        inner: The same pixels, in the window.
    """

    window: tuple[Any, ...]
    kept: tuple[Any, ...]
    inner: tuple[Any, ...]


def make_tiles(size: Sequence[int], window: Sequence[int], *, overlap: float) -> list[Tile]:
    """Cover an image with windows of one size; each pixel is taken from one of them.

    Args:
        size: Size of the image along each axis.
        window: Size of the window along each axis, at most that of the image.
        overlap: Minimum fraction of a window that neighbors share.

    Returns:
        The tiles.

    Example:
        >>> [(tile.window[0], tile.kept[0]) for tile in make_tiles((10,), (6,), overlap=0.3)]
        [(slice(0, 6, None), slice(0, 5, None)), (slice(4, 10, None), slice(5, 10, None))]
    """
    by_axis = [_make_spans(length, width, overlap=overlap) for length, width in zip(size, window, strict=True)]
    return [
        Tile(
            tuple(slice(start, start + width) for (start, _, _), width in zip(spans, window, strict=True)),
            tuple(slice(begin, end) for _, begin, end in spans),
            tuple(slice(begin - start, end - start) for start, begin, end in spans),
        )
        for spans in product(*by_axis)
    ]


def _make_spans(length: int, window: int, *, overlap: float) -> list[tuple[int, int, int]]:
    """Along one axis: the start of each window, and the begin and end of the pixels taken from it.

    The last window is moved back to end at the image's border. The step is rounded down to a multiple of the largest
    power of two that divides the window and is at most overlap and step, so that windows start on the grid of a net
    with strides if possible.

    >>> _make_spans(160, 64, overlap=0.25)
    [(0, 0, 56), (48, 56, 104), (96, 104, 160)]
    """
    shared = math.ceil(overlap * window - 1e-9)  # rounding adds no pixel
    step = max(1, window - shared)
    grid = window & -window  # the largest power of two that divides it
    while grid > max(1, min(shared, step)):
        grid //= 2
    step -= step % grid
    last = length - window
    starts = [*range(0, last, step), last]
    # Two windows are equally deep in the middle of their overlap; there the first one has the pixel.
    cuts = [(a + b + window - 1) // 2 + 1 for a, b in pairwise(starts)]
    return list(zip(starts, [0, *cuts], [*cuts, length], strict=True))


def clip_window(size: Sequence[int], window: int | Sequence[int], *, overlap: float) -> tuple[int, ...]:
    """Return the window's size along each axis, at most the image's.

    Args:
        size: Size of the image along each axis.
        window: One size for all axes, or one for each.
        overlap: Minimum fraction of a window that neighbors share, in [0, 1).

    Returns:
        The sizes.

    Raises:
        ArgumentError: If the window has another number of axes than the image, or the overlap is not in [0, 1).

    Example:
        >>> clip_window((100, 20), 64, overlap=0.25)
        (64, 20)
    """
    check_fraction("overlap", overlap, zero=True)
    widths = tuple(window) if isinstance(window, Sequence) else (window,) * len(size)
    if len(widths) != len(size):
        raise ArgumentError("window", window, f"one integer, or one for each of the {len(size)} axes of an image")
    return tuple(min(length, check_int("window", w, minimum=1)) for length, w in zip(size, widths, strict=True))


# -- maps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SegmentationMaps:
    """Predictive distribution of B replicates at each pixel, in single precision on the CPU.

    Entropy and mutual information are large where labels may be wrong. The standard deviation is that of the logits,
    which grows with their size: it is often largest where the net is most confident, and is no map of errors.

    Attributes:
        probs: Class probabilities: (N, C, *).
        entropy: Predictive entropy, in nats: (N, *).
        mutual_information: Mutual information of label and replicate, in nats: (N, *).
        std: Standard deviation of the outputs over replicates, averaged over the outputs: (N, *).
        num_samples: Number of replicates B.
        seed: Seed.
    """

    probs: Tensor
    entropy: Tensor
    mutual_information: Tensor
    std: Tensor
    num_samples: int
    seed: int

    @classmethod
    def from_summary(cls, summary: Summary, *, seed: int = 0, check_finite: bool = True) -> "SegmentationMaps":
        """Return the maps of a summary of images or volumes; pixels that are not finite raise an error, or are NaN."""
        entropy = summary.entropy.clamp_min(0)  # rounding may make it negative
        values = (exclusive_probs(summary), entropy, summary.mutual_information, summary.std.mean(1))
        probs, entropy, information, std = (value.to("cpu", torch.float32) for value in values)
        if not all(bool(torch.isfinite(value.sum())) for value in (entropy, information, std)):
            if check_finite:
                raise ArgumentError("predictor", "NaN or infinite outputs", "finite outputs")
            bad = ~(entropy + information + std).isfinite()
            probs, entropy = probs.masked_fill(bad[:, None], torch.nan), entropy.masked_fill(bad, torch.nan)
            information, std = information.masked_fill(bad, torch.nan), std.masked_fill(bad, torch.nan)
        return cls(probs, entropy, information, std, summary.num_samples, seed)

    @property
    def labels(self) -> Tensor:
        """Most probable class: (N, *); −1 where probabilities are NaN."""
        return self.probs.argmax(1).masked_fill(self.confidence.isnan(), -1)

    @property
    def confidence(self) -> Tensor:
        """Largest probability: (N, *)."""
        return self.probs.amax(1)

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return self.probs.shape[1]

    @property
    def size(self) -> tuple[int, ...]:
        """Number of pixels along each axis."""
        return tuple(self.entropy.shape[1:])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Probabilities, entropy, mutual information and standard deviation."""
        return self.probs, self.entropy, self.mutual_information, self.std


def predict_segmentation(
    predictor: Predictor,
    x: Tensor,
    num_samples: int = 100,
    *,
    seed: int = 0,
    window: Window = None,
    overlap: float = 0.25,
    batch_size: int = 1,
    check_finite: bool = True,
    progress: bool = False,
) -> SegmentationMaps:
    """Compute label and uncertainty maps of images or volumes.

    Args:
        predictor: Predictor of any method, with outputs of the size of its inputs.
        x: Images (N, C, H, W) or volumes (N, C, D, H, W).
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        window: Pixels that the net sees at a time, one number for all axes or one for each; by default the whole image.
            Only windows are moved to the net's device.
        overlap: Minimum fraction of a window that neighbors share.
        batch_size: Number of windows per batch.
        check_finite: Whether outputs that are not finite raise an error; else their pixels are NaN.
        progress: Whether to show a progress bar.

    Returns:
        The maps.

    Raises:
        ArgumentError: If x is not a batch of images or volumes, or outputs have another size or are not finite.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> predictor = DeterministicPredictor(torch.nn.Conv2d(1, 3, 5, padding=2))
        >>> x = torch.randn(1, 1, 50, 70, generator=torch.Generator().manual_seed(0))
        >>> whole = predict_segmentation(predictor, x, 2)
        >>> tiled = predict_segmentation(predictor, x, 2, window=32)  # neighbors share 8 pixels; the net sees 2
        >>> tiled.labels.shape, torch.allclose(tiled.probs, whole.probs, atol=1e-6)
        (torch.Size([1, 50, 70]), True)
    """
    check_predictor(predictor)
    check_int("batch_size", batch_size, minimum=1)
    check_images(x)
    if window is None:
        summary = _summarize(predictor, x, num_samples, seed)
        return SegmentationMaps.from_summary(summary, seed=seed, check_finite=check_finite)
    size = tuple(x.shape[2:])
    tiles = make_tiles(size, clip_window(size, window, overlap=overlap), overlap=overlap)
    jobs = [(i, tile) for i in range(len(x)) for tile in tiles]
    maps: SegmentationMaps | None = None
    with progress_bar("segmenting", -(-len(jobs) // batch_size), enabled=progress) as advance:
        for start in range(0, len(jobs), batch_size):
            some = jobs[start : start + batch_size]
            patches = torch.stack([x[(i, slice(None), *tile.window)] for i, tile in some])  # (windows, C, *)
            summary = _summarize(predictor, patches, num_samples, seed)
            part = SegmentationMaps.from_summary(summary, seed=seed, check_finite=check_finite)
            if maps is None:
                probs, *others = (torch.empty(len(x), *t.shape[1 : -len(size)], *size) for t in part.tensors)
                maps = SegmentationMaps(probs, others[0], others[1], others[2], part.num_samples, seed)
            for whole, piece in zip(maps.tensors, part.tensors, strict=True):
                for k, (i, tile) in enumerate(some):
                    whole[(i, ..., *tile.kept)] = piece[(k, ..., *tile.inner)]
            advance("segmenting")
    assert maps is not None, "there is at least one window"
    return maps


def check_images(x: Any) -> None:
    """Reject what is not a batch of images (N, C, H, W) or volumes (N, C, D, H, W) of finite numbers.

    Args:
        x: The batch.

    Raises:
        ArgumentError: If it has another number of axes, or is empty.
    """
    if not isinstance(x, Tensor) or x.ndim not in (4, 5) or x.numel() == 0:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError("x", got, "a tensor (N, C, H, W) or (N, C, D, H, W)", hint="x[None] is a batch of one")
    check_inputs(x)


def _summarize(predictor: Predictor, x: Tensor, num_samples: int, seed: int) -> Summary:
    """Summary at x, of the size of x."""
    try:
        summary = predictor.summarize(x, num_samples, seed=seed)
    except RuntimeError as error:  # layers whose sizes do not match, as of a U-Net with an odd window
        error.add_note(f"the batch has the shape {tuple(x.shape)}: does its size fit the strides of the net?")
        raise
    if summary.probs.shape[2:] != x.shape[2:]:
        got = f"outputs {tuple(summary.probs.shape[2:])} for inputs {tuple(x.shape[2:])}"
        raise ArgumentError("predictor", got, "a label for each pixel", hint="use a size that fits the net's strides")
    return summary
