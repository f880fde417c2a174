"""Every test of adapters starts from one seed: their initial values are random."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
