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
        pytest.param(lambda: densenet_bc(250, 10, growth=24), 15.3, marks=pytest.mark.slow),
        pytest.param(lambda: densenet_bc(190, 10, growth=40), 25.6, marks=pytest.mark.slow),
    ],
)
def test_sizes_match_huang_et_al_table_2(make: Callable[[], DenseNet], millions: float) -> None:
    with torch.device("meta"):
        net = make()
    assert round(sum(parameter.numel() for parameter in net.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize(("net", "layers"), [(densenet22(2), 22), (densenet100(2), 100), (plain(40, 4), 40)])
def test_depth_counts_the_layers_with_weights(net: DenseNet, layers: int) -> None:
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in net.modules()) == layers


def norm_relu(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    return norm(x).relu()


@torch.no_grad()
def test_layers_read_all_earlier_ones() -> None:
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


def test_forward_smallest_image() -> None:
    assert densenet22(10).eval()(torch.zeros(1, 3, 4, 5)).shape == (1, 10)
