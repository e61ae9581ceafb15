"""Tests of refitted heads against weighted regressions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _influence import (
    CLASSES,
    CONFIG,
    LABELS,
    NEW,
    NEW_PHI,
    PIXELS,
    THETA,
    X,
    bootstrap,
    least_squares,
    linear,
    logistic,
    make_net,
    randn,
    weighted_least_squares,
)
from _nets import Upsampling
from torch import Tensor, nn

from neuboots import load, save
from neuboots.losses import GaussianNLL
from neuboots.methods.influence import _head, _refit
from neuboots.methods.neuboots import draw_replicate_weights
from neuboots.nets import MLP
from neuboots.weights import Constant, assign_blocks


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("blocks", [None, 5])
def test_refitted_linear_model_is_weighted_least_squares(outputs: int, blocks: int | None) -> None:
    net, y = least_squares(outputs)
    options = {"loss": nn.MSELoss(), "ridge": 0.0, "residuals": "raw", "num_blocks": blocks}
    predictor = bootstrap(net, X, y, refit=True, **options)
    assert predictor.shifted.refit is not None
    alphas = draw_replicate_weights(predictor.weight_distribution, predictor.num_blocks, 0, 4, 3)
    places = torch.arange(40) if blocks is None else assign_blocks(40, blocks, seed=CONFIG.seed)
    samples = predictor.predict(NEW, 4, seed=3)
    assert samples.moments is None
    for b, alpha in enumerate(alphas):
        exact = weighted_least_squares(y.numpy(), alpha[places].numpy())
        np.testing.assert_allclose(predictor.heads(b, b + 1, seed=3)[0].numpy(), exact, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(samples.samples[b].numpy(), NEW_PHI @ exact.T, rtol=1e-9, atol=1e-10)


def test_refit_under_equal_weights_returns_the_net() -> None:
    """Also where the net is at no minimum, and with a ridge and corrected residuals."""
    for loss, y in ((nn.MSELoss(), randn(40, 2, seed=1)), (nn.CrossEntropyLoss(), CLASSES)):
        net = make_net(lambda: nn.Linear(3, 2))
        predictor = bootstrap(net, X, y, loss=loss, refit=True, weight_distribution=Constant(), residuals="hc3")
        torch.testing.assert_close(predictor.predict(NEW, 2).samples[1], net(NEW).detach())


def test_refitted_logistic_regression_is_weighted_logistic_regression() -> None:
    net = linear(THETA[None])
    predictor = bootstrap(
        net, X, LABELS.double()[:, None], loss=nn.BCEWithLogitsLoss(), ridge=1.0 / 40, residuals="raw", refit=True
    )
    alphas = draw_replicate_weights(predictor.weight_distribution, 40, 0, 3, 0).numpy()
    for b in range(3):
        exact = logistic(LABELS.numpy(), alphas[b], ridge=1.0, center=THETA)
        np.testing.assert_allclose(predictor.heads(b, b + 1, seed=0)[0, 0].numpy(), exact, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("smooth", [0.0, 0.2])
def test_refit_after_upsampling_is_refit_at_the_head(smooth: float) -> None:
    """Of pixels that are each repeated twice by twice, with their labels: the same problem, four times."""
    low = make_net(lambda: nn.Conv2d(3, 2, 1))
    high = nn.Sequential(low, nn.Upsample(scale_factor=2, mode="nearest"))
    y = torch.arange(16).view(4, 2, 2) % 2
    loss = nn.CrossEntropyLoss(label_smoothing=smooth)
    options = {"loss": loss, "refit": True, "residuals": "hc3"}
    wanted = bootstrap(low, PIXELS, y, ridge=0.1, **options).heads(0, 3, seed=0)
    found = bootstrap(high, PIXELS, y.repeat_interleave(2, 1).repeat_interleave(2, 2), ridge=0.4, **options)
    torch.testing.assert_close(found.heads(0, 3, seed=0), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("loss", "y", "outputs"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES, 2),
        (GaussianNLL(), randn(40, 1), 2),
    ],
)
def test_save_and_load(loss: Any, y: Tensor, outputs: int, tmp_path: Path) -> None:
    net = make_net(lambda: MLP(3, outputs, widths=(4,))).float()
    predictor = bootstrap(net, X.float(), y, loss=loss, refit=True)
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.predict(NEW.float(), 3).samples, predictor.predict(NEW.float(), 3).samples)


def test_refit_rejects_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = make_net(lambda: nn.Linear(3, 2))
    with pytest.raises(ValueError, match="refit"):
        bootstrap(make_net(Upsampling), randn(3, 2, 8, 8), randn(3, 2, 8, 8, seed=1), loss=GaussianNLL(), refit=True)
    with pytest.raises(ValueError, match="moments"):
        bootstrap(net, X, CLASSES, refit=True).moments(NEW)
    own_loss = bootstrap(net, X, randn(40, 2), loss=lambda z, y: (z - y).square(), refit=True)
    with pytest.raises(ValueError, match="loss"):
        save(own_loss, tmp_path / "model")
    for module, limit, value in ((_refit, "_MAX_STORED_BYTES", 100), (_head, "MAX_SYSTEM_SIZE", 5)):
        monkeypatch.setattr(module, limit, value)
        with pytest.raises(ValueError, match="refit"):
            bootstrap(net, X, CLASSES, refit=True)
        monkeypatch.undo()
