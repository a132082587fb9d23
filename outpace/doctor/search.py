"""Which known mistake turns one side's layer into the other's? Single ones first, then every two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import Tensor

from outpace.doctor.reference import (
    ALL_BIASES,
    Reading,
    relative,
)
from outpace.models.config import ModelConfig
from outpace.ops.rope import RopeConfig

COMMON_EPS = (1e-5, 1e-6)
COMMON_THETAS = (1e4, 1.5e5, 5e5, 1e6)  # Llama 2, gpt-oss, Llama 3, Qwen3
NIBBLES = {
    "split nibbles (GGML's order)": "from split",
    "split nibbles undone (interleaved order)": "to split",
}


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """`change` holds the fields of the Reading that the mistake gets wrong."""

    name: str
    change: dict[str, Any]

    def apply(self, reading: Reading) -> Reading:
        return replace(reading, **self.change)

    def with_(self, other: "Mistake") -> "Mistake":
        return Mistake(name=f"{self.name} + {other.name}", change=self.change | other.change)


def pairs(mistakes: list[Mistake]) -> list[Mistake]:
    """Every two that do not get the same field wrong."""
    return [a.with_(b) for a, b in combinations(mistakes, 2) if not a.change.keys() & b.change.keys()]


def attention_mistakes(r: Reading, config: ModelConfig) -> list[Mistake]:
    """Those that would change what this layer's attention states."""
    values: dict[str, dict[str, Any]] = {
        "no causal mask": {"causal": False},
        "no attention scale": {"scale": 1.0},
        "input norm without its weights": {"norm_weights": False},
        **_eps(r),
        **_rope(r.rope),
    }
    if 1 < r.kv_heads < r.heads:
        values["cyclic GQA mapping (query head h reads kv head h % K)"] = {"groups": "cyclic"}
    if config.hidden_size != r.heads * r.head_dim:
        values["attention scale from hidden_size / heads"] = {"scale": (config.hidden_size / r.heads) ** -0.5}
    if r.rope is not None:
        values["interleaved RoPE pairs (2i, 2i + 1)"] = {"pairs": "neighbours"}
        values["q/k rows permuted, halves to pairs"] = {"qk_rows": "to neighbours"}
        if r.qk_norm != "none":  # without one, it is the same as rotating neighbours
            values["q/k rows permuted, pairs to halves"] = {"qk_rows": "from neighbours"}
    if r.sinks != "none":
        values["missing sinks"] = {"sinks": "none"}
        values["sinks of zero"] = {"sinks": "zero"}
        values["sinks scaled like the scores"] = {"sinks": "scaled"}
    if r.qk_norm != "none":
        values["missing q/k norm"] = {"qk_norm": "none"}
        values["q/k norm after RoPE"] = {"qk_norm": "after rope"}
        values["q/k norm without its weights"] = {"qk_norm": "without weights"}
    values |= _window(r, config)
    if config.attention_bias:
        values["missing q, k and v biases"] = {"biases": ALL_BIASES - {"q", "k", "v"}}
        values["missing o bias"] = {"biases": ALL_BIASES - {"o"}}
        values["missing attention biases"] = {"biases": ALL_BIASES - {"q", "k", "v", "o"}}
    return [Mistake(name=name, change=change) for name, change in values.items()]


def mlp_mistakes(r: Reading, config: ModelConfig, *, experts: bool) -> list[Mistake]:
    """Those that would change what this layer's MLP computes; `experts` False for a dense one."""
    values: dict[str, dict[str, Any]] = {
        "post-attention norm without its weights": {"norm_weights": False},
        "gate and up swapped": {"gate_first": not r.gate_first},
        **_eps(r),
    }
    if r.gate_up == "interleaved":
        values["gate and up rows read as halves, not interleaved"] = {"gate_up": "halves"}
    else:
        values["gate and up rows read as interleaved, not halves"] = {"gate_up": "interleaved"}
    if r.limit is not None:
        values["unclamped SwiGLU"] = {"limit": None}
    if r.one:
        values["missing +1 on the up branch"] = {"one": 0.0}
    if r.alpha != 1.0:
        values["plain SiLU (alpha 1)"] = {"alpha": 1.0}
    width = config.expert_size if experts else config.intermediate_size
    if width == config.hidden_size:
        values["down matrices transposed"] = {"down_transposed": True}
    if experts:
        values |= _experts(r, config)
    return [Mistake(name=name, change=change) for name, change in values.items()]


