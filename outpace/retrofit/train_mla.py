"""Train latent KV against the target it was made from, all else frozen.

First layer by layer: given the states that the original sees, the attention with latents is to say what the
one without states (as arXiv 2604.05688). Then as a whole: KL of the logits, and the last states' squared
error.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.models.attention import Attention
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded
from outpace.retrofit.evaluate import texts_of
from outpace.retrofit.states import read_by, states_of
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
from outpace.train.drafts import Teacher
from outpace.train.losses import block_losses
from outpace.train.rows import token_stream

REPORT = "mla.json"


@dataclass(frozen=True, kw_only=True)
class MlaRecipe(FrozenRecipe):
    """Fields of recipes/memory/mla.toml."""

    NAME: ClassVar[str] = "mla"
    rows: int = 4  # of a step
    layer_share: float = 0.3  # of the steps, the first ones: every layer by itself
    kl: float = 1.0  # weights of the divergence of the logits ..
    mse: float = 1.0  # .. and of the last states' error, relative to their size


def train_mla(
    recipe: MlaRecipe,
    target: Decoder,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    train: list[Document],
    held_out: list[Document],
    folder: Path,
    *,
    teacher: Teacher | None = None,
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Train the latents of `target`, in place, and save folder/model; -> the report, None if stopped early.
    With `teacher`, a cache of the original with final states, on its texts, and the original need not be run
    again when all learn together. Raises ValueError for a target that has no latents."""
    if not target.config.mla_ranks:
        raise ValueError("train mla: this target has no latents: give it some by outpace retrofit mla")
    texts = texts_of(tokenizer, held_out, recipe.validation_texts, recipe.row_tokens, recipe.seed)
    untrained = once(folder, lambda: three_losses(target, texts, target.use_mla_kv, None)["after"])
    stream = None if teacher is not None else token_stream(tokenizer, train, recipe.seed)
    attentions = {i: a for i, a in enumerate(target.attentions) if a.latent is not None}
    parameters = learners(target, (a.latent for a in attentions.values() if a.latent is not None))
    together_from = round(recipe.steps * recipe.layer_share)

    def losses(step: int) -> tuple[Tensor, dict[str, Any]]:
        if teacher is not None:
            pairs = cached_texts(teacher, recipe, step)
        else:
            assert stream is not None
            pairs = [(row_of(stream, recipe.row_tokens, recipe.rows, step, recipe.seed), None)]
        pairs = [(rows.to(target.device), final) for rows, final in pairs]
        if step < together_from:
            loss = torch.stack([layer_losses(target, attentions, rows) for rows, _ in pairs]).mean()
            return loss, {"layers": loss.item()}
        items = [whole_losses(target, rows, final) for rows, final in pairs]
        kl, mse = (torch.stack(part).mean() for part in zip(*items, strict=True))
        return recipe.kl * kl + recipe.mse * mse, {"kl": kl.item(), "mse": mse.item()}

    train_frozen(target, parameters, recipe, losses, folder, "latents", stop_after)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    if len(log) < recipe.steps:
        return None
    held = three_losses(target, texts, target.use_mla_kv, untrained)
    return publish(target, tokenizer, template, folder / "model", REPORT, recipe, log, {"held_out": held})


def cached_texts(teacher: Teacher, recipe: MlaRecipe, step: int) -> list[tuple[Tensor, Tensor | None]]:
    """The step's texts [1, T] and final states [T, C], another order every epoch. Raises ValueError for a
    cache without final states, and for texts that do not begin at position 0."""
    items: list[tuple[Tensor, Tensor | None]] = []
    for n in range(step * recipe.rows, (step + 1) * recipe.rows):
        epoch, i = divmod(n, len(teacher))
        order = torch.randperm(len(teacher), generator=seeded(recipe.seed, 6, epoch))
        sample = teacher.sample(int(order[i]))
        if sample.final is None or sample.offset:
            raise ValueError(
                "train mla: this cache has no final states, or texts at other positions: build one with "
                "teacher build --final and without --position-offsets"
            )
        items.append((sample.tokens[None, : recipe.row_tokens].long(), sample.final[: recipe.row_tokens]))
    return items


def layer_losses(target: Decoder, attentions: dict[int, Attention], rows: Tensor) -> Tensor:
    """rows [B, T] -> the error of what attention states relative to its size, mean over the layers."""
    with torch.no_grad():
        target.use_mla_kv(False)
        states = states_of(target, rows)
        cos, sin = target.rope(torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1))
    entries = []
    for layer, attention in attentions.items():
        x = read_by(target, layer, states)
        with torch.no_grad():
            wanted = attention(x, cos, sin, None, None).float()
        attention.use_latent = True
        value = attention(x, cos, sin, None, None).float()
        entries.append((value - wanted).square().mean() / wanted.square().mean())
    target.use_mla_kv(True)
    return torch.stack(entries).mean()


def whole_losses(target: Decoder, rows: Tensor, final: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """rows [B, T] -> KL of the logits, nats per token; error of the last states relative to their size.
    `final` [B * T, C]: those of the original, if they are known."""
    with torch.no_grad():
        target.use_mla_kv(False)
        wanted = target(rows).hidden.flatten(0, 1) if final is None else final.to(rows.device, target.dtype)
        target.use_mla_kv(True)
    value = target(rows).hidden.flatten(0, 1)
    head, labels = target.dense_head, rows.flatten()
    kl = block_losses("kl", value, head, labels, wanted, head).loss.mean()
    return kl, (value.float() - wanted.float()).square().mean() / wanted.float().square().mean()
