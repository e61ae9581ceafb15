"""split_head finds the head of any net, leaves the net alone, and keeps what follows the head."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from _nets import ZOO, BodyAndHead, Case, Deep, TwoBranches, Upsampling, make
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import ArgumentError, InfluenceBootstrap, NeuBoots, TrainingConfig
from neuboots.evaluation.ood import Mahalanobis
from neuboots.head import (
    StructureCopier,
    call_net,
    cast_inputs,
    compute_output,
    copy_net,
    eager_mode,
    eval_mode,
    extract_output,
    find_head_candidates,
    split_head,
    unwrap_model,
)

by_case = pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)


@by_case
@torch.no_grad()
def test_trace_replays_what_follows_the_head(case: Case) -> None:
    net = make(case)
    split = split_head(net, example=case.x)
    assert split.name == case.head
    plain = extract_output(call_net(net, case.x))
    passed = split.trace(case.x)
    assert torch.equal(passed.output, plain)
    assert torch.equal(passed.finish(split.head(passed.phi)), plain)
    assert torch.equal(split.features(case.x), passed.phi)
    # with another head output, the rest of the net is what the net itself would have done with it
    other = split.head(passed.phi * 0.5)
    again = extract_output(split.run(case.x, lambda head, phi: head(phi * 0.5)))
    assert torch.equal(passed.finish(other), again)


@by_case
@torch.no_grad()
def test_net_unchanged(case: Case) -> None:
    net = make(case)
    inner = unwrap_model(net)
    before = {name: id(module) for name, module in inner.named_modules()}
    state = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    split = split_head(net, example=case.x)
    split.trace(case.x)
    split.features(case.x)
    assert {name: id(module) for name, module in inner.named_modules()} == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in inner.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in inner.modules())


def test_net_unchanged_after_an_error() -> None:
    net = TwoBranches()
    split = split_head(net)
    with pytest.raises(RuntimeError, match="boom"):
        split.run(torch.zeros(2, 4), lambda head, phi: (_ for _ in ()).throw(RuntimeError("boom")))
    assert net.fc is split.head


def test_features_skip_what_follows_the_head() -> None:
    class Costly(Upsampling):
        finished = 0

        def forward(self, x: Tensor) -> Tensor:
            z = self.classifier(F.relu(self.stem(x)))
            self.finished += 1
            return z

    net = Costly()
    split_head(net).features(torch.zeros(1, 2, 8, 8))
    assert net.finished == 0


def test_head_by_name() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert split_head(net, "0").width == 4
    with pytest.raises(ArgumentError, match="head"):
        split_head(net, "1")


def test_wrong_guess_raises_at_the_first_pass() -> None:
    """Without an example the last registered layer is taken."""
    with pytest.raises(ArgumentError, match="head"):
        split_head(Deep()).trace(torch.zeros(2, 4))


class Shared(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x)) + self.fc(self.body(-x))


class Functional(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x), self.fc.weight)


class Parallel(TwoBranches):
    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


class Branching(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(self.body(x))
        return z if z.sum() > 0 else -z


class Writing(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 3)
        out[:] = self.fc(self.body(x))
        return out


class Replaced(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(self.body(x))
        z.data = 2 * z.data
        return z


class ChangedLater(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        factor = torch.ones(3)
        z = self.fc(self.body(x)) * factor
        factor += 1
        return z * factor


class Pair(BodyAndHead):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(self.body(x)), x


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("head", lambda: split_head(Shared(), example=X)),
        ("head", lambda: split_head(Shared(), "fc").trace(X)),
        ("head", lambda: split_head(Functional()).features(X)),
        ("head", lambda: split_head(Parallel(), example=X)),
        ("head", lambda: split_head(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()))),
        ("model", lambda: split_head(Branching()).trace(X)),
        ("model", lambda: split_head(Writing()).trace(X)),
        ("model", lambda: split_head(Replaced()).trace(X)),
        ("model", lambda: split_head(ChangedLater()).trace(X)),
        ("model", lambda: split_head(Pair()).trace(X)),
    ],
)
def test_net_that_cannot_be_split_raises(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.name == name


def test_learned_layers_after_the_last_candidate_raise() -> None:
    net, x = nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1)), torch.randn(1, 2, 4, 4)
    for example in (None, x):
        with pytest.raises(ArgumentError, match="head"):
            split_head(net, example=example)
    assert torch.equal(split_head(net, "0").trace(x).output, net(x))  # a named head is accepted


def test_head_candidates_are_plain_layers() -> None:
    class Cosine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.normalize(x), F.normalize(self.weight))

    attention = nn.MultiheadAttention(4, 2)
    net = nn.ModuleList([attention, Cosine(4, 4), nn.Conv2d(4, 4, 1, stride=2), nn.Conv2d(4, 4, 1, groups=2)])
    assert find_head_candidates(net) == []
    assert find_head_candidates(nn.ModuleList([nn.LazyLinear(3), nn.Conv1d(4, 4, 1, padding="same")])) == ["1"]


def test_head_with_hooks_or_own_forward_raises() -> None:
    hooked, patched = TwoBranches(), TwoBranches()
    hooked.fc.register_forward_hook(lambda module, inputs, output: 3 * output)
    patched.fc.forward = lambda phi: phi[:, :3]
    for net in (hooked, patched):
        with pytest.raises(ArgumentError, match="head"):
            split_head(net)


def test_eval_mode_restores_every_module() -> None:
    net = TwoBranches()
    net.left.eval()
    before = [module.training for module in net.modules()]
    with eval_mode(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == before


class Parts(NamedTuple):
    left: Tensor
    right: Tensor


def test_cast_inputs_keeps_named_tuples_and_integers() -> None:
    moved = cast_inputs(TwoBranches().double(), {"a": Parts(torch.ones(2), torch.ones(2, dtype=torch.int64))})["a"]
    assert isinstance(moved, Parts)
    assert (moved.left.dtype, moved.right.dtype) == (torch.float64, torch.int64)


class Dressed(Tensor):
    """A tensor with functions of its own, as MONAI's and torchvision's: whatever is made of it is one too."""

    def new_empty(self, *size: int) -> Tensor:
        raise TypeError("only for tensors of one kind")


class Laid(Tensor):
    """A tensor with another layout, as torch's DTensor: its data are nobody else's business."""

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Tensor:
        raise AssertionError("its data were touched")


def test_cast_inputs_converts_tensor_subclasses() -> None:
    net, x = TwoBranches(), torch.randn(2, 4)
    dressed = x.as_subclass(Dressed)
    moved = cast_inputs(net, {"a": dressed, "b": [dressed, 3], "c": None})
    assert [type(part) for part in (moved["a"], moved["b"][0])] == [Tensor, Tensor]
    assert (moved["b"][1], moved["c"]) == (3, None)
    assert torch.equal(moved["a"], x)
    x.requires_grad_()
    cast_inputs(net, x.as_subclass(Dressed)).sum().backward()
    assert x.grad is not None
    laid = torch.zeros(2).as_subclass(Laid)
    assert cast_inputs(net, laid) is laid  # it is where it should be, and its data were not touched


# -- copies of the structure ---------------------------------------------------------------------------


class Holder:
    """An object that is no module and holds one."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part


