"""Train a DFlash draft from a teacher cache (arXiv 2602.06036, section 4.3; D-PACE, arXiv 2605.18810)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.drafts.dflash import DFlash, DFlashConfig
from outpace.drafts.load import save_dflash
from outpace.models.config import FULL, WINDOW
from outpace.models.decoder import Decoder
from outpace.ops.blocks import block_attend
from outpace.ops.sampling import seeded
from outpace.train.anchors import Packed, Sample, pack
from outpace.train.drafts import (
    StepLoss,
    Teacher,
    TrainingRecipe,
    accuracy,
    features,
    learn,
    measure_tau,
    provenance,
    rows_of_step,
    write_provenance,
)
from outpace.train.losses import chunked_nll_and_hits, decay_weights, default_gamma, dpace_weights

WEIGHTS = ("dpace", "decay")


@dataclass(frozen=True, kw_only=True)
class DFlashRecipe(TrainingRecipe):
    """A DFlash draft of any size and how to train it. Fields of recipes/dflash-*.toml."""

    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    block_size: int = 8
    sliding_window: int = 0  # of every layer; 0: they see all of the context
    target_layer_ids: tuple[int, ...] = ()  # of those the cache holds; () is all of them
    anchors: int = 128  # of a row
    weights: str = "dpace"  # or "decay"
    alpha: float = 0.5  # D-PACE's smoothing
    gamma: float | None = None  # of the decay; None: the paper's for this block size
    recompute: bool = False  # layers are run again in the backward: less memory, a third more work
    mask_token: str | None = "<|MASK|>"  # None: a learned mask_embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights {self.weights!r}: known are {', '.join(WEIGHTS)}")
        if self.anchors < 1:
            raise ValueError(f"anchors {self.anchors}: it must be at least 1")
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window {self.sliding_window}: a count of tokens, or 0 for none")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is outside 0..1")

    def config(self, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...]) -> DFlashConfig:
        """`held`: the layers whose states the cache holds. Raises ValueError where the mask token is not
        in the vocabulary."""
        theirs = target.config
        mask = None if self.mask_token is None else tokenizer.token_to_id(self.mask_token)
        if mask is None and self.mask_token is not None:
            raise ValueError(
                f"the tokenizer knows no mask_token {self.mask_token!r}: name a token that text never "
                "uses, or none for a learned embedding"
            )
        config = DFlashConfig(
            hidden_size=theirs.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=theirs.vocab_size,
            rope=theirs.rope,
            rms_norm_eps=theirs.rms_norm_eps,
            block_size=self.block_size,
            target_layer_ids=self.target_layer_ids or tuple(held),
            num_target_layers=theirs.num_layers,
            mask_token_id=mask,
            max_position_embeddings=theirs.max_position_embeddings,
        )
        return self.served(config)

    def served(self, config: DFlashConfig) -> DFlashConfig:
        """A trained draft's config with this recipe's block and window: no weight depends on them."""
        kind = WINDOW if self.sliding_window else FULL
        return replace(
            config,
            block_size=self.block_size,
            layer_types=(kind,) * config.num_layers,
            sliding_window=self.sliding_window,
            causal=False,
        )


def init_dflash(config: DFlashConfig, seed: int) -> DFlash:
    """Normal with std 1/sqrt(fan-in); what writes into the residual stream starts at zero."""
    draft, rng = DFlash(config), seeded(seed)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
                p.zero_()
            elif not name.endswith("norm.weight"):
                p.copy_(torch.randn(p.shape, generator=rng) * p.shape[-1] ** -0.5)
    return draft


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
    x = draft.embed_block(packed.anchors, target).to(dtype).view(1, A * B, -1)
    cos, sin = draft.rope(packed.positions.view(1, -1))

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = draft.layers[i].context_kv(features, *context_rope)  # type: ignore[operator]
        k, v, context_k, context_v = (t[0].transpose(0, 1) for t in (k, v, *shared))
        window = config.window(i)
        return block_attend(q[0], k, v, context_k, context_v, packed.layout, window, scale)[None]

    return draft.denoise(x, cos, sin, attend, recompute).view(A, B, -1)


def block_loss(hidden: Tensor, head: Tensor, packed: Packed, recipe: DFlashRecipe) -> tuple[Tensor, Tensor]:
    """hidden [A,B,C], head [V,C] -> loss, a weighted mean over the valid MASKs, and hits [A, B-1]: where
    the draft's first choice is the label."""
    labels, valid = packed.labels, packed.valid
    states = hidden[:, 1:].flatten(0, 1)
    nll, hits = (x.view(labels.shape) for x in chunked_nll_and_hits(states, head, labels.flatten()))
    if recipe.weights == "dpace":
        weights = dpace_weights(nll, valid, recipe.alpha)
    else:
        weights = decay_weights(valid, recipe.gamma or default_gamma(recipe.block_size))
    return (weights * nll).sum() / weights.sum(), hits & valid


