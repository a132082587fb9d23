"""Layout mistakes planted one by one and in pairs, and which of them the doctor names.

python tests/doctor/mistake_table.py [--singles]
"""

import contextlib
import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import planted
import torch
from planted import both, each, plant

from outpace.checkpoint.open import target_path
from outpace.doctor.examine import Examination, examine
from outpace.models import attention

DEFAULT = target_path("default")
HALF_ROPE = "RoPE in half the heads"


def rope(config, **message):
    return {key: config[key] | message for key in ("rope_parameters", "rope_scaling") if config.get(key)}


# mistake -> edit of the tensors, keys of config.json, the names that the doctor has for it (either direction)
WINDOW = ("window off by one: one key longer", "window off by one: one key shorter")
MISTAKES = {
    "high nibble first": (each("_blocks", planted.exchanged), None, ("high nibble first",)),
    "scale exponent off by one": (
        each("_scales", lambda x, config: x + 1), None,
        ("scale exponent off by one: halved", "scale exponent off by one: doubled"),
    ),
    "blocks of a row reversed": (
        both(each("_blocks", planted.backwards), each("_scales", planted.backwards)), None,
        ("blocks of each row reversed",),
    ),
    "gate and up exchanged": (
        both(*(each(f"gate_up_proj_{x}", planted.swapped_rows) for x in ("blocks", "scales", "bias"))), None,
        ("gate and up exchanged",),
    ),
    "query heads grouped cyclically": (
        planted.cyclic_heads, None,
        ("cyclic GQA mapping (query head h reads kv head h % K)", "cyclic GQA mapping, inverse order"),
    ),
    "sinks dropped": (each("sinks", planted.lost), None, ("sinks dropped",)),
    "window off by one": (None, lambda c: {"sliding_window": c["sliding_window"] - 1}, WINDOW),
    "YaRN's attention factor missing": (
        None, lambda c: rope(c, attention_factor=1.0), ("YaRN's attention factor missing",)
    ),
    HALF_ROPE: (None, None, ("RoPE in the first half of the heads alone",)),  # of the engine: see half_rope
    # other forms of the same, alone
    "blocks of a row reversed, scales in place": (
        each("_blocks", planted.backwards), None, ("blocks of each row reversed under their scales",)
    ),
    "scale exponent off by one, downwards": (
        each("_scales", lambda x, config: x - 1), None,
        ("scale exponent off by one: halved", "scale exponent off by one: doubled"),
    ),
    "window off by one, upwards": (None, lambda c: {"sliding_window": c["sliding_window"] + 1}, WINDOW),
    "RoPE pairs interleaved in half the heads": (
        planted.on_q_and_k(planted.half_to_neighbours), None,
        ("interleaved RoPE pairs in the first half of the heads",)
    ),
}  # fmt: skip
IN_PAIRS = list(MISTAKES)[:9]
PAIRS = list(itertools.combinations(IN_PAIRS, 2))


@contextlib.contextmanager
def half_rope():
    """The engine rotates the first half of the query heads and of the kv heads alone."""
    right = attention.rotate_heads

    def wrong(qkv, cos, sin, H, K, norms):
        q, k, v = right(qkv.clone(), cos, sin, H, K, norms)
        still_q, still_k, _ = right(qkv, torch.ones_like(cos), torch.zeros_like(sin), H, K, norms)
        return _half(q, still_q), _half(k, still_k), v

    attention.rotate_heads = wrong
    try:
        yield
    finally:
        attention.rotate_heads = right


def _half(rotated, still):
    """[B, T, heads, D]"""
    first = torch.arange(rotated.shape[2]) < -(-rotated.shape[2] // 2)
    return torch.where(first[:, None], rotated, still)


def checks(names, folder, healthy=DEFAULT, tokens=192):
    """The doctor's checks on a copy of `healthy` with mistakes planted in it."""
    edits = [MISTAKES[n][0] for n in names if MISTAKES[n][0] is not None]
    config = {}
    for name in names:
        if MISTAKES[name][1] is not None:
            config |= MISTAKES[name][1](planted.config_of(healthy))
    wrong = plant(healthy, folder, both(*edits), **config)
    with half_rope() if HALF_ROPE in names else contextlib.nullcontext():
        return list(examine(Examination(path=str(wrong), reference=str(healthy), tokens=tokens)))


def named(results):
    """Names of a run without the comparison with the reference, and of the comparison and the engine's check
    alone."""
    start = next(i for i, c in enumerate(results) if c.name == "configs")
    engine = [c for c in results if c.name == "engine against a plain forward"]
    return tuple(
        {name for c in part if c.status in ("warn", "fail") for name in c.mistakes}
        for part in (results[:start], engine + results[start:])
    )


def answers(names, results):
    """For both runs: the planted mistakes that are named, and names that were not planted."""
    right = {n for name in names for n in MISTAKES[name][2]}
    return [
        ([name for name in names if named_fields & set(MISTAKES[name][2])], named_fields - right)
        for named_fields in named(results)
    ]


if __name__ == "__main__":
    chosen = [(n,) for n in MISTAKES] if "--singles" in sys.argv else [*((n,) for n in MISTAKES), *PAIRS]
    for names in chosen:
        with tempfile.TemporaryDirectory() as place:
            results = checks(names, Path(place) / "wrong")
        print("+".join(names), flush=True)
        for (recognized, others), kind in zip(answers(names, results), ("without", "with"), strict=True):
            named_here = "ALL" if len(recognized) == len(names) else f"only {recognized}"
            print("   ", kind, named_here, others or "", flush=True)
