"""Segmentation: label and uncertainty maps of images and volumes, their metrics over a data set, and their files.

>>> import torch
>>> from neuboots.evaluation.segmentation import predict_segmentation
>>> from neuboots.methods.neuboots import BootstrapGenerator, NeuBoots, NeuBootsPredictor
>>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1))
>>> predictor = NeuBootsPredictor(BootstrapGenerator(net).eval(), NeuBoots().weight_distribution)
>>> maps = predict_segmentation(predictor, torch.randn(1, 3, 40, 60), 20, window=32)
>>> maps.labels.shape, maps.entropy.shape, bool((maps.mutual_information <= maps.entropy).all())
(torch.Size([1, 40, 60]), torch.Size([1, 40, 60]), True)
"""

from neuboots.evaluation.segmentation.io import write_maps
from neuboots.evaluation.segmentation.metrics import SegmentationReport, evaluate_segmentation
from neuboots.evaluation.segmentation.predict import SegmentationMaps, predict_segmentation

__all__ = ["SegmentationMaps", "SegmentationReport", "evaluate_segmentation", "predict_segmentation", "write_maps"]
