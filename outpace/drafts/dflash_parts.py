"""A DFlash's optional parts as files hold them: in words, and by the tensors' names."""

from collections.abc import Mapping
from typing import Any

from outpace.checkpoint.open import LoadError
from outpace.drafts.dflash_config import DFlashConfig

Shape = tuple[int, ...]


def parts_of(config: DFlashConfig) -> str:
    """The optional parts in words, "none" for a plain DFlash."""
    result = second_parts(
        config.conv_kernel_size, config.conv_group_size, config.selector_rank, config.selector_top_k
    )
    if config.markov_rank:
        result.append(f"{'gated ' if config.markov_gated else ''}Markov head {config.markov_rank}")
    if config.confidence:
        result.append("confidence head")
    if config.draft_vocab_size:
        result.append(f"{config.draft_vocab_size:,} tokens")
    return ", ".join(result) or "none"


def second_parts(taps: Any, group: Any, rank: Any, top_k: Any) -> list[str]:
    """DFlash 2's, in words."""
    items = [f"convolutions {taps} x {group}"] if taps else []
    return items + ([f"selector {rank} of {top_k}"] if rank else [])


def temperatures_in(where: str, own: Mapping[str, Any]) -> tuple[float, ...]:
    """What the "outpace" object of a config.json specifies of them. Raises LoadError for what is no list of
    decimals."""
    value = own.get("temperatures", [])
    if not isinstance(value, list) or not all(type(t) is float for t in value):
        raise LoadError(f"{where}: outpace.temperatures is no list of decimals")
    return tuple(value)


def temperatures_out(config: DFlashConfig) -> dict[str, Any]:
    return {"temperatures": list(config.temperatures)} if config.temperatures else {}


def shapes_of_parts(c: DFlashConfig) -> dict[str, Shape]:
    """The names of z-lab's DFlash 2 and of DeepSpec's DSpark."""
    C, V, taps = c.hidden_size, c.vocab_size, c.conv_kernel_size
    values: dict[str, Shape] = {}
    for i in range(c.num_layers if taps else 0):
        for conv in ("attention_conv", "mlp_conv"):
            values[f"layers.{i}.{conv}.base_kernel"] = (2, taps, C)
            values[f"layers.{i}.{conv}.kernel_projection.weight"] = (2 * taps * (C // c.conv_group_size), C)
    if c.selector_rank:
        at = "candidate_selector."
        values |= {f"{at}{side}_codebook": (V, c.selector_rank) for side in ("predecessor", "successor")}
        values[f"{at}hidden_projection.weight"] = (c.selector_rank, C)
    if c.markov_rank:
        values["markov_head.markov_w1.weight"] = (V, c.markov_rank)
        values["markov_head.markov_w2.weight"] = (c.rows, c.markov_rank)
    if c.markov_gated:
        values["markov_head.gate.weight"] = (c.markov_rank, C + c.markov_rank)
    if c.confidence:
        values |= {"confidence_head.proj.weight": (1, C + c.previous_rank), "confidence_head.proj.bias": (1,)}
    if c.draft_vocab_size:
        values |= {"d2t": (c.draft_vocab_size,), "t2d": (V,)}
    return values