class Captured(nn.Module):
    """Reaches its layers by a function, a partial, a holder, hooks and a compiled layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(4, 6), nn.Linear(6, 3), 1.0
        self.dropout = nn.Dropout(0.5)
        self.compiled = torch.compile(nn.Linear(6, 6), backend="eager")
        self.holder, self.parts = Holder(self.dropout), ({"dropout": self.dropout},)
        self.run = lambda x: self.scale * self.head(self.holder.part(self.parts[0]["dropout"](x)))
        self.warm = partial(Captured.warm_up, self)
        self.body.register_forward_hook(self.watch)

        def record(module: nn.Module, args: object, output: Tensor) -> None:
            self.seen = output

        self.compiled.register_forward_hook(record)

    def watch(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        return self.dropout(output)

    def warm_up(self, x: Tensor) -> Tensor:
        self.compiled(self.body(x))
        return self.seen

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.warm(x))


@torch.no_grad()  # which compilation needs here
def test_copy_shares_tensors_and_leaves_the_net_alone() -> None:
    net, x = Captured(), torch.randn(5, 4)
    copy = StructureCopier().copy(net)
    names = [name for name, _ in net.named_parameters()]
    assert [name for name, _ in copy.named_parameters()] == names
    assert all(a is b for a, b in zip(net.parameters(), copy.parameters(), strict=True))
    assert not {id(module) for module in net.modules()} & {id(module) for module in copy.modules()}
    assert net.training
    expected = copy(x)
    assert torch.equal(copy(x), expected)  # in evaluation mode wherever a layer is reached
    assert not torch.equal(net(x), expected)
    assert torch.equal(net.eval()(x), expected)
    net.head.weight.mul_(2)
    assert torch.equal(copy(x), net(x))
    copy.head = nn.Linear(6, 2)
    assert copy(x).shape == (5, 2)
    assert net(x).shape == (5, 3)
    with copy.body.register_forward_hook(lambda *args: pytest.fail("a hook of the copy ran in the net")):
        net(x)


class Slotted:
    """An object without `__dict__` that holds a module."""

    __slots__ = ("__hidden",)

    def __init__(self, part: nn.Module) -> None:
        self.__hidden = part

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.__hidden(x))


class Indirect(nn.Module):
    """Reaches each dropout in another way: a slot, weak references, a deque and keys of a dictionary."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(6))
        self.slot = Slotted(self.layers[0])
        self.refs = (
            weakref.proxy(self.layers[1]),
            weakref.ref(self.layers[2]),
            weakref.WeakMethod(self.layers[3].forward),
        )
        self.queue, self.scales = deque([self.layers[4]]), {self.layers[5]: 2.0}
        self.gone = [weakref.proxy(Holder(self.layers[0]))]

    def forward(self, x: Tensor) -> Tensor:
        proxy, ref, method = self.refs
        x = method()(ref()(proxy(self.slot(x))))  # type: ignore[misc]
        return self.queue[0](x) * self.scales[self.layers[5]]


