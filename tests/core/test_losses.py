"""The losses against torch's own, their weighted mean against the resampled data set, and shapes that would mislead."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from neuboots._prng import derive_keys
from neuboots.losses import BrierLoss, GaussianNLL, valid_mask, weighted_mean
from neuboots.weights import Multinomial

VOID = 255
many = settings(deadline=None, max_examples=40, derandomize=True)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(*shape: int, classes: int, seed: int = 0, ignore_index: float = 0.0) -> Tensor:
    """Random labels, a share of them void."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, shape, generator=rng)
    return y.masked_fill(torch.rand(shape, generator=rng) < ignore_index, VOID)


def mean_loss(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, w: Tensor) -> Tensor:
    return weighted_mean(loss(outputs, targets), w, valid_mask(loss, targets))


# -- the weighted mean ---------------------------------------------------------------------------------


@many
@given(st.integers(1, 6), st.integers(2, 5), st.sampled_from([(), (3,), (4, 3)]), st.integers(0, 10**6))
def test_weights_of_one_give_torchs_mean(N: int, C: int, pixels: tuple[int, ...], seed: int) -> None:
    """With void pixels too: torch divides by the number of those that count."""
    outputs = random(N, C, *pixels, seed=seed).requires_grad_()
    targets = labels(N, *pixels, classes=C, seed=seed, ignore_index=0.3)
    targets.view(-1)[0] = 0  # at least one counts
    ours = mean_loss(nn.CrossEntropyLoss(ignore_index=VOID), outputs, targets, torch.ones(N))
    theirs = F.cross_entropy(outputs, targets, ignore_index=VOID)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(value, outputs)[0] for value in (ours, theirs)))


def test_the_weighted_mean_is_its_definition() -> None:
    """1/n Σ wᵢ ℓᵢ: divided by the number of points, not by the sum of the weights."""
    losses, w = random(5, 3, 2), torch.tensor([0.0, 2.0, 0.5, 3.0, 7.0], dtype=torch.float64)
    mask = random(5, 3, 2, seed=1) > 0
    every = [(i, p, q) for i in range(5) for p in range(3) for q in range(2)]
    total = sum(w[i] * losses[i, p, q] for i, p, q in every)
    assert weighted_mean(losses, w).item() == pytest.approx(total.item() / 30)
    kept = [at for at in every if mask[at]]
    total = sum(w[at[0]] * losses[at] for at in kept)
    assert weighted_mean(losses, w, mask).item() == pytest.approx(total.item() / len(kept))


def test_the_loss_keeps_its_precision_whatever_that_of_the_weights() -> None:
    """α is drawn in double precision; float32 losses stay float32."""
    assert weighted_mean(torch.ones(3), torch.ones(3, dtype=torch.float64)).dtype == torch.float32
    assert weighted_mean(torch.ones(3).bfloat16(), torch.ones(3, dtype=torch.float64)).dtype == torch.bfloat16


