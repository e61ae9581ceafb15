"""Generated replicates beside true ones at the same inputs.

For classes the logits are compared, less their mean over classes: softmax does not see a shift of all of them, and
probabilities near 0 and 1 have no spread to compare. True replicates differ in their random first weights and order of
rows as well as in their bootstrap weights, as bootstrapped nets do. To compare the weights alone, give all of them one
start: `make_net=lambda: copy.deepcopy(net)`.

Newton and Raftery, Approximate Bayesian inference with the weighted likelihood bootstrap, JRSS B 1994 (true
replicates).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots.batches import check_rows, own_randomness
from neuboots.keys import seed_named
from neuboots.metrics.tally import Tally
from neuboots.prediction import Method, Predictor
from neuboots.tasks.audit.chance import Chance, Kept
from neuboots.tasks.audit.distances import distances_of_shapes
from neuboots.tasks.audit.spread import FLAT, NUM_SETS, Place, Ratio, Sets, Sums
from neuboots.tasks.audit.verdict import AWAY, Audit
from neuboots.tasks.common import batches_of, check_predictor, part_of
from neuboots.tasks.inputs import input_batches, rows_in
from neuboots.training import Recipe

_HELD = 1 << 21  # numbers looked at together
_FAR_OUT = 0.5  # of the variance, on average over places, that goes if one replicate is left out


def audit(
    predictor: Predictor,
    bootstrap: Method,
    make_net: Callable[[], nn.Module],
    data: Dataset[Any],
    recipe: Recipe,
    x: Any,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    classes: bool | None = None,
    progress: bool = True,
) -> Audit:
    """Train true replicates with `bootstrap` on the data that the predictor was trained on, and compare both at x.

    `bootstrap` is a method whose replicates are K nets on re-weighted or resampled data, such as
    `BayesianBootstrap(loss, num_members=20)`, which trains small nets side by side. They are trained as the recipe
    says, but under a seed of their own, lest they be nets that the predictor itself consists of. `classes` says whether
    outputs are logits of classes (None: they are if a target is one whole number, and the net has several outputs).

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import BayesianBootstrap, Plain, SquaredError
    >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    >>> data, recipe = TensorDataset(x, x.sum(1)), Recipe(epochs=1, progress=False)
    >>> make_net = lambda: nn.Linear(2, 1)
    >>> plain = Plain(SquaredError()).fit(make_net, data, recipe)
    >>> audit(plain, BayesianBootstrap(SquaredError(), 8), make_net, data, recipe, x[:20], progress=False).verdict
    "no spread at all: 8 true replicates differ, the predictor's do not"
    """
    check_predictor(predictor)
    check_rows(data)
    if recipe.folder is not None:
        raise ValueError(
            "got a recipe with a folder, where the fit of the predictor may be; expected none, since other nets are "
            "trained: give dataclasses.replace(recipe, folder=None)"
        )
    named = seed_named(recipe.seed, seed, "audit")
    with own_randomness():
        truth = bootstrap.fit(make_net, data, replace(recipe, seed=named, progress=recipe.progress and progress))
    check_predictor(truth)
    if classes is None:
        classes = _are_classes(truth, data, seed=seed)
    return compare(predictor, truth, x, num_samples=num_samples, seed=seed, classes=classes, progress=progress)


def _are_classes(truth: Predictor, data: Dataset[Any], *, seed: int) -> bool:
    """A label is one whole number for each input or pixel, where the net has several outputs for it."""
    x, y = next(batches_of(data, 1, title="", progress=False))
    outputs = truth.predict(x, 1, seed=seed).samples[0]  # (1, C, *)
    return not y.is_floating_point() and outputs.shape[1] > 1 and y.numel() == outputs[:, 0].numel()


def compare(
    predictor: Predictor,
    truth: Predictor,
    x: Any,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    classes: bool = False,
    progress: bool = True,
) -> Audit:
    """Compare a predictor's replicates with K true ones, the members of `truth`, at x.

    x is a tensor (a tuple or dict of them), a data set or a loader. Memory is bounded by the B replicates at one input
    (of many pixels, if it has them) and by the maps, one number for each input and output. `classes` says that outputs
    are logits of classes.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import BayesianBootstrap, SquaredError
    >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, x.sum(1) + torch.randn(60, generator=torch.Generator().manual_seed(1)))
    >>> method = BayesianBootstrap(SquaredError(), num_members=20)
    >>> one, other = (
    ...     method.fit(lambda: nn.Linear(3, 1), data, Recipe(epochs=5, seed=s, progress=False)) for s in (1, 2)
    ... )
    >>> compare(one, other, x, progress=False).faithful
    True
    """
    check_predictor(predictor)
    check_predictor(truth)
    num_true, num_samples = _check_counts(predictor, truth, num_samples)
    true, generated = Sets.of(num_true, seed=seed), Sets.of(num_samples, seed=seed)
    sums: Sums | int = 0
    shares: _Shares | int = 0
    kept: list[Kept] = []
    maps: list[_Maps] = []
    pixels: tuple[int, ...] = ()
    start = 0
    for batch in _batches(x, truth, num_true + num_samples, seed=seed, progress=progress):
        pair = (
            truth.predict(batch, num_true, seed=seed).samples,
            predictor.predict(batch, num_samples, seed=seed).samples,
        )
        theirs, mine = (tuple(samples.shape[1:]) for samples in pair)
        if mine != theirs:
            raise ValueError(
                f"got outputs {mine} of the predictor and {theirs} of the true replicates; expected the same: train "
                "both with the same net"
            )
        pixels = theirs[2:]
        for t, s in _places(*pair, classes):
            maps.append(part := _Maps.of(t, s))
            sums = sums + Sums.of(true.log_std(t), generated.log_std(s), true, generated, part.counted)
            shares = shares + _Shares.of(t, s, part.differs)
            new = Kept.of(t, s, part.counted, start=start, seed=seed)
            kept = [kept[0] + new] if kept else [new]
            start += t.shape[2]
    assert isinstance(sums, Sums), "there is at least one input"
    assert isinstance(shares, _Shares)
    whole = _Maps(*(torch.cat([getattr(part, field.name) for part in maps], 1) for field in fields(_Maps)))
    if not bool(whole.differs.any()):
        raise ValueError(
            f"the {num_true} true replicates do not differ at these inputs; expected a bootstrap that draws weights "
            "for each of them: is it BayesianBootstrap or StandardBootstrap?"
        )
    chance = Chance.of(kept[0], away=AWAY, seed=seed) if bool(whole.counted.any()) else None
    by_chance = 0.0 if chance is None else chance.log_ratio
    shape = (len(whole.std), -1, *pixels)  # (C, N, *)
    return Audit(
        size=Ratio.over_all(sums, true, generated, chance=by_chance),
        sizes=Ratio.by_output(sums, true, generated, chance=by_chance),
        place=Place.of(sums, true, generated),
        ks=None if chance is None else float(whole.ks[whole.counted].mean()),
        ks_chance=None if chance is None else chance.ks,
        wasserstein=None if chance is None else float(whole.wasserstein[whole.counted].mean()),
        wasserstein_chance=None if chance is None else chance.wasserstein,
        wasserstein_limit=None if chance is None else chance.wasserstein_limit,
        shift=float(whole.shift[whole.differs].median()),
        away=float((whole.shift[whole.differs] > AWAY).double().mean()),
        away_limit=0.0 if chance is None else chance.away_limit,
        flat=1 - float(whole.counted.sum() / whole.differs.sum()),
        far_out_true=_far_out(shares.true / shares.count),
        far_out=_far_out(shares.generated / shares.count),
        std=whole.std.view(shape).movedim(0, 1),
        true_std=whole.true_std.view(shape).movedim(0, 1),
        ks_map=whole.ks.view(shape).movedim(0, 1),
        wasserstein_map=whole.wasserstein.view(shape).movedim(0, 1),
        num_true=num_true,
        num_samples=num_samples,
        classes=classes,
        seed=seed,
    )


def _check_counts(predictor: Predictor, truth: Predictor, num_samples: int) -> tuple[int, int]:
    """K and B; replicates that are only repeated tell nothing new."""
    num_true = truth.num_distinct
    if num_true is None or num_true < 4:
        got = "a truth whose replicates are no members" if num_true is None else f"{num_true} true replicates"
        raise ValueError(f"got {got}; expected the predictor of a bootstrap with K ≥ 4 members, better 20")
    if not isinstance(num_samples, int) or num_samples < 2:
        raise ValueError(f"got num_samples={num_samples!r}; expected at least 2 replicates, better 1000")
    return num_true, num_samples if predictor.num_distinct is None else min(num_samples, predictor.num_distinct)


def _batches(x: Any, truth: Predictor, replicates: int, *, seed: int, progress: bool) -> Iterator[Any]:
    """So many inputs at a time that their replicates are no more than _HELD numbers, one at least."""
    size = 0
    for batch in input_batches(x, title="audit", progress=progress):
        if not size:
            one = truth.predict(part_of(batch, slice(0, 1)), 1, seed=seed).samples  # (1, 1, C, *)
            size = max(1, _HELD // (replicates * one.numel()))
        for start in range(0, rows_in(batch), size):
            yield part_of(batch, slice(start, start + size))


def _places(true: Tensor, generated: Tensor, classes: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs as they are compared, inputs and pixels in one axis, some at a time: (B, N, C, *) → (B, C, L)."""
    if not all(bool(torch.isfinite(samples).all()) for samples in (true, generated)):
        raise ValueError("got replicates with NaN or infinite outputs; expected finite numbers: look at the training")
    pair = [samples.detach().movedim(2, 1).flatten(2) for samples in (true, generated)]
    size = max(1, _HELD // (max(len(true) + len(generated), 2 * NUM_SETS) * pair[0].shape[1]))
    for t, s in zip(*(torch.split(samples, size, 2) for samples in pair), strict=True):
        t, s = t.cpu().double(), s.cpu().double()
        if classes and t.shape[1] > 1:
            t, s = t - t.mean(1, keepdim=True), s - s.mean(1, keepdim=True)
        yield t, s


@dataclass(frozen=True, eq=False)
class _Maps:
    """Figures of each output at each place: (C, L)."""

    std: Tensor
    true_std: Tensor
    ks: Tensor
    wasserstein: Tensor
    shift: Tensor
    differs: Tensor  # the true replicates do
    counted: Tensor  # and the generated ones do

    @classmethod
    def of(cls, true: Tensor, generated: Tensor) -> "_Maps":
        """Of replicates (K, C, L) and (B, C, L)."""
        std = generated.std(0) if len(generated) > 1 else torch.zeros_like(generated[0])
        true_std = true.std(0)
        # float32 outputs differ by rounding in the seventh figure
        differs = true_std > 1e-6 * true.square().mean(0).sqrt()
        ks, wasserstein = distances_of_shapes(true.flatten(1), generated.flatten(1))
        shift = (generated.mean(0) - true.mean(0)).abs() / true_std
        counted = differs & (std >= FLAT * true_std)
        return cls(std, true_std, ks.view_as(std), wasserstein.view_as(std), shift, differs, counted)


@dataclass(frozen=True, eq=False)
class _Shares(Tally):
    """For each replicate, the share of the variance that goes with it, summed over places: (K,), (B,)."""

    true: Tensor
    generated: Tensor
    count: Tensor

    @classmethod
    def of(cls, true: Tensor, generated: Tensor, differs: Tensor) -> "_Shares":
        shares = []
        for samples in (true, generated):
            squares = (samples - samples.mean(0)).square()  # (B, C, L)
            total = squares.sum(0) * (1 - 1 / len(samples))
            share = squares / total.clamp_min(torch.finfo(torch.float64).tiny)
            shares.append(share.where(differs, 0.0).sum((1, 2)))
        return cls(shares[0], shares[1], differs.sum().double())


def _far_out(share: Tensor) -> tuple[int, ...]:
    """Which replicates make up most of the spread; of fewer than eight, any of them may."""
    return () if len(share) < 8 else tuple((share > _FAR_OUT).nonzero()[:, 0].tolist())
