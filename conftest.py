"""Every test and every example of the documentation starts from the same global seed."""

import pytest
import torch

import neuboots  # noqa: F401 (before pytest imports a module of it by path, which would load that module twice)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Nets that a test or an example creates have the same initial weights in every run."""
    torch.manual_seed(0)
