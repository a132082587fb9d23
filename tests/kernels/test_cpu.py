"""The CPU kernels against plain references, and bit-equal whatever rows travel together."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nearly import DTYPES, close

from outpace.kernels import bindings, build, expert_bindings

# by the compiler, not by available(): a kernel that no longer compiles must fail here
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def unpack(blocks, scales):
    values = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1)
    values = values.flatten(-2)  # [..., G, 32]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)


def packed(*shape):
    *rest, k = shape
    return torch.randint(0, 256, (*rest, k // 32, 16), dtype=torch.uint8), torch.randint(
        118, 126, (*rest, k // 32), dtype=torch.uint8
    )


# ---- linear and rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(1, 1), (29, 72), (6, 24), (7, 1031), (40, 96), (257, 544), (301, 2080)])
def test_linear_is_a_matrix_product(dtype, n, k):
    w, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    for m in (1, 3, 4, 5, 33, 70):
        x = torch.randn(m, k)
        truth = x.double() @ w.double().T
        close(bindings.linear(x, w), truth)
        close(bindings.linear(x, w, bias), truth + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(29, 72), (13, 1100), (301, 2080)])
def test_linear_rows_do_not_depend_on_each_other(dtype, n, k):
    w, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(40, k)
    alone = torch.cat([bindings.linear(row[None], w, bias) for row in x])
    for m in [*range(1, 34), 40]:
        assert torch.equal(bindings.linear(x[:m], w, bias), alone[:m])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_that_no_cache_keeps_is_read_otherwise_and_gives_the_same(dtype):
    """Up to four rows of x take their weights one row after the other: 4 MiB and more."""
    n, k = 2**22 // dtype.itemsize // 1031 + 2, 1031
    w, bias, x = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype), torch.randn(5, k)
    assert w.nbytes >= 2**22
    together = bindings.linear(x, w, bias)
    for rows in range(1, 5):
        assert torch.equal(bindings.linear(x[:rows], w, bias), together[:rows])
    close(together, x.double() @ w.double().T + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_matrix_may_begin_anywhere(dtype):
    """More than a megabyte, which may be read in whole cache lines; its last rows and values are no tile."""
    n, k = 1037, 2080
    w, x = torch.randn(n, k).to(dtype), torch.randn(20, k)
    y = bindings.linear(x, w)
    close(y, x.double() @ w.double().T)
    for off in (1, 4, 16):
        moved = torch.empty(n * k + off, dtype=dtype)[off:].view(n, k).copy_(w)
        assert torch.equal(bindings.linear(x, moved), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row(dtype):
    w, x = torch.randn(301, 2080).to(dtype), torch.randn(17, 2080)
    wanted = bindings.linear(x, w)
    x[3, 5], x[9, 2079], x[16, 40] = math.nan, math.inf, -math.inf
    y = bindings.linear(x, w)
    kept = [i for i in range(17) if i not in (3, 9, 16)]
    assert torch.equal(y[kept], wanted[kept]) and not y[[3, 9, 16]].isfinite().any()


def test_linear_takes_more_rows_than_the_second_cache_keeps():
    w, x = torch.randn(29, 72), torch.randn(1100, 72)
    close(bindings.linear(x, w), x.double() @ w.double().T)


def test_linear_does_not_depend_on_the_number_of_threads():
    w, x, answers = torch.randn(640, 544), torch.randn(5, 544), []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        answers.append(bindings.linear(x, w))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@pytest.mark.parametrize("h", [6, 0])  # 0: keys and values alone, as a draft's context
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("d", [8, 24, 64])
def test_rope_turns_queries_and_keys_only(h, d, norms):
    m, k = 40, 2
    qkv, angle = torch.randn(m, (h + 2 * k) * d), torch.randn(m, d // 2)
    weights = (torch.randn(d), torch.randn(d).bfloat16()) if norms else (None, None)
    heads = qkv.double().view(m, h + 2 * k, d).clone()
    for part, w in ((slice(0, h), weights[0]), (slice(h, h + k), weights[1])):
        x = heads[:, part]
        if w is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w.double()
        a, b = x.chunk(2, -1)
        cos, sin = angle.double().cos()[:, None], angle.double().sin()[:, None]
        heads[:, part] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    rows = [
        bindings.rope_(
            qkv[i : i + 1].clone(), angle[i : i + 1].cos(), angle[i : i + 1].sin(), h, k, d, *weights
        )
        for i in range(m)
    ]
    assert bindings.rope_(qkv, angle.cos(), angle.sin(), h, k, d, *weights) is qkv
    close(qkv, heads.flatten(1))
    assert torch.equal(qkv, torch.cat(rows))


# ---- attention


def reference(q, k, v, start, window, sinks, scale, tree=None, depth=None):
    b, t, h, d = q.shape
    kv, s = k.shape[1], k.shape[2]
    out = torch.zeros(b, t, h, d, dtype=torch.double)
    for i in range(b):
        for j in range(t):
            first = int(start[i])
            p = first + (j if tree is None else int(depth[i, j]))
            low = max(0, p - window + 1) if window else 0
            if tree is None:
                seen = list(range(low, p + 1))
            else:
                seen = list(range(low, first)) + [first + u for u in range(t) if tree[i, j, u]]
            slots = torch.tensor(seen) % s
            for head in range(h):
                keys, values = (x[i, head // (h // kv)][slots].double() for x in (k, v))
                logits = keys @ q[i, j, head].double() * scale
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head].double()[None]])
                out[i, j, head] = logits.softmax(0)[: len(seen)] @ values
    return out.flatten(2)


def same(*arguments, tolerance=1e-5):
    close(bindings.attend(*arguments), reference(*arguments), tolerance)


def family(parents):
    """The tree mask [T, T] and the depths [T] of nodes with these parents."""
    tree, depth = torch.eye(len(parents), dtype=torch.bool), torch.zeros(len(parents), dtype=torch.int64)
    for i, parent in enumerate(parents[1:], 1):
        tree[i] |= tree[parent]
        depth[i] = depth[parent] + 1
    return tree, depth


def rings(b, kv, s, d, start, t):
    """Buffers cut out of bigger ones, with nonsense in every slot that holds no token."""
    k, v = torch.full((2, b + 1, kv + 1, s, d), math.nan)
    k, v = k[1:, :kv], v[1:, :kv]
    for i in range(b):
        slots = torch.arange(max(0, int(start[i]) + t - s), int(start[i]) + t) % s
        k[i, :, slots], v[i, :, slots] = torch.randn(2, kv, len(slots), d)
    return k, v


def queries(b, t, h, kv, d):
    return torch.randn(b, t, (h + 2 * kv) * d)[..., : h * d].unflatten(-1, (h, d))


@pytest.mark.parametrize("d", [8, 24, 40, 64, 128])
@pytest.mark.parametrize(
    "t, window, starts, s",
    [
        (1, 0, (0, 300), 320),
        (5, 0, (131, 7), 150),
        (3, 20, (200, 5), 23),
        (9, 4, (126, 0), 17),
        (40, 0, (100, 250), 300),
        (2, 128, (1000, 63), 131),
    ],
)
def test_attend_along_a_chain(d, t, window, starts, s):
    start, h, kv = torch.tensor(starts), 6, 2
    q, (k, v), sinks = queries(2, t, h, kv, d), rings(2, kv, s, d, start, t), torch.randn(h)
    for sink in (None, sinks, sinks.bfloat16()):
        same(q, k, v, start, window, sink, d**-0.5)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("starts", [(0, 125), (300, 120), (64, 128)])
def test_attend_over_a_tree(window, starts):
    b, t, h, kv, d, s = 2, 11, 6, 3, 24, 320
    start, (tree, depth) = torch.tensor(starts), family([-1, 0, 0, 1, 1, 2, 3, 3, 5, 8, 9])
    tree, depth = tree.repeat(b, 1, 1), depth.repeat(b, 1)
    tree[1] = True  # a block in which all see all
    q, (k, v), sinks = queries(b, t, h, kv, d), rings(b, kv, s, d, start, t), torch.randn(h)
    same(q, k, v, start, window, sinks, 0.3, tree, depth)


@pytest.mark.parametrize("window", [0, 5, 50])
@pytest.mark.parametrize("t", [4, 11, 40])
def test_attend_both_ways(window, t):
    """A block in which all see all, whatever the window; 40 tokens of 6 heads take two passes."""
    b, h, kv, d, s = 2, 6, 3, 24, 360
    start, depth = torch.tensor([300, 119]), torch.arange(t).repeat(b, 1)
    q, (k, v), sinks = queries(b, t, h, kv, d), rings(b, kv, s, d, start, t), torch.randn(h)
    truth = reference(q, k, v, start, window, sinks, 0.3, torch.ones(b, t, t, dtype=torch.bool), depth)
    close(bindings.attend(q, k, v, start, window, sinks, 0.3, both_ways=True), truth)


@pytest.mark.parametrize("window", [0, 33, 130])
@pytest.mark.parametrize("g, d", [(1, 64), (3, 24), (8, 64), (5, 128)])
def test_attend_rows_do_not_depend_on_length_batch_or_ring(window, g, d):
    b, t, kv, s = 2, 12, 2, 300
    start = torch.tensor([250, 118])
    q, (k, v), sinks = queries(b, t, g * kv, kv, d), rings(b, kv, s, d, start, t), torch.randn(g * kv)
    together = bindings.attend(q, k, v, start, window, sinks, d**-0.5)
    small = window + t if window else s + 5  # a ring of another size, with the same tokens
    for i in range(b):
        k2, v2 = torch.full((2, 1, kv, small, d), math.nan)
        last = int(start[i]) + t
        index = torch.arange(max(0, last - small), last)
        k2[0, :, index % small], v2[0, :, index % small] = k[i, :, index % s], v[i, :, index % s]
        for j in range(t):
            one = bindings.attend(
                q[i : i + 1, j : j + 1], k2, v2, start[i : i + 1] + j, window, sinks, d**-0.5
            )
            assert torch.equal(one[0, 0], together[i, j])
    chain = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t).contiguous()
    depth = torch.arange(t).expand(b, t).contiguous()
    if not window:
        assert torch.equal(bindings.attend(q, k, v, start, window, sinks, d**-0.5, chain, depth), together)


@pytest.mark.parametrize("window", [0, 3])
def test_attend_gives_a_tree_path_the_bits_of_plain_decoding(window):
    t, h, kv, d, s = 7, 6, 2, 64, 160
    start = torch.tensor([124])  # the path crosses the edge of a tile of keys, not where its storage does
    (tree, depth), path = family([-1, 0, 0, 1, 2, 4, 5]), [0, 2, 4, 5, 6]
    q, (k, v), sinks = queries(1, t, h, kv, d), rings(1, kv, s, d, start, t), torch.randn(h)
    if window:
        tree &= depth[:, None] - depth < window
    verified = bindings.attend(q, k, v, start, window, sinks, 0.1, tree[None], depth[None])
    late = bindings.attend(q[:, 5:], k, v, start, window, sinks, 0.1, tree[None, 5:], depth[None, 5:])
    assert torch.equal(late, verified[:, 5:])  # of columns that came before, the keys alone
    slots = torch.tensor(path) + 124
    for x in (k, v):
        x[:, :, 124 : 124 + len(path)] = x[:, :, slots].clone()
    for i, node in enumerate(path):
        plain = bindings.attend(q[:, node : node + 1], k, v, start + i, window, sinks, 0.1)
        assert torch.equal(plain[0, 0], verified[0, node])


def test_attend_survives_extreme_scores_and_sinks():
    start = torch.tensor([150])
    q, (k, v) = queries(1, 2, 6, 2, 24), rings(1, 2, 200, 24, start, 2)
    for sinks in (torch.full((6,), 90.0), torch.full((6,), -1000.0), torch.zeros(6)):
        same(q * 50, k, v, start, 0, sinks, 1.0, tolerance=1e-4)


# ---- experts


@pytest.mark.parametrize("softmax_first, renormalise", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("e, c, dtype", [(19, 72, torch.float32), (131, 4160, torch.bfloat16)])
def test_route(e, c, dtype, softmax_first, renormalise):
    """The larger router has more than a megabyte in bfloat16: its product may have a buffer of its own."""
    m, k = 40, 5
    x, w, b = torch.randn(m, c), (torch.randn(e, c) * c**-0.5).to(dtype), torch.randn(e)
    index, weight = bindings.route(x, w, b, k, softmax_first, renormalise)
    logits = x.double() @ w.double().T + b.double()
    if softmax_first:
        truth, chosen = logits.softmax(-1).topk(k)
        truth = truth / truth.sum(-1, keepdim=True) if renormalise else truth
    else:
        top, chosen = logits.topk(k)
        truth = top.softmax(-1)
    assert torch.equal(index, chosen)
    close(weight, truth, 1e-6)
    for i in range(m):
        one = bindings.route(x[i : i + 1], w, b, k, softmax_first, renormalise)
        assert torch.equal(one[0][0], index[i]) and torch.equal(one[1][0], weight[i])


def test_route_takes_the_lowest_index_among_equals():
    bias = torch.tensor([0.0, 1, 0, 1, 1, 2, 0])
    index, weight = bindings.route(torch.zeros(2, 8), torch.randn(7, 8), bias, 4, False, False)
    assert index.tolist() == [[5, 1, 3, 4]] * 2
    close(weight[0], torch.tensor([2.0, 1, 1, 1]).softmax(0), 1e-6)


def experts(form, e, f, c):
    if form == "mxfp4":
        up, down = packed(e, 2 * f, c), packed(e, c, f)
        return up, down, unpack(*up), unpack(*down)
    up, down = (torch.randn(e, 2 * f, c) / 9).to(form), (torch.randn(e, c, f) / 9).to(form)
    return up, down, up.float(), down.float()


def choices(c, e, k):
    """m tokens [m, c], and k of e experts for each with their weights."""
    for m in (1, 2, 7, 40, 67):
        index = torch.rand(m, e).topk(k).indices
        if m == 67:
            index[:, 0] = 4  # more rows for one expert than a block takes
            index[:, 1:] = torch.tensor([10, 0])
        yield m, torch.randn(m, c), index, torch.rand(m, k)


def moe_reference(x, index, weight, up, up_bias, down, down_bias, style, seen=torch.Tensor.double):
    """`seen`: what a matrix meets of x and of the hidden layer."""
    out = torch.zeros_like(x, dtype=torch.double)
    for m in range(len(x)):
        for i, e in enumerate(index[m].tolist()):
            h = up[e].double() @ seen(x[m]) + (0 if up_bias is None else up_bias[e].double())
            if style == "gpt_oss":
                gate, lift = h[::2].clamp(max=7.0), h[1::2].clamp(-7.0, 7.0)
                h = gate * torch.sigmoid(1.702 * gate) * (lift + 1)
            else:
                gate, lift = h.chunk(2)
                h = torch.nn.functional.silu(gate) * lift
            y = down[e].double() @ seen(h) + (0 if down_bias is None else down_bias[e].double())
            out[m] += weight[m, i].double() * y
    return out


@pytest.mark.parametrize("style", ["gpt_oss", "silu"])
@pytest.mark.parametrize(
    "form, c, f",
    [(torch.float32, 72, 50), (torch.bfloat16, 96, 41), ("mxfp4", 96, 160), (torch.float32, 560, 97)],
)
def test_moe(form, c, f, style):
    e, k = 11, 3
    up, down, plain_up, plain_down = experts(form, e, f, c)
    biases = (torch.randn(e, 2 * f), torch.randn(e, c).bfloat16())
    for m, x, index, weight in choices(c, e, k):
        for a, b in (biases, (None, None)):
            ours = expert_bindings.moe(x, index, weight, up, a, down, b, style)
            close(ours, moe_reference(x, index, weight, plain_up, a, plain_down, b, style))
        for i in range(m):
            row = slice(i, i + 1)
            one = expert_bindings.moe(x[row], index[row], weight[row], up, None, down, None, style)
            assert torch.equal(one, ours[row])


def test_mxfp4_golden_bytes():
    blocks = torch.zeros(2, 3, 16, dtype=torch.uint8)
    blocks[0, 0, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    blocks[0, 1, 15] = 0x7F  # low nibble 15, high nibble 7
    blocks[1, 2, 0] = 0x12
    scales = torch.tensor([[127, 130, 0], [0, 0, 120]], dtype=torch.uint8)
    truth = torch.zeros(2, 96)
    truth[0, :16] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    truth[0, 62], truth[0, 63] = -48.0, 48.0
    truth[1, 64], truth[1, 65] = 1 / 128, 0.5 / 128
    assert torch.equal(bindings.unpack_mxfp4(blocks, scales), truth)


def test_mxfp4_unpacks_every_byte_and_scale_exactly():
    blocks, scales = torch.arange(4096).byte().view(256, 1, 16), torch.arange(256).byte().view(256, 1)
    assert torch.equal(bindings.unpack_mxfp4(blocks[:255], scales[:255]), unpack(blocks, scales)[:255])
    blocks, scales = packed(5, 301, 1056)
    assert torch.equal(bindings.unpack_mxfp4(blocks, scales), unpack(blocks, scales))


# ---- the build


@pytest.fixture
def fresh():
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def test_switched_off(fresh, monkeypatch):
    monkeypatch.setenv("OUTPACE_KERNELS", "0")
    assert not bindings.available() and "OUTPACE_KERNELS" in bindings.why_not()


def test_without_a_compiler(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(bindings, "_c", bindings._Library())
    assert not bindings.available() and "no C compiler" in bindings.why_not()
    with pytest.raises(RuntimeError, match="no C compiler"):
        bindings.gated(torch.zeros(1, 2), None, 1.0)


def test_with_a_compiler_that_fails(fresh, monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo no such thing >&2; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    assert not bindings.available() and "no such thing" in bindings.why_not()
    assert not list((tmp_path / "cache").iterdir())


SCRIPT = """
import torch
from outpace.kernels.bindings import linear
assert linear(torch.ones(9, 96), torch.ones(777, 96)).sum() == 9 * 96 * 777
"""


def test_two_processes_build_at_once(tmp_path):
    env = {
        **os.environ,
        "OUTPACE_CACHE": str(tmp_path),
        "OUTPACE_CFLAGS": "-O0",  # a build of a second instead of ten
        "PYTHONPATH": str(Path(bindings.__file__).parents[2]),
    }
    both = [subprocess.Popen([sys.executable, "-c", SCRIPT], env=env) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
