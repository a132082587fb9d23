"""Train an EAGLE-3 draft from a teacher cache (arXiv 2503.01840), chained or in one pass (2602.01469)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.config import Ranges
from outpace.drafts.base import Draft
from outpace.drafts.eagle3 import Eagle3, Eagle3Config, init_eagle3
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.formats.load import save_draft
from outpace.models.decoder import Decoder
from outpace.ops.ranks import Mean
from outpace.ops.sampling import seeded
from outpace.ops.unrolled import Unrolled, unrolled_attend
from outpace.teacher.store import TeacherCache, TeacherSample
from outpace.train.drafts import (
    ABOVE_0,
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
from outpace.train.losses import block_losses, needs_target, top_tokens
from outpace.train.trainer import StepLoss

LEAST_KEPT = 0.2  # share of the indices that the deepest steps of a thinned unrolling keep

KeyValues = list[tuple[Tensor, Tensor]]  # of each layer: k, v [N,K,D]


@dataclass(frozen=True)
class Texts:
    """The rows of a step, packed: S tokens, and N indices from which draft tokens are unrolled: those where
    token t + 1 belongs to the response and t + 2 exists. Index n has the labels n, n + 1, ..; a row has as
    many labels as indices, and label m is token `at[m] + 2`."""

    tokens: Tensor  # [S] int64
    aux: Tensor  # [features, S, C]
    positions: Tensor  # [S] int64
    keys: list[int]  # [R+1]: where each row begins
    queries: list[int]  # [R+1]: where each row's indices begin
    at: Tensor  # [N] int64: their places among the S tokens
    end: Tensor  # [N] int64: one past the row's last index
    final: Tensor | None  # [N, C]: what the target's head reads to predict label m

    @property
    def labels(self) -> Tensor:
        return self.tokens[self.at + 2]

    def to(self, device: torch.device) -> "Texts":
        final = None if self.final is None else self.final.to(device)
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "aux", "positions", "at", "end")}
        return replace(self, **moved, final=final)

    def layout(self, chosen: Tensor) -> Unrolled:
        """Of the indices `chosen`, ascending."""
        ends = torch.searchsorted(chosen, torch.tensor(self.queries, device=chosen.device)).tolist()
        return Unrolled(self.keys, ends, self.at[chosen])


def gather(
    rows: Sequence[TeacherSample],
    cut: int | None,
    layers: Sequence[int] | None = None,
    *,
    final: bool = False,
) -> Texts:
    """Rows cut to `cut` tokens; `layers`: indices into aux, None for all. Rows with fewer than two tokens of
    response are left out. Raises ValueError where no row is left."""
    parts: list[tuple[Tensor, ...]] = []
    keys, queries = [0], [0]
    for row in rows:
        tokens = row.tokens[:cut]
        first, T = max(row.prompt_length - 1, 0), len(tokens)
        n = T - 2 - first
        if n < 1:
            continue
        aux = row.aux[:, :T] if layers is None else row.aux[list(layers), :T]
        at, end = torch.arange(first, first + n) + keys[-1], torch.full((n,), queries[-1] + n)
        part: tuple[Tensor, ...] = tokens, aux.transpose(0, 1), torch.arange(T) + row.offset, at, end
        if final:
            assert row.final is not None
            part = (*part, row.final[first + 1 : first + 1 + n])
        parts.append(part)
        keys.append(keys[-1] + T)
        queries.append(queries[-1] + n)
    if not parts:
        raise ValueError(
            f"none of {len(rows)} cached rows has a draft token: that takes a response of at least two tokens"
            + (f" within row_tokens {cut}" if cut else "")
        )
    tokens, aux, positions, at, end, *states = (torch.cat(x) for x in zip(*parts, strict=True))
    return Texts(
        tokens, aux.transpose(0, 1), positions, keys, queries, at, end, states[0] if states else None
    )


@dataclass(frozen=True)
class UnrollStep:
    chosen: Tensor  # [n] int64: its indices, ascending
    hidden: Tensor  # [n, C], before `norm`


def thinned(counts: Sequence[int], steps: int, keep: float, rngs: Sequence[torch.Generator]) -> list[Tensor]:
    """The indices of every step of rows with `counts` indices: all at step 0, at step j a share of
    max(keep^j, LEAST_KEPT), one of each row at least, each a subset of the step before (P-EAGLE's COD), since
    it attends to that step's keys and values. `rngs`: of each row, so that its indices do not hang on the
    others."""
    drawn = [torch.rand(n, generator=rng) for n, rng in zip(counts, rngs, strict=False)]
    for row in drawn:
        row[row.argmin()] = 0.0
    shares = [1.0] + [max(keep**j, LEAST_KEPT) for j in range(1, steps)]
    return [(torch.cat(drawn) < share).nonzero().squeeze(1) for share in shares]


def unroll(
    draft: Eagle3,
    target: Decoder,
    texts: Texts,
    indices: Sequence[Tensor],
    dtype: torch.dtype,
    recompute: bool = False,
) -> list[UnrollStep]:
    """One step for each of `indices`, all of them at step 0. `recompute`: layers are run again in the
    backward."""
    everything = torch.arange(len(texts.tokens), device=texts.tokens.device)
    whole = Unrolled(texts.keys, texts.keys, everything)
    feature = draft.fuse(texts.aux[:, None].to(dtype))
    run = _Runner(draft, target, dtype, recompute)
    hidden, first = run(texts.tokens.roll(-1), feature, texts.positions, [], [], whole)
    hidden = hidden[:, texts.at]
    done: list[UnrollStep] = []
    own: list[KeyValues] = []
    masks = draft.masks(target) if draft.config.parallel else None
    for j, chosen in enumerate(indices):
        if j:
            before = done[-1].chosen
            if len(chosen) < len(before):
                place = torch.searchsorted(before, chosen)
                own = [[(k[place], v[place]) for k, v in step] for step in own]
                hidden = hidden[:, place]
            feature = (
                draft.feedback(hidden) if masks is None else masks[1].to(dtype).expand(1, len(chosen), -1)
            )
            at = texts.at[chosen]
            # past the row's end the token is another row's: such an index has no label at this step
            token = texts.tokens[(at + 1 + j).clamp(max=len(texts.tokens) - 1)]
            inputs = token if masks is None else masks[0].to(dtype).expand(1, len(chosen), -1)
            hidden, new = run(inputs, feature, texts.positions[at] + j, first, own, texts.layout(chosen))
            own = [*own, new]
        done.append(UnrollStep(chosen, hidden[0]))
    return done


@dataclass(frozen=True)
class _Runner:
    draft: Eagle3
    target: Decoder
    dtype: torch.dtype
    recompute: bool

    def __call__(
        self,
        tokens: Tensor,
        feature: Tensor,
        positions: Tensor,
        first: KeyValues,
        own: list[KeyValues],
        layout: Unrolled,
    ) -> tuple[Tensor, KeyValues]:
        """tokens [n] or their embeddings [1,n,C], feature [1,n,C], positions [n]; first: step 0's keys and
        values, none in step 0 itself; own: those of later steps at the same indices -> hidden [1,n,C], and
        this step's keys and values."""
        draft = self.draft
        embeds = tokens if tokens.dim() == 3 else draft.embed(tokens[None], self.target).to(self.dtype)
        cos, sin = draft.rope(positions[None])
        scale, window = draft.config.head_dim**-0.5, draft.config.sliding_window

        def step(embeds: Tensor, feature: Tensor) -> tuple[Tensor, KeyValues]:
            made: KeyValues = []

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                k, v = k[0].transpose(0, 1), v[0].transpose(0, 1)
                made.append((k, v))
                keys = first[layer] if first else (k, v)
                mine = [step[layer] for step in own] + ([(k, v)] if first else [])
                return unrolled_attend(q[0], *keys, mine, layout, window, scale)[None]

            return draft(embeds, feature, cos, sin, attend), made

        if self.recompute:
            again: Callable[..., Any] = checkpoint
            return again(step, embeds, feature, use_reentrant=False)  # type: ignore[no-any-return]
        return step(embeds, feature)


@dataclass(frozen=True)
class UnrollLoss:
    """Of N indices and J steps; `hits` and `alpha` are 0 where `valid` is."""

    mean: Mean  # a scalar, with a gradient
    hits: Tensor  # [N, J] bool: the draft's first choice is the label
    run: Tensor  # [N, J] bool: of a thinned unrolling
    valid: Tensor  # [N, J] bool: it was run, and there is a label
    alpha: Tensor | None  # [N, J]: of soft labels, the chance of acceptance; 0 where they have no weight

    @property
    def loss(self) -> Tensor:
        """Of these rows alone."""
        return self.mean.value


def unrolled_loss(
    draft: Eagle3,
    steps: Sequence[UnrollStep],
    texts: Texts,
    vocabulary: DraftVocabulary,
    kind: str,
    decay: float,
) -> UnrollLoss:
    """The mean over all steps' draft tokens of the loss `kind`, a draft token of step j weighing decay^j.

    Draft tokens that the draft cannot make right have no weight: with hard labels (ce alone) those outside
    its vocabulary; with soft labels those where the target's top-1 is outside.
    """
    labels = vocabulary.rows(texts.labels)
    final = texts.final if needs_target(kind) else None
    known = labels >= 0
    if final is not None:
        final = final.to(steps[0].hidden.dtype)
        if vocabulary.ids is not None:
            known = vocabulary.rows(top_tokens(final, vocabulary.full_head)) >= 0
    N, J, device = len(labels), len(steps), labels.device
    run = torch.zeros((N, J), dtype=torch.bool, device=device)
    for j, step in enumerate(steps):
        run[step.chosen, j] = True
    ahead = torch.arange(N, device=device)[:, None] + torch.arange(J, device=device)
    valid = run & (ahead < texts.end[:, None])
    # a row for every draft token that has a weight or may be right, sorted by label
    index = torch.cat([step.chosen for step in steps])
    step_of = torch.cat([torch.full_like(step.chosen, j) for j, step in enumerate(steps)])
    place = valid[index, step_of].nonzero().squeeze(1)
    of, order = (index[place] + step_of[place]).sort(stable=True)
    useful = known[of] | (labels[of] >= 0)
    of, place = of[useful], place[order[useful]]
    index, step_of = index[place], step_of[place]
    states = draft.norm(torch.cat([step.hidden for step in steps])[place])
    weights = decay**step_of * known[of]
    head = vocabulary.head if draft.lm_head is None else draft.lm_head.weight
    assert isinstance(head, Tensor)
    target_head = None if final is None else vocabulary.head
    rows = block_losses(kind, states, head, labels, final, target_head, weights=weights, of=of)
    assert rows.total is not None
    hits = torch.zeros_like(valid)
    hits[index, step_of] = rows.hits
    alpha = None
    if rows.accept is not None:
        alpha = torch.zeros_like(valid, dtype=torch.float32)
        alpha[index, step_of] = rows.accept * known[of]
    return UnrollLoss(Mean(rows.total, weights.sum()), hits, run, valid, alpha)


BY_ADAM = ("lm_head.weight", "embed_tokens.weight", "mask_hidden")  # tables of rows


@dataclass(frozen=True, kw_only=True)
class Eagle3Recipe(DraftRecipe):
    """An EAGLE-3 draft of any size and how to train it. Fields of recipes/eagle3-*.toml. Without
    `target_layer_ids` it reads the cache's first, middle and last layer; without `draft_vocab` it predicts
    through the target's head; `mask_token` is P-EAGLE's, for the draft tokens after the first."""

    RANGES: ClassVar[Ranges] = DraftRecipe.RANGES | {
        "steps_ahead": (1, 2**10),
        "decay": (ABOVE_0, 1),
        "keep": (ABOVE_0, 1),
    }

    loss: str = "kl"
    norm_before_residual: bool = False
    norm_output: bool = False  # EAGLE-3.1
    fc_norm: bool = False  # EAGLE-3.1
    parallel: bool = False  # P-EAGLE: all draft tokens in one pass
    steps_ahead: int = 7  # draft tokens in a row that are trained
    decay: float = 0.8  # a draft token of step j weighs decay^j
    keep: float = 1.0  # of the indices, step j runs keep^j (at least 0.2): P-EAGLE's 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_window(self.sliding_window, self.steps_ahead)

    def config(self, target: Decoder, tokenizer: Tokenizer, cached_layers: tuple[int, ...]) -> Eagle3Config:
        """Raises ValueError where the mask token is not in the vocabulary."""
        layers = cached_layers
        return Eagle3Config(
            **self.sizes(target),
            target_hidden_size=target.config.hidden_size,
            draft_vocab_size=self.draft_vocab or target.config.vocab_size,
            layer_ids=self.target_layer_ids
            or tuple(sorted({layers[0], layers[len(layers) // 2], layers[-1]})),
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
            fc_norm=self.fc_norm,
            sliding_window=self.sliding_window,
            parallel=self.parallel,
            mask_token_id=self.mask_token_id(tokenizer) if self.parallel else None,
        )


def _check_window(window: int, steps_ahead: int) -> None:
    if 0 < window <= steps_ahead:
        raise ValueError(
            f"sliding_window {window} does not reach back over steps_ahead {steps_ahead}: make it larger, "
            "or 0 for none; or lower steps_ahead"
        )


def begin_eagle3(
    recipe: Eagle3Recipe, target: Decoder, tokenizer: Tokenizer, cache: TeacherCache, init: Eagle3 | None
) -> Eagle3:
    """An untrained draft: normal with std 1/sqrt(fan-in), projections into the residual stream zero, norm and
    head the target's own. Or a copy of `init`."""
    if init is not None:
        heads = {"own_embedding": init.embed_tokens is not None, "own_head": init.lm_head is not None}
        draft = Eagle3(init.config, **heads, mapped=init.d2t is not None)
        draft.load_state_dict(init.state_dict())
        return draft
    config = recipe.config(target, tokenizer, tuple(cache.meta.target_layer_ids))
    ids, head = None, target.dense_head.detach()
    if recipe.draft_vocab:
        size, texts = recipe.draft_vocab, responses(cache, recipe.training_count(cache))
        ids = most_frequent(texts, size, config.vocab_size, target.config.eos_token_ids) + torch.arange(size)
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


class Eagle3Trainer(DraftTrainer[Eagle3]):
    title, by_adam = "eagle3", BY_ADAM

    def __init__(
        self,
        recipe: Eagle3Recipe,
        target: Decoder,
        tokenizer: Tokenizer,
        cache: TeacherCache,
        init: Eagle3 | None,
    ) -> None:
        self.recipe, self.target = recipe, target
        self.draft = begin_eagle3(recipe, target, tokenizer, cache, init).to(target.device)
        self.layers = aux_indices(self.config.layer_ids, target, cache)
        self.bind()
        _check_window(self.config.sliding_window, recipe.steps_ahead)
        self.dtype = recipe.dtype(target.device)
        self.vocabulary = DraftVocabulary.of(self.draft.target_ids(), target, self.dtype)

    def loss(self, step: int, samples: list[int], rows: list[TeacherSample]) -> StepLoss:
        rngs = [seeded(self.recipe.seed, 1, step, sample) for sample in samples]
        result, tokens = self.evaluate(rows, self.recipe.keep, rngs)
        return StepLoss([result.mean], tokens, metrics_of(result))

    def evaluate(
        self, rows: list[TeacherSample], keep: float, rngs: list[torch.Generator]
    ) -> tuple[UnrollLoss, int]:
        """-> the loss of these rows, and the number of their tokens. keep 1: every index at every step."""
        recipe, device = self.recipe, self.target.device
        texts = gather(rows, recipe.row_tokens, self.layers, final=recipe.final).to(device)
        counts = [b - a for a, b in pairwise(texts.queries)]
        indices = thinned(counts, recipe.steps_ahead, keep, rngs)
        indices = [chosen.to(device) for chosen in indices]
        steps = unroll(self.draft, self.target, texts, indices, self.dtype, recipe.recompute)
        result = unrolled_loss(self.draft, steps, texts, self.vocabulary, recipe.loss, recipe.decay)
        return result, len(texts.tokens)

    @torch.no_grad()
    def validate(self, batches: Batches) -> dict[str, Mean]:
        results = [self.evaluate(rows, 1.0, [seeded(0)] * len(rows))[0] for _, rows in batches]
        return accuracy(torch.cat([r.hits for r in results]), torch.cat([r.valid for r in results]))

    def bind(self) -> Draft:
        """As a chain of the trained length."""
        return BoundEagle3(self.draft, self.target, TreeShape(depth=self.recipe.steps_ahead))

    def save(self, folder: Path) -> None:
        save_draft(self.draft, folder)


def metrics_of(result: UnrollLoss) -> dict[str, Mean]:
    """`accuracy`, its accept_len over the indices that ran every step; with soft labels also the mean
    acceptance probability of each step."""
    metrics = accuracy(result.hits, result.valid)
    metrics["accept_len"] = leading_hits(result.hits[result.run.all(1)])
    if result.alpha is not None:
        metrics["alpha"] = Mean(result.alpha.sum(0), (result.alpha > 0).sum(0).float())
    return metrics


train_eagle3 = partial(train_draft, Eagle3Trainer)  # published in SGLang's format