@torch.no_grad()
def unseen(
    draft: DFlash, target: Decoder, samples: list[Sample], recipe: DFlashRecipe, layers: list[int] | None
) -> dict[str, Any]:
    """`accuracy` on samples kept from training. Far below the training's, more steps will not help: it
    takes more answers."""
    found, valid = [], []
    for i in range(0, len(samples), recipe.rows):
        rng = seeded(recipe.seed, 2, i)
        rows = samples[i : i + recipe.rows]
        packed = pack(rows, recipe.block_size, recipe.anchors, recipe.row_tokens, rng, layers)
        hidden = block_states(draft, target, packed, recipe.dtype)
        found.append(block_loss(hidden, target.dense_head.to(recipe.dtype), packed, recipe)[1])
        valid.append(packed.valid)
    return {f"unseen_{k}": v for k, v in accuracy(torch.cat(found), torch.cat(valid)).items()}


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
    every `eval_every` steps. `init`: a draft to start from; its own sizes then stand, not the recipe's, and
    only the block and the window are the recipe's. `started_from`: that draft's provenance. When the last
    step is done, folder/draft holds the draft in z-lab's format and provenance.json. Raises ValueError
    where cache, target and recipe do not fit.
    """
    held = tuple(cache.meta.target_layer_ids)
    draft = _begin(recipe, target, tokenizer, held, init)
    config = draft.config
    layers = features(config.target_layer_ids, target, held, cache.meta.hidden_size)
    draft.bind(target)
    target.requires_grad_(False)
    head = target.dense_head.to(recipe.dtype)
    trained = recipe.trained(cache)
    kept = [cache.sample(i) for i in range(trained, len(cache))]

    def loss_of(step: int) -> StepLoss:
        rows = [cache.sample(i) for i in rows_of_step(step, recipe, trained)]
        rng = seeded(recipe.seed, 1, step)
        packed = pack(rows, config.block_size, recipe.anchors, recipe.row_tokens, rng, layers)
        hidden = block_states(draft, target, packed, recipe.dtype, recipe.recompute)
        loss, hits = block_loss(hidden, head, packed, recipe)
        return StepLoss(loss, packed.row_tokens, accuracy(hits, packed.valid))

    def judge() -> dict[str, Any]:
        metrics = unseen(draft, target, kept, recipe, layers) if kept else {}
        if held_out:
            prompts = held_out[: recipe.eval_prompts]
            metrics["tau"] = measure_tau(draft.bind(target), target, prompts, recipe.eval_new_tokens)
        return metrics

    if learn(draft, recipe, folder, "dflash", loss_of, judge, stop_after=stop_after):
        said = provenance(recipe, config, target, cache, folder) | {"started_from": started_from}
        save_dflash(draft, folder / "draft")
        write_provenance(folder / "draft", said)
    return draft.requires_grad_(False)


def _begin(
    recipe: DFlashRecipe, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...], init: DFlash | None
) -> DFlash:
    if init is None:
        return init_dflash(recipe.config(target, tokenizer, held), recipe.seed)
    draft = DFlash(recipe.served(init.config))
    draft.load_state_dict(init.state_dict())
    return draft
