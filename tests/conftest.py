"""Puts this folder on the path, so that tests import `_nets`, `_reference` and other helpers by name."""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in the source and the documentation only: each test file would be imported once more."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]
