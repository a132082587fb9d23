"""Train an index of sparse attention by the attention itself, all else frozen (DeepSeek-V3.2's two stages).

First the index learns where dense attention looks: of what it chooses among, KL(p || softmax(I)), p the
heads' weights summed, a query counting as much as its heads look there. Then the same while attention is
sparse, over what was chosen: the states that the index reads are then those that it will meet.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.kv.topk import TopKConfig
from outpace.models.decoder import Decoder
from outpace.models.indexer import Indexer
from outpace.ops.sampling import seeded
from outpace.retrofit.dsa import looked_at, mass, mass_table
from outpace.retrofit.evaluate import texts_of
from outpace.retrofit.train_frozen import (
    FrozenRecipe,
    learners,
    once,
    publish,
    row_of,
    three_losses,
    train_frozen,
)
from outpace.text.corpus import Document
from outpace.text.template import ChatTemplate
from outpace.train.rows import token_stream

REPORT = "dsa.json"


@dataclass(frozen=True, kw_only=True)
class DsaRecipe(FrozenRecipe):
    """Fields of recipes/memory/dsa.toml."""

    NAME: ClassVar[str] = "dsa"
    row_tokens: int = 4096  # one row a step
    queries: int = 256  # of a row, looked at
    sparse_share: float = 0.25  # of the steps, the last ones: attention is sparse
    decay: float = 0.5


def train_dsa(
    recipe: DsaRecipe,
    target: Decoder,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    train: list[Document],
    held_out: list[Document],
    folder: Path,
    *,
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Train the indexes of `target`, in place, and save folder/model; -> the report, None if stopped early.
    Raises ValueError for a target that has none."""
    config = target.config
    if not config.dsa_layers:
        raise ValueError("train dsa: this target has no index: give it one by outpace retrofit dsa")
    indexers = {i: indexer for i in config.dsa_layers if (indexer := target.attentions[i].indexer)}
    texts = texts_of(tokenizer, held_out, recipe.validation_texts, recipe.row_tokens, recipe.seed)
    keep = config.dsa_keep.by_count
    untrained = once(folder, lambda: _evaluated(target, texts, None))
    stream = token_stream(tokenizer, train, recipe.seed)
    parameters = learners(target, indexers.values())
    sparse_from = round(recipe.steps * (1 - recipe.sparse_share))

    def losses(step: int) -> tuple[Tensor, dict[str, Any]]:
        sparse = step >= sparse_from
        target.use_dsa(sparse)
        row = row_of(stream, recipe.row_tokens, 1, step, recipe.seed)[0].to(target.device)
        result = _losses(target, indexers, row, recipe, keep, sparse, step)
        total = torch.stack([loss for loss, _ in result.values()]).mean()
        kept = {f"kept_{i}": round(kept.item(), 4) for i, (_, kept) in result.items()}
        return total, {"kept": sum(kept.values()) / len(kept), **kept}

    train_frozen(target, parameters, recipe, losses, folder, "index", stop_after)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    if len(log) < recipe.steps:
        return None
    fields = _evaluated(target, texts, untrained["held_out"]["after"]) | {"mass_untrained": untrained["mass"]}
    return publish(target, tokenizer, template, folder / "model", REPORT, recipe, log, fields)


def _losses(
    target: Decoder,
    indexers: dict[int, Indexer],
    row: Tensor,
    recipe: DsaRecipe,
    keep: TopKConfig,
    sparse: bool,
    step: int,
) -> dict[int, tuple[Tensor, Tensor]]:
    first = min(keep.sinks + keep.recent + 1, len(row) - 1)
    many = min(recipe.queries, len(row) - first)
    rng = seeded(recipe.seed, 5, step)
    positions = first + torch.randperm(len(row) - first, generator=rng)[:many].sort().values.to(row.device)
    seen = looked_at(target, row, list(indexers))
    fields = {i: mass(target, indexer, seen[i], positions) for i, indexer in indexers.items()}
    return {i: (each.divergence(keep, sparse), each.kept(keep).mean()) for i, each in fields.items()}


def _evaluated(target: Decoder, texts: list[list[int]], untrained: dict[str, Any] | None) -> dict[str, Any]:
    """What the indexes keep of the mass that the target with full attention gives; held-out loss."""
    target.use_dsa(False)
    keep = target.config.dsa_keep.by_count
    table = mass_table(target, texts, target.config.dsa_layers, keep)
    return {"mass": table, "held_out": three_losses(target, texts, target.use_dsa, untrained)}
