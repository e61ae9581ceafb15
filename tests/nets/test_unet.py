"""The residual U-Net: MONAI's body, any size of volume, a head that a bootstrap finds by itself."""

import copy
import inspect
import json
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from monai.networks.nets.unet import UNet
from torch import nn
from torch.utils.data import TensorDataset

from neuboots import NeuBoots, TrainingConfig
from neuboots.head import split_head
from neuboots.nets.unet import UResNet, crop_to_size, num_groups, pad_to_multiple


def small(**options: object) -> UResNet:
    return UResNet(2, 3, **{"widths": (4, 8, 16), "units": 1, **options})  # type: ignore[arg-type]


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("size", [(8, 8, 8), (9, 7, 5), (1, 1, 1), (4, 1, 13)])
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_volume_of_any_size_is_labelled_voxel_by_voxel(size: tuple[int, ...], batch: int) -> None:
    assert small()(torch.randn(batch, 2, *size)).shape == (batch, 3, *size)


def test_images_are_volumes_of_two_dimensions() -> None:
    net = small(dims=2)
    assert net(torch.randn(2, 2, 9, 6)).shape == (2, 3, 9, 6)
    assert isinstance(net.head, nn.Conv2d)


def test_an_odd_size_is_padded_with_zeros_and_cropped() -> None:
    net = small().eval()
    x = torch.randn(2, 2, 6, 8, 5)
    whole = torch.zeros(2, 2, 8, 8, 8)
    whole[:, :, :6, :, :5] = x
    torch.testing.assert_close(net(x), net(whole)[:, :, :6, :, :5])


@pytest.mark.parametrize("shape", [(1, 1, 5), (2, 3, 4, 7), (1, 2, 1, 8, 9)])
def test_cropping_undoes_padding(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape)
    padded = pad_to_multiple(x, 4)
    assert all(size % 4 == 0 and size - 4 < wanted for size, wanted in zip(padded.shape[2:], shape[2:], strict=True))
    assert torch.equal(crop_to_size(padded, shape[2:]), x)
    assert padded.sum().item() == pytest.approx(x.sum().item(), abs=1e-5)


def test_the_body_is_monai_s_with_features_instead_of_classes() -> None:
    """32 features at full size; after MONAI's body one normalisation (2 · 32), one PReLU and the head (32 · 3 + 3)."""
    options = {"channels": (32, 64, 128, 256), "strides": (2, 2, 2), "num_res_units": 2}
    body = UNet(spatial_dims=3, in_channels=1, out_channels=32, norm=("group", {"num_groups": 8}), **options)
    net = UResNet(1, 3)
    assert count(net) == count(body) + 64 + 1 + 99
    body.load_state_dict(net.unet.state_dict())
    x = torch.randn(1, 1, 8, 8, 8)
    torch.testing.assert_close(net(x), net.head(net.finish(body(x))))


@pytest.mark.parametrize("dims", [2, 3])
def test_the_head_is_found_and_nothing_follows_it(dims: int) -> None:
    net, x = small(dims=dims).eval(), torch.randn(2, 2, *(5,) * dims)
    whole, head = net(x), net.head
    assert split_head(net).name == split_head(net, example=x).name == "head"
    assert list(net.modules())[-1] is head
    net.head = nn.Identity()  # type: ignore[assignment]
    torch.testing.assert_close(head(net(x)), whole)


def test_gradient_reaches_every_parameter() -> None:
    """More than rounding: the largest entry is above 1e-9, in float64 with gradients of order 1."""
    net = small().double()
    net(torch.randn(2, 2, 8, 8, 8).double()).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-9, name


def test_one_volume_counts_for_itself_in_training_too() -> None:
    """GroupNorm: a volume's output does not depend on its neighbours in the batch."""
    net, x = small().train(), torch.randn(2, 2, 8, 8, 8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 100])
def test_groups_divide_the_channels(width: int) -> None:
    groups = num_groups(width)
    assert width % groups == 0
    assert groups == 1 or (groups <= 8 and width // groups >= 4)


def test_copies_are_twins() -> None:
    net, x = small().eval(), torch.randn(1, 2, 5, 5, 5)
    options = json.loads(json.dumps(net.options))
    assert list(options) == list(inspect.signature(UResNet).parameters)
    rebuilt = UResNet(**options).eval()
    assert repr(rebuilt) == repr(net)
    rebuilt.load_state_dict(net.state_dict())
    for twin in (rebuilt, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), net(x))


def test_it_trains_and_predicts_under_neuboots() -> None:
    """Bright voxels in noise: from the first epoch to the last the loss falls, and the replicates differ."""
    x = torch.randn(8, 1, 6, 7, 5, generator=torch.Generator().manual_seed(0))
    data, losses = TensorDataset(x, (x[:, 0] > 0).long()), []
    config = TrainingConfig(epochs=4, batch_size=2, progress=False, on_epoch=lambda report: losses.append(report.loss))
    predictor = NeuBoots().fit(lambda: UResNet(1, 2, widths=(4, 8), units=1), data, config)
    prediction = predictor.predict(x[:3], 5, seed=1)
    assert prediction.samples.shape == (5, 3, 2, 6, 7, 5)
    assert prediction.samples.std(0).min() > 0
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (
            lambda: UResNet(1, 2, widths=(16,)),
            "widths is (16,); expected at least two scales: pass a tuple such as (16, 32)",
        ),
        (lambda: UResNet(1, 2, dims=1), "dims is 1; expected one of 2, 3: pass one of these"),
        (lambda: UResNet(1, 2, units=0), "units is 0; expected an int of at least 1: pass such a number"),
        (
            lambda: small()(torch.zeros(1, 1, 4, 4, 4)),
            "the net got an input of shape (1, 1, 4, 4, 4); expected (N, 2, D, H, W): "
            "reshape the input, or build the net with its in_channels",
        ),
        (
            lambda: small(dims=2)(torch.zeros(1, 2, 4, 4, 4)),
            "the net got an input of shape (1, 2, 4, 4, 4); expected (N, 2, H, W): "
            "reshape the input, or build the net with its in_channels",
        ),
        (
            lambda: small()(torch.zeros(1, 2, 4, 0, 4)),
            "the net got an input of shape (1, 2, 4, 0, 4); expected (N, 2, D, H, W): "
            "reshape the input, or build the net with its in_channels",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        act()
    assert str(caught.value) == sentence


def test_without_monai_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "monai"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "monai", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'neuboots\[volumes\]'"):
        small()
