"""The known mistakes of a port: name, the fields of the reading that undo it, and the fix.

Messages, both searches (`search.py` with a reference, `prediction.py` with a text), the tests and the table
in the docs use these names.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from outpace.doctor.reference import ALL_BIASES, BLOCK, Reading, concentration
from outpace.models.config import ModelConfig
from outpace.ops.rope import RopeConfig

Half = Literal["attention", "mlp"]
HALVES: tuple[Half, ...] = ("attention", "mlp")
Names = tuple[str, ...]  # mistakes made together; () is the weights as they are
AS_IS: Names = ()

COMMON_EPS = (1e-5, 1e-6)
COMMON_THETAS = (1e4, 1.5e5, 5e5, 1e6)  # Llama 2, gpt-oss, Llama 3, Qwen3
CYCLIC = "cyclic GQA mapping (query head h reads kv head h % K)"
SINKS_DROPPED, ZERO_SINKS = "sinks dropped", "sinks of zero"
YARN_FACTOR = "YaRN's attention factor missing"
LONGER, SHORTER = "window off by one: one key longer", "window off by one: one key shorter"
SWAPPED = "gate and up exchanged"
INTERLEAVED_ROWS = "gate and up rows read as interleaved, not halves"
HALF_ROWS = "gate and up rows read as halves, not interleaved"
DOUBLED, HALVED = "scale exponent off by one: doubled", "scale exponent off by one: halved"
SPLIT, UNSPLIT = "split nibbles (GGML's order)", "split nibbles undone (interleaved order)"
HIGH_FIRST = "high nibble first"
REVERSED = "blocks of each row reversed"
REVERSED_ALONE = "blocks of each row reversed under their scales"
NIBBLE_MISTAKES = {  # name -> (one of NIBBLE_ORDERS, fix)
    SPLIT: ("from split", "repack: byte j holds values 2j (low nibble) and 2j + 1, not j and 16 + j"),
    UNSPLIT: ("to split", "undo a conversion from GGML's order: the file was in this order already"),
    HIGH_FIRST: ("high first", "exchange the nibbles of every byte: the low one holds value 2j"),
    "bytes of each block reversed": ("bytes reversed", "reverse the 16 bytes of every block"),
}
BLOCK_MISTAKES = {  # name -> (a BlockOrder, fix)
    REVERSED: ("reversed", "reverse `_blocks` and `_scales` along their axis of blocks"),
    REVERSED_ALONE: (
        "reversed, scales in place",
        "reverse `_blocks` along the axis of blocks, not `_scales`",
    ),
}
GATE_UP_ALONE, DOWN_ALONE = " of gate and up alone", " of down alone"


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """`change`: the fields of the right Reading that the mistake gets wrong."""

    name: str
    change: dict[str, Any]
    fix: str


def mistakes_of(half: Half, r: Reading, config: ModelConfig) -> dict[str, Mistake]:
    """Those that one half of a layer can have, by name; `r` is its right reading."""
    rows = _attention(r, config) if half == "attention" else _mlp(r, config)
    return {name: Mistake(name=name, change=change, fix=fix) for name, change, fix in rows}


def apply(names: Iterable[str], known: dict[str, Mistake], reading: Reading) -> Reading:
    """The reading under several mistakes; names that this half of the layer cannot have change nothing."""
    for name in names:
        reading = replace(reading, **known[name].change) if name in known else reading
    return reading


def pairs(known: dict[str, Mistake]) -> list[Names]:
    """Every two that do not get the same field wrong."""
    return [
        (a.name, b.name) for a, b in combinations(known.values(), 2) if not a.change.keys() & b.change.keys()
    ]


Row = tuple[str, dict[str, Any], str]


def _attention(r: Reading, config: ModelConfig) -> Iterator[Row]:
    H, K, D = r.heads, r.kv_heads, r.head_dim
    scale = "multiply q.k by head_dim ** -0.5; head_dim is a value of config.json"
    yield "no causal mask", {"causal": False}, "mask the keys after the query"
    yield "no attention scale", {"scale": 1.0}, scale
    if config.hidden_size != H * D:
        yield "attention scale from hidden_size / heads", {"scale": (config.hidden_size / H) ** -0.5}, scale
    yield "input norm without its weights", {"norm_weights": False}, "multiply by input_layernorm.weight"
    yield from _eps(r)
    if 1 < K < H:
        by_kv = (
            "order q's rows, o's columns and the sinks by kv head: heads k*G .. k*G + G - 1 read kv head k"
        )
        yield CYCLIC, {"groups": "cyclic"}, by_kv
        if H != K * K:
            yield "cyclic GQA mapping, inverse order", {"groups": "cyclic, inverse"}, by_kv
    if r.rope is not None:
        yield from _rope(r.rope, D)
        in_halves = "put the rows of q and k of each head in halves: 0, 2, 4, .., 1, 3, 5, .."
        yield "interleaved RoPE pairs (2i, 2i + 1)", {"pairs": "neighbours"}, in_halves
        for half in ("first half", "second half"):
            rotated = {"rope_heads": half}
            yield f"RoPE in the {half} of the heads alone", rotated, "rotate every head of q and of k"
            paired = {"pairs": "neighbours", "pair_heads": half}
            yield f"interleaved RoPE pairs in the {half} of the heads", paired, in_halves
        in_pairs = "put the rows of q and k of each head in pairs: 0, D/2, 1, D/2 + 1, .."
        yield "q/k rows permuted, halves to pairs", {"qk_rows": "to neighbours"}, in_pairs
        if r.qk_norm != "none":  # without one, it is the same as rotating neighbours
            yield "q/k rows permuted, pairs to halves", {"qk_rows": "from neighbours"}, in_halves
    if r.sinks != "none":
        yield SINKS_DROPPED, {"sinks": "none"}, "copy self_attn.sinks: exp(sink) is part of the denominator"
        yield ZERO_SINKS, {"sinks": "zero"}, "copy self_attn.sinks"
        yield "sinks scaled like the scores", {"sinks": "scaled"}, "add the sinks after the attention scale"
    if r.qk_norm != "none":
        norm = "apply q_norm and k_norm, with their weights, to each head before RoPE"
        yield "missing q/k norm", {"qk_norm": "none"}, norm
        yield "q/k norm after RoPE", {"qk_norm": "after rope"}, norm
        yield "q/k norm without its weights", {"qk_norm": "without weights"}, norm
    if config.sliding_window:
        other = 0 if r.window else config.sliding_window
        yield "wrong window parity", {"window": other}, "copy `layer_types`"
        for name, window in ((LONGER, r.window + 1), (SHORTER, r.window - 1)):
            if r.window and window:
                yield name, {"window": window}, "set `sliding_window`: it counts the query's own key"
    if config.attention_bias:
        for name, lost in (("q, k and v biases", "qkv"), ("o bias", "o"), ("attention biases", "qkvo")):
            yield f"missing {name}", {"biases": ALL_BIASES - set(lost)}, "copy the biases"


def _rope(rope: RopeConfig, head_dim: int) -> Iterator[Row]:
    copied = "copy `rope_scaling` of the original config.json"
    yield "no RoPE", {"rope": None}, "rotate q and k"
    for theta in COMMON_THETAS:
        if theta != rope.theta:
            yield f"RoPE base {theta:,.0f}", {"rope": replace(rope, theta=theta)}, "set `rope_theta`"
    if rope.kind != "default":
        yield "no RoPE scaling at all", {"rope": RopeConfig(theta=rope.theta)}, copied
    if rope.kind != "factors" and head_dim % 4 == 0:
        yield "RoPE in half of each head's dimensions", {"rope_share": 0.5}, "rotate all dimensions"
    if rope.kind == "yarn":
        default = replace(rope, attention_factor=None)
        right = concentration(rope) == concentration(default)
        factor = replace(rope, attention_factor=1.0) if right else default
        if right or concentration(rope) == 1:
            yield YARN_FACTOR, {"rope": factor}, "multiply cos and sin by 0.1 ln(factor) + 1"
        other = "not truncated" if rope.truncate else "truncated"
        yield f"YaRN's range {other}", {"rope": replace(rope, truncate=not rope.truncate)}, copied
        yield "linear scaling instead of YaRN", {"rope": replace(rope, kind="linear")}, copied


def _mlp(r: Reading, config: ModelConfig) -> Iterator[Row]:
    weights = "multiply by post_attention_layernorm.weight"
    yield "post-attention norm without its weights", {"norm_weights": False}, weights
    yield SWAPPED, {"gate_first": False}, "exchange the rows of gate and up, and their biases"
    yield from _eps(r)
    if r.gate_up == "interleaved":
        yield HALF_ROWS, {"gate_up": "halves"}, "order the rows gate 0, up 0, gate 1, up 1, .."
    else:
        yield INTERLEAVED_ROWS, {"gate_up": "interleaved"}, "order the rows as all of gate, then all of up"
    if r.limit is not None:
        yield "unclamped SwiGLU", {"limit": None}, "set `swiglu_limit`"
    if r.one:
        yield "missing +1 on the up branch", {"one": 0.0}, "multiply by up + 1"
    if r.alpha != 1.0:
        yield "plain SiLU (alpha 1)", {"alpha": 1.0}, "use gate * sigmoid(1.702 * gate)"
    if config.hidden_size == (config.expert_size if r.experts else config.intermediate_size):
        yield "down matrices transposed", {"down_transposed": True}, "transpose the down matrices"
    if r.experts:
        yield from _experts(r, config)


def _experts(r: Reading, config: ModelConfig) -> Iterator[Row]:
    yield DOUBLED, {"expert_scale": 2.0}, "add 1 to every byte of `_scales`"
    yield HALVED, {"expert_scale": 0.5}, "subtract 1 from every byte of `_scales`"
    if r.renormalise:
        yield "softmax before top-k", {"renormalise": False}, "take the softmax of the chosen logits alone"
    else:
        yield "top-k weights renormalised", {"renormalise": True}, "set `norm_topk_prob`"
    if config.hidden_size % BLOCK == 0 and config.expert_size % BLOCK == 0:
        for name, (order, fix) in NIBBLE_MISTAKES.items():
            yield from _packed("nibbles", name, order, fix)
        yield from _packed("blocks", REVERSED, *BLOCK_MISTAKES[REVERSED])
        if r.packed:
            yield from _packed("blocks", REVERSED_ALONE, *BLOCK_MISTAKES[REVERSED_ALONE])
    if r.limit is not None:  # gpt-oss; its experts have biases
        for name, lost in (
            ("router bias", {"router"}),
            ("gate and up biases", {"gate_up"}),
            ("down biases", {"down"}),
            ("expert biases", {"gate_up", "down"}),
        ):
            yield f"missing {name}", {"biases": ALL_BIASES - lost}, "copy the biases"


def _packed(field: str, name: str, order: str, fix: str) -> Iterator[Row]:
    """A wrong order of packed values, in both matrices of the experts and in either alone."""
    gate_up, down = {f"gate_up_{field}": order}, {f"down_{field}": order}
    yield name, gate_up | down, fix
    yield name + GATE_UP_ALONE, gate_up, fix
    yield name + DOWN_ALONE, down, fix


def _eps(r: Reading) -> Iterator[Row]:
    for eps in COMMON_EPS:
        if eps != r.eps:
            yield f"RMSNorm eps {eps:g}", {"eps": eps}, "set `rms_norm_eps`"