def test_copy_reaches_modules_in_slots_and_behind_weak_references() -> None:
    net, x, copier = Indirect(), torch.ones(200), StructureCopier()
    assert torch.equal(copier.copy(net)(x), 2 * x)
    assert not torch.equal(net(x), 2 * x)
    assert copier.is_current()
    net.slot = Slotted(nn.Identity())
    assert not copier.is_current()


def test_copies_of_compiled_nets_leave_the_compiler_alone() -> None:
    net = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"))
    assert not isinstance(eager_mode(net), nullcontext)
    assert isinstance(eager_mode(StructureCopier().copy(net)), nullcontext)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "scale", 2.0),
        lambda net: net.head.bias.register_hook(print) and setattr(net.head, "bias", nn.Parameter(torch.ones(3))),
        lambda net: net.head.register_forward_hook(lambda *args: None),
        lambda net: setattr(net.holder, "part", nn.Identity()),
        lambda net: net.parts[0].update(dropout=nn.Identity()),
    ],
)
def test_copy_is_out_of_date_after_a_change(change: Callable[[nn.Module], object]) -> None:
    net, copier = Captured(), StructureCopier()
    copier.copy(net)
    assert copier.is_current()
    change(net)
    assert not copier.is_current()


def test_objects_without_a_module_are_not_copied() -> None:
    values = [object(), {"a": [1, Holder(None)]}, lambda: 1, threading.Lock()]  # type: ignore[arg-type]
    loop: list[object] = []
    loop.append(loop)
    copier = StructureCopier()
    assert all(copier.copy(value) is value for value in (*values, loop))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_script_module_must_be_in_evaluation_mode() -> None:
    net = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))), nn.Linear(6, 3))
    with pytest.raises(ArgumentError, match="ScriptModule"):
        StructureCopier().copy(net)
    assert StructureCopier().copy(net.eval())[0] is net[0]


