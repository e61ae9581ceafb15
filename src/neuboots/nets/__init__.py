"""Plain networks, each ending in an `nn.Linear` or a 1×1 convolution called `head`, and their descriptions.

A description is JSON: the name of the class and the options it was built with. Together with the
state dict it rebuilds a saved net without pickle.

>>> import torch
>>> net = MLP(4, 2, widths=(16,))
>>> twin = build_net(describe_net(net))
>>> twin.load_state_dict(net.state_dict())
<All keys matched successfully>
>>> torch.equal(twin(torch.ones(1, 4)), net(torch.ones(1, 4)))
True
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from neuboots.nets.cnn import SmallCNN
from neuboots.nets.deeplab import (
    DeepLabV3,
    deeplab_resnet50,
    deeplab_resnet101,
    load_torchvision_weights,
    small_deeplab,
)
from neuboots.nets.densenet import DenseNet, densenet22, densenet40, densenet100, densenet_bc
from neuboots.nets.mlp import MLP
from neuboots.nets.resnet import ResNet, resnet8, resnet18, resnet20, resnet34, resnet110, thin_resnet
from neuboots.nets.text import TextTransformer
from neuboots.nets.unet import UResNet

__all__ = [
    "MLP",
    "DeepLabV3",
    "DenseNet",
    "ResNet",
    "SmallCNN",
    "TextTransformer",
    "UResNet",
    "build_net",
    "deeplab_resnet50",
    "deeplab_resnet101",
    "densenet22",
    "densenet40",
    "densenet100",
    "densenet_bc",
    "describe_net",
    "load_torchvision_weights",
    "register_net",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet34",
    "resnet110",
    "small_deeplab",
    "thin_resnet",
]

_NETS: dict[str, type[nn.Module]] = {
    net.__name__: net for net in (MLP, SmallCNN, ResNet, DenseNet, DeepLabV3, UResNet, TextTransformer)
}


def register_net(net: type[nn.Module]) -> type[nn.Module]:
    """Make `describe_net` and `build_net` know another class of nets, which keeps its arguments in `options`."""
    _NETS[net.__name__] = net
    return net


def describe_net(net: nn.Module) -> dict[str, Any] | None:
    """How `net` was built; None for a foreign net, a subclass, or a net whose layers were changed.

    >>> describe_net(SmallCNN(1, 10))
    {'net': 'SmallCNN', 'options': {'in_channels': 1, 'out_features': 10, 'widths': [32, 64, 128]}}
    >>> describe_net(nn.Linear(4, 2)) is None
    True
    """
    name = type(net).__name__
    if _NETS.get(name) is not type(net):
        return None
    description = {"net": name, "options": copy.deepcopy(vars(net)["options"])}
    # A twin without numbers shows whether the layers still are what the options say; it takes no random draw away.
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        twin = build_net(description)
    return description if repr(twin) == repr(net) else None


def build_net(description: Mapping[str, Any]) -> nn.Module:
    """The net that `describe_net` described, with fresh weights.

    >>> build_net({"net": "MLP", "options": {"in_features": 4, "out_features": 2}}).head
    Linear(in_features=500, out_features=2, bias=True)
    """
    match description:
        case {"net": name, "options": dict(options)}:
            pass
        case _:
            raise ValueError(
                f"the description is {description!r}; expected a dict with 'net' and 'options': "
                "pass what describe(net) returned"
            )
    if name not in list(_NETS):
        raise ValueError(
            f"the description names the net {name!r}; expected one of {', '.join(_NETS)}: "
            "build any other net yourself and load its state dict"
        )
    signature = inspect.signature(_NETS[name])
    try:
        signature.bind(**options)
    except TypeError as fault:
        raise ValueError(
            f"the options of {name} do not fit ({fault}); "
            f"expected {', '.join(signature.parameters)}: correct the description"
        ) from None
    return _NETS[name](**options)
