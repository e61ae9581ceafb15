"""The contract, run over every method of the table and over options that change what it does."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from neuboots.methods import METHODS, find_method
from neuboots.testing import CHECKS, MethodUnderTest
from neuboots.weights import Exponential

# Options beside the defaults that take another path: name of the method, what is special, options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    "neuboots, exp link, step, warm-up": (
        "neuboots",
        {"link": "exp", "weight_distribution": Exponential(), "resample": "step", "warmup": 1},
    ),
    "neuboots, S = 3": ("neuboots", {"num_blocks": 3}),
    "neuboots, S > n": ("neuboots", {"num_blocks": 70}),
    "neuboots, head only": ("neuboots", {"tune": "head"}),
    "calibrated neuboots, by true nets": ("calibrated-neuboots", {"reference": "bootstrap", "num_members": 3}),
    "laplace, kron": ("laplace", {"structure": "kron", "prior_precision": 2.0}),
    "swag, many iterates": ("swag", {"start": 0.0, "every": 1, "rank": 2, "learning_rate": 1e-2}),
    "mc-dropout, channels before the head": ("mc-dropout", {"where": "head", "kind": "channel", "rate": 0.5}),
    "gbs, S = 3, step": ("gbs", {"num_blocks": 3, "weight_distribution": Exponential(), "resample": "step"}),
    "amortized bootstrap, one data set": ("amortized-bootstrap", {"num_resamples": 1, "latent": 2, "hidden": 3}),
    "gp, Matérn, one length-scale": ("gp", {"kernel": "matern52", "ard": False, "steps": 20}),
    "sparse-gp, Matérn, m = 5": ("sparse-gp", {"kernel": "matern52", "num_inducing": 5, "steps": 20}),
    "batch-ensemble, random signs": ("batch-ensemble", {"init": "random_sign"}),
    "mimo, some inputs repeated": ("mimo", {"input_repetition": 0.5, "batch_repetition": 1}),
    "lp-bnn, K = 1": ("lp-bnn", {"num_members": 1, "latent": 3}),
    "influence, refitted": ("influence", {"refit": True, "residuals": "raw"}),
    "influence, blocks": ("influence", {"num_blocks": 12, "weight_distribution": Exponential()}),
    "influence, last 2 layers": ("influence", {"layers": 2}),
    "influence, whole net": ("influence", {"layers": "all"}),
    "influence, whole net, sized": ("influence", {"layers": "all", "replicates": 1}),
}


@cache
def subject_of(variant: str) -> MethodUnderTest:
    name, options = VARIANTS[variant]
    entry = find_method(name)
    if options.get("layers", 1) != 1:  # a kernel of whole rows, which pixels are too many for
        entry = replace(entry, tasks=("classification", "regression"))
    return MethodUnderTest(entry, options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Callable[[MethodUnderTest], None], variant: str) -> None:
    check(subject_of(variant))
