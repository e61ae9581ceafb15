"""Benchmarks by topic; each function returns rows of the table."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import measure, memory
from benchmarks.images import data_path, pixels
from benchmarks.influence import influence
from benchmarks.measure import (
    SEED,
    Parts,
    Row,
    Runner,
    Scale,
    Watch,
    Watched,
    compare_runs,
    interleave,
    stop_after_step,
)
from benchmarks.tabular import fit, predict
from neuboots import Deterministic, Method, NeuBoots, TrainingConfig
from neuboots.methods import MCDropout, NeuBootsPredictor, StandardBootstrap
from neuboots.methods.neuboots import BootstrapGenerator, draw_replicate_weights
from neuboots.nets import MLP, SmallCNN, resnet8, resnet18, resnet20, resnet110
from neuboots.training import EpochReport


def loop_of_heads(head: nn.Module, phi: Tensor, alphas: Tensor) -> Tensor:
    """B replicates as one would write them without the library."""
    return torch.stack([head(phi * alpha) for alpha in alphas])  # (B, N, C)


# -- prediction ----------------------------------------------------------------------------------------


@torch.no_grad()
def resnet(scale: Scale) -> list[Row]:
    """B replicates of a deep net against one plain pass: the features are the same work in both."""
    net = (resnet8 if scale.quick else resnet110)(100).eval()
    title = "ResNet-8" if scale.quick else "ResNet-110"
    x = torch.randn(2 if scale.quick else 128, 3, 32, 32)
    watch = Watch()
    net.features = Watched(net.features, watch, training=False).eval()
    predictor = NeuBootsPredictor(BootstrapGenerator(net).eval(), NeuBoots().weight_distribution)
    bounds = {5: 1.03, 100: 1.06, 1000: 1.35}

    def loop(num: int) -> Tensor:
        phi = net.features(x).mean(dim=(2, 3))
        return loop_of_heads(net.head, phi, alphas[:num])

    alphas = draw_replicate_weights(
        predictor.weight_distribution, predictor.generator.num_blocks, 0, max(bounds), SEED
    ).float()
    runs: dict[str, Callable[[], object]] = {"plain": lambda: net(x), "moments": lambda: predictor.moments(x)}
    runs |= {f"predict {num}": partial(predictor.predict, x, num) for num in bounds}
    runs |= {f"loop {num}": partial(loop, num) for num in (100, 1000)}
    series = interleave({name: watch.timed(run) for name, run in runs.items()}, scale.repeats)
    row = partial(compare_runs, series, "plain")
    return [
        *(row(f"predict {num}", f"{title}: predict, B = {num} / plain pass", bound) for num, bound in bounds.items()),
        row("moments", f"{title}: exact moments / plain pass", 1.03),
        *(row(f"loop {num}", f"{title}: loop over {num} heads / plain pass") for num in (100, 1000)),
    ]


@torch.no_grad()
def mlp(scale: Scale) -> list[Row]:
    """All heads in one product against the loop over heads, at the same features."""
    n, num = (50, 10) if scale.quick else (10_000, 100)
    net = MLP(784, 10, widths=(500, 500, 500)).eval()
    x = torch.randn(n, 784)
    generator = BootstrapGenerator(net).eval()
    predictor = NeuBootsPredictor(generator, NeuBoots().weight_distribution)
    at = generator.at(x)
    phi = at.trace.phi
    alphas = draw_replicate_weights(predictor.weight_distribution, generator.num_blocks, 0, num, SEED).float()
    watch = Watch()
    runs: dict[str, Callable[[], object]] = {
        "product": lambda: at(alphas),
        "loop": lambda: loop_of_heads(net.head, phi, alphas),
        "predict": lambda: predictor.predict(x, num),
        "pass and loop": lambda: loop_of_heads(net.head, net.features(x), alphas),
    }
    series = interleave({name: watch.timed(run) for name, run in runs.items()}, scale.repeats)
    title = f"MLP 3 × 500, N = {n}, B = {num}"
    return [
        Row(f"{title}: loop over heads / one product", series.ratio("loop", "product"), at_least=5.0),
        Row(f"{title}: features and loop / predict", series.ratio("pass and loop", "predict")),
    ]


@torch.no_grad()
def dropout(scale: Scale) -> list[Row]:
    """Dropout before the last layer only: the features are computed once, and shared with one plain pass."""
    num = 5 if scale.quick else 100
    net = (resnet8 if scale.quick else resnet18)(100).eval()
    title = "ResNet-8" if scale.quick else "ResNet-18"
    x = torch.randn(2 if scale.quick else 32, 3, 32, 32)
    watch = Watch()
    net.features = Watched(net.features, watch, training=False).eval()
    predictor = MCDropout(rate=0.1, where="head").from_trained(net, (x[:2], torch.zeros(2)))
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: net(x),
        "predict": lambda: predictor.predict(x, num),
        "summarize": lambda: predictor.summarize(x, num),
    }
    series = interleave({name: watch.timed(run) for name, run in runs.items()}, scale.repeats)
    return [
        compare_runs(series, "plain", "predict", f"{title}: MC dropout before the head, B = {num} / plain pass", 1.15),
        compare_runs(series, "plain", "summarize", f"{title}: the same, summarize / plain pass"),
    ]


def memory_rows(scale: Scale) -> list[Row]:
    """`summarize` holds a few replicates at a time, whatever B is; so do the figures that stand on it."""
    few, many = (2, 4) if scale.quick else (10, 1000)
    rows = []
    for case, shape in (("flat", "(N, C)"), ("upsampled", "(N, C, H, W)")):
        for exact in (True, False):
            ratio, megabytes = memory.growth(case, few, many, quick=scale.quick, exact=exact)
            name = f"summarize, {shape}: peak memory, B = {many} / B = {few}"
            note = f"{megabytes:.0f} MB at B = {few}"
            row = Row(name, ratio, at_most=1.2, note=note) if exact else Row(f"{name}, malloc's own", ratio, note=note)
            rows.append(row)
    few, many = (1, 2) if scale.quick else (1, 100)
    ratio, megabytes = memory.growth("labelled", few, many, quick=scale.quick, exact=True)
    name = f"calibration, 10,000 × 100 classes: peak memory, B = {many} / B = {few}"
    return [*rows, Row(name, ratio, at_most=2.0, note=f"{megabytes:.0f} MB at B = {few}")]


# -- training ------------------------------------------------------------------------------------------


def training(scale: Scale) -> list[Row]:
    """One epoch of NeuBoots against one of the plain net; set-up is not counted.

    The loop itself reports the seconds of the epoch. Shared are the passes through the features, forward and
    backward, and the optimiser's step; α, the head, the loss and the loop around them are each runner's own.
    """
    rows, batch, make = (8, 4, resnet8) if scale.quick else (256, 128, resnet20)
    data = TensorDataset(torch.randn(rows, 3, 32, 32), torch.randint(100, (rows,)))
    watch = Watch()

    def model() -> nn.Module:
        net = make(100)
        net.features = Watched(net.features, watch, training=True)
        return net

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return stop_after_step(torch.optim.AdamW(parameters, lr=1e-3), watch)

    def epoch(method: Method) -> Parts:
        reports: list[EpochReport] = []
        watch.seconds = 0.0
        config = TrainingConfig(
            epochs=1, batch_size=batch, optimizer=make_optimizer, seed=SEED, on_epoch=reports.append, progress=False
        )
        method.fit(model, data, config)
        return Parts(watch.seconds, reports[0].seconds - watch.seconds)

    methods: dict[str, Method] = {"plain": Deterministic(), "default": NeuBoots(), "paper": NeuBoots.paper()}
    runners: dict[str, Runner] = {name: partial(epoch, method) for name, method in methods.items()}
    series = interleave(runners, scale.repeats)
    title = "ResNet-8" if scale.quick else "ResNet-20"
    return [
        compare_runs(series, "plain", "default", f"{title}: epoch, NeuBoots() / Plain()", 1.03),
        compare_runs(series, "plain", "paper", f"{title}: epoch, NeuBoots.paper() / Plain()", 1.03),
    ]


def members(scale: Scale) -> list[Row]:
    """K nets trained together against one after another: whole fits, set-up included."""
    num, epochs, n = (2, 1, 8) if scale.quick else (20, 40, 64)
    x = torch.randn(500, 8)
    table = TensorDataset(x, x.sum(1) + 0.1 * torch.randn(500))
    images = TensorDataset(torch.randn(n, 1, 28, 28), torch.arange(n) % 10)
    config = TrainingConfig(epochs=epochs, seed=SEED, progress=False)

    def mlps(together: bool) -> object:
        method = StandardBootstrap(nn.MSELoss(), num_members=num, vectorized=together)
        return method.fit(lambda: MLP(8, 1, widths=(64, 64)), table, config)

    def cnns(together: bool) -> object:
        method = StandardBootstrap(num_members=2 if scale.quick else 5, vectorized=together)
        return method.fit(lambda: SmallCNN(1, 10, widths=(8, 16, 32)), images, replace(config, epochs=1))

    watch = Watch()
    runners = {
        f"{name} {together}": watch.timed(partial(fit, together))
        for name, fit in (("mlps", mlps), ("cnns", cnns))
        for together in (True, False)
    }
    series = interleave(runners, scale.repeats)
    title = f"standard bootstrap, K = {num} MLPs 2 × 64, n = 500, batches of {config.batch_size}"
    return [
        Row(f"{title}: in turn / together", series.ratio("mlps False", "mlps True"), at_least=4.0),
        Row(f"standard bootstrap, small CNNs, n = {n}: in turn / together", series.ratio("cnns False", "cnns True")),
    ]


def drawing(scale: Scale) -> list[Row]:
    """What drawing α costs beside a shallow net with D = 500 features: whole fits against the plain net's."""
    n, width, epochs = (8, 8, 1) if scale.quick else (512, 500, 4)
    x = torch.randn(n, 100)
    data = TensorDataset(x, x[:, :10].sum(1))
    config = TrainingConfig(epochs=epochs, batch_size=64, seed=SEED, progress=False)
    methods: dict[str, Method] = {
        "plain": Deterministic(nn.MSELoss()),
        'redraw="sample"': NeuBoots(nn.MSELoss()),
        'redraw="step"': NeuBoots(nn.MSELoss(), resample="step"),
        "the paper's": NeuBoots.paper(nn.MSELoss()),
    }
    watch = Watch()
    runners = {
        name: watch.timed(partial(method.fit, lambda: MLP(100, 1, widths=(width,) * 5), data, config))
        for name, method in methods.items()
    }
    series = interleave(runners, scale.repeats)
    title = f"MLP 5 × {width}, n = {n}: fit, NeuBoots"
    return [Row(f"{title}, {name} / Plain", series.ratio(name, "plain")) for name in methods if name != "plain"]


# -- import --------------------------------------------------------------------------------------------

_IMPORT = """
import time
began = time.perf_counter()
import torch
torch_there = time.perf_counter()
{rest}
print(torch_there - began, time.perf_counter() - torch_there)
"""


def importing(scale: Scale) -> list[Row]:
    """`import neuboots` is `import torch`, which is shared, and the rest; each time in a fresh process."""

    def run(rest: str) -> Parts:
        return Parts(*measure.run_python("-c", _IMPORT.format(rest=rest)))

    runners: dict[str, Runner] = {"torch": partial(run, ""), "neuboots": partial(run, "import neuboots")}
    series = interleave(runners, scale.repeats)
    return [compare_runs(series, "torch", "neuboots", "import neuboots / import torch", 1.15)]


TOPICS: dict[str, Callable[[Scale], list[Row]]] = {
    "resnet": resnet,
    "mlp": mlp,
    "memory": memory_rows,
    "pixels": pixels,
    "data": data_path,
    "training": training,
    "members": members,
    "drawing": drawing,
    "dropout": dropout,
    "influence": influence,
    "fit": fit,
    "predict": predict,
    "import": importing,
}
