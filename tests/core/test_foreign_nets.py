"""Nets of MONAI and of Hugging Face's transformers through the same surgery: one table, small, nothing downloaded."""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _nets import Upsampling, noise
from torch import Tensor, nn
from torch.nn import functional as F

from neuboots import ArgumentError, NeuBoots, TrainingConfig, load, save
from neuboots.head import call_net, extract_output, split_head
from neuboots.methods import DeterministicPredictor
from neuboots.methods.neuboots import BootstrapGenerator

Make = Callable[[], nn.Module]


def library(name: str) -> Any:
    """The module; warnings of its import are ignored."""
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(name)


def monai(kind: str, *args: Any, **options: Any) -> Make:
    def make() -> nn.Module:
        with warnings.catch_warnings(action="ignore"):
            net: nn.Module = getattr(library("monai.networks.nets"), kind)(*args, **options)
        return net

    return make


def hugging(kind: str, **options: Any) -> Make:
    def make() -> nn.Module:
        net_class = getattr(library("transformers"), kind)
        net: nn.Module = net_class(net_class.config_class(**options))
        return net

    return make


def upernet() -> nn.Module:
    backbone = library("transformers").ConvNextConfig(**STAGES, out_features=[f"stage{i}" for i in range(1, 5)])
    options = {"hidden_size": 16, "pool_scales": [1, 2], "auxiliary_in_channels": 8, "auxiliary_channels": 8}
    config = {"backbone_config": backbone, **options, "num_labels": 3}
    return hugging("UperNetForSemanticSegmentation", **config)()


