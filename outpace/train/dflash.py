"""Train a DFlash draft from a teacher cache (arXiv 2602.06036, section 4.3; D-PACE, arXiv 2605.18810)."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.config import Ranges
from outpace.drafts.base import Draft
from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.dflash_decode import Head, confidence
from outpace.drafts.dflash_heads import Selector
from outpace.drafts.sampler import Greedy
from outpace.formats.load import save_draft
from outpace.models.config import FULL, WINDOW
from outpace.models.decoder import Decoder
from outpace.ops.blocks import block_attend
from outpace.ops.ranks import Mean
from outpace.ops.sampling import seeded
from outpace.teacher.store import TeacherCache, TeacherSample
from outpace.train.data import FollowedAnchors, Packed, pack
from outpace.train.drafts import (
    MOST,
    Batches,
    DraftRecipe,
    DraftTrainer,
    DraftVocabulary,
    accuracy,
    aux_indices,
    leading_hits,
    most_frequent,
    responses,
    train_draft,
)
from outpace.train.losses import (
    WEIGHTS,
    LossRows,
    block_losses,
    block_weights,
    default_gamma,
    fit_temperatures,
)
from outpace.train.trainer import StepLoss

GROUP = 16  # channels that share a coefficient of a convolution
CANDIDATES = 16  # of the selector
CONFIDENT = ("match", "overlap")
ROWS = 1024  # of one chunk of candidates
# parts that a draft may lack: freshly initialized, they change nothing
PARTS = ("_conv.", "candidate_selector.", "markov_head.", "confidence_head.", "d2t")
# matrices that Muon leaves alone: tables of rows, and those that start at 0 and should leave it slowly
BY_ADAM = ("_codebook", "hidden_projection.weight", "kernel_projection.weight", "markov_w1", "w2.weight")


@dataclass(frozen=True, kw_only=True)
class DFlashRecipe(DraftRecipe):
    """A DFlash draft of any size and how to train it. Fields of recipes/dflash-*.toml."""

    RANGES: ClassVar[Ranges] = (
        DraftRecipe.RANGES
        | dict.fromkeys(("conv", "selector", "markov", "selector_weight", "confidence_weight"), (0, MOST))
        | {"block_size": (2, 2**16), "anchors": (1, 2**24), "alpha": (0, 1), "gamma": (1e-6, MOST)}
    )

    num_layers: int = 2
    mask_token: str | None = "<|MASK|>"
    block_size: int = 8
    anchors: int = 128  # of a row
    rounds: bool = False  # anchors follow the steps of decoding (train/data.py: FollowedAnchors)
    weights: str = "dpace"  # of the positions of a block: dpace, dpace-soft, decay, auf, flat
    alpha: float = 0.5  # D-PACE's smoothing
    gamma: float | None = None  # of the decay; None: the paper's for this block size
    causal: bool = False  # a position of a block attends to none after it (JetSpec)
    conv: int = 0  # taps of the convolutions around every sublayer (DFlash 2: 2); 0: none
    selector: int = 0  # rank of the selector over the 16 most probable candidates (DFlash 2: 256); 0: none
    selector_weight: float = 1.0  # of its loss
    markov: int = 0  # rank of the Markov head (DSpark: 256); 0: none
    markov_gated: bool = False
    confidence: bool = False  # a head that predicts whether a draft token is accepted (DSpark)
    confidence_weight: float = 1.0  # of its loss
    confident: str = "match"  # its label: draft token is right; "overlap": 1 - TV, needs final states

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("weights", WEIGHTS), ("confident", CONFIDENT)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: known are {', '.join(known)}")

    @property
    def final(self) -> bool:
        overlap = self.confidence and self.confident == "overlap"
        return super().final or self.weights == "dpace-soft" or overlap

    def config(self, target: Decoder, tokenizer: Tokenizer, cached_layers: tuple[int, ...]) -> DFlashConfig:
        """Raises ValueError where the mask token is not in the vocabulary."""
        config = DFlashConfig(
            **self.sizes(target),
            block_size=self.block_size,
            target_layer_ids=self.target_layer_ids or tuple(cached_layers),
            num_target_layers=target.config.num_layers,
            mask_token_id=self.mask_token_id(tokenizer),
        )
        return self.served(config)

    def served(self, config: DFlashConfig) -> DFlashConfig:
        """A trained draft's config with this recipe's block, window and causality, on which no weight
        depends, and the parts that this recipe adds; the draft's own parts stay as they are."""
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
    """Normal with std 1/sqrt(fan-in); projections into the residual stream are zero, and the optional parts
    change nothing."""
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
    """`init` with the parts that `config` adds; untrained, they leave its proposals as they are."""
    draft = DFlash(config)
    draft.reset_parts(seeded(seed, 3))
    missing, left = draft.load_state_dict(init.state_dict(), strict=False)
    assert not left and all(map(is_part, missing)), (missing, left)
    return draft


