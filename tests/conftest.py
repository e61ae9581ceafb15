"""Tests import their neighbours (`oracle`, `zoo`) by name."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Nets that a test makes without a word have the same first weights in every run."""
    torch.manual_seed(0)
