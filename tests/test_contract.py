"""The contract, run over every method of the table and over options that change what it does."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from neuboots.contract import CHECKS, Subject
from neuboots.methods import METHODS, find
from neuboots.weights import Exponential

# Options beside the defaults that take another path: name of the method, what is special, options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    "neuboots, exp link, step, warm-up": (
        "neuboots",
        {"link": "exp", "law": Exponential(), "redraw": "step", "warmup": 1},
    ),
    "neuboots, S = 3": ("neuboots", {"num_blocks": 3}),
    "neuboots, S > n": ("neuboots", {"num_blocks": 70}),
    "neuboots, head only": ("neuboots", {"tune": "head"}),
}


@cache
def subject_of(variant: str) -> Subject:
    name, options = VARIANTS[variant]
    return Subject(find(name), options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Callable[[Subject], None], variant: str) -> None:
    check(subject_of(variant))
