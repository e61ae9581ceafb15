"""Time and memory of segmentation, and throughput of image loading."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks import memory
from benchmarks.measure import SEED, Row, Scale, Watch, Watched, compare_runs, interleave
from neuboots import NeuBoots
from neuboots.data import CropFlipCutout, LazyDataset, Standardizer, load_dataset
from neuboots.data.dataset import TensorSource
from neuboots.loading import EpochLoader
from neuboots.methods import NeuBootsPredictor
from neuboots.methods.neuboots import BootstrapGenerator
from neuboots.nets import UResNet, deeplab_resnet50, small_deeplab
from neuboots.weights import BlockTable, WeightSchedule, assign_blocks


def pixels(scale: Scale) -> list[Row]:
    """B replicates of a segmentation net against one plain pass, and memory that does not grow with B."""
    rows = [*_deeplab(scale), *_uresnet(scale)]
    few, many = (2, 4) if scale.quick else (5, 100)
    for case, title in (("deeplab", "DeepLab-v3"), ("volume", "U-ResNet")):
        ratio, megabytes = memory.growth(case, few, many, quick=scale.quick, exact=True)
        name = f"{title}: summarize, peak memory, B = {many} / B = {few}"
        rows.append(Row(name, ratio, at_most=1.2, note=f"{megabytes:.0f} MB at B = {few}"))
    gigabytes = memory.peak("tiles", many, quick=scale.quick, exact=True) / 2**30
    size = "16 × 16 × 8" if scale.quick else "512 × 512 × 64"
    rows.append(Row(f"segment, {size} in windows, B = {many}: peak memory in GiB", gigabytes, at_most=4.0))
    return rows


def _deeplab(scale: Scale) -> list[Row]:
    """The net of the paper's table 4.2; its backbone, ASPP and the layer after it are the same work in both."""
    net = (small_deeplab(21) if scale.quick else deeplab_resnet50(21, output_stride=8)).eval()
    side = 33 if scale.quick else 513
    watch = Watch()
    shared = nn.Sequential(net.backbone, net.aspp, net.refine)
    net.backbone, net.aspp, net.refine = Watched(shared, watch, training=False).eval(), nn.Identity(), nn.Identity()
    return _against_plain(net, torch.randn(1, 3, side, side), watch, scale, "DeepLab-v3", {5: 1.15, 30: 1.8})


def _uresnet(scale: Scale) -> list[Row]:
    """The default net; and a quarter of it, beside whose pass the replicates weigh more, to compare with."""
    rows = []
    for title, widths, bound in (
        ("U-ResNet", (32, 64, 128, 256), 1.2),
        ("U-ResNet of half the width", (16, 32, 64, 128), None),
    ):
        net = UResNet(1, 4, widths=(4, 8) if scale.quick else widths).eval()
        side = 8 if scale.quick else 64
        watch = Watch()
        shared = nn.Sequential(net.unet, net.finish)
        net.unet, net.finish = Watched(shared, watch, training=False).eval(), nn.Identity()
        rows += _against_plain(net, torch.randn(1, 1, side, side, side), watch, scale, title, {5: bound, 30: None})
    return rows


@torch.no_grad()
def _against_plain(
    net: nn.Module, x: Tensor, watch: Watch, scale: Scale, title: str, bounds: dict[int, float | None]
) -> list[Row]:
    predictor = NeuBootsPredictor(BootstrapGenerator(net).eval(), NeuBoots().weight_distribution)
    runs: dict[str, Callable[[], object]] = {"plain": lambda: net(x)}
    runs |= {f"summarize {num}": partial(predictor.summarize, x, num) for num in bounds}
    series = interleave({name: watch.timed(run) for name, run in runs.items()}, scale.repeats)
    size = " × ".join(map(str, x.shape[2:]))
    return [
        compare_runs(series, "plain", f"summarize {num}", f"{title}, {size}: summarize, B = {num} / plain pass", bound)
        for num, bound in bounds.items()
    ]


# -- the way of the data -------------------------------------------------------------------------------


