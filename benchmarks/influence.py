"""Time and memory of the influence bootstrap of a head after training.

    python -m benchmarks.influence N

prints the bytes by which a process grew at its peak while it was set up from N rows, as `benchmarks.memory` does for
`summarize`. Rows are made as they are asked for, so that the data need no memory of their own.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks import measure
from benchmarks.measure import SEED, Parts, Row, Scale, Watch, Watched, compare_runs, interleave
from benchmarks.memory import EXACT, resident
from neuboots import Deterministic, InfluenceBootstrap, TrainingConfig
from neuboots.nets import resnet8, resnet20, resnet110
from neuboots.training import EpochReport


def influence(scale: Scale) -> list[Row]:
    """Set-up against an epoch of training, B replicates against a plain pass, and the memory of set-up as n grows."""
    return [set_up(scale), predict(scale), memory(scale)]


def set_up(scale: Scale) -> Row:
    """Whole runs: an epoch as the loop reports it, and `around` on the net that came of it."""
    rows, batch, make = (8, 4, resnet8) if scale.quick else (256, 128, resnet20)
    data = TensorDataset(torch.randn(rows, 3, 32, 32), torch.randint(100, (rows,)))
    config = TrainingConfig(epochs=1, batch_size=batch, seed=SEED, progress=False)
    net = make(100)

    def epoch() -> Parts:
        reports: list[EpochReport] = []
        Deterministic().fit(lambda: make(100), data, TrainingConfig(**(vars(config) | {"on_epoch": reports.append})))
        return Parts(0.0, reports[0].seconds)

    def around() -> Parts:
        began = time.perf_counter()
        InfluenceBootstrap().from_trained(net, data, batch_size=config.batch_size, seed=config.seed)
        return Parts(0.0, time.perf_counter() - began)

    series = interleave({"epoch": epoch, "around": around}, scale.repeats)
    title = "ResNet-8" if scale.quick else "ResNet-20"
    return Row(f"{title}: influence, set-up / epoch of training", series.ratio("around", "epoch"), at_most=2.0)


@torch.no_grad()
def predict(scale: Scale) -> Row:
    """As many blocks as a large data set would have."""
    net = (resnet8 if scale.quick else resnet110)(100).eval()
    x = torch.randn(2 if scale.quick else 128, 3, 32, 32)
    watch = Watch()
    net.features = Watched(net.features, watch, training=False).eval()
    config = TrainingConfig(batch_size=64, progress=False)
    method = InfluenceBootstrap(num_blocks=20 if scale.quick else 1538)
    predictor = method.from_trained(net, TensorDataset(x, torch.arange(len(x)) % 100), batch_size=config.batch_size)
    num = 5 if scale.quick else 100
    runs: dict[str, Callable[[], object]] = {"plain": lambda: net(x), "predict": partial(predictor.predict, x, num)}
    series = interleave({name: watch.timed(run) for name, run in runs.items()}, scale.repeats)
    title = "ResNet-8" if scale.quick else "ResNet-110"
    return compare_runs(series, "plain", "predict", f"{title}: influence, predict, B = {num} / plain pass", 1.15)


# -- memory ------------------------------------------------------------------------------------------------


class _Rows(Dataset[Any]):
    """Row i, made when it is asked for."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randn(16, generator=torch.Generator().manual_seed(i)), i % 10


def extra(n: int) -> int:
    """Bytes that a set-up from n rows needed beyond what was there before."""
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    method, config = InfluenceBootstrap(num_blocks=256), TrainingConfig(batch_size=128, progress=False)
    method.from_trained(
        net, _Rows(256), batch_size=config.batch_size
    )  # threads, kernels and their caches are there before we look
    before = resident("VmRSS")
    method.from_trained(net, _Rows(n), batch_size=config.batch_size)
    return resident("VmHWM") - before


def memory(scale: Scale) -> Row:
    few = 16 if scale.quick else 500
    peaks = [measure.run_python("-m", "benchmarks.influence", str(n), env=EXACT)[0] for n in (few, 8 * few)]
    name = f"influence, set-up of a head of 10 × 65: peak memory, n = {8 * few} / n = {few}"
    return Row(name, peaks[1] / max(1.0, peaks[0]), at_most=1.2, note=f"{peaks[0] / 2**20:.0f} MB at n = {few}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("n", type=int)
    torch.manual_seed(SEED)
    print(extra(parser.parse_args().n))


if __name__ == "__main__":
    main()
