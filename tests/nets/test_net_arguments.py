"""Wrong options and inputs of the small nets get one sentence; the other nets' stand beside their own tests."""

from collections.abc import Callable

import pytest
import torch

from neuboots.nets import MLP, ResNet, SmallCNN, resnet8, resnet20, thin_resnet


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (
            lambda: resnet20(0),
            "num_classes is 0; expected an int of at least 1: pass such a number",
        ),
        (
            lambda: MLP(4, 2.0),  # type: ignore[arg-type]
            "out_features is 2.0; expected an int of at least 1: pass such a number",
        ),
        (
            lambda: SmallCNN(True, 2),
            "in_channels is True; expected an int of at least 1: pass such a number",
        ),
        (
            lambda: MLP(4, 2, widths=(5, 0)),
            "widths is (5, 0); expected a sequence of ints of at least 1: pass a tuple such as (64, 64)",
        ),
        (
            lambda: MLP(4, 2, activation="swish"),
            "activation is 'swish'; expected one of 'relu', 'tanh', 'silu', 'gelu': pass one of these",
        ),
        (
            lambda: SmallCNN(1, 2, widths=()),
            "widths is empty; expected at least one convolution: pass a tuple such as (32, 64)",
        ),
        (
            lambda: ResNet(2, blocks=(1, 1), widths=(8,)),
            "blocks has 2 stages and widths 1; expected as many of both, at least 1: "
            "pass one number of blocks and one width per stage",
        ),
        (
            lambda: ResNet(2, blocks=(), widths=()),
            "blocks has 0 stages and widths 0; expected as many of both, at least 1: "
            "pass one number of blocks and one width per stage",
        ),
        (
            lambda: ResNet(2, blocks=(1, 1), widths=(16, 8)),
            "widths is (16, 8) with shortcut 'pad'; expected widths that never shrink: "
            "sort them, or pass shortcut='projection'",
        ),
        (
            lambda: ResNet(2, blocks=(1,), widths=(8,), shortcut="A"),
            "shortcut is 'A'; expected one of 'pad', 'projection': pass one of these",
        ),
        (
            lambda: thin_resnet(18, 10),
            "depth is 18; expected 6m + 2 for a whole m of at least 1: pass a depth such as 8, 20, 32, 44, 56 or 110",
        ),
        (
            lambda: thin_resnet(2, 10),
            "depth is 2; expected 6m + 2 for a whole m of at least 1: pass a depth such as 8, 20, 32, 44, 56 or 110",
        ),
        (
            lambda: MLP(4, 2)(torch.zeros(3, 5)),
            "the net got an input of shape (3, 5); expected (N, *) with 4 values per row: "
            "reshape the input, or build the net with its in_features",
        ),
        (
            lambda: MLP(4, 2)(torch.zeros(4)),
            "the net got an input of shape (4,); expected (N, *) with 4 values per row: "
            "reshape the input, or build the net with its in_features",
        ),
        (
            lambda: SmallCNN(1, 2)(torch.zeros(5, 8, 8)),
            "the net got an input of shape (5, 8, 8); expected (N, 1, H, W): "
            "reshape the input, or build the net with its in_channels",
        ),
        (
            lambda: resnet8(2)(torch.zeros(5, 1, 8, 8)),
            "the net got an input of shape (5, 1, 8, 8); expected (N, 3, H, W): "
            "reshape the input, or build the net with its in_channels",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        act()
    assert str(caught.value) == sentence
