"""Kernel dispatch against the clock."""

import time

import torch

from outpace.ops.dispatch import product_dtype


def seconds(dtype):
    a, items = torch.ones(384, 384, dtype=dtype), []
    for _ in range(4):
        began = time.perf_counter()
        a @ a
        items.append(time.perf_counter() - began)
    return min(items)


def test_products_take_a_dtype_that_the_device_multiplies():
    assert product_dtype(torch.device("cuda")) == torch.bfloat16
    value = product_dtype(torch.device("cpu"))
    assert value in (torch.bfloat16, torch.float32)
    assert seconds(value) < 8 * seconds(torch.float32)  # emulated, bfloat16 takes fifty times as long
