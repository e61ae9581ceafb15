"""MIMO against nets with one head each, and what each head is taught and learns."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _nets import ZOO, Case, Deep, Skipped, Squeezed, Tokens, TwoBranches, Upsampling, make
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import Deterministic, TrainingConfig, load, save
from neuboots.head import extract_output, split_head
from neuboots.methods.mimo import (
    MIMO,
    MIMOPredictor,
    MultiHeadNet,
    MultiInput,
    combine_inputs,
    draw_input_orders,
    widen_input_layers,
    widen_layer,
)
from neuboots.nets import ResNet

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)
K = 3


@pytest.fixture(autouse=True)
def _first_weights() -> None:
    torch.manual_seed(0)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes() -> TensorDataset:
    return TensorDataset(rows(50, 4), torch.arange(50) % 3)


class Normed(nn.Module):
    """BatchNorm on the input itself, two branches, a stride and upsampling back, a dict."""

    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.norm, self.stem, self.side = norm(2), conv(2, 5, 3, 2, 1), conv(2, 4, 1, 2)
        self.after, self.classifier = norm(9), conv(9, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x += 0.5  # in place, on its own input
        low = torch.cat([self.stem(self.norm(x)).relu(), self.side(x).tanh()], 1)
        return {"out": F.interpolate(self.classifier(self.after(low)), size=x.shape[2:])}


class Flat(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(18, 7), nn.ReLU(), nn.Linear(7, 3))


def shared_twice() -> nn.Module:
    class Shared(TwoBranches):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.cat([self.right(x), self.right(2 * x)], 1))

    return Shared()


class Checking(TwoBranches):
    """Looks at the size of its input, keeps the number of rows for later, and reads the input at two depths."""

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        if width != 4:
            raise ValueError("got another width")
        h = self.left((x - torch.arange(4.0)) / 2).view(rows, -1)
        return self.fc(torch.cat([h, self.right(x.clamp(-1, 1)) * h.mean(1, keepdim=True)], 1)).view(rows, 3)


class OnSequences(nn.Module):
    """Linear layers on the last of three axes, after LayerNorm and places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.places = nn.LayerNorm(4), nn.Parameter(torch.randn(1, 7, 4))
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.norm(x) + self.places).relu().amax(1))