def _experts(r: Reading, config: ModelConfig) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {
        "expert scale off by one: doubled": {"expert_scale": 2.0},
        "expert scale off by one: halved": {"expert_scale": 0.5},
    }
    if r.renormalise:
        values["softmax before top-k"] = {"renormalise": False}
    else:
        values["top-k weights renormalised"] = {"renormalise": True}
    if config.hidden_size % 32 == 0 and config.expert_size % 32 == 0:
        for name, order in NIBBLES.items():
            values[name] = {"gate_up_nibbles": order, "down_nibbles": order}
            values[f"{name} of gate and up alone"] = {"gate_up_nibbles": order}
            values[f"{name} of down alone"] = {"down_nibbles": order}
    if r.limit is not None:  # gpt-oss; its experts have biases
        values["missing router bias"] = {"biases": ALL_BIASES - {"router"}}
        values["missing gate and up biases"] = {"biases": ALL_BIASES - {"gate_up"}}
        values["missing down biases"] = {"biases": ALL_BIASES - {"down"}}
        values["missing expert biases"] = {"biases": ALL_BIASES - {"gate_up", "down"}}
    return values


def _rope(rope: RopeConfig | None) -> dict[str, dict[str, Any]]:
    if rope is None:
        return {}
    values: dict[str, dict[str, Any]] = {"no RoPE": {"rope": None}}
    for theta in COMMON_THETAS:
        if theta != rope.theta:
            values[f"RoPE base {theta:,.0f}"] = {"rope": replace(rope, theta=theta)}
    if rope.kind != "default":
        values["no RoPE scaling at all"] = {"rope": RopeConfig(theta=rope.theta)}
    if rope.kind == "yarn":
        values["missing YaRN factor on cos and sin"] = {"rope": replace(rope, attention_factor=1.0)}
        other = "not truncated" if rope.truncate else "truncated"
        values[f"YaRN's range {other}"] = {"rope": replace(rope, truncate=not rope.truncate)}
        values["linear scaling instead of YaRN"] = {"rope": replace(rope, kind="linear")}
    return values


def _window(r: Reading, config: ModelConfig) -> dict[str, dict[str, Any]]:
    if not config.sliding_window:
        return {}
    values: dict[str, dict[str, Any]] = {
        "wrong window parity": {"window": 0 if r.window else config.sliding_window}
    }
    if r.window:
        values["window one key too long"] = {"window": r.window + 1}
    if r.window > 1:
        values["window one key too short"] = {"window": r.window - 1}
    return values


def _eps(r: Reading) -> dict[str, dict[str, Any]]:
    return {f"RMSNorm eps {eps:g}": {"eps": eps} for eps in COMMON_EPS if eps != r.eps}


# Two float32 forwards of the same layer differ by some 1e-6 of what the layer adds; the least of the known
# mistakes that a text of some hundred tokens shows at all is above 1e-4.
EXACT = 1e-4
ROUNDING = 2e-6


Run = Callable[[Sequence[Reading]], list[Tensor]]  # a layer's output under each reading


@dataclass(frozen=True, kw_only=True)
class Tried:
    """`error`: ||what it gives - what is wanted|| / ||what is wanted||."""

    mistake: Mistake
    error: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """`matches`: those that give what is wanted, best first; more than one cannot be told apart by this text.
    `nearest`: where none does, the one that comes closest."""

    before: float
    matches: tuple[Tried, ...]
    nearest: Tried | None


def search(
    mistakes: Sequence[Mistake],
    reading: Reading,
    run: Run,
    wanted: Tensor,
    limit: float,
    *,
    in_pairs: bool = True,
) -> Search:
    """`wanted` is what the layer should say; errors up to `limit` count as the same."""
    before = relative(run([reading])[0], wanted)

    def attempt(some: Sequence[Mistake]) -> list[Tried]:
        outs = run([m.apply(reading) for m in some])
        tried = [Tried(mistake=m, error=relative(out, wanted)) for m, out in zip(some, outs, strict=True)]
        return sorted((t for t in tried if t.error == t.error), key=lambda t: t.error)

    singles = attempt(mistakes)
    result = _reproducing(singles, before, limit)
    nearest = singles[:1]
    if not result and in_pairs:
        doubles = attempt(pairs(list(mistakes)))
        result = _reproducing(doubles, before, limit)
        nearest = sorted(nearest + doubles[:1], key=lambda t: t.error)[:1]
    better = nearest and nearest[0].error < before / 2
    return Search(before=before, matches=result, nearest=nearest[0] if better and not result else None)


def _reproducing(tried: list[Tried], before: float, limit: float) -> tuple[Tried, ...]:
    """What comes within the limit and clearly nearer than no mistake does: all as near as the best."""
    if not tried or tried[0].error > min(limit, before / 3):
        return ()
    alike = 10 * tried[0].error + ROUNDING if limit <= EXACT else 1.5 * tried[0].error
    return tuple(t for t in tried if t.error <= alike)
