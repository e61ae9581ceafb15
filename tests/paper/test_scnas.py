"""Tests of the SCNAS net: Gumbel-softmax sampling, mixed operations, and nets of a genotype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _reference import standard_errors
from _scnas import copy_weights, make_certain, noise
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from neuboots import NeuBoots, TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.head import split_head
from neuboots_paper.scnas.net import (
    FOUND,
    OPERATIONS,
    SCNAS,
    MixedOperation,
    SuperNet,
    choose,
    draw_gumbel,
    gumbel_softmax,
    make_operation,
    random_genotype,
)

EDGES = [(size, name) for size, candidates in OPERATIONS.items() for name in candidates]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- sampling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [5.0, 0.3])
def test_operations_are_drawn_with_their_probabilities(temperature: float) -> None:
    """Frequencies of the argmax over n draws: a standard error of √(p (1 − p) / n)."""
    logits, n = torch.tensor([0.0, 1.0, -2.0, 0.5]), 40_000
    drawn = gumbel_softmax(logits, draw_gumbel((n, 4), rng()), temperature=temperature).argmax(1)
    p = logits.double().softmax(0)
    frequency = drawn.bincount(minlength=4).double() / n
    assert ((frequency - p).abs() < standard_errors(8) * (p * (1 - p) / n).sqrt()).all()


def test_gumbel_softmax_matches_torch() -> None:
    """The same noise through torch's own gumbel_softmax, which draws −log of exponentials from its global state."""
    logits = noise(3, 6).requires_grad_()
    torch.manual_seed(4)
    theirs = functional.gumbel_softmax(logits, tau=0.7)
    torch.manual_seed(4)
    g = -torch.empty(3, 6).exponential_().log()
    mine = gumbel_softmax(logits, g, temperature=0.7)
    torch.testing.assert_close(mine, theirs)


def test_gate_is_one_hot_with_the_softmax_gradient() -> None:
    logits, g, slope = noise(5).double().requires_grad_(), draw_gumbel((5,), rng()), noise(5, seed=2).double()
    choice = choose(logits, g, temperature=0.8)
    assert choice.gate is not None
    assert choice.gate.tolist() == [float(k == choice.index) for k in range(5)]
    (mine,) = torch.autograd.grad((choice.gate * slope).sum(), logits)
    (soft,) = torch.autograd.grad((gumbel_softmax(logits, g, temperature=0.8) * slope).sum(), logits)
    torch.testing.assert_close(mine, soft)


def test_gradient_is_limited_to_compared_operations() -> None:
    """Over the two likeliest, s_a = σ((π_a − π_b)/τ), so that d gate_a / d a_a = s_a s_b / τ = −d gate_a / d a_b."""
    logits, g = noise(5).double().requires_grad_(), draw_gumbel((5,), rng(3))
    choice = choose(logits, g, temperature=0.5, num_compared=2)
    a, b = choice.compared
    assert a == choice.index
    assert choice.gate is not None
    (slope,) = torch.autograd.grad(choice.gate[a], logits)
    soft = gumbel_softmax(logits.detach(), g, temperature=0.5)
    share = float(soft[a] / (soft[a] + soft[b]))
    assert slope[a].item() == pytest.approx(share * (1 - share) / 0.5)
    assert slope[b].item() == pytest.approx(-share * (1 - share) / 0.5)
    assert {k for k in range(5) if abs(slope[k].item()) > 1e-12} == {a, b}


# -- operations and cells ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "name"), EDGES)
def test_candidates_of_an_edge_have_one_output_shape(size: str, name: str) -> None:
    shape = {"same": (4, 6, 5), "down": (2, 3, 3), "up": (8, 12, 10)}[size]
    assert make_operation(name, size, 4)(noise(2, 4, 4, 6, 5)).shape == (2, 4, *shape)


@pytest.mark.parametrize("compared", [None, 2, 3])
def test_mixed_operation_is_the_gated_sum(compared: int | None) -> None:
    """Value and gradients, towards the input, the weights and the architecture, against the plain sum."""
    edge = MixedOperation("same", 4).double()
    x, slope = noise(2, 4, 4, 4, 4).double().requires_grad_(), noise(2, 4, 4, 4, 4, seed=1).double()
    logits, g = torch.zeros(7, dtype=torch.float64, requires_grad=True), draw_gumbel((7,), rng(5))
    learned = [x, logits, *edge.parameters()]

    def gradients(out: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad((out * slope).sum(), learned, allow_unused=True))

    choice = choose(logits, g, temperature=1.0, num_compared=compared)
    mine = edge(x, choice)
    fast = gradients(mine)
    choice = choose(logits, g, temperature=1.0, num_compared=compared)
    assert choice.gate is not None
    terms = [o(x) * choice.gate[k] for k, o in enumerate(edge.operations.values())]
    plain = sum(terms[1:], terms[0])
    slow = gradients(plain)
    torch.testing.assert_close(mine, plain)
    for a, b, like in zip(fast, slow, learned, strict=True):
        torch.testing.assert_close(*(torch.zeros_like(like) if v is None else v for v in (a, b)))


