"""The contract that every method fulfils, as checks for the tests of a method.

    predict(x)[:, :k] = predict(x[:k]),   load(save(p)) = p,   summarize = predict,   …

`check_method("neuboots")` fits a registered method on small synthetic data and runs every check that applies to it. A
failed check raises AssertionError. The method's class must accept `loss=…`, and `num_members=…` if it is registered
with `members=True`.
"""

import contextlib
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.losses import Loss
from neuboots.methods import DeterministicPredictor, MethodInfo, find_method
from neuboots.methods._base import TASKS, Task
from neuboots.prediction import Predictor
from neuboots.serialization import load, save
from neuboots.training import EpochReport, TrainingConfig

CONFIG = TrainingConfig(epochs=2, batch_size=16, progress=False)


# -- small nets and data -------------------------------------------------------------------------------


class TwoBranches(nn.Module):
    """Two branches, one with BatchNorm, concatenated before one head.

    Args:
        outputs: Number of outputs.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.right = nn.Linear(4, 6)
        self.fc = nn.Linear(12, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 4) to (N, outputs)."""
        out: Tensor = self.fc(torch.cat([self.left(x), self.right(x).sigmoid()], 1))
        return out


class Upsampling(nn.Module):
    """A strided convolution with BatchNorm, a 1×1 head, and upsampling to the input's size; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 7, 3, 2, 1), nn.BatchNorm2d(7), nn.ReLU())
        self.classifier = nn.Conv2d(7, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map (N, 2, H, W) to {"out": (N, 3, H, W)}."""
        low = self.classifier(self.stem(x))
        return {"out": nn.functional.interpolate(low, size=x.shape[2:], mode="bilinear", align_corners=False)}


class Squeezing(nn.Module):
    """A net that squeezes every axis of length one, including that of a single row.

    Args:
        outputs: Number of outputs.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.fc = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 4) to (N, outputs), squeezed."""
        out: Tensor = self.fc(self.body(x).squeeze())
        return out.squeeze()


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class ExampleTask:
    """A small task.

    Attributes:
        loss: Its loss.
        model: Factory of a net for it.
        data: Training data.
        x: Further inputs.
        shape: Shape of one output.
    """

    loss: Loss
    model: Callable[[], nn.Module]
    data: TensorDataset
    x: Tensor
    shape: tuple[int, ...]


def _make_classification() -> ExampleTask:
    data = TensorDataset(_normal(50, 4), torch.arange(50) % 3)
    return ExampleTask(nn.CrossEntropyLoss(), lambda: TwoBranches(3), data, _normal(9, 4, seed=5), (3,))


def _make_regression() -> ExampleTask:
    x = _normal(50, 4)
    data = TensorDataset(x, x.sum(1) + 0.1 * _normal(50, seed=1))
    return ExampleTask(nn.MSELoss(), lambda: TwoBranches(1), data, _normal(9, 4, seed=5), (1,))


def _make_segmentation() -> ExampleTask:
    x = _normal(12, 2, 8, 8)
    y = (x[:, 0] > 0).long()
    y[:, :2] = 255
    loss = nn.CrossEntropyLoss(ignore_index=255)
    return ExampleTask(loss, Upsampling, TensorDataset(x, y), _normal(3, 2, 8, 8, seed=5), (3, 8, 8))


EXAMPLE_TASKS: dict[Task, Callable[[], ExampleTask]] = {
    "classification": _make_classification,
    "regression": _make_regression,
    "segmentation": _make_segmentation,
}


# -- the method under test -----------------------------------------------------------------------------


