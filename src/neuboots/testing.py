"""The contract of every method, as checks that anyone can run.

    predict(x)[:, :k] = predict(x[:k]),   load(save(p)) = p,   summarize = predict,   …

`check_method("neuboots")` fits the method on small made-up data and runs every check that its line in the table of
methods promises; the tests of this library run the same checks. A check that fails raises AssertionError. A method is
made with `loss=…`, which it must take, and with `num_members=…` if its line says `members=True`.
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
    """Two branches, one with BatchNorm, joined before one head."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.right = nn.Linear(4, 6)
        self.fc = nn.Linear(12, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.cat([self.left(x), self.right(x).sigmoid()], 1))
        return out


class Upsampling(nn.Module):
    """A stride, BatchNorm, a 1×1 convolution, and upsampling back to the input's size; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 7, 3, 2, 1), nn.BatchNorm2d(7), nn.ReLU())
        self.classifier = nn.Conv2d(7, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.classifier(self.stem(x))
        return {"out": nn.functional.interpolate(low, size=x.shape[2:], mode="bilinear", align_corners=False)}


class Squeezing(nn.Module):
    """Takes away every axis of length one before and after its head, that of a single row too."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        self.fc = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(x).squeeze())
        return out.squeeze()


def _rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class ExampleTask:
    """A task: its loss, a net for it, data, other inputs, and the shape of one output."""

    loss: Loss
    model: Callable[[], nn.Module]
    data: TensorDataset
    x: Tensor
    shape: tuple[int, ...]


def _classification() -> ExampleTask:
    return ExampleTask(
        nn.CrossEntropyLoss(),
        lambda: TwoBranches(3),
        TensorDataset(_rows(50, 4), torch.arange(50) % 3),
        _rows(9, 4, seed=5),
        (3,),
    )


def _regression() -> ExampleTask:
    x = _rows(50, 4)
    y = x.sum(1) + 0.1 * _rows(50, seed=1)
    return ExampleTask(nn.MSELoss(), lambda: TwoBranches(1), TensorDataset(x, y), _rows(9, 4, seed=5), (1,))


def _segmentation() -> ExampleTask:
    x = _rows(12, 2, 8, 8)
    y = (x[:, 0] > 0).long()
    y[:, :2] = 255  # void
    return ExampleTask(
        nn.CrossEntropyLoss(ignore_index=255), Upsampling, TensorDataset(x, y), _rows(3, 2, 8, 8, seed=5), (3, 8, 8)
    )


EXAMPLE_TASKS: dict[Task, Callable[[], ExampleTask]] = {
    "classification": _classification,
    "regression": _regression,
    "segmentation": _segmentation,
}


# -- the subject of the checks -------------------------------------------------------------------------


@dataclass
class MethodUnderTest:
    """A method under test: its line in the table, the options it is tested with, and what it was fitted on."""

    entry: MethodInfo
    options: dict[str, Any] = field(default_factory=dict)
    config: TrainingConfig = CONFIG

    def make(self, **options: Any) -> Any:
        options = {**self.options, **options}
        try:
            return self.entry.make(**options)
        except TypeError as error:
            raise AssertionError(
                f"It was made with {sorted(options)}, and expected to take these ({error})."
            ) from error

    def fit(self, task: Task, *, config: TrainingConfig | None = None, **options: Any) -> Predictor:
        case = EXAMPLE_TASKS[task]()
        method = self.make(loss=case.loss, **options)
        fitted: Predictor = method.fit(case.model, case.data, config or self.config)
        return fitted

    @property
    def task(self) -> Task:
        """The task most checks are run on: the first that the method can do."""
        return self.entry.tasks[0]

    @cached_property
    def predictor(self) -> Predictor:
        return self.fit(self.task)

    @cached_property
    def case(self) -> ExampleTask:
        return EXAMPLE_TASKS[self.task]()

    @property
    def x(self) -> Tensor:
        return self.case.x


# -- the checks ----------------------------------------------------------------------------------------


def _refusal(call: Callable[[], Any]) -> str:
    """The sentence with which the call was refused; nothing if it was not."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def check_shape_and_dtype(subject: MethodUnderTest) -> None:
    """Samples are (B, N, C, *), finite, in the net's precision, without gradients, for every task of the method."""
    for task in subject.entry.tasks:
        case = EXAMPLE_TASKS[task]()
        predictor = subject.predictor if task == subject.task else subject.fit(task)
        prediction = predictor.predict(case.x, 7)
        assert prediction.samples.shape == (7, len(case.x), *case.shape), prediction.samples.shape
        assert prediction.mean.shape == prediction.std.shape == (len(case.x), *case.shape)
        assert prediction.samples.dtype == torch.float32
        assert bool(torch.isfinite(prediction.samples).all()), "samples are not finite"
        assert not prediction.samples.requires_grad
        if task != "regression":
            assert prediction.entropy.shape == (len(case.x), *case.shape[1:])


