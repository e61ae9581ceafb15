"""Networks, each ending in an `nn.Linear` or a 1×1 convolution called `head`.

They are `neuboots.serialization.configurable`: a saved predictor rebuilds its net from the constructor arguments.
A module is imported when one of its nets is first used.

>>> from neuboots.serialization import build_net, describe_net
>>> from neuboots.nets import MLP
>>> net = MLP(4, 2, widths=(16,))
>>> build_net(describe_net(net)).load_state_dict(net.state_dict())
<All keys matched successfully>
"""

from typing import TYPE_CHECKING

from neuboots._validation import lazy_exports

if TYPE_CHECKING:
    from neuboots.nets.cnn import SmallCNN as SmallCNN
    from neuboots.nets.deeplab import DeepLabV3 as DeepLabV3
    from neuboots.nets.deeplab import deeplab_resnet50 as deeplab_resnet50
    from neuboots.nets.deeplab import deeplab_resnet101 as deeplab_resnet101
    from neuboots.nets.deeplab import load_torchvision_weights as load_torchvision_weights
    from neuboots.nets.deeplab import small_deeplab as small_deeplab
    from neuboots.nets.densenet import DenseNet as DenseNet
    from neuboots.nets.densenet import densenet22 as densenet22
    from neuboots.nets.densenet import densenet40 as densenet40
    from neuboots.nets.densenet import densenet100 as densenet100
    from neuboots.nets.densenet import densenet_bc as densenet_bc
    from neuboots.nets.mlp import MLP as MLP
    from neuboots.nets.resnet import ResNet as ResNet
    from neuboots.nets.resnet import resnet8 as resnet8
    from neuboots.nets.resnet import resnet18 as resnet18
    from neuboots.nets.resnet import resnet20 as resnet20
    from neuboots.nets.resnet import resnet34 as resnet34
    from neuboots.nets.resnet import resnet110 as resnet110
    from neuboots.nets.resnet import thin_resnet as thin_resnet
    from neuboots.nets.text import TextTransformer as TextTransformer
    from neuboots.nets.unet import UResNet as UResNet

_EXPORTS = {
    "cnn": ("SmallCNN",),
    "deeplab": ("DeepLabV3", "deeplab_resnet50", "deeplab_resnet101", "load_torchvision_weights", "small_deeplab"),
    "densenet": ("DenseNet", "densenet22", "densenet40", "densenet100", "densenet_bc"),
    "mlp": ("MLP",),
    "resnet": ("ResNet", "resnet8", "resnet18", "resnet20", "resnet34", "resnet110", "thin_resnet"),
    "text": ("TextTransformer",),
    "unet": ("UResNet",),
}

__all__ = [name for names in _EXPORTS.values() for name in names]
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
