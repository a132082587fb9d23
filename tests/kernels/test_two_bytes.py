"""Keys and values of two bytes: rounded as torch rounds, looked at as if they were float32."""

import pytest
import torch

from outpace.kernels import bindings
from outpace.kernels.program import Program, Rings, pack_rings

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")
TWO_BYTES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def numbers(dtype):
    """Every finite number of the dtype, what lies around it and halfway to the next, and what is too big."""
    codes = torch.arange(2**16).to(torch.uint16).view(torch.int16).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    halfway = codes[:-1] / 2 + codes[1:] / 2
    bits = torch.cat((codes, halfway)).view(torch.int32)
    near = [(bits + step).view(torch.float32) for step in (-1, 0, 1)]
    some = torch.tensor([65519.9, 65520.0, 1e6, 3e38, torch.inf, 1e-45, 2.9e-8, 3e-8])
    every = torch.cat((*near, some, -some))
    return every[~every.isnan()]


@TWO_BYTES
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_appended_keys_are_rounded_as_torch_rounds(dtype, head_dim):
    T, values = 64, numbers(dtype)
    values = torch.cat((values, torch.zeros(-len(values) % (2 * T * head_dim)))).view(-1, T, 2, head_dim)
    k, v = torch.zeros(2, len(values), 1, T + 1, head_dim, dtype=dtype)
    rings, program = Rings(1), Program()
    rings.point_to(pack_rings([(k, v)]))
    start, counts = torch.zeros(len(values), dtype=torch.int64), torch.full((len(values),), T)
    qkv = torch.cat((torch.zeros(len(values), T, 1, head_dim), values), dim=2).flatten(2)
    program.append(qkv, rings.address(0), start, counts, 1, 1, 0)
    program.run()
    for ring, part in ((k, values[:, :, 0]), (v, values[:, :, 1])):
        assert torch.equal(ring[:, 0, :T].view(torch.int16), part.to(dtype).view(torch.int16))


KINDS = ("chain", "window", "tree", "lists", "both ways")


@TWO_BYTES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 128])
def test_attention_has_the_bits_that_it_has_over_float32(dtype, kind, group, head_dim):
    B, T, K, S = 2, 5, 2, 300
    torch.manual_seed(group * head_dim)
    q, sinks, start = torch.randn(B, T, group * K, head_dim), torch.randn(group * K), torch.tensor([250, 67])
    k, v = torch.randn(2, B, K, S, head_dim).to(dtype)
    tree = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T).contiguous()
    lists = torch.stack([torch.randperm(60)[:41].sort().values for _ in range(B * T)]).view(B, T, -1)
    rules = {
        "tree": {"tree": tree, "depth": torch.arange(T).expand(B, T).contiguous()},
        "lists": {"lists": (lists, torch.full((B, T), 41))},
        "both ways": {"both_ways": True},
    }.get(kind, {})
    given = start, 30 if kind == "window" else 0, sinks, head_dim**-0.5
    got = bindings.attend(q, k, v, *given, **rules)
    assert torch.equal(got, bindings.attend(q, k.float(), v.float(), *given, **rules))
    assert not torch.equal(got, bindings.attend(q, k.float() * 1.01, v.float(), *given, **rules))
