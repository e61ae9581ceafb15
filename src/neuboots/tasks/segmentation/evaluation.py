"""How good are the labels and the uncertainty of a predictor over labelled images, and how long does it take?

    relative time = min_r seconds of B replicates / min_r seconds of a plain pass of the net

as in the paper's table 4.2 (section 4.4): mean IoU, ECE and prediction time relative to the baseline. The ratio is
taken at one window of the first image, in turn and best of several, since times on a busy machine vary.

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from neuboots.prediction import Predictor
from neuboots.surgery import call_net, copy_of, eval_mode, to_net
from neuboots.tasks.common import Rows, batches_of, check_batch_size, check_predictor
from neuboots.tasks.segmentation.maps import Window, segment
from neuboots.tasks.segmentation.result import Segmented, Times
from neuboots.tasks.segmentation.windows import window_for

_ROUNDS = 3  # of the relative time
_ENOUGH = 10.0  # seconds; after them no further round begins


def segmentation(
    predictor: Predictor,
    data: Rows,
    *,
    num_samples: int = 100,
    seed: int = 0,
    void: int | None = 255,
    window: Window = None,
    overlap: float = 0.25,
    batch_size: int = 1,
    num_bins: int = 15,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = True,
) -> Segmented:
    """mIoU, Dice, ECE, time, and the uncertainty on right and on wrong pixels, over rows (x, y) or batches of them.

    Images may be of several sizes; masks are (H, W), (1, H, W), or the same for volumes, with `void` where a pixel has
    no label (None: each has one). `batch_size` images of one size, if they come one after the other, or windows of one
    image, go through the net together. `clock` gives the time in seconds.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> net = torch.nn.Conv2d(2, 2, 1)
    >>> _ = net.load_state_dict({"weight": 9 * torch.eye(2).view(2, 2, 1, 1), "bias": torch.zeros(2)})
    >>> found = segmentation(PlainPredictor(net), TensorDataset(x, x.argmax(1)), num_samples=1, progress=False)
    >>> found.mean_iou, found.count, round(found.majority["mean_iou"], 2)
    (1.0, 256, 0.25)
    """
    check_predictor(predictor)
    check_batch_size(batch_size)
    total: Segmented | int = 0
    for x, y in _images(data, batch_size, window, overlap, progress):
        began = clock()
        maps = segment(
            predictor, x, num_samples, seed=seed, window=window, overlap=overlap, batch_size=batch_size
        )  # on the CPU: a GPU has finished
        seconds = clock() - began
        relative = (0.0, 0.0)
        if total == 0:
            relative = _beside_plain(predictor, _corner(x, window, overlap), num_samples, seed, clock)
        times = Times.of(len(x), seconds, *relative)
        total = total + Segmented.of(maps, y, void=void, num_bins=num_bins, times=times)
    assert isinstance(total, Segmented), "batches_of gives at least one batch"
    if total.count == 0:
        raise ValueError(f"got data whose pixels are all void ({void}); expected some that have a label")
    return total


# -- images --------------------------------------------------------------------------------------------


def _images(
    data: Rows, batch_size: int, window: Window, overlap: float, progress: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images (N, C, *) of one size and their masks (N, *), as many together as the net is to see at once."""
    held: list[tuple[Tensor, Tensor]] = []
    for x, y in batches_of(data, 1, title="segmentation", progress=progress):
        for row in zip(*_as_images(x, y), strict=True):
            shape = row[0].shape
            at_once = batch_size if _fits(shape[1:], window, overlap) else 1  # the maps of large images are large
            if held and (held[0][0].shape != shape or len(held) >= at_once):
                yield _stacked(held)
                held = []
            held.append(row)
    yield _stacked(held)


def _stacked(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def _fits(size: tuple[int, ...], window: Window, overlap: float) -> bool:
    return window is None or window_for(size, window, overlap=overlap) == tuple(size)


def _as_images(x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """A batch, or a single row as a batch of one, with masks (N, *), or a sentence."""
    if not isinstance(x, Tensor):
        raise ValueError(f"got inputs of type {type(x).__name__}; expected images as a tensor (N, C, *)")
    for images, masks in ((x, y), (x[None], y[None])):
        size = images.shape[2:]
        if len(size) not in (2, 3):
            continue
        if masks.shape == (len(images), *size):
            return images, masks
        if masks.shape == (len(images), 1, *size):
            return images, masks[:, 0]
    raise ValueError(
        f"got images of shape {tuple(x.shape)} and masks of shape {tuple(y.shape)}; expected (N, C, *) and (N, *), a "
        "label for each pixel: bring both to one size"
    )


# -- time ----------------------------------------------------------------------------------------------


def _corner(x: Tensor, window: Window, overlap: float) -> Tensor:
    """What the net sees first: (1, C, *)."""
    if window is None:
        return x[:1]
    sizes = window_for(x.shape[2:], window, overlap=overlap)
    return x[(slice(1), slice(None), *map(slice, sizes))]


def _beside_plain(
    predictor: Predictor, x: Tensor, num_samples: int, seed: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """The least seconds of B replicates at x and of a plain pass, in turn; (0, 0) for a predictor without a net."""
    net = plain_net(predictor)
    if net is None:
        return 0.0, 0.0

    def passed() -> None:
        with eval_mode(net), torch.no_grad():
            call_net(net, to_net(net, x))

    works = [lambda: predictor.summarize(x, num_samples, seed=seed), passed]
    best, began = [float("inf")] * 2, clock()
    passed()  # the predictor is warm already
    for _ in range(_ROUNDS):
        for k, work in enumerate(works):
            start = clock()
            work()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            best[k] = min(best[k], clock() - start)
        if clock() - began > _ENOUGH:
            break
    return best[0], best[1]


def plain_net(predictor: Predictor) -> nn.Module | None:
    """The net to run for its time: its numbers, which some methods do not keep, do not matter."""
    net = predictor.net
    if net is None or not any(tensor.is_meta for tensor in [*net.parameters(), *net.buffers()]):
        return net
    device = next((tensor.device for tensor in predictor.state().values()), torch.device("cpu"))
    net = copy_of(net).to_empty(device=device)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.zero_()  # whatever lay in the memory may be numbers that take long to multiply
    return net
