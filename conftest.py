"""Every test and every example of the documentation starts from the same global seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Nets that a test or an example makes without a word have the same first weights in every run."""
    torch.manual_seed(0)
