"""Checks of Triton's kernels in its interpreter, on a CPU, which `test_triton.py` runs.

They have a process of their own, since a kernel is interpreted or compiled for as long as its module lives.
The interpreter multiplies the bits of bfloat16 numbers as if they were integers, so these are in float16 and
float32; `test_triton.py` compiles the kernels for bfloat16.
"""

from collections import Counter

import pytest
import tiny
import torch
from dflash_drafts import random_dflash
from no_host import GPU, NoHost

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.dflash import BoundDFlash
from outpace.drafts.tree import DDTree
from outpace.kernels.triton_attention import KEYS
from outpace.kernels.triton_experts import COLUMNS, ROWS, Tiles, down_product, up_product
from outpace.kv.base import KVCache
from outpace.kv.tree import Tree
from outpace.models.cuda_graphs import GraphTarget
from outpace.models.load import build, named_tensors
from outpace.ops import attention, mxfp4
from outpace.ops.moe import Matrices, in_triton, on_device

E, C, F, TOP = 5, 96, 160, 3  # 3 and 5 blocks a row; C and F are no multiples of a tile's columns


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def packed(*shape):
    blocks, scales = mxfp4.pack(torch.randn(*shape))
    return blocks, scales - torch.randint(1, 6, scales.shape).to(torch.uint8)  # float16 ends at 65,504


def choices(rows, experts=E):
    return torch.stack([torch.randperm(experts)[:TOP] for _ in range(rows)])


@pytest.mark.parametrize(
    ("style", "dtype", "rows"),
    [
        ("gpt-oss", torch.float32, 2 * ROWS + 7),
        ("gpt-oss", torch.float16, 2),
        ("qwen3", torch.float16, 2 * ROWS + 7),
        ("qwen3", torch.float32, 1),
        ("split", torch.float32, 2),
        ("split", torch.float16, 2 * ROWS + 7),
        ("split qwen3", torch.float16, 1),
        ("split qwen3", torch.float32, 2),
    ],
)
def test_packed_experts_are_those_that_are_unpacked(style, dtype, rows):
    """An expert that nobody wants, one with several tiles of pairs, and a clamp that bites."""
    assert (2 * F) % COLUMNS == 0 and C % COLUMNS and F % COLUMNS
    error = 1e-5 if dtype == torch.float32 else 4e-3
    chosen = choices(rows, E - 1)
    chosen[:, 0] = torch.where((chosen == 1).any(1), chosen[:, 0], 1)
    x, weights = torch.randn(rows, C).to(dtype), torch.rand(rows, TOP)
    limit = 1.5 if "qwen3" not in style else None
    up, gate, down = packed(E, F if "split" in style else 2 * F, C), packed(E, F, C), packed(E, C, F)
    biases = [torch.randn(E, len(m[1][0])) if limit else None for m in (up, down, gate)]
    more = (gate, biases[2]) if "split" in style else ()
    matrices = Matrices(up, biases[0], down, biases[1], limit, *more)
    got, wanted = in_triton(x, chosen, weights, matrices), on_device(x, chosen, weights, matrices)
    assert got.dtype == dtype and got.shape == (rows, C)
    assert (got.float() - wanted.float()).abs().max() < error * wanted.abs().max()


def test_every_code_under_every_scale_is_unpacked_exactly():
    """The rows of a unit matrix pick columns out: which of a byte's two values comes first, signs, the least
    and the largest scales."""
    blocks = torch.randint(0, 256, (1, 70, 3, 16), dtype=torch.uint8)
    blocks[0, :16, 0] = torch.arange(16, dtype=torch.uint8)[:, None] * 17
    scales = torch.randint(90, 160, (1, 70, 3), dtype=torch.uint8)
    scales[0, :3, 0] = torch.tensor([0, 1, 252])
    scales[0, 16:32] = torch.arange(0, 160, 10, dtype=torch.uint8)[:, None]
    chosen = torch.zeros(96, 1, dtype=torch.int64)
    tiles = Tiles.of(chosen, 1)
    got = up_product(torch.eye(96), blocks, scales, None, tiles, 1)
    assert torch.equal(got.T, mxfp4.reference_unpack(blocks, scales)[0])


