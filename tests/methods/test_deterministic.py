"""The deterministic net."""

import torch
from _nets import QUICK, TwoBranches, class_data, noise

from neuboots import Deterministic


def test_equal_replicates_have_no_mutual_information() -> None:
    predictor, x = Deterministic().fit(TwoBranches, class_data(), QUICK), noise(9, 4, seed=5)
    for result in (predictor.predict(x, 50), predictor.summarize(x, 50)):
        assert bool((result.mutual_information == 0).all())
        assert bool((result.std == 0).all())


def test_module_is_trained_in_place_and_other_data_formats_are_accepted() -> None:
    net = TwoBranches()
    before = net.fc.weight.detach().clone()
    predictor = Deterministic().fit(net, class_data().tensors, QUICK, val_data=class_data(20).tensors)
    assert predictor.net is net
    assert not torch.equal(net.fc.weight, before)