@pytest.mark.parametrize("layers", [1, "all"])
def test_threads_compute_moments_and_replicates(layers: Any) -> None:
    x = torch.randn(40, 4)
    net, data = Deep(), (x, torch.arange(40) % 3)
    influence: Any = InfluenceBootstrap(layers=layers).from_trained(net, data)
    neuboots = NeuBoots().fit(Deep, data, TrainingConfig(epochs=1, progress=False))
    detector = Mahalanobis(neuboots).fit(train_data=TensorDataset(*data), progress=False)
    calls: list[Callable[[], Tensor]] = [
        lambda: neuboots.moments(x).std,
        lambda: neuboots.predict(x, 3).samples,
        lambda: influence.predict(x, 3).samples,
        lambda: detector.score(x, progress=False),
    ]
    expected = [call() for call in calls]

    def run(k: int) -> bool:
        order = [(k + j) % len(calls) for j in range(4 * len(calls))]
        return all(torch.equal(calls[j](), expected[j]) for j in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


class KeepsFeatures(nn.Module):
    """Keeps intermediate results in a list, and in a dict that its hook captures."""

    def __init__(self) -> None:
        super().__init__()
        features: dict[str, Tensor] = {}
        self.body, self.head, self.skips = nn.Linear(4, 4), nn.Linear(4, 3), list[Tensor]()
        self.body.register_forward_hook(lambda module, args, output: features.update(body=output))
        self.feature = lambda: features["body"]

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        self.skips.append(x)
        return cast(Tensor, self.head(self.feature()))


def test_copy_keeps_intermediate_results_of_its_own() -> None:
    """In the main thread hooks may record in what they capture."""
    net, x = KeepsFeatures(), torch.randn(5, 4)
    main = StructureCopier().copy(net)
    with ThreadPoolExecutor(1) as pool:
        first, second = (pool.submit(lambda: StructureCopier().copy(net)).result() for _ in range(2))
    main(x[:1])
    assert torch.equal(net.feature(), main.feature())
    first(x)
    second(x[:2])
    assert torch.equal(first.feature(), net.body(x))
    assert (len(first.skips), len(second.skips), len(net.skips)) == (1, 1, 0)


def test_net_that_keeps_intermediate_results_is_copied() -> None:
    net, x = KeepsFeatures(), torch.randn(5, 4)
    net.skips.append(net.body(x))
    copy = copy_net(net)
    assert torch.equal(copy.skips[0], net.skips[0])
    assert not copy.skips[0].requires_grad


# -- the axis of the outputs ---------------------------------------------------------------------------


class TokenNet(nn.Module):
    """Scores of C classes for each token, in a layout that `finish` decides."""

    def __init__(self, finish: Callable[[Tensor], Tensor], outputs: int = 4) -> None:
        super().__init__()
        self.embed, self.score, self.finish = nn.Embedding(11, 6), nn.Linear(6, outputs), finish

    def forward(self, ids: Tensor) -> Tensor:
        return self.finish(self.score(self.embed(ids)))


FINISHES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "as it is": (lambda z: z, -1),
    "element by element": (lambda z: 30 * torch.tanh(z / 30), -1),
    "mixed": (lambda z: z.log_softmax(-1), -1),
    "transposed": (lambda z: z.mT, 1),
    "mixed, transposed": (lambda z: z.softmax(-1).mT, 1),
    "smoothed over tokens": (lambda z: (z + z.roll(1, 1)) / 2, -1),
    "first output dead": (lambda z: torch.cat([0 * z[..., :1], z[..., 1:]], -1), -1),
}


@pytest.mark.parametrize("tokens", [2, 4, 7])
@pytest.mark.parametrize("name", FINISHES)
def test_outputs_of_tokens_come_to_axis_1(name: str, tokens: int) -> None:
    """Four classes, and as many tokens: the head decides, not the shape."""
    finish, axis = FINISHES[name]
    net, x = TokenNet(finish), torch.arange(3 * tokens).view(3, tokens) % 11
    found = compute_output(net, x)
    assert found.shape == (3, 4, tokens)
    assert torch.equal(found, net(x).movedim(axis, 1))
    assert net.training
    other = torch.arange(15).view(3, 5) % 11  # the axis is that of the net, for any number of tokens
    assert torch.equal(compute_output(net, other), net(other).movedim(axis, 1))


