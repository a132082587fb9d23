"""Train an EAGLE-3 draft from a teacher cache (arXiv 2503.01840), chained or in one pass (2602.01469)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from outpace.drafts.eagle3 import Eagle3, init_eagle3
from outpace.drafts.eagle3_config import Eagle3Config
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.formats.load import save_eagle3
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded
from outpace.train.drafts import (
    StepLoss,
    Teacher,
    TrainingRecipe,
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
from outpace.train.losses import needs_target, parse_loss
from outpace.train.unroll import UnrollLoss, Vocabulary, gather, thinned, unroll, unrolled_loss

BY_ADAM = ("lm_head.weight", "embed_tokens.weight", "mask_hidden")  # tables of rows


@dataclass(frozen=True, kw_only=True)
class Eagle3Recipe(TrainingRecipe):
    """An EAGLE-3 draft of any size and how to train it. Fields of recipes/eagle3-*.toml."""

    num_layers: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    draft_vocab: int = 0  # the commonest tokens of the responses; 0: all, by the target's head
    sliding_window: int = 0  # of every layer; 0: they see everything
    target_layer_ids: tuple[int, ...] = ()  # of those the cache holds; (): its first, middle and last
    norm_before_residual: bool = False
    norm_output: bool = False  # EAGLE-3.1
    fc_norm: bool = False  # EAGLE-3.1
    parallel: bool = False  # P-EAGLE: all draft tokens in one pass
    mask_token: str | None = None  # of P-EAGLE's draft tokens after the first; None: a learned mask_embedding
    steps_ahead: int = 7  # draft tokens in a row that are trained
    decay: float = 0.8  # a draft token of step j weighs decay^j
    keep: float = 1.0  # of the indices, step j runs keep^j (at least 0.2): P-EAGLE's 0.8
    loss: str = "kl"  # ce, kl, tv, nla, lk, or a sum such as 0.1*ce+0.9*tv
    recompute: bool = False  # layers are run again in the backward: less memory, a third more work

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_loss(self.loss)
        if self.steps_ahead < 1:
            raise ValueError(f"steps_ahead {self.steps_ahead}: at least one draft token is trained")
        if self.draft_vocab < 0:
            raise ValueError(f"draft_vocab {self.draft_vocab}: a count of tokens, or 0 for all")
        for name in ("decay", "keep"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is outside 0..1, and not 0")
        _check_window(self.sliding_window, self.steps_ahead)

    @property
    def final(self) -> bool:
        """Whether training needs the target's final states."""
        return needs_target(self.loss)

    def config(self, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...]) -> Eagle3Config:
        """`held`: the layers where the states the cache holds. Raises ValueError where the mask token is not
        in the vocabulary."""
        theirs = target.config
        mask = tokenizer.token_to_id(self.mask_token) if self.parallel and self.mask_token else None
        if mask is None and self.parallel and self.mask_token:
            raise ValueError(
                f"the tokenizer knows no mask_token {self.mask_token!r}: name a token that text never "
                "uses, or none for a learned embedding"
            )
        return Eagle3Config(
            hidden_size=theirs.hidden_size,
            target_hidden_size=theirs.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=theirs.vocab_size,
            draft_vocab_size=self.draft_vocab or theirs.vocab_size,
            rope=theirs.rope,
            rms_norm_eps=theirs.rms_norm_eps,
            layer_ids=self.target_layer_ids or tuple(sorted({held[0], held[len(held) // 2], held[-1]})),
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
            fc_norm=self.fc_norm,
            sliding_window=self.sliding_window,
            max_position_embeddings=theirs.max_position_embeddings,
            num_layers=self.num_layers,
            parallel=self.parallel,
            mask_token_id=mask,
        )


def _check_window(window: int, steps_ahead: int) -> None:
    if 0 < window <= steps_ahead:
        raise ValueError(
            f"sliding_window {window} does not reach back over steps_ahead {steps_ahead}: make it larger, "
            "or 0 for none; or draft token fewer steps ahead"
        )


def begin_eagle3(
    recipe: Eagle3Recipe, target: Decoder, tokenizer: Tokenizer, cache: Teacher, init: Eagle3 | None
) -> Eagle3:
    """An untrained draft: normal with std 1/sqrt(fan-in), what writes into the residual stream at zero, norm
    and head the target's own. Or a copy of `init`."""
    if init is not None:
        heads = {"own_embedding": init.embed_tokens is not None, "own_head": init.lm_head is not None}
        draft = Eagle3(init.config, **heads, mapped=init.d2t is not None)
        draft.load_state_dict(init.state_dict())
        return draft
    config = recipe.config(target, tokenizer, tuple(cache.meta.target_layer_ids))
    ids, head = None, target.dense_head.detach()
    if recipe.draft_vocab:
        size, value = recipe.draft_vocab, responses(cache, recipe.trained(cache))
        ids = commonest(value, size, config.vocab_size, target.config.eos_token_ids) + torch.arange(size)
    draft = init_eagle3(config, recipe.seed, ids=ids, head=head, own_head=ids is not None)
    rng = seeded(recipe.seed)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
            elif p.dim() == 2 and not name.endswith(BY_ADAM):
                p.copy_(torch.randn(p.shape, generator=rng) * p.shape[-1] ** -0.5)
        draft.norm.weight.copy_(target.norm.weight)
    return draft


@dataclass(frozen=True)
class Course:
    """What every step of a run has in common."""

    draft: Eagle3
    target: Decoder
    recipe: Eagle3Recipe
    layers: list[int] | None  # indices into the cache's aux
    vocabulary: Vocabulary

    def evaluate(self, rows: list[Any], keep: float, rng: torch.Generator) -> tuple[UnrollLoss, int]:
        """Of these samples, and how many tokens they have. keep 1: every index at every step."""
        recipe = self.recipe
        texts = gather(rows, recipe.row_tokens, self.layers, final=recipe.final)
        texts = texts.to(self.target.device)
        indices = thinned(len(texts.at), recipe.steps_ahead, keep, rng)
        indices = [chosen.to(self.target.device) for chosen in indices]
        dtype = recipe.dtype(self.target.device)
        steps = unroll(self.draft, self.target, texts, indices, dtype, recipe.recompute)
        validation = unrolled_loss(self.draft, steps, texts, self.vocabulary, recipe.loss, recipe.decay)
        return validation, len(texts.tokens)

    @torch.no_grad()
    def validate(self, cache: Teacher, kept: list[int]) -> dict[str, Any]:
        """`accuracy` on samples kept from training. Far below the training's, more steps will not help: it
        takes more answers."""
        entries = []
        for i in range(0, len(kept), self.recipe.rows):
            rows = [cache.sample(n) for n in kept[i : i + self.recipe.rows]]
            entries.append(self.evaluate(rows, 1.0, seeded(self.recipe.seed, 2, i))[0])
        hits, valid = (torch.cat([getattr(x, name) for x in entries]) for name in ("hits", "valid"))
        return {f"unseen_{k}": v for k, v in accuracy(hits, valid).items()}

    def tau(self, prompts: list[list[int]]) -> float:
        """Of a chain as long as was trained."""
        shape = TreeShape(depth=self.recipe.steps_ahead)
        bound = BoundEagle3(self.draft, self.target, shape)
        return measure_tau(bound, self.target, prompts, self.recipe.eval_new_tokens)


def metrics_of(unroll_loss: UnrollLoss) -> dict[str, Any]:
    """`accuracy`; its accept_len is of the indices that ran every step; and of soft labels the mean
    chance of acceptance at each."""
    value = accuracy(unroll_loss.hits, unroll_loss.valid)
    if not unroll_loss.run.all():
        whole = unroll_loss.run.all(1)
        value["accept_len"] = accuracy(unroll_loss.hits[whole], unroll_loss.valid[whole])["accept_len"]
    if unroll_loss.alpha is not None:
        shares = unroll_loss.alpha.sum(0) / (unroll_loss.alpha > 0).sum(0).clamp(min=1)
        value["alpha"] = [round(x, 4) for x in shares.tolist()]
    return value


def train_eagle3(
    recipe: Eagle3Recipe,
    target: Decoder,
    tokenizer: Tokenizer,
    cache: Teacher,
    held_out: list[list[int]],
    folder: Path,
    *,
    init: Eagle3 | None = None,
    started_from: dict[str, Any] | None = None,
    stop_after: int | None = None,
) -> Eagle3:
    """Train, resuming from folder/checkpoint.pt where there is one; -> the draft, float32.

    `target` is frozen from here on. `held_out`: prompts that the cache does not hold, for real acceptance
    every `eval_every` steps. `init`: a draft to start from; its own sizes then apply, not the recipe's.
    `started_from`: that draft's provenance. When the last step is done, folder/draft holds the draft in
    SGLang's format and provenance.json. Raises ValueError where cache, target and recipe do not fit.
    """
    width = cache.meta.hidden_size
    held = tuple(cache.meta.target_layer_ids)
    draft = begin_eagle3(recipe, target, tokenizer, cache, init).to(target.device)
    layers = features(draft.config.layer_ids, target, held, width)
    BoundEagle3(draft, target)
    _check_window(draft.config.sliding_window, recipe.steps_ahead)
    target.requires_grad_(False)
    if recipe.final and cache.sample(0).final is None:
        raise ValueError(
            f"loss {recipe.loss!r} compares with the target's distribution, and the cache holds no final "
            "states: build one with `teacher build --final`, or take loss ce"
        )
    course = Course(draft, target, recipe, layers, Vocabulary.of(draft, target, recipe.dtype(target.device)))
    training, kept = recipe.training_samples(cache), recipe.validation_samples(cache)

    def loss_of(step: int) -> StepLoss:
        rows = [cache.sample(training[i]) for i in rows_of_step(step, recipe, len(training))]
        validation, tokens = course.evaluate(rows, recipe.keep, seeded(recipe.seed, 1, step))
        return StepLoss(validation.loss, tokens, metrics_of(validation))

    def judge() -> dict[str, Any]:
        metrics = course.validate(cache, kept) if kept else {}
        if held_out:
            metrics["tau"] = course.tau(held_out[: recipe.eval_prompts])
        return metrics

    if learn(draft, recipe, folder, "eagle3", loss_of, judge, by_adam=BY_ADAM, stop_after=stop_after):
        values = provenance(recipe, draft.config, target, cache, folder) | {"started_from": started_from}
        save_eagle3(draft, folder / "draft")
        write_provenance(folder / "draft", values)
    return draft.requires_grad_(False)
