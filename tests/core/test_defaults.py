"""Defaults of the public API: programs rely on them, so that a change is a decision and no accident."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from neuboots import InfluenceBootstrap, NeuBoots, TrainingConfig
from neuboots.evaluation.conformal import (
    ConformalClassifier,
    ConformalRegressor,
    fit_conformal_classifier,
    fit_conformal_regressor,
)
from neuboots.methods.neuboots import BootstrapGenerator, NeuBootsPredictor, make_blocks
from neuboots.prediction import Prediction, Predictor
from neuboots.training import EpochReport, prepare_net, progress_bar, train
from neuboots.weights import Dirichlet, Exponential, WeightSchedule, assign_blocks, compute_strata

_SETS = {"level": 0.9, "num_samples": 100, "seed": 0, "batch_size": 256, "progress": True}
_BATCHES = {"batch_size": 256, "progress": True}
_LOOP = {"epochs": 30, "batch_size": 128, "seed": 0, "num_workers": 0, "progress": True}
_FABRIC = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true"}

DEFAULTS: dict[Callable[..., Any], dict[str, Any]] = {
    Dirichlet: {"concentration": 1.0},
    Exponential: {"concentration": 1.0},
    assign_blocks: {"seed": 0},
    compute_strata: {"num_bins": 10, "ignore_index": -100},
    WeightSchedule: {"seed": 0, "resample": "epoch", "warmup": 0},
    BootstrapGenerator: {"link": "identity"},
    BootstrapGenerator.train: {"mode": True},
    NeuBootsPredictor.export: {"seed": 0},
    NeuBoots: {"link": "identity", "resample": "sample", "warmup": 0, "train_head_only": False},
    NeuBoots.make_schedule: {"seed": 0},
    make_blocks: {"seed": 0},
    Predictor.predict: {"num_samples": 100, "seed": 0},
    Predictor.summarize: {"num_samples": 100, "seed": 0, "quantiles": ()},
    Prediction.interval: {"level": 0.95, "method": "normal"},
    Prediction.prediction_interval: {"level": 0.95},
    ConformalClassifier: {"quantiles": (), "count": 0},
    ConformalClassifier.predict: _BATCHES,
    ConformalClassifier.evaluate: {"ignore_index": -100, **_BATCHES},
    fit_conformal_classifier: {
        **_SETS,
        "score": "adaptive",
        "class_conditional": False,
        "allow_empty": True,
        "penalty": 0.01,
        "k_reg": 5,
        "ignore_index": -100,
    },
    ConformalRegressor.predict: _BATCHES,
    ConformalRegressor.evaluate: {"num_bins": 5, **_BATCHES},
    fit_conformal_regressor: {**_SETS, "score": "absolute", "noise_std": 0.0},
    InfluenceBootstrap: {"layers": 1, "refit": False, "max_kernel_rows": 3000, "num_folds": 2},
    TrainingConfig: {**_LOOP, **_FABRIC},
    EpochReport: {"title": ""},
    train: {"title": ""},
    progress_bar: {"enabled": True, "done": 0},
    prepare_net: {"copy": False},
}


@pytest.mark.parametrize("call", DEFAULTS, ids=lambda call: call.__qualname__)
def test_defaults_are_those_of_the_documentation(call: Callable[..., Any]) -> None:
    parameters = inspect.signature(call).parameters.values()
    found = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    expected = DEFAULTS[call]
    assert {name: found[name] for name in expected} == expected
    others = {name for name in found.keys() - expected.keys() if isinstance(found[name], bool | int | float | str)}
    assert not others  # which have a default that is not listed
