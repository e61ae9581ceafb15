"""The deterministic net."""

import torch
from _nets import QUICK, TwoBranches, class_data

from neuboots import Deterministic


def test_module_is_trained_in_place_and_other_data_formats_are_accepted() -> None:
    net = TwoBranches()
    before = net.fc.weight.detach().clone()
    predictor = Deterministic().fit(net, class_data().tensors, QUICK, val_data=class_data(20).tensors)
    assert predictor.net is net
    assert not torch.equal(net.fc.weight, before)
