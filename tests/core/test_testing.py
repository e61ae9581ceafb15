"""The contract, run on every registered method and on options that take another code path."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import neuboots_paper.baselines  # noqa: F401 (registers its methods)
from neuboots.methods import METHODS, find_method
from neuboots.testing import CHECKS, MethodUnderTest
from neuboots.weights import Exponential

VARIANTS: dict[str, dict[str, Any]] = {name: {} for name in METHODS}
VARIANTS |= {"gp": {"steps": 20}, "sparse-gp": {"steps": 20}}
VARIANTS |= {"standard-bootstrap": {"num_members": 5}, "bayesian-bootstrap": {"num_members": 5}}
SLOW_VARIANTS: dict[str, dict[str, Any]] = {
    "neuboots, exp link, step, warm-up": {
        "link": "exp",
        "weight_distribution": Exponential(),
        "resample": "step",
        "warmup": 1,
    },
    "neuboots, S = 3": {"num_blocks": 3},
    "neuboots, S > n": {"num_blocks": 70},
    "neuboots, head only": {"train_head_only": True},
    "calibrated-neuboots, by bootstrap": {"reference": "bootstrap", "num_members": 3},
    "laplace, kron": {"structure": "kron", "prior_precision": 2.0},
    "swag, many iterates": {"start": 0.0, "every": 1, "rank": 2, "learning_rate": 1e-2},
    "mc-dropout, channels before the head": {"where": "head", "granularity": "channel", "rate": 0.5},
    "gbs, S = 3, step": {"num_blocks": 3, "weight_distribution": Exponential(), "resample": "step"},
    "amortized-bootstrap, one data set": {"num_resamples": 1, "latent": 2, "hidden": 3},
    **{f"{name}, all defaults": {} for name in ("gp", "sparse-gp", "standard-bootstrap", "bayesian-bootstrap")},
    "gp, Matérn, one length-scale": {"kernel": "matern52", "ard": False, "steps": 20},
    "sparse-gp, Matérn, m = 5": {"kernel": "matern52", "num_inducing": 5, "steps": 20},
    "batch-ensemble, random signs": {"init": "random_sign"},
    "mimo, some inputs repeated": {"input_repetition": 0.5, "batch_repetition": 1},
    "lp-bnn, K = 1": {"num_members": 1, "latent": 3},
    "influence, refitted": {"refit": True, "residuals": "raw"},
    "influence, blocks": {"num_blocks": 12, "weight_distribution": Exponential()},
    "influence, last 2 layers": {"layers": 2},
    "influence, all layers": {"layers": "all"},
    "influence, all layers, no folds": {"layers": "all", "num_folds": 0},
}


@cache
def method_under_test(variant: str) -> MethodUnderTest:
    options = (VARIANTS | SLOW_VARIANTS)[variant]
    info = find_method(variant.split(",")[0])
    if options.get("layers", 1) != 1:  # a kernel over all rows, of which pixels are too many
        info = replace(info, tasks=("classification", "regression"))
    return MethodUnderTest(info, options)


@pytest.mark.parametrize(
    "variant", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_VARIANTS)]
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Callable[[MethodUnderTest], None], variant: str) -> None:
    check(method_under_test(variant))
