"""Anchors: which are drawn; and the block mask, in its parts, against a brute-force grid."""

from itertools import repeat
from types import SimpleNamespace

import pytest
import torch

from outpace.ops.blocks import Layout, block_attend, reference_block_attend
from outpace.train.data import draw_anchors, pack

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


def test_the_first_are_taken_before_any_other_where_they_may_be_anchors():
    first = torch.tensor([5, 30, 30, 58, 59, 200, 9])  # 30 twice; 9 is of the prompt, 59 the last token
    for i in range(50):
        drawn = draw_anchors(10, 60, 7, rng(i), first).tolist()
        assert len(set(drawn)) == 7 and drawn == sorted(drawn) and {30, 58} <= set(drawn)
    assert draw_anchors(10, 60, 2, rng(), first).tolist() == [30, 58]
    of_many = [draw_anchors(10, 60, 5, rng(i), torch.arange(20, 40)).tolist() for i in range(50)]
    assert {a for drawn in of_many for a in drawn} == set(range(20, 40))


def test_pack():
    rows = [sample(19, 4, 1), sample(6, 5, 2), sample(31, 2, 3, offset=1000)]  # the second has no anchor
    packed = pack(rows, 5, 6, 25, repeat(rng()))
    assert packed.anchors.shape == (12,)
    assert packed.row_tokens == 19 + 6 + 25
    layout = packed.layout
    assert layout.first.tolist() == [0, 6, 12] and layout.block == 5
    for i, row in enumerate((rows[0], rows[2])):
        anchors = layout.seen[layout.first[i] : layout.first[i + 1]]
        end = int(anchors[-1])
        context = slice(int(layout.context[i]), int(layout.context[i + 1]))
        assert context.stop - context.start == end
        assert torch.equal(packed.aux[:, context], row.aux[:, :end])
        assert packed.context_positions[context].tolist() == [row.offset + i for i in range(end)]
        tokens = row.tokens[:25]
        for b, a in enumerate(anchors.tolist(), int(layout.first[i])):
            assert packed.anchors[b] == tokens[a]
            assert packed.positions[b].tolist() == [row.offset + a + j for j in range(5)]
            for j in range(1, 5):
                assert packed.valid[b, j - 1] == (a + j < len(tokens))
                assert packed.labels[b, j - 1] == (tokens[a + j] if a + j < len(tokens) else 0)
    assert not packed.valid.all()


def test_pack_picks_features():
    packed = pack([sample(19, 4)], 5, 6, None, repeat(rng()), [2, 0])
    whole = pack([sample(19, 4)], 5, 6, None, repeat(rng()))
    assert torch.equal(packed.aux, whole.aux[[2, 0]])


def test_rows_without_anchors_are_refused():
    with pytest.raises(ValueError, match="two tokens"):
        pack([sample(6, 5)], 4, 3, None, repeat(rng()))


def brute_force(rows, packed, B, window):
    """[A*B, S + A*B] from the positions alone."""
    A, S = packed.anchors.shape[0], packed.context_positions.shape[0]
    grid = torch.zeros(A * B, S + A * B, dtype=torch.bool)
    starts = packed.layout.context.tolist()
    for row, start, end, first, last in zip(
        rows, starts, starts[1:], packed.layout.first.tolist(), packed.layout.first.tolist()[1:], strict=False
    ):
        for b in range(first, last):
            anchor = int(packed.positions[b, 0]) - row.offset
            for j in range(B):
                for key in range(end - start):
                    near = not window or key > anchor + j - window
                    grid[b * B + j, start + key] = key < anchor and near
            grid[b * B : b * B + B, S + b * B : S + b * B + B] = True
    return grid


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("prompt_length", [0, 11])
def test_mask_is_the_brute_force_grid(window, prompt_length):
    B = 5
    rows = [
        sample(30, prompt_length, 1),
        sample(14, prompt_length, 2),
        sample(53, prompt_length, 3, offset=70),
    ]
    packed = pack(rows, B, 9, None, repeat(rng()))
    assert torch.equal(packed.layout.grid(window), brute_force(rows, packed, B, window))


def dense(q, k, v, context_k, context_v, layout, window, scale):
    """In float64 over the whole grid: the brute-force twin of both forms."""
    G = q.shape[1] // k.shape[1]
    keys, values = (
        torch.cat(x).repeat_interleave(G, dim=1).double() for x in ((context_k, k), (context_v, v))
    )
    scores = torch.einsum("nhd,shd->hns", q.double(), keys) * scale
    weights = scores.masked_fill(~layout.grid(window), -torch.inf).softmax(-1)
    return torch.einsum("hns,shd->nhd", weights, values).flatten(1)


@pytest.mark.parametrize("window", [0, 7, 90])
@pytest.mark.parametrize("D", [8, 32, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", [block_attend, reference_block_attend])
def test_block_attention_and_its_gradients(attend, dtype, D, window):
    """Contexts past a tile of keys, rows that no tile divides, a window within and past a tile."""
    B, H, K = 5, 6, 2
    packed = pack([sample(30, 0, 1), sample(203, 4, 2), sample(14, 2, 3)], B, 9, None, repeat(rng()))
    N, S = len(packed.anchors) * B, len(packed.context_positions)
    shapes = ((N, H, D), (N, K, D), (N, K, D), (S, K, D), (S, K, D))
    inputs = [(2 * torch.randn(s, generator=rng(i))).to(dtype) for i, s in enumerate(shapes)]
    grad = torch.randn(N, H * D, generator=rng(9)).to(dtype)
    items = []
    for f in (attend, dense):
        given = [x.clone().requires_grad_() for x in inputs]
        out = f(*given, packed.layout, window, D**-0.5)  # type: ignore[call-arg]
        items.append((out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))))
    bar = 3e-6 if dtype == torch.float32 else 2**-7
    for ours, truth in zip(*items, strict=True):
        assert ours.dtype == dtype
        assert (ours - truth).abs().max() <= bar * truth.abs().max()


def test_an_anchor_that_sees_nothing():
    """The first token of a text as anchor: its block has no context at all."""
    B, H, K, D = 4, 6, 2, 8
    layout = Layout(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([0]), B)
    x = [torch.randn(s) for s in ((B, H, D), (B, K, D), (B, K, D), (0, K, D), (0, K, D))]
    truth = dense(*x, layout, 0, 1.0)  # type: ignore[call-arg]
    for f in (block_attend, reference_block_attend):
        torch.testing.assert_close(f(*x, layout, 0, 1.0).double(), truth, atol=1e-6, rtol=1e-6)  # type: ignore[call-arg]


def test_threads_do_not_change_the_gradients():
    B, H, K, D = 3, 4, 2, 16
    packed = pack([sample(90, 0, i) for i in range(5)], B, 20, None, repeat(rng()))
    N, S = len(packed.anchors) * B, len(packed.context_positions)
    shapes = ((N, H, D), (N, K, D), (N, K, D), (S, K, D), (S, K, D))
    inputs = [torch.randn(s, generator=rng(i)).requires_grad_() for i, s in enumerate(shapes)]
    items, before = [], torch.get_num_threads()
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        out = block_attend(*inputs, packed.layout, 0, 0.25)  # type: ignore[call-arg]
        items.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    torch.set_num_threads(before)
    for other in items[1:]:
        assert all(torch.equal(a, b) for a, b in zip(items[0], other, strict=True))
