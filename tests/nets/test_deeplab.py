"""DeepLab-v3: dilation agrees with strides, and torchvision's weights give torchvision's outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from neuboots import ArgumentError, BatchEnsemble, TrainingConfig
from neuboots.nets import DeepLabV3, deeplab_resnet50, deeplab_resnet101, load_torchvision_weights, small_deeplab
from neuboots.nets.deeplab import dilated_resnet

TINY: dict[str, Any] = {"blocks": (1, 2, 1, 2), "widths": (8, 16, 16, 32), "output_stride": 8, "aspp_width": 6}


def randomize(net: nn.Module) -> nn.Module:
    """In float64 and evaluation mode, with BatchNorm statistics that differ from channel to channel."""
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
            nn.init.normal_(layer.weight, 1.0, 0.2)
            nn.init.normal_(layer.bias, 0.0, 0.2)
    return net.double().eval()


# -- the backbone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
@pytest.mark.parametrize(
    ("stem", "finest", "size"), [("large", 4, (67, 50)), ("small", 2, (33, 41)), ("small", 4, (16, 16))]
)
@torch.no_grad()
def test_dilation_matches_subsampled_strides(block: str, stem: str, finest: int, size: tuple[int, int]) -> None:
    """Every (coarse/fine)-th pixel of the finer map is a pixel of the coarse one, borders and odd sizes included."""

    def make(output_stride: int) -> nn.Module:
        return dilated_resnet(2, (1, 2, 1, 2), (8, 8, 12, 16), block, stem, output_stride)

    coarsest = 8 * (4 if stem == "large" else 2)
    coarse = randomize(make(coarsest))
    fine = make(finest).double().eval()
    fine.load_state_dict(coarse.state_dict())
    x = torch.randn(2, 2, *size).double()
    found, wanted = fine(x), coarse(x)
    assert found.shape[2:] == tuple(-(-side // finest) for side in size)
    step = coarsest // finest
    torch.testing.assert_close(found[..., ::step, ::step], wanted, rtol=1e-9, atol=1e-9)


def dilations(net: nn.Module) -> list[int]:
    convs = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3)]
    return [layer.dilation[0] for layer in convs]


def test_dilation_rates_match_the_paper() -> None:
    """Chen et al. 2017, section 3: rates 6, 12, 18 at output stride 16, doubled at 8; torchvision's backbone."""
    with torch.device("meta"):
        at_16, at_8 = deeplab_resnet50(21, output_stride=16), deeplab_resnet50(21)
        multi = DeepLabV3(21, output_stride=16, multi_grid=(1, 2, 4))
    assert dilations(at_16.backbone) == [1] * 13 + [1, 2, 2]
    assert dilations(at_8.backbone) == [1] * 7 + [1] + [2] * 5 + [2, 4, 4]
    assert dilations(multi.backbone) == [1] * 13 + [1, 4, 8]
    assert dilations(at_16.aspp) == [6, 12, 18]
    assert dilations(at_8.aspp) == [12, 24, 36]
    assert dilations(DeepLabV3(2, **TINY, rates=(1, 5)).aspp) == [1, 5]


# -- the whole net -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 16), (17, 23), (64, 33), (8, 40)])
@pytest.mark.parametrize("training", [False, True])
def test_forward_any_image_size(size: tuple[int, int], training: bool) -> None:
    for net in (small_deeplab(4), DeepLabV3(4, **TINY)):
        out = net.train(training)(torch.randn(2, 3, *size))
        assert out.shape == (2, 4, *size)
        assert out.isfinite().all()


def test_single_image_uses_running_statistics() -> None:
    """One value for each channel has no variance: there BatchNorm uses, and leaves, its running statistics."""
    net = DeepLabV3(4, **TINY).train()
    norm = net.aspp.pooling.norm
    norm.running_mean.fill_(0.3)  # type: ignore[union-attr]
    x = torch.randn(1, 3, 32, 32)
    out = net(x)
    out.square().mean().backward()
    assert out.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())
    assert (norm.running_mean == 0.3).all()  # type: ignore[union-attr]
    assert int(norm.num_batches_tracked) == 0  # type: ignore[arg-type]
    # the branch is the one of evaluation
    features = torch.randn(1, 32, 4, 4)
    trained = net.aspp.pooling(features)
    assert torch.equal(trained, net.aspp.pooling.eval()(features))


