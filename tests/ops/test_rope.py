"""Rotary tables against the published formulas in float64 and transformers', to position 131,072."""

import math

import pytest
import tiny
import torch

from outpace.models.config import parse_rope, rope_to_hf
from outpace.ops import rope
from outpace.ops.rope import (
    RopeConfig,
    inverse_frequencies,
    reference_rotate,
    rope_tables,
    rotate,
    rotate_heads,
)

POSITIONS = torch.tensor([0, 1, 2, 31, 32, 33, 4095, 4096, 65536, 131071, 131072])
GPT_OSS_20B = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
KINDS = {
    "gpt-oss": (GPT_OSS_20B, 64),
    "gpt-oss, truncated": (GPT_OSS_20B | {"truncate": True}, 64),
    "llama-3.1": (LLAMA_31, 128),
    "tiny yarn": (tiny.GPT_OSS["rope_parameters"], 8),
    "tiny llama3": (tiny.LLAMA["rope_parameters"], 8),
    "default": ({"rope_type": "default", "rope_theta": 1e6}, 128),
}


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_formulas(kind):
    value, head_dim = KINDS[kind]
    rope = parse_rope({"rope_parameters": value})
    turns, scale = tiny.exact_frequencies(value, head_dim)
    inv = inverse_frequencies(rope, head_dim)
    assert inv.dtype == torch.float64 and torch.allclose(inv, turns, rtol=1e-12, atol=0)
    assert rope.concentration == pytest.approx(scale, abs=1e-12)
    cos, sin = rope_tables(POSITIONS, inv, rope.concentration)
    for row, position in enumerate(POSITIONS.tolist()):
        for i, w in enumerate(turns.tolist()):
            assert float(cos[row, i]) == pytest.approx(math.cos(position * w) * scale, abs=1e-6)
            assert float(sin[row, i]) == pytest.approx(math.sin(position * w) * scale, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_against_transformers(kind):
    """Their frequencies are float32; at 131,072 that alone moves an angle by up to 131,072 * 2^-24."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    value, head_dim = KINDS[kind]
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters=dict(value),
    )  # fmt: skip
    rope = parse_rope({"rope_parameters": value, "max_position_embeddings": 131072})
    inv = inverse_frequencies(rope, head_dim)
    if kind != "default":
        theirs, scale = ROPE_INIT_FUNCTIONS[value["rope_type"]](config, torch.device("cpu"))
        assert torch.allclose(inv.float(), theirs, rtol=2e-6, atol=0)
        assert rope.concentration == pytest.approx(scale, abs=1e-7)
    table = LlamaRotaryEmbedding(config)
    cos, sin = table(torch.zeros(1, 1), POSITIONS[None])
    ours = rope_tables(POSITIONS, inv, rope.concentration)
    allowed = 1e-6 + 2 * POSITIONS[:, None] * 2.0**-23
    assert ((cos[0, :, : head_dim // 2] - ours[0]).abs() <= allowed).all()
    assert ((sin[0, :, : head_dim // 2] - ours[1]).abs() <= allowed).all()


def test_gpt_oss_concentration():
    assert parse_rope({"rope_parameters": GPT_OSS_20B}).concentration == pytest.approx(1.3466, abs=1e-4)


def test_rotation_pairs_dimension_i_with_its_half():
    x = torch.zeros(1, 1, 1, 8)
    x[..., 1] = 1.0
    turned = rotate(x, torch.full((1, 1, 4), 0.6), torch.full((1, 1, 4), 0.8))
    assert turned.flatten().tolist() == pytest.approx([0, 0.6, 0, 0, 0, 0.8, 0, 0])


def test_scores_depend_on_distance_alone_at_any_position():
    rope = parse_rope({"rope_parameters": GPT_OSS_20B})
    inv = inverse_frequencies(rope, 64)
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)

    def score(position):
        tables = [rope_tables(torch.tensor([[p]]), inv, rope.concentration) for p in (position + 9, position)]
        return float((rotate(q, *tables[0]) * rotate(k, *tables[1])).sum())

    assert all(score(p) == pytest.approx(score(0), abs=2e-5) for p in (4096, 65536, 131072))


@pytest.mark.parametrize("kind", KINDS)
def test_configs_round_trip(kind):
    rope = parse_rope({"rope_parameters": KINDS[kind][0]})
    both = rope_to_hf(rope)
    assert parse_rope(both) == rope
    assert parse_rope({k: v for k, v in both.items() if k != "rope_parameters"}) == rope


def test_linear_scaling_divides_positions():
    plain, scaled = RopeConfig(theta=1e4), RopeConfig(theta=1e4, kind="linear", factor=4.0)
    assert torch.allclose(inverse_frequencies(plain, 8) / 4, inverse_frequencies(scaled, 8), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [6, 20, 32])
def test_the_kernel_turns_and_turns_back_as_the_reference(dtype, head_dim):
    rng = torch.Generator().manual_seed(head_dim)
    x = torch.randn(2, 5, 4, head_dim, generator=rng).to(dtype)
    dy = torch.randn(2, 5, 4, head_dim, generator=rng).to(dtype)
    angles = torch.randn(1, 5, head_dim // 2, generator=rng)
    cos, sin = angles.cos() * 1.3, angles.sin() * 1.3

    def grown(turn):
        leaf = x.clone().requires_grad_()
        y = turn(leaf, cos, sin)
        y.backward(dy)
        return y.detach(), leaf.grad

    exact = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip(grown(rotate), grown(reference_rotate), strict=True):
        assert ours.dtype == dtype and (ours - theirs).abs().max() < exact

    qkv = x[:, :, :3].reshape(2, 5, -1)  # one query, one key and one value head
    q, k, v = rotate_heads(qkv.clone().requires_grad_(), cos, sin, 1, 1)
    wanted = reference_rotate(x, cos, sin)
    assert (torch.cat((q, k), 2) - wanted[:, :, :2]).abs().max() < exact and torch.equal(v, x[:, :, 2:3])


def test_without_the_kernel_some_heads_turn_and_turn_back_as_the_reference(monkeypatch):
    """As on a GPU: one function for the queries and the keys, with the values beside them."""
    monkeypatch.setattr(rope, "use_kernel", lambda x, **_: False)
    x, angles = torch.randn(2, 7, 5, 16, requires_grad=True), torch.randn(2, 7, 8)
    cos, sin, dy = angles.cos(), angles.sin(), torch.randn(2, 7, 5, 16)
    got = rope._Rotated.apply(x, cos, sin, 3)
    exact = torch.cat((reference_rotate(x[:, :, :3], cos, sin), x[:, :, 3:]), dim=2)
    assert (got - exact).abs().max() < 1e-6
    way, reference = (torch.autograd.grad(y, x, dy)[0] for y in (got, exact))
    assert (way - reference).abs().max() < 1e-6
