"""The residual U-Net: MONAI's body, any size of volume, a head that a bootstrap finds by itself."""

import sys

import pytest
import torch
from monai.networks.nets.unet import UNet
from torch import nn

from neuboots.nets.unet import UResNet, crop_to_size, num_groups, pad_to_multiple


def small(**options: object) -> UResNet:
    return UResNet(2, 3, **{"widths": (4, 8, 16), "units": 1, **options})  # type: ignore[arg-type]


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("size", [(8, 8, 8), (9, 7, 5), (1, 1, 1), (4, 1, 13)])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_forward_any_volume_size(size: tuple[int, ...], batch: int) -> None:
    assert small()(torch.randn(batch, 2, *size)).shape == (batch, 3, *size)


def test_odd_sizes_are_padded_and_cropped() -> None:
    net = small().eval()
    x = torch.randn(2, 2, 6, 8, 5)
    whole = torch.zeros(2, 2, 8, 8, 8)
    whole[:, :, :6, :, :5] = x
    torch.testing.assert_close(net(x), net(whole)[:, :, :6, :, :5])


@pytest.mark.parametrize("shape", [(1, 1, 5), (2, 3, 4, 7), (1, 2, 1, 8, 9)])
def test_crop_inverts_pad(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape)
    padded = pad_to_multiple(x, 4)
    assert all(size % 4 == 0 and size - 4 < wanted for size, wanted in zip(padded.shape[2:], shape[2:], strict=True))
    assert torch.equal(crop_to_size(padded, shape[2:]), x)
    assert padded.sum().item() == pytest.approx(x.sum().item(), abs=1e-5)


def test_body_is_monai_unet() -> None:
    """32 features at full size; after MONAI's body one normalisation (2 · 32), one PReLU and the head (32 · 3 + 3)."""
    options = {"channels": (32, 64, 128, 256), "strides": (2, 2, 2), "num_res_units": 2}
    body = UNet(spatial_dims=3, in_channels=1, out_channels=32, norm=("group", {"num_groups": 8}), **options)
    net = UResNet(1, 3)
    assert count(net) == count(body) + 64 + 1 + 99
    body.load_state_dict(net.unet.state_dict())
    x = torch.randn(1, 1, 8, 8, 8)
    torch.testing.assert_close(net(x), net.head(net.finish(body(x))))


def test_output_independent_of_batch_in_training() -> None:
    """GroupNorm: a volume's output does not depend on its neighbours in the batch."""
    net, x = small().train(), torch.randn(2, 2, 8, 8, 8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 100])
def test_num_groups_divides_channels(width: int) -> None:
    groups = num_groups(width)
    assert width % groups == 0
    assert groups == 1 or (groups <= 8 and width // groups >= 4)


def test_missing_monai_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "monai"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "monai", None)
    with pytest.raises(ImportError, match=r"pip install 'neuboots\[volumes\]'"):
        small()
