"""Attention over lists of tokens: what is listed is seen, and nothing else is read."""

import math

import pytest
import torch
from nearly import close
from test_cpu import queries, rings

from outpace.kernels import bindings
from outpace.ops.attention import attend

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")


@pytest.mark.parametrize("g, d", [(1, 64), (3, 24), (8, 64), (5, 128)])
def test_attend_sees_the_tokens_of_a_list_and_reads_no_other(g, d):
    b, t, kv, s = 2, 12, 2, 400
    start = torch.tensor([350, 118])
    q, (k, v), sinks = queries(b, t, g * kv, kv, d), rings(b, kv, s, d, start, t), torch.randn(g * kv)
    every = torch.arange(s).expand(b, t, s).contiguous(), start[:, None] + torch.arange(t) + 1
    dense = bindings.attend(q, k, v, start, 0, sinks, d**-0.5)
    assert torch.equal(bindings.attend(q, k, v, start, 0, sinks, d**-0.5, lists=every), dense)

    many = torch.randint(1, 119, (b, t))
    many[1, 3] = 0  # padding
    rows = [torch.randperm(int(start[i]) + j + 1)[:118].sort().values for i in range(b) for j in range(t)]
    lists = torch.stack(rows).view(b, t, 118)
    unread = torch.ones(b, s, dtype=torch.bool)
    allowed = torch.zeros(b, t, s, dtype=torch.bool)
    for i in range(b):
        for j in range(t):
            allowed[i, j, lists[i, j, : many[i, j]]] = True
        unread[i] = ~allowed[i].any(0)
    assert unread[0].any()
    wanted = attend(q, k.nan_to_num(), v.nan_to_num(), allowed, sinks, d**-0.5)
    for x in (k, v):
        x.transpose(1, 2)[unread] = math.nan
    result = bindings.attend(q, k, v, start, 0, sinks, d**-0.5, lists=(lists, many))
    real = many > 0
    close(result[real], wanted[real].double())
    assert not result[~real].any()
    for i, j in ((0, 0), (1, 7)):  # a row does not depend on its company
        one = lists[i : i + 1, j : j + 1].contiguous(), many[i : i + 1, j : j + 1].contiguous()
        alone = q[i : i + 1, j : j + 1], k[i : i + 1], v[i : i + 1], start[i : i + 1]
        assert torch.equal(bindings.attend(*alone, 0, sinks, d**-0.5, lists=one)[0, 0], result[i, j])
