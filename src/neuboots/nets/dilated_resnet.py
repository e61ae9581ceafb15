"""Residual nets whose last stages dilate instead of striding: finer maps from the same filters.

    (x ∗_r w)[i] = Σ_k x[i + r·k] w[k]                                             (Chen et al. 2017, eq. 1)

He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, CVPR 2016; Chen, Papandreou, Schroff and Adam,
Rethinking Atrous Convolution for Semantic Image Segmentation, 2017. A stage that would exceed the output stride keeps
the size of its map, and from there on filters read the same pixels as they would have: every (stride ÷ output
stride)-th pixel of the map is what the net without dilation gives.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from neuboots.nets.mlp import check_choice, check_size, check_sizes

STEM_STRIDES = {"large": 4, "small": 2}


class DilatedResNet(nn.Module):
    """A stem and stages of residual blocks: images (N, in_channels, H, W) to a map (N, widths[-1], ⌈H/s⌉, ⌈W/s⌉).

    `blocks[i]` blocks of output width `widths[i]` make stage i. A "bottleneck" block is 1×1, 3×3, 1×1 with a quarter
    of the width inside, a "basic" one two 3×3 convolutions. The "large" stem is 7×7 and a max pool (stride 4), the
    "small" one 3×3 (stride 2). Block j of the last stage dilates by a further `multi_grid[j]`; empty: by 1.

    >>> import torch
    >>> net = DilatedResNet(3, blocks=(1, 1, 1), widths=(8, 8, 16), block="basic", stem="small", output_stride=4)
    >>> net(torch.zeros(2, 3, 33, 40)).shape
    torch.Size([2, 16, 9, 10])
    """

    def __init__(
        self,
        in_channels: int,
        *,
        blocks: Sequence[int],
        widths: Sequence[int],
        block: str = "bottleneck",
        stem: str = "large",
        output_stride: int = 16,
        multi_grid: Sequence[int] = (),
    ) -> None:
        super().__init__()
        check_size("in_channels", in_channels)
        check_sizes("blocks", blocks)
        check_sizes("widths", widths)
        check_choice("block", block, ("bottleneck", "basic"))
        check_choice("stem", stem, tuple(STEM_STRIDES))
        check_sizes("multi_grid", multi_grid)
        if len(blocks) != len(widths) or not widths:
            raise ValueError(
                f"blocks has {len(blocks)} stages and widths {len(widths)}; expected as many "
                "of both, at least 1: pass one number of blocks and one width per stage"
            )
        if block == "bottleneck" and any(width % 4 for width in widths):
            raise ValueError(
                f"widths is {list(widths)!r} with bottleneck blocks; expected multiples of 4, the inner width being a "
                "quarter: pass such widths, or block='basic'"
            )
        if multi_grid and len(multi_grid) != blocks[-1]:
            raise ValueError(
                f"multi_grid is {list(multi_grid)!r} for {blocks[-1]} blocks in the last stage; expected one number "
                "for each: pass as many, or () for none"
            )
        stride = STEM_STRIDES[stem]
        check_choice("output_stride", output_stride, [stride * 2**i for i in range(len(widths))])
        before = widths[0] // 4 if block == "bottleneck" else widths[0]
        self.stem = _stem(stem, in_channels, before)
        stages = []
        dilation = 1
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            step, entry = 1, dilation  # the first convolution of a stage still reads the map of the one before
            if stage > 0 and stride < output_stride:
                step, stride = 2, 2 * stride
            elif stage > 0:
                dilation = 2 * dilation
            grid = multi_grid if multi_grid and stage == len(widths) - 1 else [1] * count
            layers = []
            for i, factor in enumerate(grid):
                first = i == 0
                layers.append(
                    DilatedBlock(
                        before,
                        width,
                        kind=block,
                        stride=step if first else 1,
                        dilations=((entry if first else dilation) * factor, dilation * factor),
                        project=before != width or (first and stage > 0),  # whatever the output stride is
                    )
                )
                before = width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to features (N, D, ⌈H/s⌉, ⌈W/s⌉)."""
        out: Tensor = self.stages(self.stem(x))
        return out


class DilatedBlock(nn.Module):
    """y = relu(shortcut(x) + residual(x)); `dilations` are those of the 3×3 convolutions before and after the stride.

    A bottleneck has its only 3×3 convolution in the middle, and it takes the stride. Where asked, the shortcut is a
    `project`ion: 1×1 convolution and BatchNorm.
    """

    def __init__(
        self, before: int, width: int, *, kind: str, stride: int, dilations: tuple[int, int], project: bool
    ) -> None:
        super().__init__()
        entry, after = dilations
        layers: list[nn.Module]
        if kind == "basic":
            layers = [
                *_normed(nn.Conv2d(before, width, 3, stride, padding=entry, dilation=entry, bias=False)),
                nn.ReLU(),
                *_normed(nn.Conv2d(width, width, 3, padding=after, dilation=after, bias=False)),
            ]
        else:
            inner = width // 4
            layers = [
                *_normed(nn.Conv2d(before, inner, 1, bias=False)),
                nn.ReLU(),
                *_normed(nn.Conv2d(inner, inner, 3, stride, padding=entry, dilation=entry, bias=False)),
                nn.ReLU(),
                *_normed(nn.Conv2d(inner, width, 1, bias=False)),
            ]
        self.residual = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = nn.Sequential(*_normed(nn.Conv2d(before, width, 1, stride, bias=False)))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, before, H, W) to (N, width, ⌈H/stride⌉, ⌈W/stride⌉)."""
        out: Tensor = self.relu(self.shortcut(x) + self.residual(x))
        return out


def _stem(kind: str, in_channels: int, width: int) -> nn.Module:
    if kind == "small":
        return nn.Sequential(*_normed(nn.Conv2d(in_channels, width, 3, 2, padding=1, bias=False)), nn.ReLU())
    conv = nn.Conv2d(in_channels, width, 7, 2, padding=3, bias=False)
    return nn.Sequential(*_normed(conv), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def _normed(conv: nn.Conv2d) -> list[nn.Module]:
    return [conv, nn.BatchNorm2d(conv.out_channels)]