@dataclass
class MethodUnderTest:
    """A method with the options it is tested with, and its predictor fitted on an example task.

    Args:
        info: Facts about the method.
        options: Options of the method's class.
        config: Training options.
    """

    info: MethodInfo
    options: dict[str, Any] = field(default_factory=dict)
    config: TrainingConfig = CONFIG

    def make(self, **options: Any) -> Any:
        """Return the method with further options."""
        return self.info.make(**{**self.options, **options})

    def fit(self, task: Task, *, config: TrainingConfig | None = None, **options: Any) -> Predictor:
        """Return the predictor fitted on an example task, with further options."""
        case = EXAMPLE_TASKS[task]()
        fitted: Predictor = self.make(loss=case.loss, **options).fit(case.model, case.data, config or self.config)
        return fitted

    @property
    def task(self) -> Task:
        """The task of most checks: the first that the method supports."""
        return self.info.tasks[0]

    @cached_property
    def predictor(self) -> Predictor:
        """The predictor fitted on that task."""
        return self.fit(self.task)

    @cached_property
    def case(self) -> ExampleTask:
        """That task."""
        return EXAMPLE_TASKS[self.task]()

    @property
    def x(self) -> Tensor:
        """Its further inputs."""
        return self.case.x


# -- the checks ----------------------------------------------------------------------------------------

_ROUNDING: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}  # of sums in another order


def check_shape_and_dtype(method: MethodUnderTest) -> None:
    """Samples are (B, N, C, *), finite, in the net's precision and without gradients, for every supported task.

    Args:
        method: The method under test.
    """
    for task in method.info.tasks:
        case = EXAMPLE_TASKS[task]()
        predictor = method.predictor if task == method.task else method.fit(task)
        prediction = predictor.predict(case.x, 7)
        assert prediction.samples.shape == (7, len(case.x), *case.shape), prediction.samples.shape
        assert prediction.mean.shape == prediction.std.shape == (len(case.x), *case.shape)
        assert prediction.samples.dtype == torch.float32
        assert bool(torch.isfinite(prediction.samples).all()), "samples are not finite"
        assert not prediction.samples.requires_grad
        if task != "regression":
            assert prediction.entropy.shape == (len(case.x), *case.shape[1:])


def check_unsupported_tasks(method: MethodUnderTest) -> None:
    """A task that the method does not support raises ValueError in `fit`.

    Args:
        method: The method under test.
    """
    for task in set(TASKS) - set(method.info.tasks):
        error = _catch_error(partial(method.fit, task))
        assert error is not None, f"{method.info.name} does not list {task}, but its fit raises no ValueError"


def check_seeds(method: MethodUnderTest) -> None:
    """The same seed gives the same replicates for any B; another seed gives others.

    Args:
        method: The method under test.
    """
    predictor, x = method.predictor, method.x
    samples = predictor.predict(x, 6, seed=3).samples
    assert torch.equal(samples, predictor.predict(x, 6, seed=3).samples)
    torch.testing.assert_close(samples[:4], predictor.predict(x, 4, seed=3).samples)
    if method.info.random:
        others = [predictor.predict(x, 6, seed=seed).samples for seed in (4, 5, 6, 7)]  # orders of K members recur
        assert not all(torch.allclose(samples, other) for other in others), "the seed makes no difference"
        assert bool((predictor.predict(x, 6).std > 0).any()), "the replicates are all the same"


def check_coherence(method: MethodUnderTest) -> None:
    """A replicate is one function of x, whatever the batch and its order.

    Args:
        method: The method under test.
    """
    if not method.info.coherent:
        return
    predictor, x = method.predictor, method.x
    full = predictor.predict(x, 5)
    for rows in (torch.arange(4), torch.tensor([2]), torch.arange(len(x)).flip(0).roll(2), torch.arange(0)):
        part = predictor.predict(x[rows], 5)
        torch.testing.assert_close(part.samples, full.samples[:, rows], **_ROUNDING)
        torch.testing.assert_close(part.mean, full.mean[rows], **_ROUNDING)
        torch.testing.assert_close(part.std, full.std[rows], **_ROUNDING)


def check_single_row(method: MethodUnderTest) -> None:
    """A single row keeps its axis with a net that squeezes, also if training ends on a batch of one row.

    Args:
        method: The method under test.
    """
    for task in method.info.tasks:
        case = EXAMPLE_TASKS[task]()
        if len(case.shape) > 1:
            continue
        config = replace(method.config, batch_size=7)
        predictor = method.make(loss=case.loss).fit(partial(Squeezing, case.shape[0]), case.data, config)
        full, single = (predictor.predict(x, 6, seed=3) for x in (case.x, case.x[:1]))
        assert single.samples.shape == (6, 1, *case.shape), f"one row of {task} gave {tuple(single.samples.shape)}"
        if method.info.coherent:
            torch.testing.assert_close(single.samples, full.samples[:, :1], **_ROUNDING)
            torch.testing.assert_close(single.std, full.std[:1], **_ROUNDING)


