"""Sliding windows over an image or volume, and the one window that each pixel is taken from.

    owner(p) = argmax_k depth_k(p),   depth_k(p) = min distance from p to a border of window k inside the image

A border that the window shares with the image does not count: nothing lies behind it. Windows stand on a grid, so the
owner is found axis by axis, and the pixels of one owner are a box.

Image in, label map and uncertainty maps out, in memory that does not grow with B.

    p = 1/B Σ_b softmax f_b(x),   H(p),   H(p) − 1/B Σ_b H(p_b),   mean_c std_b f_b,c        at each pixel

Large images go through the net window by window. A pixel's figures come from the one window in which it lies deepest;
the rest of each window is context. So replicate b is still one function of the image, at each pixel, and so are the
figures of B of them. A blend, the mean of a pixel over the windows that hold it, would be another function, whose
entropy and mutual information need the replicates of all those windows at once: they are no mean of the windows' own.

Where half the overlap is at least as wide as the net sees to one side, and windows start on the grid of its strides,
the figures are those of one pass over the whole image. Where replicates drop single pixels, as MC dropout's do by
default, the masks lie by place in the window: the law of the figures is the same, the draw another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from neuboots._validation import check_int
from neuboots.evaluation._batching import check_batch_size, check_predictor
from neuboots.prediction import Predictor, Summary, check_inputs
from neuboots.training import progress_bar

Box = tuple[Any, ...]  # slices


@dataclass(frozen=True)
class Tile:
    """A window of the image, the box of pixels that are taken from it, and the same box counted from its corner."""

    window: Box
    kept: Box
    inner: Box


def make_tiles(size: Sequence[int], window: Sequence[int], *, overlap: float) -> list[Tile]:
    """Windows that cover an image of this size, all equally large; each pixel is kept from one of them.

    >>> [(tile.window[0], tile.kept[0]) for tile in make_tiles((10,), (6,), overlap=0.3)]
    [(slice(0, 6, None), slice(0, 5, None)), (slice(4, 10, None), slice(5, 10, None))]
    """
    by_axis = [make_spans(length, width, overlap=overlap) for length, width in zip(size, window, strict=True)]
    return [
        Tile(
            tuple(slice(start, start + width) for (start, _, _), width in zip(spans, window, strict=True)),
            tuple(slice(begin, end) for _, begin, end in spans),
            tuple(slice(begin - start, end - start) for start, begin, end in spans),
        )
        for spans in product(*by_axis)
    ]


def make_spans(length: int, window: int, *, overlap: float) -> list[tuple[int, int, int]]:
    """Along one axis: where each window starts, and where the pixels taken from it begin and end.

    Neighbours share at least this fraction of a window; the last one is pushed back to end where the image ends. The
    step is rounded down to a multiple of the largest power of two that divides the window and is no wider than overlap
    and step, so that the windows of a net with strides start on its grid wherever they can.

    >>> make_spans(160, 64, overlap=0.25)
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
    # Two windows are equally deep in the middle of what they share; there the first has the pixel.
    cuts = [(a + b + window - 1) // 2 + 1 for a, b in pairwise(starts)]
    return list(zip(starts, [0, *cuts], [*cuts, length], strict=True))


def clip_window(size: Sequence[int], window: Any, *, overlap: float) -> tuple[int, ...]:
    """The window's size along each axis, never more than the image's, or a sentence.

    >>> clip_window((100, 20), 64, overlap=0.25)
    (64, 20)
    """
    number = isinstance(overlap, int | float) and not isinstance(overlap, bool)
    if not number or not 0 <= overlap < 1:
        raise ValueError(f"got overlap={overlap!r}; expected a fraction of the window from 0 to below 1, such as 0.25")
    several = window if isinstance(window, Sequence) else [window] * len(size)
    widths = tuple(check_int("window", width, minimum=1) for width in several)
    if len(widths) != len(size):
        raise ValueError(
            f"got a window of {len(widths)} axes, {widths}, for images of {tuple(size)}; expected one number for each "
            f"of the {len(size)} axes, or one number for all"
        )
    return tuple(min(length, width) for length, width in zip(size, widths, strict=True))


Window = int | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class SegmentationMaps:
    """What B replicates say of each pixel, in single precision and on the CPU, wherever the net is.

    Entropy and mutual information are large where labels may be wrong. The standard deviation is that of the logits,
    which grows with their size: it is often largest where the net is surest, and no map of errors.
    """

    probs: Tensor  # (N, C, *)
    entropy: Tensor  # (N, *), in nats
    mutual_information: Tensor  # (N, *), in nats
    std: Tensor  # (N, *), of the outputs over the replicates, mean over the outputs
    num_samples: int
    seed: int

    @classmethod
    def of(cls, summary: Summary, *, seed: int = 0) -> "SegmentationMaps":
        """Of the figures of B replicates at images or volumes."""
        entropy = summary.entropy.clamp_min(0)  # rounding may take it below
        figures = (summary.probs, entropy, summary.mutual_information, summary.std.mean(1))
        probs, entropy, information, std = (figure.to("cpu", torch.float32) for figure in figures)
        if not all(bool(torch.isfinite(each.sum())) for each in (entropy, information, std)):
            raise ValueError(
                "the net gives NaN or infinite outputs; expected finite numbers: check its weights and the range of x"
            )
        return cls(probs, entropy, information, std, summary.num_samples, seed)

    @property
    def labels(self) -> Tensor:
        """argmax of the probabilities: (N, *)."""
        return self.probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """The largest probability: (N, *)."""
        return self.probs.amax(1)

    @property
    def num_classes(self) -> int:
        return self.probs.shape[1]

    @property
    def size(self) -> tuple[int, ...]:
        """Pixels or voxels along each axis."""
        return tuple(self.entropy.shape[1:])

    def resized(self, num_images: int, size: Sequence[int]) -> "SegmentationMaps":
        """Empty maps of so many images of this size."""
        wide = self.probs.new_empty(num_images, self.num_classes, *size)
        entropy, information, std = (self.entropy.new_empty(num_images, *size) for _ in range(3))
        return replace(self, probs=wide, entropy=entropy, mutual_information=information, std=std)

    def tensors(self) -> list[Tensor]:
        return [value for part in fields(self) if isinstance(value := getattr(self, part.name), Tensor)]


def predict_segmentation(
    predictor: Predictor,
    x: Tensor,
    num_samples: int = 100,
    *,
    seed: int = 0,
    window: Window = None,
    overlap: float = 0.25,
    batch_size: int = 1,
    progress: bool = False,
) -> SegmentationMaps:
    """p, H(p), mutual information and standard deviation at each pixel of images or volumes x of one size, (N, C, *).

    With a `window`, one number of pixels for all axes or one for each, the net sees that much at a time, `batch_size`
    windows together, each sharing a fraction `overlap` with the next; an axis shorter than the window is taken whole.
    Only windows go to the net's device. Without, all of x goes through the net at once.

    >>> from neuboots import DeterministicPredictor
    >>> net = torch.nn.Conv2d(1, 3, 5, padding=2)
    >>> x = torch.randn(1, 1, 50, 70, generator=torch.Generator().manual_seed(0))
    >>> whole = predict_segmentation(DeterministicPredictor(net), x, 2)
    >>> tiled = predict_segmentation(
    ...     DeterministicPredictor(net), x, 2, window=32
    ... )  # neighbours share 8 pixels; the net sees 2 to each side
    >>> tiled.labels.shape, torch.allclose(tiled.probs, whole.probs, atol=1e-6)
    (torch.Size([1, 50, 70]), True)
    """
    check_predictor(predictor)
    check_batch_size(batch_size)
    check_images(x)
    if window is None:
        return SegmentationMaps.of(_summary(predictor, x, num_samples, seed), seed=seed)
    size = tuple(x.shape[2:])
    tiles = make_tiles(size, clip_window(size, window, overlap=overlap), overlap=overlap)
    jobs = [(i, tile) for i in range(len(x)) for tile in tiles]
    found: SegmentationMaps | None = None
    with progress_bar("segmenting", -(-len(jobs) // batch_size), enabled=progress) as advance:
        for start in range(0, len(jobs), batch_size):
            some = jobs[start : start + batch_size]
            patches = torch.stack([x[(i, slice(None), *tile.window)] for i, tile in some])  # (windows, C, *)
            part = SegmentationMaps.of(_summary(predictor, patches, num_samples, seed), seed=seed)
            found = part.resized(len(x), size) if found is None else found
            for whole, piece in zip(found.tensors(), part.tensors(), strict=True):
                for k, (i, tile) in enumerate(some):
                    whole[(i, ..., *tile.kept)] = piece[(k, ..., *tile.inner)]
            advance("segmenting")
    assert found is not None, "there is at least one window"
    return found


def check_images(x: Any) -> None:
    """Refuse what is not images (N, C, H, W) or volumes (N, C, D, H, W) of finite numbers."""
    if isinstance(x, Tensor) and (x.ndim not in (4, 5) or x.numel() == 0):
        raise ValueError(
            f"got x of shape {tuple(x.shape)}; expected at least one image (N, C, H, W) or volume (N, C, D, H, W): "
            "x[None] makes a batch of one"
        )
    if not isinstance(x, Tensor):
        raise ValueError(f"got x of type {type(x).__name__}; expected a tensor: torch.as_tensor(x) makes one")
    check_inputs(x)


def _summary(predictor: Predictor, x: Tensor, num_samples: int, seed: int) -> Summary:
    """The figures at x, of x's own size, or a sentence."""
    try:
        summary = predictor.summarize(x, num_samples, seed=seed)
    except RuntimeError as error:  # layers whose sizes do not meet, as of a U-Net on an odd window
        error.add_note(f"this was a batch of shape {tuple(x.shape)}: does its size fit the strides of the net?")
        raise
    got, size = tuple(summary.probs.shape[2:]), tuple(x.shape[2:])
    if got != size:
        raise ValueError(
            f"the net gives outputs of size {got} for inputs of size {size}; expected a label for each pixel: let the "
            "net scale its outputs up, or choose images or a window whose size fits its strides"
        )
    return summary
