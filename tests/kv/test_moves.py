"""Tokens moved within memories: the kernel against indexing, row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.decode.request import BatchRows, Request
from outpace.kernels import bindings
from outpace.kv.base import LayerCache, moves_of
from outpace.kv.moves import Moves, kept_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_moves_as_row_by_row(dtype):
    B, K, D = 3, 2, 5
    sizes = (23, 7, 23)  # two dense memories and a ring
    memories = [torch.randn(B, K, size + 1, D).to(dtype) for size in sizes]
    start, pairs = [14, 17, 16], [([1, 3, 5], [0, 1, 2]), ([3], [0]), ([2, 5], [1, 2])]
    wanted = [m.clone() for m in memories]
    for memory, size in zip(wanted, sizes, strict=True):
        for b, (begin, pair) in enumerate(zip(start, pairs, strict=True)):
            before = memory[b].clone()
            for s, t in zip(*pair, strict=True):
                memory[b, :, (begin + t) % size] = before[:, (begin + s) % size]
    for by_kernel in (True, False):
        got = [m.clone() for m in memories]
        moves = Moves(got)
        assert moves.tables
        moves.tables = moves.tables if by_kernel else None
        moves(start, pairs)
        for a, b, size in zip(got, wanted, sizes, strict=True):
            assert torch.equal(a[:, :, :size], b[:, :, :size])
    assert bindings.available()  # else the kernel was not tried


def test_memories_of_several_dtypes_are_moved_together():
    dtypes = torch.float32, torch.float16, torch.float32
    memories = [LayerCache(2, 3, 20, 5, 0, dtype=dtype, device="cpu") for dtype in dtypes]
    for memory in memories:
        for part in memory.parts:
            part.copy_(torch.arange(part.numel()).view_as(part) % 997)
    wanted = [part.clone() for memory in memories for part in memory.parts]
    for part in wanted:
        part[0, :, 8], part[1, :, 3] = part[0, :, 9].clone(), part[1, :, 6].clone()
    moves_of(memories)([7, 3], [([2], [1]), ([3], [0])])
    assert all(map(torch.equal, [part for memory in memories for part in memory.parts], wanted))


@given(st.permutations(range(6)), st.integers(1, 6))
def test_rows_that_stay_are_those_of_indexing(order, count):
    memory, rows = torch.randn(6, 2, 5, 3), order[:count]
    wanted = memory[rows]
    assert torch.equal(kept_rows(memory, rows), wanted)


@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_rows_that_end_are_replaced_by_the_last_ones(done):
    rows = BatchRows(len(done), Request(max_new_tokens=1), None)
    rows.done = done
    memory = torch.randn(len(done), 2, 5, 3)
    before = memory.clone()
    kept = rows.running(list(range(len(done))))
    assert sorted(kept) == [i for i, ended in enumerate(done) if not ended]
    stayed = kept_rows(memory, kept)
    assert torch.equal(stayed, before[kept]) and stayed.untyped_storage().data_ptr() == memory.data_ptr()
    moved = sum(i != row for i, row in enumerate(kept))
    assert moved <= sum(done)
