"""Generated replicates beside true ones at the same inputs.

For classes the logits are compared, less their mean over classes: softmax does not see a shift of all of them, and
probabilities near 0 and 1 have no spread to compare. True replicates differ in their random first weights and order of
rows as well as in their bootstrap weights, as bootstrapped nets do. To compare the weights alone, give all of them one
start: `make_net=lambda: copy.deepcopy(net)`.

Newton and Raftery, Approximate Bayesian inference with the weighted likelihood bootstrap, JRSS B 1994 (true
replicates).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots.batches import own_randomness
from neuboots.keys import seed_named
from neuboots.prediction import Method, Predictor
from neuboots.tasks.audit.distances import distances_by_chance, distances_of_replicates
from neuboots.tasks.audit.spread import FLAT, Place, Sets, Sums, ratio_of
from neuboots.tasks.audit.verdict import Audit
from neuboots.tasks.common import check_predictor, check_rows, inputs_of, part_of
from neuboots.tasks.inputs import rows_in
from neuboots.training import Recipe

_HELD = 1 << 21  # replicates × outputs looked at together: memory does not grow with B


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
    outputs are logits of classes (None: they are if targets are whole numbers).

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
    named = seed_named(recipe.seed, seed, "audit")
    with own_randomness():
        if classes is None:
            row: Any = data[0]
            classes = not torch.as_tensor(row[-1]).is_floating_point()
        truth = bootstrap.fit(make_net, data, replace(recipe, seed=named, progress=recipe.progress and progress))
    return compare(predictor, truth, x, num_samples=num_samples, seed=seed, classes=classes, progress=progress)


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

    x is a tensor, or a tuple or dict of them. Inputs are taken a few at a time: memory grows with neither B nor N, but
    for the maps. `classes` says that outputs are logits of classes.

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
    if rows_in(x) == 0:
        raise ValueError("got no inputs; expected at least one")
    one = truth.predict(part_of(x, slice(0, 1)), 1, seed=seed).samples  # (1, 1, C, *)
    true, generated = Sets.of(num_true, seed=seed), Sets.of(num_samples, seed=seed)
    size = max(1, _HELD // ((num_true + num_samples) * one.numel()))
    sums: Sums | int = 0
    parts: list[_Maps] = []
    for batch in inputs_of(x, size, title="audit", progress=progress):
        pair = truth.predict(batch, num_true, seed=seed), predictor.predict(batch, num_samples, seed=seed)
        theirs, mine = (tuple(prediction.samples.shape[1:]) for prediction in pair)
        if mine != theirs:
            raise ValueError(
                f"got outputs {mine} of the predictor and {theirs} of the true replicates; expected the same: train "
                "both with the same net"
            )
        t, s = (_places(prediction.samples, classes) for prediction in pair)
        parts.append(maps := _Maps.of(t, s))
        sums = sums + Sums.of(true.log_std(t), generated.log_std(s), true, generated, maps.counted)
    assert isinstance(sums, Sums), "there is at least one input"
    whole = _Maps(*(torch.cat([getattr(part, field.name) for part in parts], 1) for field in fields(_Maps)))
    if not bool(whole.differs.any()):
        raise ValueError(
            f"the {num_true} true replicates do not differ at these inputs; expected a bootstrap that draws weights "
            "for each of them: is it BayesianBootstrap or StandardBootstrap?"
        )
    shape = (one.shape[2], -1, *one.shape[3:])  # (C, N, *)
    ks_chance, ks_limit, wasserstein_chance = distances_by_chance(num_true, num_samples, seed=seed)
    ratio, ratio_low, ratio_high = ratio_of(sums, true, generated, num_true, num_samples)
    place = Place.of(sums, true, generated)
    return Audit(
        ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        ratio_spread=place.spread,
        correlation=place.correlation,
        correlation_error=place.error,
        raw_correlation=place.raw,
        reliability=place.reliability,
        ks=float(whole.ks[whole.differs].mean()),
        ks_chance=ks_chance,
        ks_limit=ks_limit,
        wasserstein=float(whole.wasserstein[whole.differs].mean()),
        wasserstein_chance=wasserstein_chance,
        shift=float(whole.shift[whole.differs].median()),
        flat=1 - float(whole.counted.sum() / whole.differs.sum()),
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


def _places(samples: Tensor, classes: bool) -> Tensor:
    """Outputs as they are compared, inputs and pixels in one axis: (B, N, C, *) → (B, C, L)."""
    if not bool(torch.isfinite(samples).all()):
        raise ValueError("got replicates with NaN or infinite outputs; expected finite numbers: look at the training")
    samples = samples.detach().cpu().double()
    if classes and samples.shape[2] > 1:
        samples = samples - samples.mean(2, keepdim=True)
    return samples.movedim(2, 1).flatten(2)


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
        ks, wasserstein = distances_of_replicates(true.flatten(1), generated.flatten(1))
        shift = (generated.mean(0) - true.mean(0)).abs() / true_std
        wasserstein = wasserstein.view_as(std).where(differs, 0.0)
        return cls(std, true_std, ks.view_as(std), wasserstein, shift, differs, differs & (std >= FLAT * true_std))
