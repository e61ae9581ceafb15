"""Puts this folder on the path, so that tests import `_nets`, `_reference` and other helpers by name."""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

from neuboots.methods import METHODS

sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in the source and the documentation only: each test file would be imported once more."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever is of `neuboots_paper` is slow: its folder of tests, and its methods in the tests of every method."""
    methods = {name for name, info in METHODS.items() if info.make.__module__.startswith("neuboots_paper")}
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        of_method = any(isinstance(value, str) and value in methods for value in values)
        if of_method or item.path.is_relative_to(Path(__file__).with_name("paper")):
            item.add_marker(pytest.mark.slow)