def check_exact_moments(method: MethodUnderTest) -> None:
    """Exact mean and standard deviation agree with those of many samples, within standard errors.

    Args:
        method: The method under test.
    """
    count = 400
    prediction = method.predictor.predict(method.x, count)
    if prediction.moments is None:
        return
    mean, std = prediction.moments.mean, prediction.moments.std
    gap = (prediction.samples.mean(0) - mean).abs()
    assert bool((gap <= 6 * std / count**0.5 + 1e-5).all()), f"the samples' mean is {float(gap.max()):g} off"
    found = prediction.samples.std(0)
    # 400 draws give it within a few percent; K members, each drawn many times, give √((K − 1)/K) of it
    assert bool(((found >= 0.6 * std - 1e-5) & (found <= 1.5 * std + 1e-5)).all()), "the samples have another std"


def check_summarize_matches_predict(method: MethodUnderTest) -> None:
    """The statistics of `summarize` are those of `predict`.

    Args:
        method: The method under test.
    """
    predictor, x = method.predictor, method.x
    names = ("mean", "std", "probs", "entropy", "expected_entropy", "mutual_information")
    for num_samples in (1, 2, 9, 40):
        prediction = predictor.predict(x, num_samples, seed=2)
        summary = predictor.summarize(x, num_samples, seed=2, quantiles=(0.025, 0.975))
        for name in names:
            torch.testing.assert_close(getattr(summary, name), getattr(prediction, name), **_ROUNDING)
        intervals = (each.interval(method="percentile") for each in (summary, prediction))
        for found, expected in zip(*intervals, strict=True):
            torch.testing.assert_close(found, expected, **_ROUNDING)


def check_no_side_effects(method: MethodUnderTest) -> None:
    """Prediction does not depend on training modes, and changes no mode, parameter, buffer or random state.

    Args:
        method: The method under test.
    """
    predictor, x = method.predictor, method.x
    before = _random_states()
    expected = predictor.predict(x, 3).samples
    module = predictor.module
    module.train()
    next(iter(module.children()), module).eval()
    modes = [part.training for part in module.modules()]
    state = {name: value.clone() for name, value in predictor.state_dict().items()}
    assert torch.equal(predictor.predict(x, 3).samples, expected), "a module in training mode predicts otherwise"
    predictor.summarize(x, 3)
    assert _random_states() == before, "prediction changed the random state of torch, NumPy or Python"
    assert [part.training for part in module.modules()] == modes, "prediction changed the mode of a module"
    after = predictor.state_dict()
    changed = [name for name, value in state.items() if not torch.equal(value, after[name])]
    assert not changed, f"prediction changed {changed}"
    module.eval()