class Upsampled(nn.Module):
    """A net whose maps are smaller than its images, brought to the size of the labels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.net(x).logits, size=x.shape[2:], mode="bilinear", align_corners=False)


def then(body: Make, head: Callable[[], nn.Module]) -> Make:
    return lambda: nn.Sequential(body(), head())


IMAGE, COLOUR, VOLUME = noise(2, 1, 32, 32), noise(2, 3, 32, 32), noise(2, 1, 16, 16, 16)
TEXT = {
    "input_ids": torch.tensor([[5, 9, 3, 7, 0, 0], [4, 8, 8, 6, 3, 9]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]),
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}
WORDS = {**SMALL, "vocab_size": 20}
PATCHES = {**SMALL, "image_size": 32, "patch_size": 8}
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
    "num_attention_heads": [1, 2], "strides": [2, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3,
}  # fmt: skip
STAGES = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
GPT2 = {
    "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 1,
}  # fmt: skip
DISTILBERT = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": 20, "num_labels": 3}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
BEIT = {**PATCHES, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2]}
UNETR = {"feature_size": 4, "hidden_size": 24, "mlp_dim": 24, "num_heads": 3}
SWIN = {"spatial_dims": 2, "feature_size": 12, "depths": (1,) * 4, "num_heads": (1,) * 4}
UNET = {"channels": (8, 16), "strides": (2,)}
segformer = hugging("SegformerForSemanticSegmentation", **SEGFORMER)
vit = hugging("ViTForImageClassification", **PATCHES)

# Inputs and the shape of the output, of 3 classes.
CLASSES = (2, 3)
OF_TEXT, OF_COLOUR, OF_VOLUME = (TEXT, CLASSES), (COLOUR, CLASSES), (VOLUME, CLASSES)
IMAGE_MAPS, COLOUR_MAPS, VOLUME_MAPS = ((x, (2, 3, *x.shape[2:])) for x in (IMAGE, COLOUR, VOLUME))

# The net, an input with the shape of the output, the head that is found with that input as an example.
NETS: dict[str, tuple[Make, tuple[Any, tuple[int, ...]], str]] = {
    "BasicUNet": (monai("BasicUNet", 2, 1, 3, features=(4, 4, 8, 8, 8, 4)), IMAGE_MAPS, "final_conv"),
    "SegResNet, 3D": (
        monai("SegResNet", 3, 8, 1, 3, blocks_down=(1, 1), blocks_up=(1,)),
        VOLUME_MAPS,
        "conv_final.2.conv",
    ),
    "DynUNet": (
        monai("DynUNet", 2, 1, 3, (3, 3, 3), (1, 2, 2), (2, 2), filters=(4, 8, 8)),
        IMAGE_MAPS,
        "output_block.conv.conv",
    ),
    "AttentionUnet": (monai("AttentionUnet", 2, 1, 3, channels=(4, 8), strides=(2,)), IMAGE_MAPS, "model.2.conv"),
    "UNETR, 3D": (monai("UNETR", 1, 3, (16,) * 3, **UNETR), VOLUME_MAPS, "out.conv.conv"),
    "SwinUNETR": (monai("SwinUNETR", 1, 3, **SWIN), (noise(2, 1, 64, 64), (2, 3, 64, 64)), "out.conv.conv"),
    "VNet, 3D": (monai("VNet", 3, 1, 3), VOLUME_MAPS, "out_tr.conv2"),
    "DenseNet121": (monai("DenseNet121", 2, 3, 3), OF_COLOUR, "class_layers.out"),
    "MONAI ResNet, 3D": (
        monai("ResNet", "basic", [1] * 4, [8] * 4, n_input_channels=1, num_classes=3),
        OF_VOLUME,
        "fc",
    ),
    # MONAI's UNet ends in a 3×3 (transposed) convolution: a 1×1 one is put after it
    "UNet and a head": (then(monai("UNet", 2, 1, 8, **UNET), lambda: nn.Conv2d(8, 3, 1)), IMAGE_MAPS, "1"),
    "residual UNet and a head, 3D": (
        then(monai("UNet", 3, 1, 8, **UNET, num_res_units=2), lambda: nn.Conv3d(8, 3, 1)),
        VOLUME_MAPS,
        "1",
    ),
    "BERT": (hugging("BertForSequenceClassification", **WORDS), OF_TEXT, "classifier"),
    "BERT, tokens": (hugging("BertForTokenClassification", **WORDS), (TEXT, (2, 3, 6)), "classifier"),
    "DistilBERT": (hugging("DistilBertForSequenceClassification", **DISTILBERT), OF_TEXT, "classifier"),
    "RoBERTa": (hugging("RobertaForSequenceClassification", **WORDS), OF_TEXT, "classifier.out_proj"),
    "GPT-2": (hugging("GPT2ForSequenceClassification", **GPT2), OF_TEXT, "score"),
    "Llama": (
        hugging("LlamaForSequenceClassification", **WORDS, num_key_value_heads=2, pad_token_id=0),
        OF_TEXT,
        "score",
    ),
    "ViT": (vit, ({"pixel_values": COLOUR}, CLASSES), "classifier"),
    "ViT, positions": (vit, OF_COLOUR, "classifier"),
    "ResNet": (hugging("ResNetForImageClassification", **RESNET), OF_COLOUR, "classifier.1"),
    "ConvNeXt": (hugging("ConvNextForImageClassification", **STAGES, num_labels=3), OF_COLOUR, "classifier"),
    "SegFormer": (segformer, ({"pixel_values": COLOUR}, (2, 3, 16, 16)), "decode_head.classifier"),
    "SegFormer, upsampled": (lambda: Upsampled(segformer()), COLOUR_MAPS, "net.decode_head.classifier"),
    # the last layer registered is the auxiliary head: it needs the example, or its name
    "BEiT": (hugging("BeitForSemanticSegmentation", **BEIT), (COLOUR, (2, 3, 16, 16)), "decode_head.classifier"),
    "UPerNet": (upernet, COLOUR_MAPS, "decode_head.classifier"),
}
GUESSED_WRONGLY = {"BEiT", "UPerNet"}
SLOW = {"VNet, 3D"}
every_net = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NETS]
)


@every_net
@torch.no_grad()
def test_foreign_net_replicates(name: str) -> None:
    """g(x, 1) is the net bit for bit; replicates from one pass are those of a pass each, within rounding."""
    make, (x, shape), head = NETS[name]
    net = make().eval()
    split = split_head(net, example=x)
    assert split.name == head
    if name in GUESSED_WRONGLY:
        with pytest.raises(ArgumentError, match="head"):
            split_head(net).trace(x)
    else:
        assert split_head(net).name == head
    g = BootstrapGenerator(net, head=head)
    output = extract_output(call_net(net, x))
    one = g(x, torch.ones(split.width))
    assert one.shape == shape
    assert torch.equal(one, output.movedim(-1, 1) if name == "BERT, tokens" else output)
    alphas = torch.rand(3, split.width, generator=torch.Generator().manual_seed(2)) * 2
    found = g.replicates(x, alphas)
    wanted = torch.stack([g(x, alpha) for alpha in alphas])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    assert found.std(0).max() > 0


def examples(x: Any, shape: tuple[int, ...]) -> list[tuple[Any, Tensor]]:
    """Each row of x twice, with random labels."""
    rows = [{key: value[i] for key, value in x.items()} for i in range(2)] if isinstance(x, dict) else list(x)
    return list(
        zip(rows * 2, torch.randint(0, 3, (4, *shape[2:]), generator=torch.Generator().manual_seed(0)), strict=True)
    )


@every_net
def test_foreign_net_trains_predicts_and_saves(name: str, tmp_path: Path) -> None:
    make, (x, shape), head = NETS[name]
    predictor = NeuBoots().fit(make, examples(x, shape), TrainingConfig(epochs=1, batch_size=4, progress=False))
    assert predictor.generator.split.name == head
    summary = predictor.summarize(x, 4)
    assert summary.mean.shape == shape
    assert summary.mean.isfinite().all()
    save(predictor, tmp_path / "model")
    with pytest.raises(ArgumentError, match="model"):
        load(tmp_path / "model")
    again = load(tmp_path / "model", model=make())
    assert torch.equal(again.predict(x, 3).samples, predictor.predict(x, 3).samples)


# -- nets without a head -------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [None, IMAGE], ids=["registered", "run"])
@pytest.mark.parametrize("units", [0, 2])
def test_unet_without_pointwise_head_raises(units: int, example: Tensor | None) -> None:
    net = monai("UNet", 2, 1, 3, channels=(4, 8), strides=(2,), num_res_units=units)()
    with pytest.raises(ArgumentError, match="head"):
        split_head(net, example=example)


# -- MONAI's tensors -----------------------------------------------------------------------------------


def test_monai_tensors_are_accepted() -> None:
    kind = library("monai.data").MetaTensor
    x, shape = noise(2, 2, 16, 16), (2, 4, 16, 16)
    meta = kind(x)
    config = TrainingConfig(epochs=1, batch_size=4, progress=False)
    predictor = NeuBoots().fit(Upsampling, [(kind(image), kind(y)) for image, y in examples(x, shape)], config)
    wanted = NeuBoots().fit(Upsampling, examples(x, shape), config).predict(x, 3).samples
    found = predictor.predict(meta, 3).samples
    assert type(found) is Tensor
    assert torch.equal(found, wanted)
    assert torch.equal(predictor.summarize(meta, 3).mean, predictor.summarize(x, 3).mean)
    plain = DeterministicPredictor(predictor.net).predict(meta, 2).samples
    assert type(plain) is Tensor
