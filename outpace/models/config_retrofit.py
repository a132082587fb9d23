"""What config.json specifies of retrofits: latent KV (use_mla_kv, mla_*) and an index (use_dsa, dsa_*)."""

from dataclasses import fields
from typing import Any

from outpace.kv.topk import TopKConfig
from outpace.models.config import ModelConfig, need

SHARES = ("dsa_top_p", "dsa_least_mass")  # left out where they are 0
KEEP = tuple(field.name for field in fields(TopKConfig))


def parse_mla(hf: dict[str, Any], layers: int) -> dict[str, Any]:
    """Of a retrofitted checkpoint: fields of ModelConfig from `use_mla_kv`, `mla_layers` and
    `mla_latent_dim`, one for all of these layers or a list. Nothing where there are no such layers."""
    named = hf.get("mla_layers")
    if not named:
        if hf.get("use_mla_kv"):
            raise ValueError("config.json: use_mla_kv without mla_layers: name the layers that have a latent")
        return {}
    value = need(hf, "mla_latent_dim")
    ranks = value if isinstance(value, list) else [value] * len(named)
    if len(ranks) != len(named) or len(set(named)) < len(named) or not all(0 <= i < layers for i in named):
        raise ValueError(
            f"config.json: mla_layers {named}, mla_latent_dim {value}: distinct layers below {layers}, and "
            "one rank for all or one for each"
        )
    values = dict(zip(named, ranks, strict=True))
    return {
        "mla_ranks": tuple(values.get(i, 0) for i in range(layers)),
        "use_mla_kv": bool(hf.get("use_mla_kv", True)),
    }


def mla_to_hf(config: ModelConfig) -> dict[str, Any]:
    layers = [i for i, rank in enumerate(config.mla_ranks) if rank]
    if not layers:
        return {}
    ranks = [config.mla_ranks[i] for i in layers]
    return {
        "use_mla_kv": config.use_mla_kv,
        "mla_layers": layers,
        "mla_latent_dim": ranks[0] if len(set(ranks)) == 1 else ranks,
    }


def parse_dsa(hf: dict[str, Any], layers: int) -> dict[str, Any]:
    """Fields of ModelConfig from `use_dsa`, `dsa_layers`, `dsa_index_dim`, `dsa_index_heads` and those of
    `TopKConfig` with dsa_ before them. Nothing where there are no such layers."""
    named = hf.get("dsa_layers")
    if not named:
        if hf.get("use_dsa"):
            raise ValueError("config.json: use_dsa without dsa_layers: name the layers that have an index")
        return {}
    if len(set(named)) < len(named) or not all(0 <= i < layers for i in named):
        raise ValueError(f"config.json: dsa_layers {named}: distinct layers below {layers}")
    values = {name: hf[f"dsa_{name}"] for name in KEEP if hf.get(f"dsa_{name}") is not None}
    return {
        "dsa_layers": tuple(sorted(named)),
        "dsa_index_dim": need(hf, "dsa_index_dim"),
        "dsa_index_heads": need(hf, "dsa_index_heads"),
        "dsa_keep": TopKConfig(**values),
        "use_dsa": bool(hf.get("use_dsa", True)),
    }


def dsa_to_hf(config: ModelConfig) -> dict[str, Any]:
    if not config.dsa_layers:
        return {}
    values = {
        "use_dsa": config.use_dsa,
        "dsa_layers": list(config.dsa_layers),
        "dsa_index_dim": config.dsa_index_dim,
        "dsa_index_heads": config.dsa_index_heads,
        **{f"dsa_{name}": value for name, value in vars(config.dsa_keep).items()},
    }
    return {name: value for name, value in values.items() if value or name not in SHARES}