def test_outputs_of_single_tokens_come_to_axis_1() -> None:
    for name, (finish, axis) in FINISHES.items():
        for outputs in (1, 4):
            if outputs == 1 and ("mixed" in name or "dead" in name):
                continue  # a softmax of one output is constant
            net, one = TokenNet(finish, outputs), torch.arange(3).view(3, 1)
            assert compute_output(net, one).shape == (3, outputs, 1)
            more = torch.arange(15).view(3, 5) % 11
            assert torch.equal(compute_output(net, more), net(more).movedim(axis, 1)), name


def test_ambiguous_axes_raise() -> None:
    """Everything depends on everything: only two different lengths tell outputs from tokens."""
    net = TokenNet(lambda z: z.flatten(1).softmax(1).view(z.shape))
    assert compute_output(net, torch.zeros(2, 3, dtype=torch.long)).shape == (2, 4, 3)
    with pytest.raises(ArgumentError) as error:
        compute_output(net, torch.zeros(2, 4, dtype=torch.long))
    assert error.value.name == "model"


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv1d(3, 4, 1)), (2, 9)),
        (nn.Sequential(nn.Linear(9, 5), nn.Conv1d(2, 4, 1)), (2, 9)),
        (nn.Sequential(nn.Flatten(), nn.Linear(18, 12), nn.Unflatten(1, (3, 2, 2))), (2, 9)),
        (nn.Sequential(nn.Linear(9, 5), nn.Conv1d(2, 4, 3)), (2, 9)),
        (nn.Sequential(nn.Conv1d(2, 3, 3)), (2, 9)),
    ],
    ids=["convolution", "pointwise convolution", "unflattened", "another layer", "no head"],
)
def test_other_layouts_stay(net: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(compute_output(net, x), net(x))


def test_axis_is_found_for_nets_that_write_into_their_inputs() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.score(x.mul_(-2.0))

    net, x = Writing(), torch.ones(2, 4, 4)
    assert torch.equal(compute_output(net, x), net.score(torch.full((2, 4, 4), -2.0)).mT)
    assert torch.equal(x, torch.full((2, 4, 4), -2.0))  # as after one call


def test_two_heads_decide_together() -> None:
    class Summed(TokenNet):
        def __init__(self) -> None:
            super().__init__(lambda z: z)
            self.skip = nn.Linear(6, 4)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.embed(ids)
            return self.score(h) + self.skip(h)

    net, x = Summed(), torch.zeros(2, 4, dtype=torch.long)
    assert torch.equal(compute_output(net, x), net(x).mT)


def test_axis_is_found_without_side_effects() -> None:
    """With dropout that is on in evaluation, too, and BatchNorm in training mode."""

    class Noisy(TokenNet):
        def __init__(self) -> None:
            super().__init__(lambda z: z)
            self.norm = nn.BatchNorm1d(6)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.norm(self.embed(ids).mT).mT
            return self.finish(self.score(nn.functional.dropout(h, 0.5, training=True)))

    net, twin, x = Noisy(), Noisy(), torch.arange(12).view(3, 4) % 11
    twin.load_state_dict(net.state_dict())
    torch.manual_seed(0)
    found = compute_output(net, x)
    torch.manual_seed(0)
    assert torch.equal(found, twin(x).mT)
    for name, value in twin.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    assert net.training
    assert net.norm.training


def test_nets_that_need_their_own_layers_keep_their_layout() -> None:
    """Nothing else than the head's class can stand in for it here."""

    class Particular(TokenNet):
        def forward(self, ids: Tensor) -> Tensor:
            if not isinstance(self.score, nn.Linear):
                raise ValueError(type(self.score))
            return super().forward(ids)

    net, x = Particular(lambda z: z), torch.arange(6).view(2, 3)
    assert torch.equal(compute_output(net, x), net(x))
