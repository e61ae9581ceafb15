"""Image in, label map and uncertainty maps out, in memory that does not grow with B.

    p = 1/B Σ_b softmax f_b(x),   H(p),   H(p) − 1/B Σ_b H(p_b),   mean_c std_b f_b,c        at each pixel

Large images go through the net window by window. A pixel's figures come from the one window in which it lies deepest;
the rest of each window is context. So replicate b is still one function of the image, at each pixel, and so are the
figures of B of them. A blend, the mean of a pixel over the windows that hold it, would be another function, whose
entropy and mutual information need the replicates of all those windows at once: they are no mean of the windows' own.

Where half the overlap is at least as wide as the net sees to one side, and windows start on the grid of its strides,
the figures are those of one pass over the whole image. Where replicates drop single pixels, as MC dropout's do by
default, the masks lie by place in the window: the law of the figures is the same, the draw another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from neuboots.prediction import Predictor, Summary, check_inputs
from neuboots.progress import bar
from neuboots.tasks.common import check_batch_size, check_predictor
from neuboots.tasks.segmentation.windows import tiles_of, window_for

Window = int | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class Maps:
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
    def of(cls, summary: Summary, *, seed: int = 0) -> "Maps":
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

    def resized(self, num_images: int, size: Sequence[int]) -> "Maps":
        """Empty maps of so many images of this size."""
        wide = self.probs.new_empty(num_images, self.num_classes, *size)
        entropy, information, std = (self.entropy.new_empty(num_images, *size) for _ in range(3))
        return replace(self, probs=wide, entropy=entropy, mutual_information=information, std=std)

    def tensors(self) -> list[Tensor]:
        return [value for part in fields(self) if isinstance(value := getattr(self, part.name), Tensor)]


def segment(
    predictor: Predictor,
    x: Tensor,
    num_samples: int = 100,
    *,
    seed: int = 0,
    window: Window = None,
    overlap: float = 0.25,
    batch_size: int = 1,
    progress: bool = False,
) -> Maps:
    """p, H(p), mutual information and standard deviation at each pixel of images or volumes x of one size, (N, C, *).

    With a `window`, one number of pixels for all axes or one for each, the net sees that much at a time, `batch_size`
    windows together, each sharing a fraction `overlap` with the next; an axis shorter than the window is taken whole.
    Only windows go to the net's device. Without, all of x goes through the net at once.

    >>> from neuboots import PlainPredictor
    >>> net = torch.nn.Conv2d(1, 3, 5, padding=2)
    >>> x = torch.randn(1, 1, 50, 70, generator=torch.Generator().manual_seed(0))
    >>> whole = segment(PlainPredictor(net), x, 2)
    >>> tiled = segment(PlainPredictor(net), x, 2, window=32)  # neighbours share 8 pixels; the net sees 2 to each side
    >>> tiled.labels.shape, torch.allclose(tiled.probs, whole.probs, atol=1e-6)
    (torch.Size([1, 50, 70]), True)
    """
    check_predictor(predictor)
    check_batch_size(batch_size)
    check_images(x)
    if window is None:
        return Maps.of(_summary(predictor, x, num_samples, seed), seed=seed)
    size = tuple(x.shape[2:])
    tiles = tiles_of(size, window_for(size, window, overlap=overlap), overlap=overlap)
    jobs = [(i, tile) for i in range(len(x)) for tile in tiles]
    found: Maps | None = None
    with bar("segmenting", -(-len(jobs) // batch_size), show=progress) as advance:
        for start in range(0, len(jobs), batch_size):
            some = jobs[start : start + batch_size]
            patches = torch.stack([x[(i, slice(None), *tile.window)] for i, tile in some])  # (windows, C, *)
            part = Maps.of(_summary(predictor, patches, num_samples, seed), seed=seed)
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
