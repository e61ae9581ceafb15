"""DenseNet: the sizes of Huang et al., and that every layer reads all earlier ones."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuboots.nets import DenseNet, densenet22, densenet100, densenet_bc


def plain(depth: int, growth: int) -> DenseNet:
    """DenseNet without bottlenecks and compression: three blocks of (depth − 4) / 3 layers."""
    return DenseNet(10, growth=growth, blocks=((depth - 4) // 3,) * 3, bottleneck=False, compression=1.0)


@pytest.mark.parametrize(
    ("make", "millions"),
    [
        (lambda: plain(40, 12), 1.0),
        (lambda: plain(100, 12), 7.0),
        (lambda: plain(100, 24), 27.2),
        (lambda: densenet100(10), 0.8),
        (lambda: densenet_bc(250, 10, growth=24), 15.3),
        (lambda: densenet_bc(190, 10, growth=40), 25.6),
    ],
)
def test_sizes_are_those_of_huang_et_al_table_2(make: Callable[[], DenseNet], millions: float) -> None:
    with torch.device("meta"):
        net = make()
    assert round(sum(parameter.numel() for parameter in net.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize(("net", "layers"), [(densenet22(2), 22), (densenet100(2), 100), (plain(40, 4), 40)])
def test_depth_counts_the_layers_with_weights(net: DenseNet, layers: int) -> None:
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in net.modules()) == layers


def norm_relu(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    return norm(x).relu()


@torch.no_grad()
def test_every_layer_reads_all_earlier_ones() -> None:
    """Against the net written out by hand: a list of maps that only grows within a block."""
    net = DenseNet(3, 2, growth=4, blocks=(2, 1), compression=0.5).double().eval()
    convs = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    x = torch.randn(2, 2, 9, 6).double()
    maps = [convs.pop(0)(x)]
    assert maps[0].shape[1] == 8

    def layer() -> None:
        h = convs.pop(0)(norm_relu(norms.pop(0), torch.cat(maps, 1)))
        assert h.shape[1] == 16
        maps.append(convs.pop(0)(norm_relu(norms.pop(0), h)))

    layer()
    layer()
    joined = convs.pop(0)(norm_relu(norms.pop(0), torch.cat(maps, 1)))
    maps = [F.avg_pool2d(joined, 2)]
    assert maps[0].shape == (2, 8, 4, 3)
    layer()
    phi = norm_relu(norms.pop(0), torch.cat(maps, 1)).mean((2, 3))
    torch.testing.assert_close(net(x), net.head(phi))
    assert not convs
    assert not norms


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: densenet_bc(20, 10), r"depth is 20; expected 6m \+ 4 for a whole m of at least 1"),
        (lambda: densenet_bc(4, 10), r"depth is 4; expected 6m \+ 4"),
        (lambda: densenet_bc("22", 10), "depth is '22'; expected an int of at least 1"),  # type: ignore[arg-type]
        (lambda: DenseNet(10, blocks=()), "blocks is empty; expected at least one dense block"),
        (lambda: DenseNet(10, growth=0), "growth is 0; expected an int of at least 1"),
        (lambda: DenseNet(10, compression=0.0), r"compression is 0.0; expected a share in \(0, 1\]"),
        (lambda: DenseNet(10, compression=1.5), r"compression is 1.5; expected a share in \(0, 1\]"),
        (lambda: DenseNet(10, compression=True), r"compression is True; expected a share in \(0, 1\]"),
        (lambda: DenseNet(10, bottleneck=1), "bottleneck is 1; expected one of False, True"),  # type: ignore[arg-type]
        (lambda: densenet22(10)(torch.zeros(1, 1, 8, 8)), r"shape \(1, 1, 8, 8\); expected \(N, 3, H, W\)"),
        (lambda: densenet22(10)(torch.zeros(1, 3, 8, 3)), "images of 8×3 pixels; expected at least 4 on each side"),
    ],
)
def test_bad_arguments_get_one_sentence(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        act()


def test_the_smallest_image_goes_through() -> None:
    assert densenet22(10).eval()(torch.zeros(1, 3, 4, 5)).shape == (1, 10)
