"""MIMO against nets with one head each, and what each head is trained on."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _nets import QUICK, ZOO, Deep, Skipped, Squeezed, Tokens, TwoBranches, Upsampling, make, noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import MIMO, TrainingConfig
from neuboots.head import compute_output, extract_output, split_head
from neuboots.methods.mimo import (
    MIMOPredictor,
    MultiHeadNet,
    _combine_inputs,
    _draw_input_orders,
    _MultiInput,
    _widen_input_layers,
    _widen_layer,
)

K = 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Normed(nn.Module):
    """BatchNorm on the input itself, two branches, a stride, upsampling, and a dict."""

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


class SharedLayer(TwoBranches):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cat([self.right(x), self.right(2 * x)], 1))


class ReadsShape(TwoBranches):
    """Reads the shape of its input, and reads the input at two depths."""

    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        assert width == 4
        h = self.left((x - torch.arange(4.0)) / 2).view(rows, -1)
        return self.fc(torch.cat([h, self.right(x.clamp(-1, 1)) * h.mean(1, keepdim=True)], 1)).view(rows, 3)


class OnSequences(nn.Module):
    """Linear layers on the last of three axes, after LayerNorm and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.positions = nn.LayerNorm(4), nn.Parameter(torch.randn(1, 7, 4))
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.norm(x) + self.positions).relu().amax(1))


