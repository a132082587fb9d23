"""Drafts to measure: the given one, with and without its window, and gpt-oss-20b's shape."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outpace.bench.machine import parameters
from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.models.config import FULL
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors, parse_config
from outpace.models.published import PUBLISHED
from outpace.ops.sampling import seeded

GIVEN, UNWINDOWED, PUBLISHED_20B = SHAPES = ("draft", "draft, full attention", "gpt-oss-20b")


def published_draft() -> DFlashConfig:
    """gpt-oss-20b's: 8 layers of full attention, blocks of 8. Heads and MLP width as published with it."""
    target = parse_config(PUBLISHED["gpt-oss-20b"])
    return DFlashConfig(
        hidden_size=target.hidden_size,
        num_layers=8,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=7680,
        vocab_size=target.vocab_size,
        rope=target.rope,
        rms_norm_eps=target.rms_norm_eps,
        block_size=8,
        target_layer_ids=(1, 6, 11, 16, 21),
        num_target_layers=target.num_layers,
        mask_token_id=200000,
        max_position_embeddings=target.max_position_embeddings,
    )


def random_pair(config: DFlashConfig, like: str, seed: int) -> tuple[DFlash, Decoder]:
    """A draft of random bfloat16 weights, and of its target the embedding and the head alone."""
    rng = seeded(seed)
    with torch.device("meta"):
        draft, ends = DFlash(config), Decoder(parse_config(PUBLISHED[like]), [])
    for module in (draft, ends):
        for name, old in list(module.named_parameters()):
            owner = module.get_submodule(name.rpartition(".")[0])
            value = torch.empty(old.shape, dtype=torch.bfloat16)
            value = value.fill_(1.0) if old.dim() == 1 else _noise(value, rng)
            setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))
    return draft.eval(), ends.eval()


def _noise(into: Tensor, rng: torch.Generator) -> Tensor:
    """Uniform, with products of unit vectors that are about one."""
    most = (3 / into.shape[-1]) ** 0.5
    return into.uniform_(-most, most, generator=rng)


def needed_bytes(draft: DFlash, target: Decoder, longest: int) -> dict[str, int]:
    """By part, at a context of `longest`: what the largest cell holds at once."""
    config, size = draft.config, target.dtype.itemsize
    windows = [config.window(i) for i in range(config.num_layers)]
    rows = [min(longest, w + config.block_size) if w else longest for w in windows]
    kv_row = 2 * config.num_kv_heads * config.head_dim * size
    return {
        "weights": sum(t.nbytes for m in (draft, target) for _, t in named_tensors(m)),
        "keys and values": sum(rows) * kv_row,
        "fused states": longest * config.hidden_size * size,
        "one layer's rows in the making": 6 * max(rows) * kv_row,
    }


def pairs(
    shapes: tuple[str, ...], draft: DFlash, target: Decoder, seed: int
) -> Iterator[tuple[str, DFlash, Decoder]]:
    """The shapes asked for, made one at a time: the large one is dropped before the next comes. A draft
    without a window is not measured twice."""
    config = draft.config
    windowed = any(config.window(i) for i in range(config.num_layers))
    for shape in shapes:
        if shape == GIVEN:
            yield shape, draft, target
        elif shape == PUBLISHED_20B:
            yield shape, *random_pair(published_draft(), shape, seed)
        elif windowed:
            twin = copy.copy(draft)  # the same modules: a window is the session's matter
            twin.config = replace(config, layer_types=(FULL,) * config.num_layers, sliding_window=0)
            yield shape, twin, target


def describe(draft: DFlash, target: Decoder, longest: int) -> dict[str, Any]:
    config = draft.config
    weights = dict(named_tensors(draft))
    return {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "windows": [config.window(i) for i in range(config.num_layers)],
        "parameters": parameters(draft),
        "weights": sorted({str(t.dtype).removeprefix("torch.") for t in weights.values() if t.dim() > 1}),
        "keys_and_values": str(target.dtype).removeprefix("torch."),
        "needed_bytes": needed_bytes(draft, target, longest),
    }


def check_positions(name: str, draft: DFlash, context: int) -> None:
    last, end = context + draft.block_size, draft.config.max_position_embeddings
    if last > end:
        raise ValueError(
            f"draft-context: a block behind context {context} reaches position {last}, and the positions of "
            f"{name} end at {end}: ask for shorter contexts"
        )


def check_memory(name: str, needed: dict[str, int], limit_gib: float) -> None:
    total = sum(needed.values())
    if total > limit_gib * 2**30:
        parts = ", ".join(f"{part} {n / 2**30:.1f}" for part, n in needed.items())
        raise ValueError(
            f"draft-context: {name} takes {total / 2**30:.1f} GiB ({parts}), and memory_gib is "
            f"{limit_gib:g}: ask for shorter contexts, or leave this shape out"
        )
