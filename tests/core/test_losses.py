"""The losses against torch's own, their weighted mean against the resampled data set, and shapes that would mislead."""

import json
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from _nets import noise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from neuboots import ArgumentError
from neuboots._prng import derive_keys
from neuboots.losses import (
    BrierLoss,
    GaussianNLL,
    as_loss,
    build_loss,
    describe_loss,
    has_independent_outputs,
    valid_mask,
    weighted_mean,
)
from neuboots.weights import Multinomial

IGNORED = 255
random = partial(noise, dtype=torch.float64)
many = settings(deadline=None, max_examples=40, derandomize=True)


def labels(*shape: int, classes: int, seed: int = 0, fraction: float = 0.0) -> Tensor:
    """Random labels, a fraction of them ignored."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, shape, generator=rng)
    return y.masked_fill(torch.rand(shape, generator=rng) < fraction, IGNORED)


def mean_loss(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, w: Tensor) -> Tensor:
    return weighted_mean(loss(outputs, targets), w, valid_mask(loss, targets))


# -- the weighted mean ---------------------------------------------------------------------------------


@many
@given(st.integers(1, 6), st.integers(2, 5), st.sampled_from([(), (3,), (4, 3)]), st.integers(0, 10**6))
def test_weighted_mean_with_unit_weights_matches_torch(N: int, C: int, pixels: tuple[int, ...], seed: int) -> None:
    """With ignored pixels too: torch divides by the number of those that count."""
    outputs = random(N, C, *pixels, seed=seed).requires_grad_()
    targets = labels(N, *pixels, classes=C, seed=seed, fraction=0.3)
    targets.view(-1)[0] = 0  # at least one counts
    ours = mean_loss(as_loss(nn.CrossEntropyLoss(ignore_index=IGNORED)), outputs, targets, torch.ones(N))
    theirs = F.cross_entropy(outputs, targets, ignore_index=IGNORED)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(value, outputs)[0] for value in (ours, theirs)))


@pytest.mark.parametrize("pixels", [(), (4, 3)], ids=["vectors", "pixels"])
@pytest.mark.parametrize("draw", range(5))
def test_multinomial_weights_match_resampling(draw: int, pixels: tuple[int, ...]) -> None:
    """In loss and in gradient, for a small net; equal but for the order of the sums."""
    n, C = 12, 3
    torch.manual_seed(draw)
    layer = nn.Conv2d if pixels else nn.Linear
    kernel = {"kernel_size": 1} if pixels else {}
    net = nn.Sequential(layer(4, 8, **kernel), nn.Tanh(), layer(8, C, **kernel)).double()
    x, y = random(n, 4, *pixels, seed=draw), labels(n, *pixels, classes=C, seed=draw)
    counts = Multinomial().sample(derive_keys(torch.tensor([draw]), 0), n)[0]
    rows = torch.repeat_interleave(torch.arange(n), counts.long())
    assert len(rows) == n
    assert counts.max() > 1  # some points are drawn twice and others never

    weighted = weighted_mean(as_loss(nn.CrossEntropyLoss())(net(x), y), counts)
    resampled = F.cross_entropy(net(x[rows]), y[rows])
    torch.testing.assert_close(weighted, resampled, rtol=1e-12, atol=0)
    parameters = list(net.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(value, parameters) for value in (weighted, resampled)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "losses", [torch.tensor(1.0), torch.ones(2), torch.ones(1, 3)], ids=["scalar", "(2,)", "(1, 3)"]
)
def test_weighted_mean_needs_one_loss_per_example(losses: Tensor) -> None:
    with pytest.raises(ArgumentError, match="loss"):
        weighted_mean(losses, torch.ones(3))


# -- ignored pixels ---------------------------------------------------------------------------------------

CROSS_ENTROPIES = [
    as_loss(nn.CrossEntropyLoss(ignore_index=IGNORED)),
    lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="none"),
]
CROSS_ENTROPIES[1].ignore_index = IGNORED  # type: ignore[attr-defined]
both = pytest.mark.parametrize("loss", CROSS_ENTROPIES, ids=["torch", "callable"])


@both
def test_ignored_pixels_have_no_loss_and_gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    targets = labels(3, 4, 4, classes=5, fraction=0.5)
    outputs, w = random(3, 5, 4, 4).requires_grad_(), torch.tensor([0.5, 2.0, 3.0])
    value = mean_loss(loss, outputs, targets, w)
    (gradient,) = torch.autograd.grad(value, outputs)
    ignore_index = (targets == IGNORED)[:, None].expand_as(gradient)
    assert 0 < ignore_index.sum() < ignore_index.numel()
    assert (gradient[ignore_index] == 0).all()
    assert (gradient[~ignore_index] != 0).all()
    # whatever stands there, the loss does not see it
    changed = outputs.detach().masked_fill(ignore_index, 100.0)
    assert torch.equal(mean_loss(loss, changed, targets, w), value)
    # and the others count as if they were alone
    kept, image = targets != IGNORED, torch.arange(3).view(3, 1, 1).expand_as(targets)
    alone = F.cross_entropy(outputs.movedim(1, -1)[kept], targets[kept], reduction="none")
    torch.testing.assert_close(value, (alone * w[image[kept]]).mean())


@both
def test_batch_of_ignored_pixels_has_zero_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """0 and not 0/0: one empty batch would turn the net into NaNs."""
    outputs = random(2, 3, 4).requires_grad_()
    value = mean_loss(loss, outputs, torch.full((2, 4), IGNORED), torch.ones(2))
    assert value.item() == 0
    assert (torch.autograd.grad(value, outputs)[0] == 0).all()


def test_valid_mask() -> None:
    y = torch.tensor([0, IGNORED, 2])
    assert valid_mask(as_loss(nn.CrossEntropyLoss(ignore_index=IGNORED)), y).tolist() == [True, False, True]
    assert valid_mask(as_loss(nn.CrossEntropyLoss(ignore_index=IGNORED)), torch.tensor([0, 1])) is None
    assert valid_mask(as_loss(nn.CrossEntropyLoss()), torch.tensor([0, -100])).tolist() == [True, False]
    assert valid_mask(as_loss(nn.MSELoss()), y) is None
    probabilities = torch.tensor([[0.0, 1.0], [0.5, 0.5]])  # in which 0 is no label
    assert valid_mask(nn.CrossEntropyLoss(reduction="none", ignore_index=0), probabilities) is None


# -- each loss against torch's own ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_every_integer_type(dtype: torch.dtype) -> None:
    """156 is a class, not −100, also where both are the same byte."""
    outputs = random(3, 200)
    targets = torch.tensor([0, 156, 199])
    ours = mean_loss(as_loss(nn.CrossEntropyLoss()), outputs, targets.to(dtype), torch.ones(3))
    torch.testing.assert_close(ours, F.cross_entropy(outputs, targets))


def test_gaussian_nll() -> None:
    """Two means, two logarithms of variances; torch takes the variances themselves."""
    outputs, targets = random(6, 4, 3), random(6, 2, 3, seed=1)
    mean, variance = outputs[:, :2], outputs[:, 2:].exp()
    theirs = F.gaussian_nll_loss(mean, targets, variance, reduction="none")
    torch.testing.assert_close(GaussianNLL()(outputs, targets), theirs)


def test_gaussian_nll_has_a_floor() -> None:
    """A net that is wrong and wholly certain pays as if σ² were e⁻¹², not an infinity."""
    outputs = torch.tensor([[0.0, -1000.0]], requires_grad=True)
    value = GaussianNLL()(outputs, torch.tensor([1.0]))
    assert value.item() == pytest.approx(0.5 * (math.exp(12) - 12))
    value.backward()
    assert outputs.grad.isfinite().all()


def test_binary_cross_entropy() -> None:
    outputs, soft = random(6, 3), random(6, 3, seed=1).sigmoid()
    theirs = F.binary_cross_entropy_with_logits(outputs, soft, reduction="none")
    torch.testing.assert_close(as_loss(nn.BCEWithLogitsLoss())(outputs, soft), theirs)
    hard = labels(6, classes=2)
    theirs = F.binary_cross_entropy(outputs[:, :1].sigmoid(), hard[:, None].double(), reduction="none")
    torch.testing.assert_close(as_loss(nn.BCEWithLogitsLoss())(outputs[:, :1], hard), theirs)
    torch.testing.assert_close(as_loss(nn.BCEWithLogitsLoss())(outputs[:, :1], hard.bool()), theirs)


# -- shapes that would mislead -------------------------------------------------------------------------

ELEMENTWISE = (nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.PoissonNLLLoss(), nn.SoftMarginLoss())
SAME_SHAPE = [(GaussianNLL(), 2), *((as_loss(loss), 1) for loss in ELEMENTWISE)]
one_shape = pytest.mark.parametrize(("loss", "heads"), SAME_SHAPE)


@one_shape
@pytest.mark.parametrize("pixels", [(), (4, 3)])
def test_targets_n_for_outputs_n_1_do_not_broadcast(loss, heads: int, pixels: tuple[int, ...]) -> None:
    outputs, targets = random(6, heads, *pixels), labels(6, *pixels, classes=2).double()
    losses = loss(outputs, targets)
    assert losses.shape == (6, 1, *pixels)
    torch.testing.assert_close(losses, loss(outputs, targets[:, None]))
    each = torch.cat([loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(losses, each)


@one_shape
@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        ((6, 1), (5,)),
        ((6, 3), (6,)),
        ((6, 3), (3, 6)),  # as many numbers, but transposed
        ((1, 3), (3, 1)),
        ((6, 2, 3), (6, 3, 2)),
    ],
)
def test_other_shapes_raise(loss, heads: int, outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    shape = (outputs[0], heads * outputs[1], *outputs[2:])
    with pytest.raises(ArgumentError, match="targets"):
        loss(torch.zeros(shape), torch.zeros(targets))


@pytest.mark.parametrize(
    ("name", "loss", "outputs", "targets"),
    [
        ("outputs", GaussianNLL(), torch.zeros(6, 3), torch.zeros(6)),
        ("outputs", GaussianNLL(), torch.zeros(6), torch.zeros(6)),
        ("targets", as_loss(nn.BCEWithLogitsLoss()), torch.zeros(2), torch.tensor([0.0, 1.5])),
        ("targets", as_loss(nn.BCEWithLogitsLoss()), torch.zeros(2), torch.tensor([-0.1, 1.0])),
        *(
            ("targets", loss, torch.zeros(outputs), torch.zeros(targets, dtype=torch.long))
            for loss in (as_loss(nn.CrossEntropyLoss()), BrierLoss())
            for outputs, targets in [
                ((6, 3), (6, 1)),
                ((6, 3), (6, 3)),
                ((6,), (6,)),
                ((6, 3, 4, 4), (6, 4)),
                ((6, 3), (5,)),
            ]
        ),
        *(
            ("targets", loss, torch.zeros(2, 3), targets)
            for loss in (as_loss(nn.CrossEntropyLoss()), BrierLoss())
            for targets in (torch.tensor([0, 3]), torch.tensor([0, -1]), torch.tensor([0.0, 1.0]))
        ),
    ],
)
def test_outputs_and_targets_that_do_not_fit_raise(
    name: str, loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
) -> None:
    with pytest.raises(ArgumentError) as caught:
        loss(outputs, targets)
    assert caught.value.name == name


# -- torch's losses as they are ------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_as_loss_ignores_the_reduction_and_keeps_options(reduction: str) -> None:
    outputs, targets = random(6, 4), labels(6, classes=4)
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    given = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1, reduction=reduction)
    expected = F.cross_entropy(outputs, targets, weight=weight, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(as_loss(given)(outputs, targets), expected)
    assert given.reduction == reduction
    huber = nn.HuberLoss(delta=0.3, reduction=reduction)
    expected = F.huber_loss(outputs[:, :1], outputs[:, 1:2], delta=0.3, reduction="none")
    torch.testing.assert_close(as_loss(huber)(outputs[:, :1], outputs[:, 1]), expected)


def test_as_loss_of_class_probabilities() -> None:
    outputs, soft = random(6, 4), random(6, 4, seed=1).softmax(1)
    torch.testing.assert_close(
        as_loss(nn.CrossEntropyLoss())(outputs, soft), F.cross_entropy(outputs, soft, reduction="none")
    )


def test_as_loss_is_idempotent_and_compares_by_options() -> None:
    loss = as_loss(nn.CrossEntropyLoss(ignore_index=3))
    assert as_loss(loss) is loss
    assert loss == as_loss(nn.CrossEntropyLoss(ignore_index=3)) != as_loss(nn.CrossEntropyLoss())
    assert isinstance(loss, nn.CrossEntropyLoss)
    own = lambda outputs, targets: (outputs - targets).abs()  # noqa: E731
    assert as_loss(own) is own
    for wrong in ("ce", nn.CrossEntropyLoss, None):
        with pytest.raises(ArgumentError, match="loss"):
            as_loss(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(ignore_index=7), nn.MSELoss(), nn.BCEWithLogitsLoss(), GaussianNLL(0.5), BrierLoss(9)],
    ids=str,
)
def test_describe_and_build_loss_round_trip(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert build_loss(json.loads(json.dumps(describe_loss(loss)))) == as_loss(loss)


def test_describe_loss_of_other_losses_raises() -> None:
    for loss in (nn.L1Loss(), nn.CrossEntropyLoss(weight=torch.ones(3)), torch.add):
        with pytest.raises(ArgumentError, match="loss"):
            describe_loss(loss)


# -- Brier -----------------------------------------------------------------------------------------------


@many
@given(st.integers(1, 6), st.integers(2, 5), st.sampled_from([(), (3,), (4, 3)]), st.integers(0, 10**6))
def test_brier_definition(N: int, C: int, pixels: tuple[int, ...], seed: int) -> None:
    outputs, targets = random(N, C, *pixels, seed=seed), labels(N, *pixels, classes=C, seed=seed, fraction=0.3)
    found = BrierLoss(ignore_index=IGNORED)(outputs, targets)
    hot = F.one_hot(targets.clamp_max(C - 1), C).movedim(-1, 1).double()
    expected = (outputs.softmax(1) - hot).square().sum(1).masked_fill(targets == IGNORED, 0.0)
    torch.testing.assert_close(found, expected)


def test_brier_is_strictly_proper() -> None:
    """The expected loss of q under labels from p exceeds that of p by |p − q|²."""
    p, q = (random(50, 4, seed=seed).softmax(1) for seed in (0, 1))

    def expected_loss(forecast: Tensor) -> Tensor:
        losses = [BrierLoss()(forecast.log(), torch.full((50,), label)) for label in range(4)]
        return (p * torch.stack(losses, 1)).sum(1)

    torch.testing.assert_close(expected_loss(q) - expected_loss(p), (p - q).square().sum(1))


@pytest.mark.parametrize(
    "targets",
    [
        torch.randn(8, 1),  # of a regression, with one output
        torch.randn(8),
        torch.randn(8, 3),
        5 * torch.rand(8, 3),
    ],
)
def test_cross_entropy_rejects_targets_of_a_regression(targets: Tensor) -> None:
    outputs = torch.zeros(8, targets.shape[1] if targets.ndim > 1 else 1)
    with pytest.raises(ArgumentError, match="MSELoss"):
        as_loss(nn.CrossEntropyLoss())(outputs, targets)
    probs = torch.rand(8, 3).softmax(1)
    assert as_loss(nn.CrossEntropyLoss())(torch.zeros(8, 3), probs).shape == (8,)


def test_losses_of_independent_outputs() -> None:
    own = partial(nn.functional.binary_cross_entropy_with_logits, reduction="none")
    assert not has_independent_outputs(own)
    own.independent = True  # type: ignore[attr-defined]
    for loss in (nn.BCEWithLogitsLoss(), nn.MultiLabelSoftMarginLoss(), nn.SoftMarginLoss(), own):
        assert has_independent_outputs(loss) is True
        assert has_independent_outputs(as_loss(loss)) is True
    for other in (nn.CrossEntropyLoss(), nn.MSELoss(), BrierLoss(), GaussianNLL()):
        assert has_independent_outputs(as_loss(other)) is False