def test_single_image_batches_train_members_that_share_the_net() -> None:
    """K members make K images of one, but the BatchNorm of each member sees its own only."""
    data = TensorDataset(torch.randn(2, 3, 17, 20), torch.randint(0, 4, (2, 17, 20)))
    config = TrainingConfig(epochs=1, batch_size=1, progress=False)
    predictor = BatchEnsemble(num_members=2).fit(lambda: small_deeplab(4), data, config)
    assert predictor.predict(data.tensors[0], 2).samples.isfinite().all()


# -- torchvision's weights -----------------------------------------------------------------------------


def norm_state(name: str, width: int) -> dict[str, Tensor]:
    parts = ("weight", "bias", "running_mean", "running_var")
    state = {f"{name}.{part}": torch.rand(width) + 0.5 for part in parts}
    return {**state, f"{name}.num_batches_tracked": torch.tensor(7)}


def resnet_state(blocks: tuple[int, ...], widths: tuple[int, ...], channels: int = 3) -> dict[str, Tensor]:
    """Names and shapes of torchvision's bottleneck ResNets without `fc`."""
    before = widths[0] // 4
    state = {"conv1.weight": torch.randn(before, channels, 7, 7) / 12, **norm_state("bn1", before)}
    for i, (count, width) in enumerate(zip(blocks, widths, strict=True), 1):
        inner = width // 4
        for j in range(count):
            name = f"layer{i}.{j}"
            shapes = [(inner, before, 1), (inner, inner, 3), (width, inner, 1)]
            for k, (out, given, size) in enumerate(shapes, 1):
                state[f"{name}.conv{k}.weight"] = torch.randn(out, given, size, size) / (given * size**2) ** 0.5
                state |= norm_state(f"{name}.bn{k}", out)
            if j == 0:
                state[f"{name}.downsample.0.weight"] = torch.randn(width, before, 1, 1) / before**0.5
                state |= norm_state(f"{name}.downsample.1", width)
            before = width
    return state


