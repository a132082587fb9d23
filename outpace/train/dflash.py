"""Train a DFlash draft from a teacher cache (arXiv 2602.06036, section 4.3; D-PACE, arXiv 2605.18810)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_decode import Head
from outpace.formats.load import save_dflash
from outpace.models.decoder import Decoder
from outpace.ops.blocks import block_attend
from outpace.ops.sampling import seeded
from outpace.train.anchors import Packed, pack
from outpace.train.calibration import fit_temperatures
from outpace.train.dflash_loss import Objective, served_guesses
from outpace.train.dflash_recipe import BY_ADAM, continued, init_dflash
from outpace.train.dflash_recipe import DFlashRecipe as DFlashRecipe
from outpace.train.drafts import (
    StepLoss,
    Teacher,
    accuracy,
    commonest,
    features,
    learn,
    measure_tau,
    provenance,
    responses,
    rows_of_step,
    write_provenance,
)
from outpace.train.rounds import Rounds


def block_states(
    draft: DFlash, target: Decoder, packed: Packed, dtype: torch.dtype, recompute: bool = False
) -> Tensor:
    """All blocks in one forward: -> hidden [A, B, C]; the state at slot i >= 1 predicts that very position.

    Keys and values of the context are formed once a layer and shared by every block.
    """
    config, (A, B) = draft.config, packed.positions.shape
    scale = config.head_dim**-0.5
    features = draft.context(packed.aux.to(dtype)[:, None])
    context_rope = draft.rope(packed.context_positions[None])
    x = draft.embed_block(packed.anchors, target).to(dtype)
    cos, sin = draft.rope(packed.positions)

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = draft.layers[i].context_kv(features, *context_rope)  # type: ignore[operator]
        context_k, context_v = (t[0].transpose(0, 1) for t in shared)
        own_k, own_v = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))
        given = q.flatten(0, 1), own_k, own_v, context_k, context_v
        how = config.window(i), scale, config.hides(i)
        return block_attend(*given, packed.layout, *how).view(A, B, -1)

    return draft.denoise(x, cos, sin, attend, recompute)


@torch.no_grad()
def validate(
    draft: DFlash,
    target: Decoder,
    cache: Teacher,
    kept: list[int],
    recipe: DFlashRecipe,
    layers: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """On the samples `kept` from training: hits, valid and sure [A, n], through the code that serves. Far
    fewer hits than training's, and more steps will not help: it takes more answers."""
    hits, valid, sure = [], [], []
    head = Head.of(target, draft.d2t)
    for i in range(0, len(kept), recipe.rows):
        rng = seeded(recipe.seed, 2, i)
        rows = [cache.sample(n) for n in kept[i : i + recipe.rows]]
        packed = pack(rows, recipe.block_size, recipe.anchors, recipe.row_tokens, rng, layers)
        states = block_states(draft, target, packed, recipe.dtype(target.device))
        right, chance = served_guesses(draft, head, states, packed)
        hits.append(right)
        valid.append(packed.valid)
        sure.append(chance)
    return torch.cat(hits), torch.cat(valid), torch.cat(sure)


def train_dflash(
    recipe: DFlashRecipe,
    target: Decoder,
    tokenizer: Tokenizer,
    cache: Teacher,
    held_out: list[list[int]],
    folder: Path,
    *,
    init: DFlash | None = None,
    started_from: dict[str, Any] | None = None,
    stop_after: int | None = None,
) -> DFlash:
    """Train, resuming from folder/checkpoint.pt where there is one; -> the draft, float32.

    `target` is frozen from here on. `held_out`: prompts that the cache does not hold, for real acceptance
    every `eval_every` steps. `init`: a draft to start from; its own sizes then apply, not the recipe's, and
    the recipe's are the block, the window and the parts that it adds. `started_from`: that draft's
    provenance. When the last step is done, folder/draft holds the draft in our format and provenance.json.
    Raises ValueError where cache, target and recipe do not fit.
    """
    held = tuple(cache.meta.target_layer_ids)
    draft = _begin(recipe, target, tokenizer, held, init)
    layers = features(draft.config.target_layer_ids, target, held, cache.meta.hidden_size)
    draft.bind(target)
    if draft.d2t is not None and (init is None or init.d2t is None):
        size = len(draft.d2t), target.config.vocab_size
        texts = responses(cache, recipe.trained(cache))
        draft.d2t.copy_(commonest(texts, *size, target.config.eos_token_ids))
    target.requires_grad_(False)
    objective = Objective.of(draft, target, recipe)
    training, kept = recipe.training_samples(cache), recipe.validation_samples(cache)
    rounds = Rounds(len(cache), recipe.anchors) if recipe.rounds else None

    def loss_of(step: int) -> StepLoss:
        samples = [training[i] for i in rows_of_step(step, recipe, len(training))]
        rows = [cache.sample(i) for i in samples]
        rng = seeded(recipe.seed, 1, step)
        how = recipe.block_size, recipe.anchors, recipe.row_tokens, rng, layers
        items = None
        if rounds:
            items = [rounds.of(i, row.prompt_length) for i, row in zip(samples, rows, strict=True)]
        packed = pack(rows, *how, final=recipe.final, items=items)
        dtype = recipe.dtype(target.device)
        result = objective(block_states(draft, target, packed, dtype, recipe.recompute), packed)
        if rounds:
            rounds.ended(samples, packed.layout, result.hits)
        return StepLoss(result.loss, packed.row_tokens, accuracy(result.hits, packed.valid) | result.more)

    def judge() -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        if kept:
            hits, valid, _ = validate(draft, target, cache, kept, recipe, layers)
            metrics = {f"unseen_{k}": v for k, v in accuracy(hits, valid).items()}
        if held_out:
            prompts = held_out[: recipe.eval_prompts]
            metrics["tau"] = measure_tau(draft.bind(target), target, prompts, recipe.eval_new_tokens)
        return metrics

    parts = {"rounds": rounds} if rounds else {}
    if learn(draft, recipe, folder, "dflash", loss_of, judge, parts, by_adam=BY_ADAM, stop_after=stop_after):
        if kept:
            hits, valid, sure = validate(draft, target, cache, kept, recipe, layers)
            draft.config = replace(draft.config, temperatures=fit_temperatures(sure, hits, valid))
        values = provenance(recipe, draft.config, target, cache, folder) | {"started_from": started_from}
        save_dflash(draft, folder / "draft")
        write_provenance(folder / "draft", values)
    return draft.requires_grad_(False)


def _begin(
    recipe: DFlashRecipe, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...], init: DFlash | None
) -> DFlash:
    if init is None:
        return init_dflash(recipe.config(target, tokenizer, held), recipe.seed)
    return continued(recipe.served(init.config), init, recipe.seed)