class Residual(TwoBranches):
    """The input reaches the head as well."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cat([self.left(x), x, x[:, :2]], 1))


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(18, 7), nn.ReLU(), nn.Linear(7, 3))


def reflected() -> nn.Module:
    conv = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
    return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


NETS: dict[str, tuple[Any, tuple[int, ...], list[str]]] = {
    "two branches": (TwoBranches, (6, 4), ["left.0", "right"]),
    "flattened images": (flat, (6, 2, 3, 3), ["1"]),
    "squeezed": (Squeezed, (6, 4), ["net.0"]),
    "logits": (partial(Upsampling, 2, "logits"), (6, 2, 8, 8), ["stem"]),
    "head first": (Deep, (6, 4), ["body"]),
    "one layer twice": (SharedLayer, (6, 4), ["right"]),
    "bare linear": (partial(nn.Linear, 4, 3), (6, 4), ["0"]),
    "normed input, 1d": (partial(Normed, 1), (6, 2, 8), ["stem", "side"]),
    "normed input, 2d": (Normed, (6, 2, 8, 6), ["stem", "side"]),
    "normed input, 3d": (partial(Normed, 3), (6, 2, 4, 4, 2), ["stem", "side"]),
    "reads shape": (ReadsShape, (6, 4), ["left.0", "right"]),
    "sequences": (OnSequences, (6, 7, 4), ["body"]),
    "residual": (Residual, (6, 4), ["left.0", "fc"]),
    "reflected": (reflected, (6, 2, 5, 5), ["0"]),
}
CONCATENABLE = list(NETS)[:7]  # nets that accept K times as many channels


def make_multi_head(net: nn.Module, x: Any) -> tuple[MultiHeadNet, list[str]]:
    split = split_head(net, example=x)
    widened = _widen_input_layers(split, x, K, seed=7)
    return MultiHeadNet(split, K, seed=7), widened


@pytest.mark.parametrize("name", NETS)
def test_equal_blocks_of_weights_at_equal_inputs_give_the_original_net(name: str) -> None:
    factory, shape, names = NETS[name]
    net, x = factory(), noise(*shape)
    for norm in net.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.weight)
    multi, widened = make_multi_head(copy.deepcopy(net), x)
    assert widened == names
    with torch.no_grad():
        for name in widened:
            original = net if isinstance(net, nn.Linear) else net.get_submodule(name)
            multi.net.get_submodule(name).weight.copy_(torch.cat([original.weight] * K, 1) / K)
        for head in multi.more_heads:
            head.load_state_dict(multi.split.head.state_dict())
        for z in multi.eval()([x] * K):
            torch.testing.assert_close(z, extract_output(net.eval()(x.clone())), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_heads_equal_nets_with_one_head(name: str) -> None:
    """Outputs, gradients and BatchNorm statistics in training mode."""
    factory, shape, _ = NETS[name]
    multi, _ = make_multi_head(factory(), noise(*shape))
    multi.train()
    x = [noise(*shape, seed=k) for k in range(K)]
    if name in CONCATENABLE:
        expected = extract_output(copy.deepcopy(multi.net)(torch.cat(x, 1)))
        torch.testing.assert_close(copy.deepcopy(multi)(x)[0], expected, rtol=1e-4, atol=1e-5)
    separate = []
    for k in range(K):
        net = copy.deepcopy(multi.net)
        if k:
            net.get_submodule(multi.split.name).load_state_dict(multi.more_heads[k - 1].state_dict())
        separate.append(net)
    outputs = multi(x)
    slow = [extract_output(net(_combine_inputs(x))) for net in separate]
    weights = [torch.cos(torch.arange(outputs[0].numel()) + k).view(outputs[0].shape) for k in range(K)]
    sum((z * w).sum() for z, w in zip(outputs, weights, strict=True)).backward()
    sum((z * w).sum() for z, w in zip(slow, weights, strict=True)).backward()
    for k in range(K):
        torch.testing.assert_close(outputs[k], slow[k], rtol=1e-4, atol=1e-5)
    head = multi.split.name
    for name, parameter in multi.net.named_parameters():
        grads = [net.get_parameter(name).grad for net in separate]
        total = grads[0] if grads[0] is None or name.startswith(head + ".") else sum(grads)
        torch.testing.assert_close(parameter.grad, total, rtol=1e-3, atol=1e-4)
    for k, more in enumerate(multi.more_heads, 1):
        torch.testing.assert_close(more.weight.grad, separate[k].get_submodule(head).weight.grad, rtol=1e-3, atol=1e-4)
    for name, buffer in multi.net.named_buffers():
        torch.testing.assert_close(buffer, separate[0].get_buffer(name))


def test_batch_norm_of_the_input_has_the_statistics_of_all_inputs() -> None:
    multi, _ = make_multi_head(Normed(), noise(6, 2, 4, 4))
    x = [noise(6, 2, 4, 4, seed=k) for k in range(K)]
    multi.train()(x)
    rows, norm = torch.cat(x) + 0.5, multi.net.norm
    torch.testing.assert_close(norm.running_mean, 0.1 * rows.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * rows.var((0, 2, 3)))
    assert int(norm.num_batches_tracked) == 1
    expected = (rows - rows.mean((0, 2, 3))[:, None, None]) / rows.var((0, 2, 3), correction=0)[:, None, None].sqrt()
    found = norm(_combine_inputs([part + 0.5 for part in x]))
    torch.testing.assert_close(torch.cat(found.parts), expected, rtol=1e-4, atol=1e-4)


def test_multi_input_behaves_as_one_tensor() -> None:
    parts = [noise(5, 4, seed=k) for k in range(K)]
    x = _combine_inputs(parts)
    assert isinstance(x, _MultiInput)
    assert (x.shape, x.shape.numel(), len(x), x.size(1), x.dtype, x.ndim) == ((5, 4), 20, 5, 4, torch.float32, 2)
    values, index = (torch.cat([x, 2 * x.flip(0)], 1)[:, 1:].relu() - 1).max(1)
    for k, part in enumerate(parts):
        expected = (torch.cat([part, 2 * part.flip(0)], 1)[:, 1:].relu() - 1).max(1)
        assert torch.equal(values.parts[k], expected.values)
        assert torch.equal(index.parts[k], expected.indices)
    mixed = _combine_inputs([{"x": parts[0], "scale": torch.tensor(2.0), "table": torch.ones(7, 2)}] * K)
    assert [type(mixed[name]) for name in ("x", "scale", "table")] == [_MultiInput, Tensor, Tensor]
    x += 1
    x[:, 0] = 0
    assert torch.equal(x.parts[2][:, 1:], parts[2][:, 1:] + 1)
    assert not bool(x.parts[1][:, 0].any())
    assert torch.equal(parts[0], noise(5, 4))  # the inputs are not changed
    with pytest.raises(ValueError, match="expected"):
        float(x.sum())


@pytest.mark.parametrize("make_layer", [partial(nn.Linear, 50, 40), partial(nn.Conv2d, 20, 30, 3)])
def test_widened_weights_are_distributed_as_an_initialisation(make_layer: Any) -> None:
    layer = make_layer()
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    inputs = weight.shape[1]
    _widen_layer(layer, 1, 0, "name")
    assert torch.equal(layer.weight, weight)
    _widen_layer(layer, 4, 0, "name")
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


# -- training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("repetition", "times"), [(0.0, 1), (0.0, 4), (0.5, 2), (1.0, 3)])
def test_each_head_is_trained_on_the_target_of_its_input(repetition: float, times: int) -> None:
    """Inputs and targets are row numbers; the net records its inputs and the loss its targets."""
    inputs: list[Tensor] = []
    targets: list[Tensor] = []

    class Recording(nn.Module):
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
    method.fit(Recording, TensorDataset(numbers[:, None], numbers), QUICK)
    assert len(inputs) == 6  # two epochs of 16, 16 and 8 rows
    seen = []
    for step, x in enumerate(inputs):
        assert torch.equal(x, torch.stack(targets[step * K : (step + 1) * K], 1))
        for k in range(K):
            found, counts = x[:, k].unique(return_counts=True)
            assert counts.tolist() == [times] * len(found)
        assert repetition <= (x == x[:, :1]).all(1).float().mean() <= repetition + 0.3
        seen.append(x[:, 0].unique())
    assert torch.equal(torch.cat(seen[:3]).sort().values, numbers)


class OneUnlessIgnored:
    """A loss of 1 for any output, and of 0 for ignored targets."""

    ignore_index = 7

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return 0 * z[:, 0] + (y != 7).float()


def test_objective_is_the_sum_over_heads_without_ignored_targets() -> None:
    reports: list[Any] = []
    y = torch.ones(20).long()
    y[::3] = 7
    method = MIMO(OneUnlessIgnored(), num_members=K)
    method.fit(TwoBranches, TensorDataset(noise(20, 4), y), replace(QUICK, on_epoch=reports.append))
    assert reports[0].loss == pytest.approx(K)


def draw_orders(n: int, repetition: float = 0.0) -> Tensor:
    return _draw_input_orders(n, K, input_repetition=repetition, batch_repetition=1)


def test_orders_of_inputs_are_independent() -> None:
    n, draws = 10, 2000
    same = torch.stack([(s[0] == s[1]).float() for s in (draw_orders(n) for _ in range(draws))])  # (draws, n)
    assert abs(float(same.mean()) - 1 / n) < standard_errors(1) / (draws * n) ** 0.5  # matches of a permutation: var 1
    repeated = torch.stack([draw_orders(n, 0.4)[:, -4:] for _ in range(50)])
    assert bool((repeated == repeated[:, :1]).all())
    assert repeated[:, 0].unique().numel() == n


def test_linear_net_learns_to_read_the_input_of_each_head() -> None:
    """y = 2x exactly: in the only net without error head k reads input k with weight 2 and no other."""
    x = noise(64, 1)
    config = TrainingConfig(epochs=100, batch_size=32, optimizer=partial(torch.optim.Adam, lr=0.1), progress=False)
    predictor = MIMO(nn.MSELoss(), num_members=K).fit(partial(nn.Linear, 1, 1), TensorDataset(x, 2 * x), config)
    heads = [predictor.module.split.head, *predictor.module.more_heads]
    weights = torch.cat([head.weight for head in heads]).detach()
    torch.testing.assert_close(weights, 2 * torch.eye(K), rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_any_net_is_widened_or_rejected(case: Any) -> None:
    net = make(case)
    net = getattr(net, "module", getattr(net, "_orig_mod", net))
    if case.make is Skipped:
        with pytest.raises(ValueError, match="expected"):
            make_multi_head(net, case.x)
        return
    shape = compute_output(net, case.x).shape
    multi, widened = make_multi_head(net, case.x)
    assert widened
    with torch.no_grad():
        outputs = multi.eval()([case.x] * K)
    assert outputs.shape == (K, *shape)
    assert not torch.allclose(outputs[0], outputs[1])


# -- nets ----------------------------------------------------------------------------------------------


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


class Branching(TwoBranches):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean() > 1.5 else -x)


class FunctionalLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.weight))


class KeywordLinear(FunctionalLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(input=x, weight=self.weight))


def normed_weights() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    return net


def fit(factory: Any, *x: Tensor, **options: Any) -> MIMOPredictor:
    return MIMO(**options).fit(factory, TensorDataset(*x, torch.arange(len(x[0])) % 3), QUICK)


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (Skipped, "after its head"),
        (Recurrent, "lstm"),
        (Reused, "MIMO"),
        (Branching, "values"),
        (FunctionalLinear, "no layer"),
        (KeywordLinear, "keyword"),
        (normed_weights, "computed"),
        (grouped, "groups"),
        (frozen, "frozen"),
        (nn.Flatten, "Linear"),
    ],
)
def test_nets_that_cannot_be_widened_raise(factory: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fit(factory, noise(9, 2, 6, 6) if factory is grouped else noise(9, 4))


def test_tokens_are_embedded_separately_and_read_together() -> None:
    case = next(case for case in ZOO if case.make is Tokens)
    net = make(case)
    table = net.embed.weight.detach().clone()
    multi, widened = make_multi_head(net, case.x)
    assert widened == ["score"]
    inputs = [{**case.x, "input_ids": case.x["input_ids"].roll(k, 0)} for k in range(K)]
    embedded = torch.cat([2.0 * table[x["input_ids"]] for x in inputs], -1)  # (5, 7, K·6)
    torch.testing.assert_close(multi(inputs)[0], (embedded @ net.score.weight.T + net.score.bias).mT)
