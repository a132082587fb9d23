"""Kernel dispatch against the clock, and what there is."""

import os
import time
from pathlib import Path

import pytest
import torch

from outpace.ops.dispatch import available_memory, find_device, product_dtype


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


def test_memory_that_holds_copies_of_files_is_there_to_be_had(monkeypatch):
    """With a full page cache next to nothing is free, and nearly all available."""
    text = "MemTotal: 24000000 kB\nMemFree: 200000 kB\nMemAvailable: 20000000 kB\nCached: 19000000 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert available_memory() == 20_000_000 * 1024
    monkeypatch.setattr(Path, "read_text", lambda path: text.replace("MemAvailable", "Mem"))
    assert available_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_a_device_is_named_by_what_is_there(monkeypatch):
    assert find_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    for name in ("cuda", "cuda:0", "cuda:7"):
        with pytest.raises(ValueError, match=f"device {name}: there are 0 CUDA devices here.*use device cpu"):
            find_device(name)
    for name in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "", "mps"):
        with pytest.raises(ValueError, match="it must be auto, cpu, cuda or cuda:N"):
            find_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda", 0)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device cuda:2: there are 2 CUDA devices here"):
        find_device("cuda:2")