def test_a_row_has_the_same_bits_whatever_surrounds_it():
    """In float16: the interpreter's products of float32 are a library's, and its rows are not alike."""
    rows = 2 * ROWS + 3
    x, chosen, weights = torch.randn(rows, C).half(), choices(rows), torch.rand(rows, TOP)
    matrices = Matrices(packed(E, 2 * F, C), torch.randn(E, 2 * F), packed(E, C, F), None, 7.0)
    whole = in_triton(x, chosen, weights, matrices)
    for some in ([4], [0, 1], torch.randperm(rows)[:19].tolist()):
        assert torch.equal(in_triton(x[some], chosen[some], weights[some], matrices), whole[some])


@pytest.mark.parametrize(("rows", "experts"), [(1, 5), (7, 3), (40, 4), (50, 128)])
def test_tiles_cover_every_pair_once(rows, experts):
    chosen = choices(rows, experts)
    tiles = Tiles.of(chosen, experts)
    seen = []
    for e, first, end in zip(*(t.tolist() for t in tiles[1:]), strict=True):
        if e == experts:
            continue
        pairs = tiles.order[first : min(first + ROWS, end)]
        assert len(pairs) and (chosen.flatten()[pairs] == e).all()
        seen += pairs.tolist()
    assert sorted(seen) == list(range(rows * TOP))


def test_tiles_are_made_without_asking_the_host():
    with NoHost():
        tiles = Tiles.of(torch.empty(7, TOP, dtype=torch.int64, device=GPU), E)
    assert all(part.device == GPU for part in tiles)


def test_weights_of_choices_stay_with_their_pairs():
    """One token that weighs its experts differently, each of which gives its own number."""
    down = mxfp4.pack(torch.eye(32)[None] * torch.tensor([1.0, 2, 4])[:, None, None])
    chosen, weights = torch.tensor([[2, 0, 1]]), torch.tensor([[0.5, 0.25, 0.125]])
    tiles = Tiles.of(chosen, 3)
    y = down_product(torch.ones(3, 32), *down, None, tiles, weights)
    assert torch.equal(y, torch.full((1, 32), 4 * 0.5 + 1 * 0.25 + 2 * 0.125))


# ---- attention ---------------------------------------------------------------------------------------

HEADS, KV, HEAD_DIM, LENGTH = 6, 2, 16, 3 * KEYS
KINDS = {
    "chain": {}, "one token": {}, "wide": {}, "both ways": {"both_ways": True},
    "tree": {"tree": [0, 0, 0, 1, 2, 2, 5]}, "grown tree": {"tree": [0, 0, 1, 1, 3, 2, 4, 5], "held": 3},
}  # fmt: skip
SIZES = {"one token": 1, "wide": 40, "tree": 7, "grown tree": 5}


def append(cache, step, dtype):
    """-> what the queries of the step see."""
    k, v = torch.randn(2, 2, KV, step.T, HEAD_DIM).to(dtype)
    return cache.layers[0].append(k, v, step)


def remembered(window, dtype, lengths):
    """A layer that has forgotten some of the tokens that it was shown, if it has a window."""
    cache, shown = KVCache(2, LENGTH, 9, (window,), KV, HEAD_DIM, dtype=dtype), 0
    while shown < max(lengths):
        counts = [min(max(n - shown, 0), 9) for n in lengths]
        step = cache.begin(9, counts)
        append(cache, step, dtype)
        cache.advance(step)
        shown += 9
    return cache


