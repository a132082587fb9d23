"""Heads that copy before anything is learnt: how a text goes on, it has most often said before.

The induction heads of a trained model (Olsson et al. 2022, "In-context learning and induction heads") are
the work of two layers: heads of the first bring what the token before was, and heads of the second look for
places behind a token like the present one. To find that out takes a training millions of tokens. It is a
matter of a few directions, which can be written down. The model's head begins as the embedding, and so reads
their copies; it remains so only where Adam's steps are small next to its numbers (`TargetShape.head_lr`).
"""

import torch
from torch import Tensor

from outpace.models.attention import Attention
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded

NEAR, FAST = 5.0, 6  # bias at how many of a head's fastest frequencies: it looks at places by their distance
REACH, STILL = 512, 0.35  # over so many tokens, frequencies that turn by less tell tokens apart, not places
SHARP = 10.0**0.5  # length of the directions in which tokens are compared
COPIED = 4.0  # length of what is copied, where a token's own is 1
LOGIT = 32.0  # of a token that the last state is the embedding of
DIMMED = 0.3  # of a token's own part in the directions that hold the tokens before it
QUIET, SILENT = 0.3, 0.1  # of the random weights of heads that go by distance, and of those that compare


@torch.no_grad()
def copying_heads(model: Decoder, seed: int) -> None:
    """For new weights with biases, where the second layer has no window: the first query head of each of its
    groups copies what followed the present token elsewhere; the second looks by the token before that, and
    writes nothing yet. In half of the groups two tokens have to agree.

    Of the model's directions a third tells the token, and two thirds the two tokens before it."""
    C, K = model.config.hidden_size, model.config.num_kv_heads
    first, second = model.attentions[:2]
    slow = (model.inv * REACH < STILL).nonzero()[:, 0]
    compared = torch.cat((slow, slow + second.head_dim // 2))
    n = min(len(compared), C // 3 // K)
    basis = torch.linalg.qr(torch.randn(C, C, generator=seeded(seed)))[0].T
    own, before, earlier = basis[: 3 * K * n].view(3, K, n, C)
    assert model.lm_head is not None
    embedding, head = model.embed_tokens.weight, model.lm_head.weight
    assert isinstance(embedding, Tensor) and isinstance(head, Tensor)
    for directions in (before.flatten(0, 1), earlier.flatten(0, 1)):
        embedding -= (1 - DIMMED) * (embedding @ directions.T) @ directions
    head.copy_(embedding * (LOGIT / C))
    _bring(first, model.inv[:FAST], own, (before, earlier))
    for kv in range(K):
        agree = n if kv < K // 2 else n // 2
        behind = torch.cat((before[kv, :agree], earlier[kv, : n - agree]))
        _compare(second, kv, compared[:n], behind, torch.cat((own[kv, :agree], before[kv, : n - agree])))
        _write(second, kv, 0, own[kv], COPIED * own[kv])


def _bring(attention: Attention, frequencies: Tensor, own: Tensor, to: tuple[Tensor, Tensor]) -> None:
    """Two heads of each group look one token back, and two: keys have `NEAR` at the real part of the fastest
    frequencies, and queries that vector turned back by the distance: their product is highest there."""
    bias, weight, D = attention.qkv_proj.bias, attention.qkv_proj.weight, attention.head_dim
    assert bias is not None and isinstance(weight, Tensor)
    n, group = len(frequencies), attention.heads // attention.kv_heads
    weight[: (attention.heads + attention.kv_heads) * D] *= QUIET
    for kv in range(attention.kv_heads):
        bias[(attention.heads + kv) * D :][:n] = NEAR
        for distance in range(1, min(group, 2) + 1):
            query = bias[(kv * group + distance - 1) * D :]
            query[:n] = NEAR * torch.cos(distance * frequencies)
            query[D // 2 : D // 2 + n] = -NEAR * torch.sin(distance * frequencies)
            _write(attention, kv, distance - 1, own[kv], to[distance - 1][kv])


def _compare(attention: Attention, kv: int, places: Tensor, behind: Tensor, present: Tensor) -> None:
    """Keys tell the tokens `behind` them, and are sought by the `present` ones, or a token earlier."""
    weight, D = attention.qkv_proj.weight, attention.head_dim
    assert isinstance(weight, Tensor)
    group = attention.heads // attention.kv_heads
    sought = [(kv * group, present), (kv * group + 1, behind)][:group]
    for head, directions in [(attention.heads + kv, behind), *sought]:
        rows = weight[head * D : (head + 1) * D]
        rows *= SILENT
        rows[places] = SHARP * directions


def _write(attention: Attention, kv: int, which: int, read: Tensor, to: Tensor) -> None:
    """A query head of a group reads n directions of the tokens that it looks at, and writes along others."""
    weight, out, D = attention.qkv_proj.weight, attention.o_proj.weight, attention.head_dim
    assert isinstance(weight, Tensor) and isinstance(out, Tensor)
    value = (attention.heads + attention.kv_heads + kv) * D
    weight[value : value + len(read)] = read
    head = (kv * (attention.heads // attention.kv_heads) + which) * D
    out[:, head : head + len(read)] = to.T