@pytest.mark.parametrize("pixels", [(), (4, 3)], ids=["vectors", "pixels"])
@pytest.mark.parametrize("draw", range(5))
def test_multinomial_weights_are_the_resampled_data_set(draw: int, pixels: tuple[int, ...]) -> None:
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

    weighted = weighted_mean(nn.CrossEntropyLoss()(net(x), y), counts)
    resampled = F.cross_entropy(net(x[rows]), y[rows])
    torch.testing.assert_close(weighted, resampled, rtol=1e-12, atol=0)
    parameters = list(net.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(value, parameters) for value in (weighted, resampled)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_multinomial_weights_are_the_resampled_data_set_with_void_pixels() -> None:
    """Σ wᵢ ℓᵢ is the sum over the resampled images; the divisor stays that of the data."""
    loss, n = nn.CrossEntropyLoss(ignore_index=VOID), 10
    outputs, targets = random(n, 3, 4, 4), labels(n, 4, 4, classes=3, ignore_index=0.4)
    counts = Multinomial().sample(derive_keys(torch.tensor([0]), 0), n)[0]
    rows = torch.repeat_interleave(torch.arange(n), counts.long())
    resampled = F.cross_entropy(outputs[rows], targets[rows], ignore_index=VOID, reduction="sum")
    ours = mean_loss(loss, outputs, targets, counts) * (targets != VOID).sum()
    torch.testing.assert_close(ours, resampled)


@pytest.mark.parametrize(
    ("losses", "weights", "sentence"),
    [
        (torch.tensor(1.0), torch.ones(3), "got a single number for 3 weights; expected one loss for each point"),
        (torch.ones(2), torch.ones(3), "got 2 losses for 3 weights; expected one loss for each point"),
        (torch.ones(1, 3), torch.ones(3), "got 1 losses for 3 weights; expected one loss for each point"),
    ],
)
def test_a_loss_that_reduces_is_refused(losses: Tensor, weights: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=f'^{sentence}: use a loss with reduction="none"$'):
        weighted_mean(losses, weights)


# -- void pixels ---------------------------------------------------------------------------------------

CROSS_ENTROPIES = [nn.CrossEntropyLoss(ignore_index=VOID), nn.CrossEntropyLoss(reduction="none", ignore_index=VOID)]
both = pytest.mark.parametrize("loss", CROSS_ENTROPIES, ids=["ours", "torch's"])


@both
def test_void_pixels_have_no_loss_and_no_gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    targets = labels(3, 4, 4, classes=5, ignore_index=0.5)
    outputs, w = random(3, 5, 4, 4).requires_grad_(), torch.tensor([0.5, 2.0, 3.0])
    value = mean_loss(loss, outputs, targets, w)
    (gradient,) = torch.autograd.grad(value, outputs)
    ignore_index = (targets == VOID)[:, None].expand_as(gradient)
    assert 0 < ignore_index.sum() < ignore_index.numel()
    assert (gradient[ignore_index] == 0).all()
    assert (gradient[~ignore_index] != 0).all()
    # whatever stands there, the loss does not see it
    changed = outputs.detach().masked_fill(ignore_index, 100.0)
    assert torch.equal(mean_loss(loss, changed, targets, w), value)
    # and the others count as if they were alone
    kept, image = targets != VOID, torch.arange(3).view(3, 1, 1).expand_as(targets)
    alone = F.cross_entropy(outputs.movedim(1, -1)[kept], targets[kept], reduction="none")
    torch.testing.assert_close(value, (alone * w[image[kept]]).mean())


@both
def test_a_batch_of_void_pixels_costs_nothing(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """0 and not 0/0: one empty batch would turn the net into NaNs."""
    outputs = random(2, 3, 4).requires_grad_()
    value = mean_loss(loss, outputs, torch.full((2, 4), VOID), torch.ones(2))
    assert value.item() == 0
    assert (torch.autograd.grad(value, outputs)[0] == 0).all()


def test_where_targets_count() -> None:
    y = torch.tensor([0, VOID, 2])
    assert valid_mask(nn.CrossEntropyLoss(ignore_index=VOID), y).tolist() == [True, False, True]
    assert valid_mask(nn.CrossEntropyLoss(ignore_index=VOID), torch.tensor([0, 1])) is None
    assert valid_mask(nn.CrossEntropyLoss(), torch.tensor([0, -100])).tolist() == [True, False]
    assert valid_mask(nn.MSELoss(), y) is None
    probabilities = torch.tensor([[0.0, 1.0], [0.5, 0.5]])  # in which 0 is no label
    assert valid_mask(nn.CrossEntropyLoss(reduction="none", ignore_index=0), probabilities) is None


# -- each loss against torch's own ---------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("pixels", [(), (5,), (4, 3), (2, 3, 2)])
def test_cross_entropy(pixels: tuple[int, ...], smoothing: float) -> None:
    outputs, targets = random(6, 4, *pixels), labels(6, *pixels, classes=4, ignore_index=0.2)
    ours = nn.CrossEntropyLoss(VOID, smoothing)(outputs, targets)
    assert ours.shape == targets.shape
    theirs = nn.CrossEntropyLoss(reduction="none", ignore_index=VOID, label_smoothing=smoothing)(outputs, targets)
    torch.testing.assert_close(ours, theirs)
    mean = nn.CrossEntropyLoss(ignore_index=VOID, label_smoothing=smoothing)(outputs, targets)
    loss = nn.CrossEntropyLoss(VOID, smoothing)
    torch.testing.assert_close(mean_loss(loss, outputs, targets, torch.ones(6)), mean)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_every_whole_type(dtype: torch.dtype) -> None:
    """156 is a class, not −100, also where both are the same byte."""
    outputs = random(3, 200)
    targets = torch.tensor([0, 156, 199])
    ours = mean_loss(nn.CrossEntropyLoss(), outputs, targets.to(dtype), torch.ones(3))
    torch.testing.assert_close(ours, F.cross_entropy(outputs, targets))


def test_squared_error() -> None:
    outputs, targets = random(6, 2), random(6, 2, seed=1)
    assert torch.equal(nn.MSELoss()(outputs, targets), F.mse_loss(outputs, targets, reduction="none"))


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
    torch.testing.assert_close(nn.BCEWithLogitsLoss()(outputs, soft), theirs)
    hard = labels(6, classes=2)
    theirs = F.binary_cross_entropy(outputs[:, :1].sigmoid(), hard[:, None].double(), reduction="none")
    torch.testing.assert_close(nn.BCEWithLogitsLoss()(outputs[:, :1], hard), theirs)
    torch.testing.assert_close(nn.BCEWithLogitsLoss()(outputs[:, :1], hard.bool()), theirs)


# -- shapes that would mislead -------------------------------------------------------------------------

SAME_SHAPE = [(nn.MSELoss(), 1), (GaussianNLL(), 2), (nn.BCEWithLogitsLoss(), 1)]
one_shape = pytest.mark.parametrize(("loss", "heads"), SAME_SHAPE, ids=["squared", "gaussian", "binary"])


@one_shape
@pytest.mark.parametrize("pixels", [(), (4, 3)])
def test_n_targets_against_n_1_outputs_do_not_broadcast(loss, heads: int, pixels: tuple[int, ...]) -> None:
    outputs, targets = random(6, heads, *pixels), labels(6, *pixels, classes=2).double()
    losses = loss(outputs, targets)
    assert losses.shape == (6, 1, *pixels)
    torch.testing.assert_close(losses, loss(outputs, targets[:, None]))
    each = torch.cat([loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(losses, each)


def test_n_1_targets_against_n_outputs_do_not_broadcast() -> None:
    outputs, targets = random(6), random(6, seed=1)
    assert torch.equal(nn.MSELoss()(outputs, targets[:, None]), (outputs - targets).square())


@one_shape
@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        ((6, 1), (5,)),
        ((6, 1), (6, 2)),
        ((6, 3), (6,)),
        ((6, 3), (3, 6)),  # as many numbers, but transposed
        ((1, 3), (3, 1)),
        ((6, 2, 3), (6, 3, 2)),
        ((6, 1), (1,)),
        ((6, 1), ()),
    ],
)
def test_other_shapes_are_refused(loss, heads: int, outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    shape = (outputs[0], heads * outputs[1], *outputs[2:])
    with pytest.raises(ValueError, match=r"^got targets .* for outputs .*; expected the same shape: broadcasting "):
        loss(torch.zeros(shape), torch.zeros(targets))


@pytest.mark.parametrize("shape", [(6, 3), (6,), (6, 5, 2)])
def test_a_gaussian_head_has_two_outputs_for_each_mean(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^got outputs .*; expected \(N, 2k, \*\): k means, then k values of log σ²$"):
        GaussianNLL()(torch.zeros(shape), torch.zeros(6))


@pytest.mark.parametrize("targets", [[0.0, 1.5], [-0.1, 1.0], [2.0, 0.0]])
def test_probabilities_lie_between_0_and_1(targets: list[float]) -> None:
    sentence = r"^got targets outside \[0, 1\]; expected probabilities or 0/1 labels$"
    with pytest.raises(ValueError, match=sentence):
        nn.BCEWithLogitsLoss()(torch.zeros(2), torch.tensor(targets))


@pytest.mark.parametrize(
    ("outputs", "targets"), [((6, 3), (6, 1)), ((6, 3), (6, 3)), ((6,), (6,)), ((6, 3, 4, 4), (6, 4)), ((6, 3), (5,))]
)
def test_one_label_for_each_output(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    sentence = r"^got outputs \(.*\) and labels \(.*\); expected \(N, C, \*\) and \(N, \*\), one class label for each "
    with pytest.raises(ValueError, match=sentence):
        nn.CrossEntropyLoss()(torch.zeros(outputs), torch.zeros(targets, dtype=torch.long))


@pytest.mark.parametrize("label", [3, -1, 255])
def test_labels_out_of_range(label: int) -> None:
    """On a GPU torch would stop the process with no word of which label it was."""
    sentence = rf"^got label {label} for a net with 3 outputs; expected 0 … 2 \(or -100, which is ignored\)$"
    with pytest.raises(ValueError, match=sentence):
        nn.CrossEntropyLoss()(torch.zeros(2, 3), torch.tensor([0, label]))


def test_labels_are_whole_numbers() -> None:
    sentence = r"^got floating-point labels; expected integers 0 … C − 1: use labels.long\(\)$"
    with pytest.raises(ValueError, match=sentence):
        nn.CrossEntropyLoss()(torch.zeros(2, 3), torch.tensor([0.0, 1.0]))


# -- Brier -----------------------------------------------------------------------------------------------


@many
@given(st.integers(1, 6), st.integers(2, 5), st.sampled_from([(), (3,), (4, 3)]), st.integers(0, 10**6))
def test_brier_is_the_squared_distance_to_the_one_hot_label(N: int, C: int, pixels: tuple[int, ...], seed: int) -> None:
    outputs, targets = random(N, C, *pixels, seed=seed), labels(N, *pixels, classes=C, seed=seed, ignore_index=0.3)
    found = BrierLoss(ignore_index=VOID)(outputs, targets)
    hot = F.one_hot(targets.clamp_max(C - 1), C).movedim(-1, 1).double()
    expected = (outputs.softmax(1) - hot).square().sum(1).masked_fill(targets == VOID, 0.0)
    torch.testing.assert_close(found, expected)


def test_brier_is_proper() -> None:
    """Its expectation over labels drawn from p is least at p."""
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    z = p.log().requires_grad_()
    scores = BrierLoss()(z.expand(3, 3), torch.arange(3))
    (gradient,) = torch.autograd.grad((p * scores).sum(), z)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_brier_refuses_what_cross_entropy_refuses() -> None:
    with pytest.raises(ValueError, match="got label 3 for a net with 3 outputs; expected 0 … 2"):
        BrierLoss()(torch.zeros(1, 3), torch.tensor([3]))
    with pytest.raises(ValueError, match="got floating-point labels"):
        BrierLoss()(torch.zeros(1, 3), torch.tensor([1.0]))