def data_path(scale: Scale) -> list[Row]:
    """Images decoded, augmented and normalised in one process; and what looking up α for each row costs beside that."""
    import datasets

    n, batch = (256, 64) if scale.quick else (10_000, 128)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(datasets.config, "HF_DATASETS_CACHE", Path(folder, "cache")),  # not the user's
    ):
        write_cifar(Path(folder), n)
        data = load_dataset("cifar10", root=folder, val_fraction=0.0).augmented_train
        watch = Watch()
        seconds = interleave({"pass": watch.timed(lambda: _pass(data, batch))}, min(3, scale.repeats)).runs["pass"]
    rate = n / min(part.whole for part in seconds)
    return [
        Row("CIFAR-10 from files, cropped, flipped and cut: images a second", rate, at_least=2000.0),
        *_look_up(scale),
        *_augmenting(scale),
    ]


def _pass(data: Dataset[object], batch: int) -> None:
    for _ in EpochLoader(data, batch_size=batch, seed=SEED).epoch(0):
        pass


def _look_up(scale: Scale) -> list[Row]:
    """Beside the quickest epoch of augmented images: bytes in memory, and no net."""
    n = 500 if scale.quick else 50_000
    images = TensorSource(torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))
    augment = CropFlipCutout((32, 32), padding=4, cutout=16)
    loader = EpochLoader(
        LazyDataset(images, transform=Standardizer((0.5,) * 3, (0.25,) * 3), augment=augment), batch_size=128, seed=SEED
    )
    weights = WeightSchedule(NeuBoots().weight_distribution, BlockTable(assign_blocks(n, 64), 64)).at_epoch(0)

    watch = Watch()

    def epoch(look_up: bool) -> None:
        batches = loader.epoch(0)
        while True:
            watch.start()
            found = next(batches, None)
            watch.stop()
            if found is None:
                return
            if look_up:
                weights.schedule.blocks(found[1].index)

    series = interleave({str(way): watch.timed(partial(epoch, way)) for way in (False, True)}, scale.repeats)
    return [
        Row(f"epoch of n = {n:,} augmented images, with blocks / without", series.ratio("True", "False"), at_most=1.02)
    ]


def _augmenting(scale: Scale) -> list[Row]:
    """Crop, flip and cutout beside kornia's modules, for a batch and for a single row of a stream."""
    import kornia.augmentation as K

    ours = CropFlipCutout((32, 32), padding=4, cutout=16)
    theirs = nn.Sequential(
        K.RandomCrop((32, 32), padding=4),
        K.RandomHorizontalFlip(),
        K.RandomErasing(scale=(0.25, 0.25), ratio=(1.0, 1.0)),
    )
    rows = []
    for size in (128, 1):
        x, y = torch.rand(size, 3, 32, 32), torch.zeros(size)
        watch = Watch()
        runs: dict[str, Callable[[], object]] = {"ours": partial(ours, x, y), "kornia": partial(theirs, x)}
        series = interleave({name: watch.timed(run) for name, run in runs.items()}, scale.repeats)
        name = f"crop, flip and cutout of {size} × 32 × 32: kornia's modules / ours"
        rows.append(Row(name, series.ratio("kornia", "ours")))
    return rows


def write_cifar(root: Path, n: int) -> None:
    """n made-up photographs, smooth as photographs are, in the layout of the hub."""
    from io import BytesIO

    import pandas
    from PIL import Image

    rng = np.random.default_rng(SEED)
    coarse = torch.from_numpy(rng.uniform(0, 255, (n, 3, 8, 8))).float()
    smooth = nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic") + 6 * torch.randn(n, 3, 32, 32)
    images = smooth.clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()

    def png(image: np.ndarray) -> dict[str, object]:
        file = BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    folder = root / "cifar10" / "data"
    folder.mkdir(parents=True)
    for split, rows in (("train", slice(n)), ("test", slice(16))):
        frame = pandas.DataFrame({"image": [png(image) for image in images[rows]]})
        frame["label"] = [i % 10 for i in range(len(frame))]
        frame.to_parquet(folder / f"{split}-00000-of-00001.parquet")