def _random_states() -> tuple[Any, ...]:
    """The global random states of torch, NumPy and Python."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().tolist(), kind, list(keys), rest, random.getstate()


def check_save_and_load(method: MethodUnderTest) -> None:
    """A loaded predictor gives the same samples and saves to the same files, bit for bit.

    Args:
        method: The method under test.
    """
    predictor, x = method.predictor, method.x
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"
        save(predictor, first)
        loaded = load(first, model=method.case.model() if method.info.needs_net else None)
        assert type(loaded) is type(predictor)
        assert torch.equal(loaded.predict(x, 5, seed=1).samples, predictor.predict(x, 5, seed=1).samples)
        save(loaded, second)
        for path in first.iterdir():
            assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def check_fit_seed(method: MethodUnderTest) -> None:
    """What is learned depends on `config.seed` and not on global random states, which do not change.

    Args:
        method: The method under test.
    """
    with torch.random.fork_rng():
        torch.manual_seed(99)
        before = _random_states()
        again = method.fit(method.task)
        assert _random_states() == before, "the fit changed the random state of torch, NumPy or Python"
        torch.manual_seed(1)
        other = method.fit(method.task, config=replace(method.config, seed=1))
    first, second, third = (p.predict(method.x, 3).samples for p in (method.predictor, again, other))
    assert torch.equal(first, second), "two fits with one seed differ"
    if method.info.needs_net:
        assert not torch.equal(first, third), "two fits with different seeds are the same"


def check_resume(method: MethodUnderTest) -> None:
    """An interrupted fit resumes where it stopped and gives the same predictor.

    Args:
        method: The method under test.
    """
    full: list[EpochReport] = []
    rest: list[EpochReport] = []

    def interrupt(report: EpochReport) -> None:
        raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        config = replace(method.config, folder=Path(folder), on_epoch=interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            method.fit(method.task, config=config)
        resumed = method.fit(method.task, config=replace(config, on_epoch=rest.append))
    method.fit(method.task, config=replace(method.config, on_epoch=full.append))
    assert len(rest) < len(full), "the finished epoch is repeated: no checkpoint was found"
    samples = [p.predict(method.x, 4).samples for p in (method.predictor, resumed)]
    assert torch.equal(*samples), "a resumed fit gives another predictor"


def check_single_member(method: MethodUnderTest) -> None:
    """With K = 1 all replicates are the same function: that of the only net.

    Args:
        method: The method under test.
    """
    if not method.info.members:
        return
    predictor = method.fit(method.task, num_members=1)
    prediction = predictor.predict(method.x, 4)
    assert bool((prediction.std == 0).all())
    torch.testing.assert_close(prediction.samples[0], prediction.samples[3])
    nets, export = getattr(predictor, "nets", None), getattr(predictor, "export", None)
    if nets or export:
        single = nets[0] if nets else export(0)  # type: ignore[misc]
        expected = DeterministicPredictor(single).predict(method.x, 1).samples[0]
        torch.testing.assert_close(prediction.samples[0], expected)


def check_argument_errors(method: MethodUnderTest) -> None:
    """Wrong arguments raise an ArgumentError with the name of the argument.

    Args:
        method: The method under test.
    """
    predictor, x = method.predictor, method.x
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("num_samples", lambda: predictor.predict(x, 0)),
        ("num_samples", lambda: predictor.summarize(x, -1)),
        ("x", lambda: predictor.predict(x * torch.nan, 2)),
        ("x", lambda: predictor.predict(x.tolist(), 2)),
        ("seed", lambda: predictor.predict(x, 2, seed="a")),  # type: ignore[arg-type]
        ("loss", lambda: method.make(loss="ce")),
    ]
    if method.info.members:
        calls.append(("num_members", lambda: method.make(num_members=0)))
    for name, call in calls:
        found = getattr(_catch_error(call), "name", None)
        assert found == name, f"expected an ArgumentError about {name}, got one about {found}"


def _catch_error(call: Callable[[], Any]) -> ValueError | None:
    """The ValueError, such as an ArgumentError, that a call raises."""
    try:
        call()
    except ValueError as error:
        return error
    return None


CHECKS: tuple[Callable[[MethodUnderTest], None], ...] = (
    check_shape_and_dtype,
    check_unsupported_tasks,
    check_seeds,
    check_coherence,
    check_single_row,
    check_exact_moments,
    check_summarize_matches_predict,
    check_no_side_effects,
    check_save_and_load,
    check_fit_seed,
    check_resume,
    check_single_member,
    check_argument_errors,
)


def check_method(name: str, **options: Any) -> None:
    """Run every check of the contract on a registered method.

    Args:
        name: Name of the method.
        **options: Options of its class.

    Raises:
        AssertionError: If a check fails; the message names it.

    Example:
        >>> check_method("deterministic")
    """
    method = MethodUnderTest(find_method(name), options)
    for check in CHECKS:
        try:
            check(method)
        except AssertionError as error:
            raise AssertionError(f"{name} fails {check.__name__} ({check.__doc__}): {error}") from error
