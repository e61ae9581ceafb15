"""Networks, each ending in an `nn.Linear` or a 1×1 convolution called `head`.

They are `neuboots.serialization.configurable`: a saved predictor rebuilds its net from the constructor arguments.

>>> from neuboots.serialization import build_net, describe_net
>>> from neuboots.nets import MLP
>>> net = MLP(4, 2, widths=(16,))
>>> build_net(describe_net(net)).load_state_dict(net.state_dict())
<All keys matched successfully>
"""

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
    "deeplab_resnet50",
    "deeplab_resnet101",
    "densenet22",
    "densenet40",
    "densenet100",
    "densenet_bc",
    "load_torchvision_weights",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet34",
    "resnet110",
    "small_deeplab",
    "thin_resnet",
]