def check_unsupported_tasks(subject: MethodUnderTest) -> None:
    """What the method cannot do, it says in a sentence."""
    for task in set(TASKS) - set(subject.entry.tasks):
        said = _refusal(partial(subject.fit, task))
        assert "expected" in said, f"{subject.entry.name} does not list {task}; it should say so, but said {said!r}"


def check_seeds(subject: MethodUnderTest) -> None:
    """The same seed gives the same replicates, whatever B; another seed gives others."""
    predictor, x = subject.predictor, subject.x
    samples = predictor.predict(x, 6, seed=3).samples
    assert torch.equal(samples, predictor.predict(x, 6, seed=3).samples)
    torch.testing.assert_close(samples[:4], predictor.predict(x, 4, seed=3).samples)
    if subject.entry.random:
        others = [predictor.predict(x, 6, seed=seed).samples for seed in (4, 5, 6, 7)]  # of K members, orders recur
        assert not all(torch.allclose(samples, other) for other in others), "the seed makes no difference"
        assert bool((predictor.predict(x, 6).std > 0).any()), "the replicates are all the same"


def check_coherence(subject: MethodUnderTest) -> None:
    """A replicate is one function of x: any batch, any order, within the rounding of sums in another order."""
    if not subject.entry.coherent:
        return
    predictor, x = subject.predictor, subject.x
    whole = predictor.predict(x, 5)
    for rows in (torch.arange(4), torch.tensor([2]), torch.arange(len(x)).flip(0).roll(2), torch.arange(0)):
        part = predictor.predict(x[rows], 5)
        torch.testing.assert_close(part.samples, whole.samples[:, rows], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(part.mean, whole.mean[rows], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(part.std, whole.std[rows], rtol=1e-4, atol=1e-5)


def check_single_row(subject: MethodUnderTest) -> None:
    """predict(x[:1]) = predict(x)[:, :1] of a net that squeezes, also where training ends on a batch of one row."""
    for task in subject.entry.tasks:
        case = EXAMPLE_TASKS[task]()
        if len(case.shape) == 1:
            method = subject.make(loss=case.loss)
            model = partial(Squeezing, case.shape[0])
            predictor = method.fit(model, case.data, replace(subject.config, batch_size=7))
            whole, alone = (predictor.predict(x, 6, seed=3) for x in (case.x, case.x[:1]))
            assert alone.samples.shape == (6, 1, *case.shape), f"One row of {task} gave {tuple(alone.samples.shape)}."
            if subject.entry.coherent:
                torch.testing.assert_close(alone.samples, whole.samples[:, :1], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(alone.std, whole.std[:1], rtol=1e-4, atol=1e-5)


def check_exact_moments(subject: MethodUnderTest) -> None:
    """Where mean and standard deviation are said to be exact, many samples have them, within their standard errors."""
    many = 400
    prediction = subject.predictor.predict(subject.x, many)
    if prediction.moments is None:
        return
    mean, std = prediction.moments.mean, prediction.moments.std
    gap = (prediction.samples.mean(0) - mean).abs()
    assert bool((gap <= 6 * std / many**0.5 + 1e-5).all()), f"the samples' mean is {float(gap.max()):g} off"
    drawn = prediction.samples.std(0)
    # 400 draws have it within a few per cent; K members, counted again and again, have √((K − 1)/K) of it
    assert bool(((drawn >= 0.6 * std - 1e-5) & (drawn <= 1.5 * std + 1e-5)).all()), "the samples have another spread"


def check_summarize_matches_predict(subject: MethodUnderTest) -> None:
    """The streamed figures are those of the samples in memory."""
    predictor, x = subject.predictor, subject.x
    for num_samples in (1, 2, 9, 40):
        prediction = predictor.predict(x, num_samples, seed=2)
        summary = predictor.summarize(x, num_samples, seed=2, quantiles=(0.025, 0.975))
        for figure in ("mean", "std", "probs", "entropy", "expected_entropy", "mutual_information"):
            torch.testing.assert_close(getattr(summary, figure), getattr(prediction, figure), rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(
            summary.interval(method="percentile"), prediction.interval(method="percentile"), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def check_no_side_effects(subject: MethodUnderTest) -> None:
    """Every parameter, buffer and training mode is as it was, and the caller's random state too."""
    predictor, x = subject.predictor, subject.x
    module = predictor.module
    module.train()
    next(iter(module.children()), module).eval()
    modes = [part.training for part in module.modules()]
    state = {name: value.clone() for name, value in predictor.state_dict().items()}
    before = _random_states()
    predictor.predict(x, 3)
    predictor.summarize(x, 3)
    assert _random_states() == before, "prediction moved the random state of torch, NumPy or Python"
    assert [part.training for part in module.modules()] == modes, "prediction left modules in another mode"
    after = predictor.state_dict()
    changed = [name for name, value in state.items() if not torch.equal(value, after[name])]
    assert not changed, f"prediction changed {changed}"
    module.eval()


def _random_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().tolist(), kind, list(keys), rest, random.getstate()


def check_eval_mode(subject: MethodUnderTest) -> None:
    """A module left in training mode predicts the same."""
    predictor, x = subject.predictor, subject.x
    samples = predictor.predict(x, 3).samples
    predictor.module.train()
    again = predictor.predict(x, 3).samples
    predictor.module.eval()
    assert torch.equal(samples, again)


def check_save_and_load(subject: MethodUnderTest) -> None:
    """A loaded predictor gives the same samples, bit for bit."""
    predictor, x = subject.predictor, subject.x
    with tempfile.TemporaryDirectory() as folder:
        save(predictor, Path(folder) / "model")
        again = load(Path(folder) / "model", model=subject.case.model() if subject.entry.needs_net else None)
        assert type(again) is type(predictor)
        assert torch.equal(again.predict(x, 5, seed=1).samples, predictor.predict(x, 5, seed=1).samples)
        save(again, Path(folder) / "again")
        for name in ("config.json", "model.safetensors"):
            assert (Path(folder) / "model" / name).read_bytes() == (Path(folder) / "again" / name).read_bytes(), name


def check_fit_seed(subject: MethodUnderTest) -> None:
    """The recipe's seed alone decides what is learned, and the caller's random state is as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(99)
        before = _random_states()
        again = subject.fit(subject.task)
        assert _random_states() == before, "the fit moved the random state of torch, NumPy or Python"
        torch.manual_seed(1)
        other = subject.fit(subject.task, config=replace(subject.config, seed=1))
    first, second, third = (p.predict(subject.x, 3).samples for p in (subject.predictor, again, other))
    assert torch.equal(first, second), "two fits with one seed differ"
    if subject.entry.needs_net:
        assert not torch.equal(first, third), "two fits with different seeds are the same"


class _Cut(Exception):
    pass


def check_resume(subject: MethodUnderTest) -> None:
    """A fit that was cut short goes on where it stopped, and ends in the same predictor."""
    whole: list[EpochReport] = []
    rest: list[EpochReport] = []

    def cut(report: EpochReport) -> None:
        raise _Cut

    with tempfile.TemporaryDirectory() as folder:
        config = replace(subject.config, folder=Path(folder), on_epoch=cut)
        with contextlib.suppress(_Cut):
            subject.fit(subject.task, config=config)
        resumed = subject.fit(subject.task, config=replace(config, on_epoch=rest.append))
    subject.fit(subject.task, config=replace(subject.config, on_epoch=whole.append))
    assert len(rest) < len(whole), "the epoch that was done is done again: nothing was found in the folder"
    samples = [p.predict(subject.x, 4).samples for p in (subject.predictor, resumed)]
    assert torch.equal(*samples), "a fit that was cut short and resumed ends elsewhere"


def check_single_member(subject: MethodUnderTest) -> None:
    """With K = 1 all replicates are the same function, and for a method of K nets that net by itself."""
    if not subject.entry.members:
        return
    predictor = subject.fit(subject.task, num_members=1)
    prediction = predictor.predict(subject.x, 4)
    assert bool((prediction.std == 0).all())
    torch.testing.assert_close(prediction.samples[0], prediction.samples[3])
    nets, export = getattr(predictor, "nets", None), getattr(predictor, "export", None)
    if nets or export:
        single = nets[0] if nets else export(0)  # type: ignore[misc]
        torch.testing.assert_close(
            prediction.samples[0], DeterministicPredictor(single).predict(subject.x, 1).samples[0]
        )


def check_argument_errors(subject: MethodUnderTest) -> None:
    """B = 0, NaN, and what is no tensor get one sentence."""
    predictor, x = subject.predictor, subject.x
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: predictor.predict(x, 0), "got B = 0 replicates; expected num_samples ≥ 1"),
        (lambda: predictor.summarize(x, -1), "got B = -1 replicates"),
        (lambda: predictor.predict(x * torch.nan, 2), "NaN or infinite"),
        (lambda: predictor.predict(x.numpy(), 2), "got inputs of type ndarray; expected a tensor"),
        (lambda: predictor.predict(x, 2, seed="a"), "expected a whole number"),  # type: ignore[arg-type]
        (lambda: subject.make(loss="ce"), "got loss='ce'"),
    ]
    if subject.entry.members:
        calls.append((lambda: subject.make(num_members=0), "got num_members=0; expected K ≥ 1"))
    for call, sentence in calls:
        said = _refusal(call)
        assert sentence in said, f"said {said!r}; expected {sentence!r} in it"


CHECKS: tuple[Callable[[MethodUnderTest], None], ...] = (
    check_shape_and_dtype,
    check_unsupported_tasks,
    check_seeds,
    check_coherence,
    check_single_row,
    check_exact_moments,
    check_summarize_matches_predict,
    check_no_side_effects,
    check_eval_mode,
    check_save_and_load,
    check_fit_seed,
    check_resume,
    check_single_member,
    check_argument_errors,
)


def check_method(name: str, **options: Any) -> None:
    """Put a method of the table, made with these options, through every check.

    >>> check_method("deterministic")
    """
    subject = MethodUnderTest(find_method(name), options)
    for check in CHECKS:
        try:
            check(subject)
        except AssertionError as error:
            raise AssertionError(f"{name} breaks the contract. {check.__doc__} {error}") from error
