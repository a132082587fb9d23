"""Train a DFlash draft from a teacher cache (arXiv 2602.06036, section 4.3; D-PACE, arXiv 2605.18810)."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.checkpoint.publish import published
from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.dflash_decode import Head, confidence
from outpace.drafts.dflash_heads import Selector
from outpace.drafts.sampler import Greedy
from outpace.formats.load import save_draft
from outpace.models.config import FULL, WINDOW
from outpace.models.decoder import Decoder
from outpace.ops.blocks import block_attend
from outpace.ops.sampling import seeded
from outpace.train.data import Packed, Rounds, pack
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
from outpace.train.losses import (
    WEIGHTS,
    LossRows,
    block_losses,
    block_weights,
    default_gamma,
    fit_temperatures,
    needs_target,
)

GROUP = 16  # channels that share a coefficient of a convolution
CANDIDATES = 16  # of the selector
CONFIDENT = ("match", "overlap")
# parts that a draft may begin without: at their start they change nothing
PARTS = ("_conv.", "candidate_selector.", "markov_head.", "confidence_head.", "d2t")
# matrices that Muon leaves alone: tables of rows, and what begins at 0 and should leave it slowly
BY_ADAM = ("_codebook", "hidden_projection.weight", "kernel_projection.weight", "markov_w1", "w2.weight")


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
    rounds: bool = False  # they are where decoding's steps would begin (train/data.py), not anywhere
    loss: str = "ce"  # of train/losses.py: ce, kl, tv, nla, lk, or a sum such as 0.1*ce+0.9*tv
    weights: str = "dpace"  # of the positions of a block: dpace, dpace-soft, decay, auf, flat
    alpha: float = 0.5  # D-PACE's smoothing
    gamma: float | None = None  # of the decay; None: the paper's for this block size
    recompute: bool = False  # layers are run again in the backward: less memory, a third more work
    mask_token: str | None = "<|MASK|>"  # None: a learned mask_embedding
    causal: bool = False  # no slot of a block sees what follows it (JetSpec)
    conv: int = 0  # taps of the convolutions around every sublayer (DFlash 2: 2); 0: none
    selector: int = 0  # rank of the selector over the 16 most probable candidates (DFlash 2: 256); 0: none
    selector_weight: float = 1.0  # of its loss
    markov: int = 0  # rank of the Markov head (DSpark: 256); 0: none
    markov_gated: bool = False
    confidence: bool = False  # a head that predicts whether a draft token is accepted (DSpark)
    confidence_weight: float = 1.0  # of its loss
    confident: str = (
        "match"  # learns where draft tokens are right; "overlap": 1 - TV, which needs final states
    )
    draft_vocab: int = 0  # the draft can say the so-many commonest tokens of the cache; 0: all

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_target(self.loss)  # raises for one that is not known
        for name, known in (("weights", WEIGHTS), ("confident", CONFIDENT)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: known are {', '.join(known)}")
        for name in ("conv", "selector", "markov", "draft_vocab", "selector_weight", "confidence_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is below 0")
        if self.anchors < 1:
            raise ValueError(f"anchors {self.anchors}: it must be at least 1")
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window {self.sliding_window}: a count of tokens, or 0 for none")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is outside 0..1")

    @property
    def final(self) -> bool:
        """Whether training needs the target's final states."""
        overlap = self.confidence and self.confident == "overlap"
        return needs_target(self.loss) or self.weights == "dpace-soft" or overlap

    def config(self, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...]) -> DFlashConfig:
        """`held`: the layers where the states the cache holds. Raises ValueError where the mask token is not
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
        """A trained draft's config with this recipe's block, window and causality, on which no weight
        depends, and with the parts that this recipe adds; those it has already stay as they are."""
        kind = WINDOW if self.sliding_window else FULL
        added: dict[str, Any] = {}
        if self.conv and not config.conv_kernel_size:
            added |= {"conv_kernel_size": self.conv, "conv_group_size": math.gcd(config.hidden_size, GROUP)}
        if self.selector and not config.selector_rank:
            rows = config.draft_vocab_size or self.draft_vocab or config.vocab_size
            added |= {"selector_rank": self.selector, "selector_top_k": min(CANDIDATES, rows)}
        if self.markov and not config.markov_rank:
            added |= {"markov_rank": self.markov, "markov_gated": self.markov_gated}
        if self.draft_vocab and not config.draft_vocab_size:
            added["draft_vocab_size"] = min(self.draft_vocab, config.vocab_size)
        return replace(
            config,
            block_size=self.block_size,
            layer_types=(kind,) * config.num_layers,
            sliding_window=self.sliding_window,
            causal=self.causal and kind == WINDOW,
            causal_full=self.causal and kind == FULL,
            confidence=self.confidence or config.confidence,
            temperatures=(),
            **added,
        )


def init_dflash(config: DFlashConfig, seed: int) -> DFlash:
    """Normal with std 1/sqrt(fan-in); what writes into the residual stream starts at zero, and the optional
    parts where they change nothing."""
    draft, rng = DFlash(config), seeded(seed)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
                p.zero_()
            elif not name.endswith("norm.weight") and not is_part(name):
                p.copy_(torch.randn(p.shape, generator=rng) * p.shape[-1] ** -0.5)
    draft.reset_parts(seeded(seed, 3))
    return draft


def continued(config: DFlashConfig, init: DFlash, seed: int) -> DFlash:
    """`init` with the parts that `config` adds: until they learn, it proposes what it did."""
    draft = DFlash(config)
    draft.reset_parts(seeded(seed, 3))
    missing, left = draft.load_state_dict(init.state_dict(), strict=False)
    assert not left and all(map(is_part, missing)), (missing, left)
    return draft


def is_part(name: str) -> bool:
    return any(part in name for part in PARTS)


ROWS = 1024  # where the candidates are looked at together


@dataclass(frozen=True)
class ValidationLoss:
    """loss: a scalar with its gradient to come; hits [A, n] bool: where the draft predicts the label, its
    predecessor given; more: for the log."""

    loss: Tensor
    hits: Tensor
    more: dict[str, float]


@dataclass(frozen=True)
class Objective:
    """A draft's loss against one target. head [N, C]: the rows of the target's head that the draft can say,
    in the training's dtype; row_of [V] int64: which row a token has, -1 for none; None: its own id."""

    draft: DFlash
    recipe: DFlashRecipe
    head: Tensor
    row_of: Tensor | None

    @staticmethod
    def of(draft: DFlash, target: Decoder, recipe: DFlashRecipe) -> "Objective":
        ids = Head.of(target, draft.d2t).ids
        head, dtype = target.dense_head.detach(), recipe.dtype(target.device)
        if ids is None:
            return Objective(draft, recipe, head.to(dtype), None)
        row_of = torch.full((target.config.vocab_size,), -1, device=ids.device)
        row_of[ids] = torch.arange(len(ids), device=ids.device)
        return Objective(draft, recipe, head[ids].to(dtype), row_of)

    def __call__(self, hidden: Tensor, packed: Packed) -> ValidationLoss:
        """hidden [A, B, C], of which slot i >= 1 predicts its own position.

        Every part learns with the true predecessor. A token that the draft cannot say teaches nothing but
        that it is not accepted.
        """
        draft, recipe = self.draft, self.recipe
        states, tokens = hidden[:, 1:].flatten(0, 1), packed.labels.flatten()
        previous = predecessors(packed).flatten()
        labels = tokens if self.row_of is None else self.row_of[tokens]
        given, head = states, self.head
        if draft.markov_head is not None:  # U + e W_2^T, as one product
            w2 = draft.markov_head.markov_w2.weight
            assert isinstance(w2, Tensor)
            given = torch.cat((states, draft.markov_head.embed(previous, states)), dim=-1)
            head = torch.cat((head, w2.to(head.dtype)), dim=-1)
        final = None if packed.final is None else packed.final.flatten(0, 1).to(self.head.dtype)
        theirs = None if final is None else self.head
        selector = draft.candidate_selector  # never next to a Markov head: its candidates are of these logits
        top = 0 if selector is None else selector.top_k
        rows = block_losses(recipe.loss, given, head, labels, final, theirs, top=top)
        known, shape = (labels >= 0) & packed.valid.flatten(), packed.valid.shape
        gamma = recipe.gamma or default_gamma(packed.layout.block)
        unknown = replace(rows, nll=rows.nll.masked_fill(labels < 0, torch.inf))
        validation = unknown if recipe.weights == "dpace" else rows
        how = {"alpha": recipe.alpha, "gamma": gamma}
        weights = block_weights(recipe.weights, validation, packed.valid, **how).flatten()
        loss, hits, more = _mean(rows.loss, weights * known), rows.hits & known, {}
        if selector is not None and rows.top is not None:
            nll, chosen, has = self.selected(selector, states, rows.top, labels, previous)
            more = {"recall": (has & known).sum().item() / max(1, int(known.sum()))}
            more["base_accept_len"] = _leading(hits.view(shape))
            hits = chosen & known
            loss = loss + recipe.selector_weight * _mean(nll, weights * (known & has))
        if draft.confidence_head is not None:
            bce = self.confident(states, previous, hits, rows)
            loss = loss + recipe.confidence_weight * _mean(bce, weights * packed.valid.flatten())
            more["confidence_loss"] = _mean(bce.detach(), packed.valid.flatten().float()).item()
        return ValidationLoss(loss, hits.view(shape), more)

    def selected(
        self, selector: Selector, states: Tensor, top: Tensor, labels: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Per row, of its candidates `top` [n, k]: -log of the label's share among them (0 where it is none),
        whether it has the largest score, and whether it is among them. Gradients reach the states too: the
        candidates' own logits are part of their scores."""
        items = []
        for i in range(0, len(states), ROWS):
            part = slice(i, i + ROWS)
            rows = top[part]
            given = (selector, states[part], rows, previous[part])
            scores = checkpoint(self._scores, *given, use_reentrant=False)
            is_label = rows == labels[part, None]
            place, has = is_label.long().argmax(-1), is_label.any(-1)
            nll = F.cross_entropy(scores, place, reduction="none") * has
            items.append((nll, has & (scores.detach().argmax(-1) == place), has))
        nll, chosen, has = (torch.cat(x) for x in zip(*items, strict=True))
        return nll, chosen, has

    def _scores(self, selector: Selector, states: Tensor, rows: Tensor, previous: Tensor) -> Tensor:
        values = torch.einsum("nkc,nc->nk", self.head[rows], states)
        ids = rows if self.draft.d2t is None else rows + self.draft.d2t[rows]
        return selector.scores(previous, ids, values, selector.hidden_projection(states))

    def confident(self, states: Tensor, previous: Tensor, hits: Tensor, rows: LossRows) -> Tensor:
        """Binary cross-entropy per row. The states learn nothing from it: what is stated about a draft token
        shall not change the draft token."""
        draft = self.draft
        assert draft.confidence_head is not None
        parts = draft.candidate_selector, draft.markov_head
        logit = confidence(draft.confidence_head, *parts, states.detach(), previous)
        wanted = hits.float()
        if self.recipe.confident == "overlap":
            assert rows.accept is not None
            wanted = rows.accept.clamp(0, 1)
        return F.binary_cross_entropy_with_logits(logit, wanted, reduction="none")


def predecessors(packed: Packed) -> Tensor:
    """[A, n]: the true token before each label."""
    return torch.cat((packed.anchors[:, None], packed.labels[:, :-1]), dim=1)


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    return (weights * x).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)


