"""Segmentation: image in, label map and uncertainty maps out; their figures over a data set; their pictures.

>>> import torch
>>> from neuboots import BootstrapGenerator, NeuBoots, NeuBootsPredictor
>>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1))
>>> predictor = NeuBootsPredictor(BootstrapGenerator(net).eval(), NeuBoots().law)
>>> maps = segment(predictor, torch.randn(1, 3, 40, 60), 20, window=32)
>>> maps.labels.shape, maps.entropy.shape, bool((maps.mutual_information <= maps.entropy).all())
(torch.Size([1, 40, 60]), torch.Size([1, 40, 60]), True)
"""

from neuboots.tasks.segmentation.evaluation import segmentation
from neuboots.tasks.segmentation.maps import Maps, segment
from neuboots.tasks.segmentation.result import Segmented
from neuboots.tasks.segmentation.writing import write_maps

__all__ = ["Maps", "Segmented", "segment", "segmentation", "write_maps"]
