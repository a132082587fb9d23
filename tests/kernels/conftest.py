"""Kernels are tested with more than one thread, however many the others run with."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
