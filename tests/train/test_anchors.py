"""Anchors: which are drawn; and the block mask, in its parts, against a brute-force grid."""

from types import SimpleNamespace

import pytest
import torch

from outpace.ops.flash import block_attend, dense_mask, reference_block_attend
from outpace.train.anchors import PART_QUERIES, draw_anchors, pack

FEATURES, C, V = 3, 10, 97


def sample(T, prompt_length, seed=0, offset=0):
    rng = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        tokens=torch.randint(V, (T,), generator=rng),
        prompt_length=prompt_length,
        aux=torch.randn(FEATURES, T, C, generator=rng),
        offset=offset,
    )


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_anchors_have_loss_on_themselves_and_their_successor():
    assert draw_anchors(3, 9, 100, rng()).tolist() == [3, 4, 5, 6, 7]
    assert draw_anchors(8, 9, 100, rng()).tolist() == []
    assert draw_anchors(9, 9, 100, rng()).tolist() == []
    drawn = [draw_anchors(10, 60, 7, rng(i)) for i in range(200)]
    for x in drawn:
        assert len(x) == 7
        assert (x[1:] > x[:-1]).all()
    assert {int(a) for x in drawn for a in x} == set(range(10, 59))


def test_pack():
    rows = [sample(19, 4, 1), sample(6, 5, 2), sample(31, 2, 3, offset=1000)]  # the second has no anchor
    packed = pack(rows, 5, 6, 25, rng())
    assert packed.anchors.shape == (12,)
    assert packed.row_tokens == 19 + 6 + 25
    for span, row in zip(packed.spans, (rows[0], rows[2]), strict=True):
        end = int(span.anchors[-1])
        context = slice(span.context, span.context + end)
        assert torch.equal(packed.aux[:, context], row.aux[:, :end])
        assert packed.context_positions[context].tolist() == [row.offset + i for i in range(end)]
        tokens = row.tokens[:25]
        for i, a in enumerate(span.anchors.tolist()):
            b = span.block + i
            assert packed.anchors[b] == tokens[a]
            assert packed.positions[b].tolist() == [row.offset + a + j for j in range(5)]
            for j in range(1, 5):
                assert packed.valid[b, j - 1] == (a + j < len(tokens))
                assert packed.labels[b, j - 1] == (tokens[a + j] if a + j < len(tokens) else 0)
    assert not packed.valid.all()


def test_pack_picks_features():
    packed = pack([sample(19, 4)], 5, 6, None, rng(), [2, 0])
    whole = pack([sample(19, 4)], 5, 6, None, rng())
    assert torch.equal(packed.aux, whole.aux[[2, 0]])


def test_rows_without_anchors_are_refused():
    with pytest.raises(ValueError, match="two tokens"):
        pack([sample(6, 5)], 4, 3, None, rng())


def brute_force(packed, B, window):
    A, S = packed.anchors.shape[0], packed.context_positions.shape[0]
    grid = torch.zeros(A * B, S + A * B, dtype=torch.bool)
    for n, span in enumerate(packed.spans):
        ends = packed.spans[n + 1].context if n + 1 < len(packed.spans) else S
        for i, anchor in enumerate(span.anchors.tolist()):
            for j in range(B):
                row = (span.block + i) * B + j
                for key in range(ends - span.context):
                    near = not window or key > anchor + j - window
                    grid[row, span.context + key] = key < anchor and near
                grid[row, S + (span.block + i) * B : S + (span.block + i + 1) * B] = True
    return grid


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("prompt_length", [0, 11])
def test_mask_is_the_brute_force_grid(window, prompt_length, monkeypatch):
    monkeypatch.setattr("outpace.train.anchors.PART_QUERIES", 12)
    B = 5
    rows = [sample(30, prompt_length, 1), sample(14, prompt_length, 2), sample(53, prompt_length, 3)]
    packed = pack(rows, B, 9, None, rng())
    parts = packed.parts(window)
    A, S = len(packed.anchors), len(packed.context_positions)
    assert torch.equal(dense_mask(parts, A * B, S, B, torch.device("cpu")), brute_force(packed, B, window))
    seen = torch.zeros(A * B, S)
    for p in parts:  # no key twice, or the merge would count it twice
        seen[p.first : p.last, p.begin : p.end] += 1
    assert seen.max() == 1


def test_parts_follow_the_anchors():
    """The ragged edge alone is masked: with many anchors the masks hold far less than the grid."""
    packed = pack([sample(512, 8)], 8, 400, None, rng())
    parts = packed.parts()
    masked = sum(p.mask.numel() for p in parts if p.mask is not None)
    assert masked < 0.1 * 3200 * 512
    assert sum((p.last - p.first) * (p.end - p.begin) for p in parts) < 0.6 * 3200 * 512
    assert max(p.last - p.first for p in parts) <= PART_QUERIES


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_attention_and_its_gradients(window, dtype, monkeypatch):
    monkeypatch.setattr("outpace.train.anchors.PART_QUERIES", 12)
    B, H, K, D = 5, 6, 2, 8
    packed = pack([sample(30, 0, 1), sample(53, 4, 2)], B, 9, None, rng())
    N, S = len(packed.anchors) * B, len(packed.context_positions)
    shapes = ((N, H, D), (N, K, D), (N, K, D), (S, K, D), (S, K, D))
    inputs = [torch.randn(s, generator=rng(i)).to(dtype) for i, s in enumerate(shapes)]
    grad = torch.randn(N, H * D, generator=rng(9)).to(dtype)
    found = []
    for f in (block_attend, reference_block_attend):
        given = [x.clone().requires_grad_() for x in inputs]
        out = f(*given, packed.parts(window), B, D**-0.5)
        assert out.dtype == dtype
        found.append((out.detach(), *torch.autograd.grad(out, given, grad)))
    close = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


def test_blocks_without_any_context():
    B, H, K, D = 4, 6, 2, 8
    x = [torch.randn(s) for s in ((B, H, D), (B, K, D), (B, K, D), (0, K, D), (0, K, D))]
    out = block_attend(*x, (), B, 1.0)
    torch.testing.assert_close(out, reference_block_attend(*x, (), B, 1.0))