# -- nets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("size", [(8, 8, 8), (5, 6, 7)])
def test_fixed_net_equals_the_supernet_with_its_choices(seed: int, size: tuple[int, ...]) -> None:
    genotype = random_genotype(2, seed=seed)
    supernet = SuperNet(2, 3, width=4, levels=3).double()
    net = SCNAS(2, 3, genotype=genotype, width=4, levels=3).double()
    copy_weights(net, supernet)
    x = noise(2, 2, *size).double()
    torch.testing.assert_close(net(x), supernet(x, supernet.pick(genotype)))


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """What the graph of a pass keeps for its gradient, each piece of memory once."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = forward()
    assert out.requires_grad
    return sum(sizes.values())


def test_pass_needs_the_memory_of_one_architecture() -> None:
    """A step of the weights keeps what the fixed net keeps; one that compares two operations, less than twice that."""
    supernet, genotype, x = SuperNet(1, 2, width=8, levels=2), random_genotype(2, seed=1), noise(2, 1, 12, 12, 12)
    make_certain(supernet, genotype)
    fixed = kept_bytes(lambda: SCNAS(1, 2, genotype=genotype, width=8, levels=2)(x))
    assert kept_bytes(lambda: supernet(x, supernet.pick(genotype))) <= 1.05 * fixed
    assert kept_bytes(lambda: supernet(x, supernet.sample(rng(2), num_compared=2))) < 2 * fixed


def test_genotype_has_the_most_probable_operations() -> None:
    supernet, genotype = SuperNet(1, 2, width=2, levels=2), random_genotype(2, seed=4)
    make_certain(supernet, genotype)
    assert supernet.genotype() == genotype
    supernet.logits["reduction"][0].data[:] = torch.tensor([3.0, 0, 0, 0, 0, 0])
    frequent = supernet.probabilities()["reduction"][0]["none"]
    assert frequent == pytest.approx(float(torch.tensor([3.0, 0, 0, 0, 0, 0]).softmax(0)[0]))


def test_unreachable_node_keeps_an_operation() -> None:
    supernet = SuperNet(1, 2, width=2, levels=2)
    for a in supernet.architecture:
        a.data[0] = 5.0  # "none" everywhere
    supernet.logits["decoder_normal"][1].data[3] = 1.0
    genotype = supernet.genotype()
    assert genotype["decoder_normal"][0] == ["none", "dilated_conv"]
    SCNAS(1, 2, genotype=genotype, width=2, levels=2)


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("size", [(8, 8, 8), (9, 7, 5), (1, 1, 1)])
def test_scnas_accepts_any_volume_size(levels: int, size: tuple[int, ...]) -> None:
    assert SCNAS(2, 3, width=4, levels=levels)(noise(2, 2, *size)).shape == (2, 3, *size)


def test_head_is_the_last_layer() -> None:
    net, x = SCNAS(1, 3, width=4, levels=2).eval(), noise(2, 1, 5, 6, 7)
    whole, head = net(x), net.head
    assert split_head(net).name == split_head(net, example=x).name == "head"
    assert list(net.modules())[-1] is head
    net.head = nn.Identity()  # type: ignore[assignment]
    torch.testing.assert_close(head(net(x)), whole)


def test_scnas_works_with_neuboots() -> None:
    """Bright voxels in noise: from the first epoch to the last the loss falls, and the replicates differ."""
    x, losses = noise(8, 1, 6, 5, 4), []
    data = TensorDataset(x, (x[:, 0] > 0).long())
    config = TrainingConfig(epochs=4, batch_size=2, progress=False, on_epoch=lambda report: losses.append(report.loss))
    predictor = NeuBoots().fit(lambda: SCNAS(1, 2, width=4, levels=2), data, config)
    prediction = predictor.predict(x[:3], 5, seed=1)
    assert prediction.samples.shape == (5, 3, 2, 6, 5, 4)
    assert prediction.samples.std(0).min() > 0
    assert losses[-1] < losses[0]


# -- genotypes -----------------------------------------------------------------------------------------


def test_random_genotype_depends_on_the_seed() -> None:
    assert random_genotype(2, seed=0) == random_genotype(2, seed=0) != random_genotype(2, seed=1)
    many = [random_genotype(2, seed=seed) for seed in range(200)]
    assert {name for cells in many for row in cells["encoder_normal"] for name in row} == set(OPERATIONS["same"])
    assert {cells["expansion"][0][0] for cells in many} == set(OPERATIONS["up"]) - {"none"}


def changed(kind: str, rows: Any) -> dict[str, Any]:
    return {**FOUND, kind: rows}


@pytest.mark.parametrize(
    ("genotype", "named"),
    [
        (None, "genotype"),
        ({"normal": []}, "genotype"),
        (changed("reduction", []), "genotype['reduction']"),
        (changed("reduction", "conv"), "genotype['reduction']"),
        (changed("reduction", [["conv"], ["conv"]]), "genotype['reduction'][1]"),
        (changed("reduction", [["identity"]]), "genotype['reduction'][0][0]"),
        (changed("expansion", [[3]]), "genotype['expansion'][0][0]"),
        (changed("decoder_normal", [["none", "none"]]), "genotype['decoder_normal'][0]"),
    ],
)
def test_invalid_genotype_is_rejected(genotype: Any, named: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        SCNAS(1, 2, genotype=genotype)
    assert caught.value.name == named