class Residual(TwoBranches):
    """The input reaches the head as well."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cat([self.left(x), x, x[:, :2]], 1))


NETS: dict[str, tuple[Any, tuple[int, ...], list[str]]] = {
    "two branches": (TwoBranches, (6, 4), ["left.0", "right"]),
    "flattened images": (Flat, (6, 2, 3, 3), ["1"]),
    "normed input, 1d": (partial(Normed, 1), (6, 2, 8), ["stem", "side"]),
    "normed input, 2d": (Normed, (6, 2, 8, 6), ["stem", "side"]),
    "normed input, 3d": (partial(Normed, 3), (6, 2, 4, 4, 2), ["stem", "side"]),
    "squeezed": (Squeezed, (6, 4), ["net.0"]),
    "logits": (partial(Upsampling, 2, "logits"), (6, 2, 8, 8), ["stem"]),
    "head first": (Deep, (6, 4), ["body"]),
    "one layer twice": (shared_twice, (6, 4), ["right"]),
    "bare linear": (partial(nn.Linear, 4, 3), (6, 4), ["0"]),
    "checking": (Checking, (6, 4), ["left.0", "right"]),
    "sequences": (OnSequences, (6, 7, 4), ["body"]),
    "residual": (Residual, (6, 4), ["left.0", "fc"]),
    "reflected": (lambda: reflected(), (6, 2, 5, 5), ["0"]),
}
BY_HAND = ["two branches", "flattened images", "squeezed", "logits", "head first", "one layer twice", "bare linear"]


def reflected() -> nn.Module:
    conv = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
    return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def multi_of(net: nn.Module, x: Any, num_members: int = K) -> tuple[MultiHeadNet, list[str]]:
    split = split_head(net, example=x)
    widened = widen_input_layers(split, x, num_members, seed=7)
    return MultiHeadNet(split, num_members, seed=7), widened


def out(net: nn.Module, x: Tensor) -> Tensor:
    return extract_output(net(x.clone()))


@pytest.mark.parametrize("name", NETS)
def test_copied_blocks_over_k_are_the_plain_net_where_all_inputs_are_equal(name: str) -> None:
    model, shape, names = NETS[name]
    torch.manual_seed(0)
    plain, x = model(), rows(*shape)
    for norm in plain.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):  # statistics that matter
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.weight)
    multi, widened = multi_of(copy.deepcopy(plain), x)
    assert widened == names
    head = multi.split.head
    with torch.no_grad():
        for name in widened:
            layer = multi.net.get_submodule(name)
            own = plain if isinstance(plain, nn.Linear) else plain.get_submodule(name)
            layer.weight.copy_(torch.cat([own.weight] * K, 1) / K)
        for more in multi.more_heads:
            more.load_state_dict(head.state_dict())
        outputs = multi.eval()([x] * K)
        for z in outputs:
            torch.testing.assert_close(z, out(plain.eval(), x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_k_heads_are_k_nets_with_one_head_each(name: str) -> None:
    """Outputs and gradients in training mode, from one pass that the statistics see once."""
    model, shape, _ = NETS[name]
    torch.manual_seed(0)
    multi, _ = multi_of(model(), rows(*shape))
    multi.train()
    x = [rows(*shape, seed=k) for k in range(K)]
    apart = []
    for k in range(K):
        net = copy.deepcopy(multi.net)
        if k:
            net.get_submodule(multi.split.name).load_state_dict(multi.more_heads[k - 1].state_dict())
        apart.append(net)
    together = multi(x)
    slow = [extract_output(net(combine_inputs(x))) for net in apart]
    weights = [torch.cos(torch.arange(together[0].numel()) + k).view(together[0].shape) for k in range(K)]
    sum((z * w).sum() for z, w in zip(together, weights, strict=True)).backward()
    sum((z * w).sum() for z, w in zip(slow, weights, strict=True)).backward()
    for k in range(K):
        torch.testing.assert_close(together[k], slow[k], rtol=1e-4, atol=1e-5)
    head = multi.split.name
    for name, parameter in multi.net.named_parameters():
        if name.startswith(head + "."):
            theirs = apart[0].get_parameter(name).grad
        else:
            grads = [net.get_parameter(name).grad for net in apart]
            theirs = None if grads[0] is None else sum(grads)
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-3, atol=1e-4)
    for k, more in enumerate(multi.more_heads, 1):
        torch.testing.assert_close(more.weight.grad, apart[k].get_submodule(head).weight.grad, rtol=1e-3, atol=1e-4)
    for name, buffer in multi.net.named_buffers():
        torch.testing.assert_close(buffer, apart[0].get_buffer(name))


@pytest.mark.parametrize("name", BY_HAND)
def test_the_widened_net_reads_inputs_that_were_put_side_by_side_by_hand(name: str) -> None:
    """Where a net does not mind the size of its input, the K inputs in one tensor are the same as K inputs."""
    model, shape, _ = NETS[name]
    torch.manual_seed(0)
    multi, _ = multi_of(model(), rows(*shape))
    x = [rows(*shape, seed=k) for k in range(K)]
    torch.testing.assert_close(multi(x)[0], out(multi.net, torch.cat(x, 1)), rtol=1e-4, atol=1e-5)


def test_statistics_of_the_input_are_those_of_all_k() -> None:
    torch.manual_seed(0)
    multi, _ = multi_of(Normed(), rows(6, 2, 4, 4))
    x = [rows(6, 2, 4, 4, seed=k) for k in range(K)]
    multi.train()(x)
    whole = torch.cat(x) + 0.5
    norm = multi.net.norm
    torch.testing.assert_close(norm.running_mean, 0.1 * whole.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * whole.var((0, 2, 3)))
    assert int(norm.num_batches_tracked) == 1
    expected = (whole - whole.mean((0, 2, 3))[:, None, None]) / whole.var((0, 2, 3), correction=0)[:, None, None].sqrt()
    found = norm(combine_inputs([part + 0.5 for part in x]))
    torch.testing.assert_close(torch.cat(found.parts), expected, rtol=1e-4, atol=1e-4)


def test_k_tensors_look_like_one() -> None:
    parts = [rows(5, 4, seed=k) for k in range(K)]
    x = combine_inputs(parts)
    assert isinstance(x, MultiInput)
    assert x.shape.numel() == 20
    assert (x.shape, len(x), x.size(1), x.dtype, x.ndim) == ((5, 4), 5, 4, torch.float32, 2)
    values, index = (torch.cat([x, 2 * x.flip(0)], 1)[:, 1:].relu() - 1).max(1)
    for k, part in enumerate(parts):
        expected = (torch.cat([part, 2 * part.flip(0)], 1)[:, 1:].relu() - 1).max(1)
        assert torch.equal(values.parts[k], expected.values)
        assert torch.equal(index.parts[k], expected.indices)
    mixed = combine_inputs([{"x": parts[0], "scale": torch.tensor(2.0), "table": torch.ones(7, 2)}] * K)
    assert [type(mixed[name]) for name in ("x", "scale", "table")] == [MultiInput, Tensor, Tensor]
    x += 1
    x[:, 0] = 0
    assert torch.equal(x.parts[2][:, 1:], parts[2][:, 1:] + 1)
    assert not bool(x.parts[1][:, 0].any())
    assert torch.equal(parts[0], rows(5, 4))  # what was given is left alone
    with pytest.raises(ValueError, match="it reads values of its input"):
        float(x.sum())


@pytest.mark.parametrize("make_layer", [partial(nn.Linear, 50, 40), partial(nn.Conv2d, 20, 30, 3)])
def test_widened_weights_are_as_a_first_draw_over_k_times_the_inputs(make_layer: Any) -> None:
    torch.manual_seed(0)
    layer = make_layer()
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    inputs = weight.shape[1]
    widen_layer(layer, 1, 0, "name")
    assert torch.equal(layer.weight, weight)
    widen_layer(layer, 4, 0, "name")
    assert layer.weight.shape[1] == 4 * inputs == getattr(layer, "in_features", getattr(layer, "in_channels", None))
    assert torch.equal(layer.bias, bias)
    blocks = layer.weight.detach().split(inputs, 1)
    assert torch.equal(blocks[0], weight / 2)  # √4
    for k, block in enumerate(blocks):
        assert torch.equal(block.flatten().sort().values, (weight / 2).flatten().sort().values)
        for other in blocks[:k]:
            correlation = float((block * other).mean() / weight.square().mean() * 4)
            assert abs(correlation) < standard_errors(6) / weight.numel() ** 0.5
    fan_in = layer.weight[0].numel()  # torch draws from ±1/√fan_in
    assert float(layer.weight.detach().abs().max()) <= fan_in**-0.5
    assert float(layer.weight.detach().std() * (3 * fan_in) ** 0.5) == pytest.approx(1, abs=0.05)


def test_one_member_is_the_plain_net_of_the_same_recipe() -> None:
    config = replace(RECIPE, optimizer=partial(torch.optim.SGD, lr=0.1))
    x = rows(9, 4, seed=5)
    plain = Deterministic().fit(TwoBranches, classes(), config).predict(x, 1).samples
    single = MIMO(num_members=1, batch_repetition=1).fit(TwoBranches, classes(), config).predict(x, 1).samples
    torch.testing.assert_close(single, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("repetition", "times"), [(0.0, 1), (0.0, 4), (0.5, 2), (1.0, 3)])
def test_each_head_is_taught_the_target_of_its_own_input(repetition: float, times: int) -> None:
    """The net notes what it sees, the loss what it compares: row numbers both."""
    inputs: list[Tensor] = []
    targets: list[Tensor] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(1, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                inputs.append(torch.cat(x.parts, 1))
            return self.head(self.body(x).tanh())

    def loss(z: Tensor, y: Tensor) -> Tensor:
        targets.append(y.clone())
        return (z[:, 0] - y).square()

    numbers = torch.arange(40.0)
    method = MIMO(loss, num_members=K, input_repetition=repetition, batch_repetition=times)
    method.fit(Noting, TensorDataset(numbers[:, None], numbers), RECIPE)
    assert len(inputs) == 6  # two epochs of 16, 16 and 8 rows
    seen = []
    for step, x in enumerate(inputs):
        ys = torch.stack(targets[step * K : (step + 1) * K], 1)
        assert torch.equal(x, ys)
        for k in range(K):
            found, counts = x[:, k].unique(return_counts=True)
            assert counts.tolist() == [times] * len(found)
        same = (x == x[:, :1]).all(1).float().mean()
        assert same >= repetition
        assert same <= repetition + 0.3
        seen.append(x[:, 0].unique())
    assert torch.equal(torch.cat(seen[:3]).sort().values, numbers)


class OneUnlessVoid:
    """A loss of 1 for any output, and of 0 where the target is void."""

    ignore_index = 7

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return 0 * z[:, 0] + (y != 7).float()


def test_the_losses_of_all_heads_are_added_and_void_targets_do_not_count() -> None:
    reports: list[Any] = []
    y = torch.ones(20).long()
    y[::3] = 7
    method = MIMO(OneUnlessVoid(), num_members=K)
    method.fit(TwoBranches, TensorDataset(rows(20, 4), y), replace(RECIPE, on_epoch=reports.append))
    assert reports[0].loss == pytest.approx(K)


def test_shuffles_are_independent() -> None:
    """Two inputs hold the same row as often as chance will have it, in 1 of n rows."""
    torch.manual_seed(0)
    n, draws = 10, 2000
    same = torch.stack([(s[0] == s[1]).float() for s in (_shuffle(n) for _ in range(draws))])  # (draws, n)
    assert abs(float(same.mean()) - 1 / n) < standard_errors(1) / (draws * n) ** 0.5  # matches of a permutation: var 1
    kept = torch.stack([_shuffle(n, 0.4)[:, -4:] for _ in range(50)])
    assert bool((kept == kept[:, :1]).all())
    assert kept[:, 0].unique().numel() == n  # any row may be among them


def test_frozen_layers_may_read_the_only_input() -> None:
    weight = fit(frozen, FLAT, num_members=1).multi.net[0].weight
    assert weight.shape == (8, 4)


@pytest.mark.parametrize(("repetition", "apart"), [(0.8, 2), (0.7, 3), (0.4, 6), (1.0, 0)])
def test_the_share_that_is_shuffled_is_rounded(repetition: float, apart: int) -> None:
    drawn = torch.stack([_shuffle(10, repetition) for _ in range(50)])  # (50, K, 10)
    differs = (drawn != drawn[:, :1]).any(1).any(0)  # (10,)
    assert differs.tolist() == [True] * apart + [False] * (10 - apart)


def _shuffle(n: int, repetition: float = 0.0) -> Tensor:
    return draw_input_orders(n, K, input_repetition=repetition, batch_repetition=1)


def test_a_linear_net_learns_to_read_the_input_of_each_head_alone() -> None:
    """y = 2x exactly: the only net without error has head k read input k with weight 2 and no other."""
    x = rows(64, 1)
    config = TrainingConfig(epochs=150, batch_size=32, optimizer=partial(torch.optim.Adam, lr=0.1), progress=False)
    predictor = MIMO(nn.MSELoss(), num_members=K).fit(partial(nn.Linear, 1, 1), TensorDataset(x, 2 * x), config)
    multi = predictor.multi
    weights = torch.cat([multi.split.head.weight, *(head.weight for head in multi.more_heads)]).detach()
    torch.testing.assert_close(weights, 2 * torch.eye(K), rtol=0, atol=1e-3)


def test_each_head_of_a_deep_net_depends_on_its_own_input() -> None:
    x = rows(256, 2)
    config = TrainingConfig(epochs=20, batch_size=64, optimizer=partial(torch.optim.Adam, lr=0.02), progress=False)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    predictor = MIMO(num_members=2, batch_repetition=2).fit(
        lambda: nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)), data, config
    )
    inputs = [rows(200, 2, seed=3).requires_grad_(), rows(200, 2, seed=4).requires_grad_()]
    outputs = predictor.multi(inputs)  # (2, N, 2)
    for k, z in enumerate(outputs):
        grads = torch.autograd.grad(z.diff(dim=1).sum(), inputs, retain_graph=True)
        own, other = (grads[j].square().mean() for j in (k, 1 - k))
        assert other < 0.1 * own
        right = (z.argmax(1) == (inputs[k].prod(1) > 0).long()).float().mean()
        assert right > 0.85


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_any_net_is_widened_or_refused(case: Case) -> None:
    net = make(case)
    net = getattr(net, "module", getattr(net, "_orig_mod", net))
    if case.make is Skipped:
        with pytest.raises(ValueError, match="after its head it uses the input again"):
            multi_of(net, case.x)
        return
    plain = extract_output(net(**case.x) if isinstance(case.x, dict) else net(case.x))
    multi, widened = multi_of(net, case.x)
    assert widened
    with torch.no_grad():
        outputs = multi.eval()([case.x] * K)
        assert outputs.shape == (K, *plain.shape)
        assert not torch.allclose(outputs[0], outputs[1])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[:, None])[0][:, -1])


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x).relu()))


class FromTheLeft(Skipped):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] + self.fc(self.body(x))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return self.head(self.attention(x, x, x)[0][:, 0])


class Branching(TwoBranches):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean() > 1.5 else -x)


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.weight))


class Named(Loose):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(input=x, weight=self.weight))


def normed_weights() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def fit(model: Any, x: Any, **options: Any) -> MIMOPredictor:
    return MIMO(**options).fit(model, TensorDataset(*x, torch.arange(len(x[0])) % 3), RECIPE)


FLAT = (rows(9, 4),)


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: MIMO(num_members=0), "got num_members=0; expected K ≥ 1"),
        (lambda: MIMO(input_repetition=1.5), r"got input_repetition=1.5; expected a share from 0 to 1"),
        (lambda: MIMO(batch_repetition=0), "got batch_repetition=0; expected at least 1"),
        (lambda: fit(Skipped, FLAT), "after its head it uses the input again; expected a plain Linear or convolution"),
        (lambda: fit(FromTheLeft, FLAT), "after its head it uses the input again"),
        (lambda: fit(Recurrent, FLAT), r"other than Linear and convolution reads the input \(lstm\)"),
        (lambda: fit(Attending, FLAT), r"reads the input \(multi_head_attention_forward\)"),
        (lambda: fit(Reused, FLAT), "cannot be widened for MIMO: mat1 and mat2 shapes cannot be multiplied"),
        (lambda: fit(Branching, FLAT), "it reads values of its input, which differ between the K inputs"),
        (lambda: fit(Loose, FLAT), "are computed from others, or in no layer"),
        (lambda: fit(Named, FLAT), "the input is given to a linear map by name, or as its weights"),
        (lambda: fit(normed_weights, FLAT), "are computed from others, or in no layer"),
        (lambda: fit(grouped, (rows(9, 2, 6, 6),)), "'0' reads the input in groups of channels"),
        (
            lambda: fit(frozen, FLAT),
            "'0' reads the input and is frozen, so it would never learn to read K of them; expec",
        ),
        (lambda: fit(nn.Flatten, FLAT), "the net has no Linear or 1×1 convolution"),
        (lambda: fit(TwoBranches, FLAT, head="left"), "got head='left'; expected the name of a Linear"),
    ],
)
def test_bad_options_and_nets_get_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_tokens_are_embedded_one_by_one_and_read_together() -> None:
    case = next(case for case in ZOO if case.make is Tokens)
    net = make(case)
    table = net.embed.weight.detach().clone()
    multi, widened = multi_of(net, case.x)
    assert widened == ["score"]
    inputs = [{**case.x, "input_ids": case.x["input_ids"].roll(k, 0)} for k in range(K)]
    embedded = torch.cat([2.0 * table[x["input_ids"]] for x in inputs], -1)  # (5, 7, K·6)
    torch.testing.assert_close(multi(inputs)[0], embedded @ net.score.weight.T + net.score.bias)


def test_several_inputs_stand_each_beside_its_like() -> None:
    class Several(TwoBranches):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(torch.cat([self.left(a), self.right(b)], 1))

    predictor = fit(Several, (rows(20, 4), rows(20, 4, seed=1)))
    assert predictor.widened == ("left.0", "right")
    assert predictor.predict((rows(3, 4), rows(3, 4, seed=1)), 4).samples.shape == (4, 3, 3)


def test_lazy_layers_wrappers_and_void_pixels() -> None:
    def lazy() -> nn.Module:
        return nn.DataParallel(nn.Sequential(nn.LazyConv2d(6, 3, padding=1), nn.ReLU(), nn.LazyConv2d(3, 1)))

    x = rows(12, 2, 4, 4)
    y = (x[:, 0] > 0).long()
    y[:, 0] = 255
    predictor = MIMO(nn.CrossEntropyLoss(ignore_index=255)).fit(lazy, TensorDataset(x, y), RECIPE)
    assert predictor.predict(x[:2], 3).samples.shape == (3, 2, 3, 4, 4)
    assert isinstance(predictor.net[0], nn.Conv2d)
    assert predictor.net[0].in_channels == 2  # as its maker built it


@pytest.mark.parametrize("shortcut", ["pad", "projection"])
def test_a_net_of_this_library_is_rebuilt_when_loaded(shortcut: str, tmp_path: Any) -> None:
    def small() -> nn.Module:
        return ResNet(3, 2, blocks=(1, 1), widths=(4, 8), shortcut=shortcut)

    x = rows(9, 2, 6, 6)
    predictor = fit(small, (x,))
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(x, 3).samples, predictor.predict(x, 3).samples)


def test_gradients_flow_to_the_input_when_asked() -> None:
    x = rows(3, 4).requires_grad_()
    fit(TwoBranches, FLAT).predict(x, 3).probs.amax(1).sum().backward()
    assert bool((x.grad != 0).any())


def test_validation_is_the_mean_over_heads() -> None:
    reports: list[Any] = []
    x, y = rows(9, 4, seed=5), torch.arange(9) % 3
    config = replace(RECIPE, epochs=1, on_epoch=reports.append)
    predictor = MIMO().fit(TwoBranches, classes(), config, val_data=TensorDataset(x, y))
    samples = predictor.predict(x, 3).samples
    expected = sum(float(F.cross_entropy(z, y)) for z in samples) / 3
    assert reports[0].val_metrics["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_fit_that_was_cut_short_goes_on_where_it_stopped(tmp_path: Any) -> None:
    def stop(report: Any) -> None:
        raise RuntimeError("cut short")

    x = rows(6, 4, seed=5)
    whole = MIMO().fit(TwoBranches, classes(), RECIPE).predict(x, 3).samples
    config = replace(RECIPE, folder=tmp_path)
    with pytest.raises(RuntimeError, match="cut short"):
        MIMO().fit(TwoBranches, classes(), replace(config, on_epoch=stop))
    assert torch.equal(MIMO().fit(TwoBranches, classes(), config).predict(x, 3).samples, whole)
