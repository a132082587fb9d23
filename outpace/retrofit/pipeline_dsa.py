"""A target on disk -> the same with an index of sparse attention next to it: first weights, judged, saved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from outpace.kv.topk import TopKConfig
from outpace.models.decoder import Decoder
from outpace.models.indexer import Indexer, usual_heads
from outpace.models.load import fingerprint
from outpace.retrofit import dsa
from outpace.retrofit.evaluate import judge
from outpace.retrofit.pipeline import RetrofitSettings, open_for, save_retrofit, texts_for
from outpace.text.corpus import Document

REPORT = "dsa.json"


@dataclass(frozen=True, kw_only=True)
class DsaSettings(RetrofitSettings):
    """`index_dim`: numbers of an index's key, 0: half a head's; `index_heads`: 0: `usual_heads`. The others
    as in kv/topk.py: Keep."""

    NAME: ClassVar[str] = "dsa"
    index_dim: int = 0
    index_heads: int = 0
    top_k: float = 1024.0
    top_p: float = 0.0
    least_mass: float = 0.0
    min_context: int = 1024
    sinks: int = 4
    recent: int = 64
    row_tokens: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.keep

    @property
    def keep(self) -> TopKConfig:
        return TopKConfig(**{field.name: getattr(self, field.name) for field in fields(TopKConfig)})


def retrofit_dsa(
    path: str,
    settings: DsaSettings,
    documents: Sequence[Document],
    out: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Write out/, a checkpoint where the original tensors are untouched; -> the report, also out/dsa.json.
    Raises ValueError for settings that this target cannot have, and for an `out` that holds something."""
    target, tokenizer = open_for(path, out)
    layers, heads, dim = asked_of(target, settings)
    on_stage("reading text")
    texts, validation = texts_for(tokenizer, documents, settings)
    on_stage(f"going over {settings.rows} texts with {len(layers)} layers")
    made = first_indexes(target, texts, layers, heads, dim)
    dsa.temper(target, made, texts[0], settings.keep)
    before = judge(target, validation)
    whose = fingerprint(target)
    on_stage("judging on held-out text")
    dsa.attach_index(target, made, settings.keep)
    report = {
        "settings": asdict(settings) | {"layers": layers, "index_heads": heads, "index_dim": dim},
        "made_from": whose,
        "calibration_tokens": sum(map(len, texts)),
        "numbers_per_token": numbers_of(target),
        "parameters": sum(p.numel() for indexer in made.values() for p in indexer.parameters()),
        **index_metrics(target, validation, before),
    }
    on_stage("saving")
    save_retrofit(target, tokenizer, path, out, report, REPORT)
    return report


def asked_of(target: Decoder, settings: DsaSettings) -> tuple[list[int], int, int]:
    """-> layers, heads and dimensions of an index."""
    config = target.config
    if config.dsa_layers:
        raise ValueError("retrofit dsa: this target has an index already: start from the one it was made for")
    dim = settings.index_dim or max(8, config.head_dim // 2 // 8 * 8)
    return settings.layers_of(config), settings.index_heads or usual_heads(config.num_heads), dim


def first_indexes(
    target: Decoder, texts: Sequence[Sequence[int]], layers: Sequence[int], heads: int, dim: int
) -> dict[int, Indexer]:
    sums: dict[int, dsa.Phases] = {}
    for text in texts:
        tokens = torch.tensor(list(text), device=target.device)
        for layer, seen in dsa.looked_at(target, tokens, layers).items():
            result = dsa.Phases.of(seen)
            sums[layer] = sums[layer] + result if layer in sums else result
    return {i: dsa.first_weights(target.attentions[i], phases, heads, dim) for i, phases in sums.items()}


def numbers_of(target: Decoder) -> dict[str, int]:
    """What the layers with an index remember of a token, and what their queries read of one at most."""
    layers, config = target.config.dsa_layers, target.config
    kept = sum(config.kv_numbers(i) for i in layers)
    return {"before": kept, "after": kept + sum(config.index_numbers(i) for i in layers)}


def index_metrics(target: Decoder, entries: list[list[int]], before: Mapping[str, Any]) -> dict[str, Any]:
    """What the indexes keep of the attention's mass, layer by layer; held-out loss with and without them."""
    after = judge(target, entries, before["log_probabilities"])
    plain = {name: value for name, value in before.items() if name != "log_probabilities"}
    del after["log_probabilities"]
    config = target.config
    target.use_dsa(False)  # the states of the target as it was
    table = dsa.mass_table(target, entries, config.dsa_layers, config.dsa_keep.by_count)
    target.use_dsa(True)
    return {"mass": table, "held_out": {"texts": len(entries), "before": plain, "after": after}}
