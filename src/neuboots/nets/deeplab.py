"""DeepLab-v3: a dilated residual net, atrous spatial pyramid pooling, a 1×1 head and bilinear upsampling.

    z = up(W φ + b),   φ = conv₃ₓ₃(P [conv₁ₓ₁ f, conv_{r₁} f, conv_{r₂} f, conv_{r₃} f, mean f]),   f = backbone(x)
    (x ∗_r w)[i] = Σ_k x[i + r·k] w[k]                                             (Chen et al. 2017, eq. 1)

He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, CVPR 2016; Chen, Papandreou, Schroff and Adam,
Rethinking Atrous Convolution for Semantic Image Segmentation, 2017. A stage that would exceed the output stride keeps
the size of its map and dilates its filters, so that every (stride ÷ output stride)-th pixel of the map is that of the
net without dilation. The 3×3 convolution after the projection P is torchvision's, whose weights
`load_torchvision_weights` reads.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuboots._validation import ArgumentError, check_choice
from neuboots.nets.resnet import ResidualBlock, conv_norm, he_init
from neuboots.serialization import configurable

STEM_STRIDES = {"large": 4, "small": 2}


def dilated_resnet(
    in_channels: int,
    blocks: Sequence[int],
    widths: Sequence[int],
    block: str,
    stem: str,
    output_stride: int,
    multi_grid: Sequence[int] = (),
) -> nn.Sequential:
    """Residual net with dilated last stages: images (N, in_channels, H, W) to a map (N, widths[-1], ⌈H/s⌉, ⌈W/s⌉).

    Args:
        in_channels: Number of channels of the images.
        blocks: Number of blocks in each stage.
        widths: Output channels of each stage.
        block: "bottleneck" (1×1, 3×3, 1×1 with a quarter of the width inside) or "basic" (two 3×3 convolutions).
        stem: "large" (7×7 and max pooling, stride 4) or "small" (3×3, stride 2).
        output_stride: Stride s of the map.
        multi_grid: Further dilation of each block of the last stage; empty: none.

    Returns:
        The net.

    Example:
        >>> net = dilated_resnet(3, (1, 1, 1), (8, 8, 16), "basic", "small", 4)
        >>> net(torch.zeros(2, 3, 33, 40)).shape
        torch.Size([2, 16, 9, 10])
    """
    check_choice("block", block, ("bottleneck", "basic"))
    check_choice("stem", stem, STEM_STRIDES)
    bottleneck, stride = block == "bottleneck", STEM_STRIDES[stem]
    if not widths or len(blocks) != len(widths):
        raise ArgumentError("blocks", blocks, f"one number per stage, as in widths={widths!r}")
    if bottleneck and any(width % 4 for width in widths):
        raise ArgumentError("widths", widths, "multiples of 4 with bottleneck blocks", hint="or use block='basic'")
    if multi_grid and len(multi_grid) != blocks[-1]:
        raise ArgumentError("multi_grid", multi_grid, f"one number for each of the last {blocks[-1]} blocks, or ()")
    if output_stride not in (strides := [stride * 2**i for i in range(min(len(widths), 32))]):
        raise ArgumentError("output_stride", output_stride, f"one of {strides}")
    before = widths[0] // 4 if bottleneck else widths[0]
    first = [*conv_norm(in_channels, before, 7 if stem == "large" else 3, stride=2), nn.ReLU()]
    first += [nn.MaxPool2d(3, 2, padding=1)] if stem == "large" else []
    stages, dilation = nn.Sequential(), 1
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
        step, entry = 1, dilation  # the first convolution of a stage still reads the map of the one before
        if stage > 0 and stride < output_stride:
            step, stride = 2, 2 * stride
        elif stage > 0:
            dilation = 2 * dilation
        layers = nn.Sequential()
        for factor in multi_grid if multi_grid and stage == len(widths) - 1 else repeat(1, count):
            # projected whatever the output stride is
            shortcut = "projection" if before != width or (stage > 0 and not layers) else "identity"
            dilations = (entry * factor, dilation * factor)
            layers.append(
                ResidualBlock(before, width, stride=step, shortcut=shortcut, bottleneck=bottleneck, dilations=dilations)
            )
            before, step, entry = width, 1, dilation
        stages.append(layers)
    return nn.Sequential(OrderedDict(stem=nn.Sequential(*first), stages=stages))


@configurable
class DeepLabV3(nn.Module):
    """Backbone, atrous spatial pyramid pooling (ASPP), 3×3 convolution, 1×1 head, upsampling to the input's size.

    There is no auxiliary head and no dropout. The default backbone is ResNet-50.

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.
        blocks: Number of blocks in each stage of the backbone, a `dilated_resnet`.
        widths: Output channels of each stage.
        block: "bottleneck" or "basic".
        stem: "large" or "small".
        output_stride: Stride of the features: 8 as in the paper's evaluation and torchvision; 16 is faster and coarser.
        multi_grid: Further dilation of each block of the last stage; empty: none.
        aspp_width: Channels of the pooling; the head reads D = aspp_width features.
        rates: Dilations in ASPP; None: (96, 192, 288) pixels over the output stride, 6, 12, 18 at stride 16 as in the
            paper.

    Example:
        >>> net = small_deeplab(11)
        >>> net(torch.zeros(2, 3, 120, 160)).shape
        torch.Size([2, 11, 120, 160])
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        blocks: Sequence[int] = (3, 4, 6, 3),
        widths: Sequence[int] = (256, 512, 1024, 2048),
        block: str = "bottleneck",
        stem: str = "large",
        output_stride: int = 8,
        multi_grid: Sequence[int] = (),
        aspp_width: int = 256,
        rates: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.backbone = dilated_resnet(in_channels, blocks, widths, block, stem, output_stride, multi_grid)
        if rates is None:
            rates = [max(1, i * 96 // output_stride) for i in (1, 2, 3)]
        self.aspp = ASPP(widths[-1], aspp_width, rates)
        self.refine = _conv_norm_relu(aspp_width, aspp_width, rate=1)
        self.head = nn.Conv2d(aspp_width, num_classes, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights as in He et al. 2015."""
        self.apply(he_init)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes, H, W)."""
        phi = self.refine(self.aspp(self.backbone(x)))  # (N, D, ⌈H/s⌉, ⌈W/s⌉)
        return functional.interpolate(self.head(phi), size=x.shape[2:], mode="bilinear", align_corners=False)


def deeplab_resnet50(num_classes: int, in_channels: int = 3, *, output_stride: int = 8) -> DeepLabV3:
    """DeepLab-v3 on ResNet-50, D = 256 (39.64 M parameters with 21 classes).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.
        output_stride: Stride of the features.

    Returns:
        The net.

    Example:
        >>> with torch.device("meta"):  # no memory is allocated
        ...     net = deeplab_resnet50(21)
        >>> net.head
        Conv2d(256, 21, kernel_size=(1, 1), stride=(1, 1))
    """
    return DeepLabV3(num_classes, in_channels, blocks=(3, 4, 6, 3), output_stride=output_stride)


def deeplab_resnet101(num_classes: int, in_channels: int = 3, *, output_stride: int = 8) -> DeepLabV3:
    """DeepLab-v3 on ResNet-101, D = 256 (58.63 M parameters with 21 classes).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.
        output_stride: Stride of the features.

    Returns:
        The net.
    """
    return DeepLabV3(num_classes, in_channels, blocks=(3, 4, 23, 3), output_stride=output_stride)


def small_deeplab(num_classes: int, in_channels: int = 3) -> DeepLabV3:
    """DeepLab-v3 on three basic blocks at output stride 4, D = 48: for a CPU and images of 100 pixels (0.16 M).

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.

    Returns:
        The net.
    """
    return DeepLabV3(
        num_classes,
        in_channels,
        blocks=(1, 1, 1),
        widths=(16, 32, 48),
        block="basic",
        stem="small",
        output_stride=4,
        aspp_width=48,
        rates=(3, 6, 9),
    )


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: 1×1, 3×3 at each rate and image pooling, concatenated and projected.

    Args:
        before: Number of input channels.
        width: Number of channels.
        rates: Dilations.
    """

    def __init__(self, before: int, width: int, rates: Sequence[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [_conv_norm_relu(before, width), *(_conv_norm_relu(before, width, rate=rate) for rate in rates)]
        )
        conv = nn.Conv2d(before, width, 1, bias=False)
        self.pooling = nn.Sequential(OrderedDict(conv=conv, norm=PooledNorm(width), relu=nn.ReLU()))
        self.project = _conv_norm_relu((len(rates) + 2) * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, before, H, W) to (N, width, H, W)."""
        pooled = self.pooling(x.mean(dim=(2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        out: Tensor = self.project(torch.cat([*(branch(x) for branch in self.branches), pooled], dim=1))
        return out


class PooledNorm(nn.BatchNorm2d):
    """BatchNorm of one value for each image and channel (N, C, 1, 1).

    A training batch of one image has no variance: then the running statistics are used and not updated.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, 1, 1) to the same shape."""
        if not self.training or len(input) != 1:
            return super().forward(input)
        return functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def _conv_norm_relu(before: int, width: int, *, rate: int | None = None) -> nn.Sequential:
    """1×1, or 3×3 at a rate; then BatchNorm and ReLU."""
    layers = conv_norm(before, width, 1)  # also before a 3×3 convolution: its draws are part of what a seed gives
    if rate is not None:
        layers = conv_norm(before, width, 3, dilation=rate)
    return nn.Sequential(*layers, nn.ReLU())


# -- weights trained elsewhere -------------------------------------------------------------------------


def load_torchvision_weights(net: DeepLabV3, state: Mapping[str, Tensor]) -> list[str]:
    """Copy torchvision's weights into the net.

    Args:
        net: Net with bottleneck blocks and the large stem.
        state: State dict of torchvision's `resnet50` or `resnet101` (the backbone only), or of its
            `deeplabv3_resnet50` or `deeplabv3_resnet101` (everything; trained at output stride 8). A classifier with
            another number of classes leaves the head unchanged.

    Returns:
        Names of the net's tensors that the weights do not contain.

    Raises:
        ArgumentError: If the weights do not fit; the net is not changed.

    Example:
        >>> load_torchvision_weights(small_deeplab(2), {"conv1.weight": torch.zeros(64, 3, 7, 7)})
        Traceback (most recent call last):
        neuboots._validation.ArgumentError: got state=...; expected torchvision's weights for a net of this depth ...
    """
    unused = ("aux_classifier.", "fc.")
    found = {_translate_name(name): tensor for name, tensor in state.items() if not name.startswith(unused)}
    if (head := found.get("head.weight")) is not None and len(head) != net.head.out_channels:
        found = {name: tensor for name, tensor in found.items() if not name.startswith("head.")}
    expected = net.state_dict()
    remaining = [name for name in expected if name not in found]
    backbone_only = all(name.startswith("backbone.") for name in found)
    # older files have no numbers of batches, and nothing depends on them
    needed = [name for name in remaining if not name.startswith("head.") and not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if name.startswith("backbone.") or not backbone_only]
    wrong = [name for name, value in found.items() if name not in expected or value.shape != expected[name].shape]
    if missing or wrong:
        got = f"{len(missing)} missing, {len(wrong)} unexpected or misshapen tensors, such as {(missing + wrong)[:3]}"
        raise ArgumentError("state", got, "torchvision's weights for a net of this depth and these in_channels")
    net.load_state_dict(found, strict=False)
    return remaining


_PREFIXES = {
    "conv1.": "backbone.stem.0.",
    "bn1.": "backbone.stem.1.",
    "classifier.0.convs.4.1.": "aspp.pooling.conv.",
    "classifier.0.convs.4.2.": "aspp.pooling.norm.",
    "classifier.0.convs.": "aspp.branches.",
    "classifier.0.project.": "aspp.project.",
    "classifier.1.": "refine.0.",
    "classifier.2.": "refine.1.",
    "classifier.4.": "head.",
}


def _translate_name(name: str) -> str:
    """Translate torchvision's name of a tensor to ours; other names are returned as they are."""
    theirs = name.removeprefix("backbone.")
    if inner := re.fullmatch(r"layer(\d)\.(\d+)\.(conv|bn|downsample\.)(\d)\.(\w+)", theirs):
        stage, block, kind, number, last = inner.groups()
        layer = f"shortcut.{number}"
        if kind != "downsample.":
            layer = f"residual.{3 * (int(number) - 1) + (kind == 'bn')}"  # convolution, BatchNorm, ReLU
        return f"backbone.stages.{int(stage) - 1}.{block}.{layer}.{last}"
    for prefix, ours in _PREFIXES.items():
        if theirs.startswith(prefix):
            return ours + theirs.removeprefix(prefix)
    return name