def is_part(name: str) -> bool:
    return any(part in name for part in PARTS)


@dataclass(frozen=True)
class BlockLoss:
    """terms: with a gradient, their sum is the loss; hits [A, n] bool: the draft predicts the label, given
    its true predecessor; metrics: for the log."""

    terms: list[Mean]
    hits: Tensor
    metrics: dict[str, Mean]

    @property
    def loss(self) -> Tensor:
        """Of these rows alone."""
        return torch.stack([term.value for term in self.terms]).sum()


@dataclass(frozen=True)
class Objective:
    """The training loss of a DFlash draft, and of each of its parts, against one target."""

    draft: DFlash
    recipe: DFlashRecipe
    vocabulary: DraftVocabulary

    @staticmethod
    def of(draft: DFlash, target: Decoder, recipe: DFlashRecipe) -> "Objective":
        ids = Head.of(target, draft.d2t).ids
        return Objective(draft, recipe, DraftVocabulary.of(ids, target, recipe.dtype(target.device)))

    def __call__(self, hidden: Tensor, packed: Packed) -> BlockLoss:
        """hidden [A, B, C]: slot i >= 1 predicts its own position.

        Every part is trained with the true predecessor. Labels outside the draft's vocabulary have no loss;
        they count as not accepted.
        """
        draft, recipe = self.draft, self.recipe
        states, tokens = hidden[:, 1:].flatten(0, 1), packed.labels.flatten()
        previous = predecessors(packed).flatten()
        labels = self.vocabulary.rows(tokens)
        inputs, head = states, self.vocabulary.head
        if draft.markov_head is not None:  # U + e W_2^T, as one product
            w2 = draft.markov_head.markov_w2.weight
            assert isinstance(w2, Tensor)
            inputs = torch.cat((states, draft.markov_head.embed(previous, states)), dim=-1)
            head = torch.cat((head, w2.to(head.dtype)), dim=-1)
        final = None if packed.final is None else packed.final.flatten(0, 1).to(self.vocabulary.head.dtype)
        theirs = None if final is None else self.vocabulary.head
        selector = draft.candidate_selector  # never next to a Markov head: its candidates are of these logits
        top = 0 if selector is None else selector.top_k
        rows = block_losses(recipe.loss, inputs, head, labels, final, theirs, top=top)
        known, shape = (labels >= 0) & packed.valid.flatten(), packed.valid.shape
        gamma = recipe.gamma or default_gamma(packed.layout.block)
        unknown = replace(rows, nll=rows.nll.masked_fill(labels < 0, torch.inf))
        weighed = unknown if recipe.weights == "dpace" else rows
        options = {"alpha": recipe.alpha, "gamma": gamma}
        weights = block_weights(recipe.weights, weighed, packed.valid, **options).flatten()
        terms, hits, metrics = [Mean.of(rows.loss, weights * known)], rows.hits & known, {}
        if selector is not None and rows.top is not None:
            nll, chosen, has = self.selected(selector, states, rows.top, labels, previous)
            metrics = {"recall": Mean.of(has.float(), known.float())}
            metrics["base_accept_len"] = leading_hits(hits.view(shape))
            hits = chosen & known
            terms.append(Mean.of(nll, weights * (known & has)).times(recipe.selector_weight))
        if draft.confidence_head is not None:
            bce = self.confident(states, previous, hits, rows)
            valid = packed.valid.flatten()
            terms.append(Mean.of(bce, weights * valid).times(recipe.confidence_weight))
            metrics["confidence_loss"] = Mean.of(bce.detach(), valid.float())
        return BlockLoss(terms, hits.view(shape), metrics)

    def selected(
        self, selector: Selector, states: Tensor, top: Tensor, labels: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Per row, over its candidates `top` [n, k]: -log of the label's share (0 where it is no candidate),
        whether it has the largest score, and whether it is a candidate. Gradients reach the states too: the
        candidates' own logits are part of their scores."""
        parts = []
        for i in range(0, len(states), ROWS):
            part = slice(i, i + ROWS)
            rows = top[part]
            inputs = (selector, states[part], rows, previous[part])
            scores = checkpoint(self._scores, *inputs, use_reentrant=False)
            is_label = rows == labels[part, None]
            place, has = is_label.long().argmax(-1), is_label.any(-1)
            nll = F.cross_entropy(scores, place, reduction="none") * has
            parts.append((nll, has & (scores.detach().argmax(-1) == place), has))
        nll, chosen, has = (torch.cat(x) for x in zip(*parts, strict=True))
        return nll, chosen, has

    def _scores(self, selector: Selector, states: Tensor, rows: Tensor, previous: Tensor) -> Tensor:
        values = torch.einsum("nkc,nc->nk", self.vocabulary.head[rows], states)
        ids = rows if self.draft.d2t is None else rows + self.draft.d2t[rows]
        return selector.scores(previous, ids, values, selector.hidden_projection(states))

    def confident(self, states: Tensor, previous: Tensor, hits: Tensor, rows: LossRows) -> Tensor:
        """Binary cross-entropy per row, with no gradient to the states: confidence in a draft token must
        not change the draft token."""
        draft = self.draft
        assert draft.confidence_head is not None
        parts = draft.candidate_selector, draft.markov_head
        logit = confidence(draft.confidence_head, *parts, states.detach(), previous)
        label = hits.float()
        if self.recipe.confident == "overlap":
            assert rows.accept is not None
            label = rows.accept.clamp(0, 1)
        return F.binary_cross_entropy_with_logits(logit, label, reduction="none")


def predecessors(packed: Packed) -> Tensor:
    """[A, n]: the true token before each label."""
    return torch.cat((packed.anchors[:, None], packed.labels[:, :-1]), dim=1)


def served_proposals(draft: DFlash, head: Head, hidden: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """hidden [A, B, C] -> hits and confidence [A, n] of the decoding code, given the true predecessors."""
    states, previous = hidden[:, 1:].flatten(0, 1)[:, None], predecessors(packed).flatten()
    pairs = zip(states.split(ROWS), previous.split(ROWS), strict=True)
    proposals = [draft.guess(head, *pair, Greedy()) for pair in pairs]
    hits = torch.cat([p.tokens[:, 0] for p in proposals]).view(packed.labels.shape) == packed.labels
    return hits & packed.valid, torch.cat([p.sure[:, 0] for p in proposals]).view(hits.shape)


def block_states(
    draft: DFlash, target: Decoder, packed: Packed, dtype: torch.dtype, recompute: bool = False
) -> Tensor:
    """All blocks in one forward: -> hidden [A, B, C]; slot i >= 1 predicts its own position.

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
        tensors = q.flatten(0, 1), own_k, own_v, context_k, context_v
        out = block_attend(*tensors, packed.layout, config.window(i), scale, config.hides(i))
        return out.view(A, B, -1)

    return draft.denoise(x, cos, sin, attend, recompute)


class DFlashTrainer(DraftTrainer[DFlash]):
    title, by_adam = "dflash", BY_ADAM

    def __init__(
        self,
        recipe: DFlashRecipe,
        target: Decoder,
        tokenizer: Tokenizer,
        cache: TeacherCache,
        init: DFlash | None,
    ) -> None:
        if init is None:
            config = recipe.config(target, tokenizer, tuple(cache.meta.target_layer_ids))
            self.draft = init_dflash(config, recipe.seed)
        else:
            self.draft = continued(recipe.served(init.config), init, recipe.seed)
        self.layers = aux_indices(self.config.target_layer_ids, target, cache)
        self.recipe, self.target = recipe, target
        self.bind()
        if self.draft.d2t is not None and (init is None or init.d2t is None):
            texts = responses(cache, recipe.training_count(cache))
            sizes = len(self.draft.d2t), target.config.vocab_size
            self.draft.d2t.copy_(most_frequent(texts, *sizes, target.config.eos_token_ids))
        self.objective = Objective.of(self.draft, target, recipe)
        self.followed = FollowedAnchors(len(cache), recipe.anchors) if recipe.rounds else None

    def loss(self, step: int, samples: list[int], rows: list[TeacherSample]) -> StepLoss:
        first = None if self.followed is None else self.followed.of(samples, rows)
        rngs = [seeded(self.recipe.seed, 1, step, sample) for sample in samples]
        packed = self.pack(rows, rngs, first, final=self.recipe.final)
        result = self.objective(self.states_of(packed, self.recipe.recompute), packed)
        metrics = accuracy(result.hits, packed.valid) | result.metrics
        loss = StepLoss(result.terms, packed.row_tokens, metrics)
        if self.followed is None:
            return loss
        return replace(loss, after=partial(self.followed.update, samples, packed.layout, result.hits))

    def pack(
        self,
        rows: list[TeacherSample],
        rngs: list[torch.Generator],
        first: list[Tensor] | None = None,
        *,
        final: bool = False,
    ) -> Packed:
        recipe = self.recipe
        sizes = recipe.block_size, recipe.anchors, recipe.row_tokens
        return pack(rows, *sizes, rngs, self.layers, final=final, first_anchors=first)

    def states_of(self, packed: Packed, recompute: bool = False) -> Tensor:
        return block_states(self.draft, self.target, packed, self.recipe.dtype(self.target.device), recompute)

    @torch.no_grad()
    def proposals(self, batches: Batches) -> tuple[Tensor, Tensor, Tensor]:
        """hits, valid and confidence [A, n] of the decoding code on validation samples."""
        head, parts = Head.of(self.target, self.draft.d2t), []
        for i, rows in batches:
            packed = self.pack(rows, [seeded(self.recipe.seed, 2, i + n) for n in range(len(rows))])
            hits, sure = served_proposals(self.draft, head, self.states_of(packed), packed)
            parts.append((hits, packed.valid, sure))
        hits, valid, sure = (torch.cat(x) for x in zip(*parts, strict=True))
        return hits, valid, sure

    def validate(self, batches: Batches) -> dict[str, Mean]:
        hits, valid, _ = self.proposals(batches)
        return accuracy(hits, valid)

    def finish(self, batches: Batches) -> None:
        hits, valid, sure = self.proposals(batches)
        self.draft.config = replace(self.config, temperatures=fit_temperatures(sure, hits, valid))

    def bind(self) -> Draft:
        return self.draft.bind(self.target)

    def states(self) -> dict[str, Any]:
        return {} if self.followed is None else {"rounds": self.followed}

    def save(self, folder: Path) -> None:
        save_draft(self.draft, folder)


# of an `init` the block, the window and the added parts are the recipe's all the same
train_dflash = partial(train_draft, DFlashTrainer)
