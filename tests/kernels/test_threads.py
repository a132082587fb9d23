"""The threads of the kernels: the same bits however many take part, and nobody waits for one that cannot."""

import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

from outpace.kernels.bindings import argmax, linear

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@pytest.fixture(autouse=True)
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_threads(n, call):
    torch.set_num_threads(n)
    return call()


@pytest.fixture
def product():
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(shape, generator=generator) for shape in ((7, 96), (1501, 96)))
    return lambda: linear(x, w)


@pytest.mark.parametrize("n", [2, 3, 16, 128])
def test_as_with_one_thread(product, n):
    expected = with_threads(1, product)
    torch.set_num_threads(n)
    assert all(torch.equal(product(), expected) for _ in range(200))


def test_a_job_ends_when_its_last_item_does():
    """Long items, and memory that a job before this one has filled with other numbers."""
    x, w = torch.randn(64, 4096), torch.randn(48, 4096)
    expected = [with_threads(1, lambda sign=sign: linear(sign * x, w)) for sign in (1, -1)]
    torch.set_num_threads(2)
    inputs = x, -x
    assert all(torch.equal(linear(inputs[i % 2], w), expected[i % 2]) for i in range(200))


def test_rows_of_a_job_are_all_done():
    x = torch.randn(3001, 257)
    assert torch.equal(with_threads(5, lambda: argmax(x)), x.argmax(1))


def test_two_callers_at_once(product):
    """One has the pool; the other works alone."""
    expected, wrong = with_threads(1, product), []
    torch.set_num_threads(2)

    def call():
        wrong.extend(i for i in range(300) if not torch.equal(product(), expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_forked_child_has_threads_of_its_own(product):
    expected = with_threads(3, product)
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(product(), expected) for _ in range(50)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_busy_machine_costs_no_time_slices(product):
    """Four times as many threads as cores, and every core busy: a barrier that all threads must reach would
    wait for a time slice of several milliseconds in most of the 2,000 jobs."""
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        torch.set_num_threads(min(4 * cores, 128))
        product()
        began = time.perf_counter()
        for _ in range(2000):
            product()
        took = time.perf_counter() - began
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert took < 4, f"2,000 small products took {took:.1f} s"
