"""Rotary positions of cached forwards: keys in the cache against a recomputation at the cache's offset.

Attention depends on distances alone, so logits are the same at every offset, and at a wrong one: only the
keys show it.
"""

import pytest
import tiny
import torch

from outpace.kv.tree import Tree
from outpace.ops.norm import reference_rms_norm
from outpace.ops.rope import reference_rotate

T, PARENTS = 12, [0, 0, 1, 0]


def recomputed_keys(attention, x, positions, model):
    """x [B, n, C], the attention's input -> keys [B, K, n, D] rotated at positions [n], in float64 angles."""
    H, K, D = attention.heads, attention.kv_heads, attention.head_dim
    k = attention.qkv_proj(x)[..., H * D : (H + K) * D].unflatten(-1, (K, D))
    if attention.k_norm is not None:
        k = reference_rms_norm(k, attention.k_norm.weight, attention.k_norm.eps)
    angles = positions.double()[:, None] * model.inv
    cos, sin = (f(angles).float()[None] * model.config.rope.concentration for f in (torch.cos, torch.sin))
    return reference_rotate(k, cos, sin).transpose(1, 2)


@pytest.mark.parametrize("offset", [0, 130_688])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_cached_keys_are_rotated_at_the_caches_offset(family, offset, monkeypatch):
    model, tokens = tiny.target(family), tiny.tokens(2, T + len(PARENTS))
    monkeypatch.setattr(model, "native", False)  # for the hooks; test_native_step.py compares the two
    inputs = [[] for _ in model.layers]
    hooks = [
        block.self_attn.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        for block, seen in zip(model.layers, inputs, strict=True)
    ]
    cache = model.make_cache(2, 30, slack=8, offset=offset)
    for piece in tokens[:, :T].split([7, 1, 4], dim=1):
        model(piece, cache)
    model(tokens[:, T:], cache, tree=Tree(torch.tensor([PARENTS] * 2)))
    for hook in hooks:
        hook.remove()
    positions = offset + torch.cat((torch.arange(T), T + torch.tensor([0, 1, 2, 1])))
    for block, seen, layer in zip(model.layers, inputs, cache.layers, strict=True):
        wanted = recomputed_keys(block.self_attn, torch.cat(seen, 1), positions, model)
        # all but what a ring lost
        held = torch.arange(max(0, T + len(PARENTS) - layer.size), T + len(PARENTS))
        assert len(held) >= 12
        assert (layer.k[:, :, held % layer.size] - wanted[:, :, held]).abs().max() < 1e-4