def asked(kind, cache, counts, dtype):
    """-> the queries, and the view that they have."""
    how, T = dict(KINDS[kind]), SIZES.get(kind, 6)
    if "tree" in how:
        held, parents = how.pop("held", 0), torch.tensor([how["tree"]] * 2)
        if held:
            step = cache.begin(held, tree=Tree(parents[:, :held]))
            append(cache, step, dtype)
        how["tree"] = Tree(parents, held)
    step = cache.begin(T, [min(n, T) for n in counts], **how)
    view = append(cache, step, dtype)
    qkv = torch.randn(2, T, HEADS + 2 * KV, HEAD_DIM).to(dtype)
    return qkv[:, :, :HEADS], view


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_attention_sees_what_the_reference_sees(kind, window, sinks, dtype, error):
    """Past a window and past a round of keys, in rows of other lengths, one of them with padding."""
    cache = remembered(window, dtype, (KEYS + 13, 21))
    counts = (9, 2) if "tree" not in kind else (9, 9)
    q, view = asked(kind, cache, counts, dtype)
    own = torch.randn(HEADS) if sinks else None
    got = attention.in_triton(q, view, window, own, 0.3)
    wanted = attention.attend(q, view.k, view.v, view.allowed(window), own, 0.3)
    assert got.shape == (2, q.shape[1], HEADS * HEAD_DIM) and got.dtype == dtype
    for b, count in enumerate(view.step.counts):
        assert (got[b, :count] - wanted[b, :count]).abs().max() < error


def test_attention_over_keys_of_another_dtype():
    cache = remembered(7, torch.bfloat16, (KEYS + 13, 21))
    q, view = asked("tree", cache, (9, 9), torch.bfloat16)
    got = attention.in_triton(q.float(), view, 7, None, 0.3)
    wanted = attention.attend(q.float(), view.k, view.v, view.allowed(7), None, 0.3)
    assert got.dtype == torch.float32 and (got - wanted).abs().max() < 1e-5


def test_a_verified_row_of_attention_has_the_bits_of_autoregressive_decoding():
    """In float16, as above: token by token, as a chain, and in other company."""
    text, q = [], torch.randn(2, 5, HEADS, HEAD_DIM).half()
    k, v = torch.randn(2, 2, KV, 5, HEAD_DIM).half()
    for widths in ([1] * 5, [5], [2, 3]):
        torch.manual_seed(2)
        cache, begin, parts = remembered(7, torch.float16, (KEYS + 3, 30)), 0, []
        for width in widths:
            now = slice(begin, begin + width)
            step = cache.begin(width)
            view = cache.layers[0].append(k[:, :, now], v[:, :, now], step)
            parts.append(attention.in_triton(q[:, now], view, 7, torch.ones(HEADS), 0.3))
            cache.advance(step)
            begin += width
        text.append(torch.cat(parts, 1))
    assert torch.equal(text[0], text[1]) and torch.equal(text[0], text[2])


# ---- a whole target ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_a_target_writes_the_same_through_these_kernels(family, monkeypatch):
    """As a GPU runs it: captured steps with lengths in tensors, prompts in chunks past the windows, a draft
    that proposes trees, rows that end one after the other."""
    model = build(tiny.config(family, head_dim=16))
    tiny.randomise(named_tensors(model), 3)
    model = tiny.in_mxfp4(model) if family == "gpt_oss" else model.eval()
    prompts = [tiny.tokens(1, n, seed=n)[0].tolist() for n in (21, 9)]
    request = Request(max_new_tokens=5, stop=frozenset(), limits=(5, 3), prefill_chunk=9)
    wanted = generate(model, prompts, request).tokens
    calls = Counter()

    def counted(name, kernel):
        def run(*arguments, **how):
            calls[name] += 1
            return kernel(*arguments, **how)

        return run

    def experts(x, chosen, weights, *matrices, rounded):
        return counted("experts", in_triton)(x, chosen, weights, Matrices(*matrices, rounded=rounded))

    monkeypatch.setattr("outpace.models.blocks.run_experts", experts)
    monkeypatch.setattr(attention, "use_kernel", lambda x: False)
    monkeypatch.setattr(attention, "use_triton", lambda x: True)
    monkeypatch.setattr(attention, "cached_attention", counted("attention", attention.cached_attention))
    draft = DDTree(BoundDFlash(random_dflash(model), model), 5, 2)
    for drafted in (None, draft):
        assert generate(GraphTarget(model), prompts, request, drafted).tokens == wanted
    assert calls["attention"] and bool(calls["experts"]) == (family == "gpt_oss")