def _leading(hits: Tensor) -> float:
    return hits.long().cumprod(1).sum(1).float().mean().item()


@torch.no_grad()
def served_guesses(draft: DFlash, head: Head, hidden: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """hidden [A, B, C] -> hits and sure [A, n]: what serving would predict after the true predecessors,
    through the code that serves."""
    states, previous = hidden[:, 1:].flatten(0, 1)[:, None], predecessors(packed).flatten()
    items = []
    for i in range(0, len(states), ROWS):
        part = slice(i, i + ROWS)
        items.append(draft.guess(head, states[part], previous[part], Greedy()))
    hits = torch.cat([g.tokens[:, 0] for g in items]).view(packed.labels.shape) == packed.labels
    return hits & packed.valid, torch.cat([g.sure[:, 0] for g in items]).view(hits.shape)


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

    def evaluate() -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        if kept:
            hits, valid, _ = validate(draft, target, cache, kept, recipe, layers)
            metrics = {f"unseen_{k}": v for k, v in accuracy(hits, valid).items()}
        if held_out:
            prompts = held_out[: recipe.eval_prompts]
            metrics["tau"] = measure_tau(draft.bind(target), target, prompts, recipe.eval_new_tokens)
        return metrics

    parts = {"rounds": rounds} if rounds else {}
    if learn(
        draft, recipe, folder, "dflash", loss_of, evaluate, parts, by_adam=BY_ADAM, stop_after=stop_after
    ):
        if kept:
            hits, valid, sure = validate(draft, target, cache, kept, recipe, layers)
            draft.config = replace(draft.config, temperatures=fit_temperatures(sure, hits, valid))
        values = provenance(recipe, draft.config, target, cache, folder) | {"started_from": started_from}
        with published(folder / "draft") as new:
            save_draft(draft, new)
            write_provenance(new, values)
    return draft.requires_grad_(False)


def _begin(
    recipe: DFlashRecipe, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...], init: DFlash | None
) -> DFlash:
    if init is None:
        return init_dflash(recipe.config(target, tokenizer, held), recipe.seed)
    return continued(recipe.served(init.config), init, recipe.seed)