def deeplab_state(
    blocks: tuple[int, ...], widths: tuple[int, ...], classes: int = 21, aspp: int = 256
) -> dict[str, Tensor]:
    """Names and shapes of torchvision's DeepLabV3 with its auxiliary head."""
    state = {f"backbone.{name}": tensor for name, tensor in resnet_state(blocks, widths).items()}
    convs = {
        **{f"classifier.0.convs.{i}.0": (aspp, widths[-1], 3 if i else 1) for i in range(4)},
        "classifier.0.convs.4.1": (aspp, widths[-1], 1),
        "classifier.0.project.0": (aspp, 5 * aspp, 1),
        "classifier.1": (aspp, aspp, 3),
        "classifier.4": (classes, aspp, 1),
        "aux_classifier.0": (widths[-1] // 8, widths[-1] // 2, 3),
        "aux_classifier.4": (classes, widths[-1] // 8, 1),
    }
    for name, (out, given, size) in convs.items():
        state[f"{name}.weight"] = torch.randn(out, given, size, size) / (given * size**2) ** 0.5
    norms = ("convs.0.1", "convs.1.1", "convs.2.1", "convs.3.1", "convs.4.2", "project.1")
    for name in (*(f"classifier.0.{norm}" for norm in norms), "classifier.2"):
        state |= norm_state(name, aspp)
    state |= norm_state("aux_classifier.1", widths[-1] // 8)
    state["classifier.4.bias"] = torch.randn(classes)
    state["aux_classifier.4.bias"] = torch.randn(classes)
    return state


def torchvision_forward(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """torchvision's DeepLabV3 in evaluation mode at output stride 8, written out from its names."""

    def conv(name: str, x: Tensor, **how: int) -> Tensor:
        return F.conv2d(x, state[f"{name}.weight"], state.get(f"{name}.bias"), **how)

    def norm(name: str, x: Tensor) -> Tensor:
        parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts)

    h = norm("backbone.bn1", conv("backbone.conv1", x, stride=2, padding=3)).relu()
    h = F.max_pool2d(h, 3, 2, 1)
    for stage, (stride, first, later) in enumerate([(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 4)], 1):
        j = 0
        while (name := f"backbone.layer{stage}.{j}") + ".conv1.weight" in state:
            step, rate = (stride, first) if j == 0 else (1, later)
            out = norm(f"{name}.bn1", conv(f"{name}.conv1", h)).relu()
            out = norm(f"{name}.bn2", conv(f"{name}.conv2", out, stride=step, padding=rate, dilation=rate)).relu()
            out = norm(f"{name}.bn3", conv(f"{name}.conv3", out))
            if j == 0:
                h = norm(f"{name}.downsample.1", conv(f"{name}.downsample.0", h, stride=step))
            h = (h + out).relu()
            j += 1
    name = "classifier.0.convs"
    found = [norm(f"{name}.0.1", conv(f"{name}.0.0", h)).relu()]
    for i, rate in enumerate((12, 24, 36), 1):
        found.append(norm(f"{name}.{i}.1", conv(f"{name}.{i}.0", h, padding=rate, dilation=rate)).relu())
    pooled = norm(f"{name}.4.2", conv(f"{name}.4.1", F.adaptive_avg_pool2d(h, 1))).relu()
    found.append(F.interpolate(pooled, size=h.shape[2:], mode="bilinear", align_corners=False))
    h = norm("classifier.0.project.1", conv("classifier.0.project.0", torch.cat(found, 1))).relu()
    h = norm("classifier.2", conv("classifier.1", h, padding=1)).relu()
    return F.interpolate(conv("classifier.4", h), size=x.shape[2:], mode="bilinear", align_corners=False)


@torch.no_grad()
def test_loaded_weights_reproduce_torchvision() -> None:
    blocks, widths = (1, 2, 1, 3), (8, 16, 16, 32)
    state = deeplab_state(blocks, widths, classes=5, aspp=6)
    net = DeepLabV3(5, blocks=blocks, widths=widths, output_stride=8, aspp_width=6).eval()
    assert load_torchvision_weights(net, state) == []
    net = net.double()
    x = torch.randn(2, 3, 75, 50).double()
    wanted = torchvision_forward({name: tensor.double() for name, tensor in state.items()}, x)
    torch.testing.assert_close(net(x), wanted)
    assert wanted.std() > 0.01


@pytest.mark.parametrize(("make", "blocks"), [(deeplab_resnet50, (3, 4, 6, 3)), (deeplab_resnet101, (3, 4, 23, 3))])
def test_published_nets_have_all_torchvision_tensors(make: Callable[[int], DeepLabV3], blocks: tuple[int, ...]) -> None:
    widths = (256, 512, 1024, 2048)
    with torch.device("meta"):
        net, state, backbone = make(21), deeplab_state(blocks, widths), resnet_state(blocks, widths)
        assert load_torchvision_weights(net, state) == []
        backbone |= {"fc.weight": torch.empty(1000, 2048), "fc.bias": torch.empty(1000)}
        left = load_torchvision_weights(net, backbone)
    assert left == [name for name in net.state_dict() if not name.startswith("backbone.")]


def tiny_state(classes: int = 4) -> dict[str, Tensor]:
    return deeplab_state(TINY["blocks"], TINY["widths"], classes, aspp=6)


def test_load_torchvision_weights_other_classes_keep_the_head() -> None:
    net = DeepLabV3(4, **TINY)
    head = net.head.weight.clone()
    state = tiny_state(21)
    assert load_torchvision_weights(net, state) == ["head.weight", "head.bias"]
    assert torch.equal(net.head.weight, head)
    assert torch.equal(net.refine[0].weight, state["classifier.1.weight"])


def test_load_torchvision_weights_without_batch_counts() -> None:
    net = DeepLabV3(4, **TINY)
    state = {name: tensor for name, tensor in tiny_state().items() if not name.endswith("num_batches_tracked")}
    assert all(name.endswith("num_batches_tracked") for name in load_torchvision_weights(net, state))


@pytest.mark.parametrize(
    "make_state",
    [
        dict,
        lambda: {"encoder.weight": torch.zeros(2)},
        lambda: resnet_state((1, 2, 2, 2), TINY["widths"]),
        lambda: resnet_state((1, 2, 1, 1), TINY["widths"]),
        lambda: resnet_state(TINY["blocks"], TINY["widths"], channels=1),
        lambda: {name: tensor for name, tensor in tiny_state().items() if "convs.4" not in name},
    ],
    ids=["empty", "another net", "too many blocks", "too few blocks", "other channels", "no pooling"],
)
def test_load_torchvision_weights_mismatch_changes_nothing(make_state: Callable[[], Any]) -> None:
    net = DeepLabV3(4, **TINY)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(ArgumentError, match="state"):
        load_torchvision_weights(net, make_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
