"""Train an EAGLE-3 draft from a teacher cache (arXiv 2503.01840), chained or in one pass (2602.01469)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.checkpoint.publish import published
from outpace.drafts.eagle3 import Eagle3, Eagle3Config, init_eagle3
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.formats.load import save_draft
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded
from outpace.ops.unrolled import Unrolled, unrolled_attend
from outpace.train.data import AnchorSample
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
from outpace.train.losses import needs_target, parse_loss, top_tokens, weighted_losses

LEAST_KEPT = 0.2  # share of the indices that the deepest steps of a thinned unrolling keep

KeyValues = list[tuple[Tensor, Tensor]]  # of each layer: k, v [N,K,D]


@dataclass(frozen=True)
class Texts:
    """The rows of a step, packed: S tokens, of which N indices begin a draft token: those where the token t
    + 1 is of the response, and t + 2 is there. Index n's first label is of[n + 0], its next of[n + 1], ..:
    labels and indices of a row are equally many, so label m belongs to token `at[m] + 2`."""

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
    rows: Sequence[AnchorSample], cut: int | None, layers: Sequence[int] | None = None, *, final: bool = False
) -> Texts:
    """Rows cut to `cut` tokens; `layers`: indices into aux, None for all. Raises ValueError where no row has
    two tokens of response, and where final states are wanted and a row holds none."""
    pieces: list[tuple[Tensor, ...]] = []
    states: list[Tensor] = []
    keys, queries = [0], [0]
    for row in rows:
        tokens = row.tokens[:cut]
        first, T = max(row.prompt_length - 1, 0), len(tokens)
        n = T - 2 - first
        if n < 1:
            continue
        aux = row.aux[:, :T] if layers is None else row.aux[list(layers), :T]
        at, end = torch.arange(first, first + n) + keys[-1], torch.full((n,), queries[-1] + n)
        pieces.append((tokens, aux.transpose(0, 1), torch.arange(T) + row.offset, at, end))
        if final:
            if row.final is None:
                raise ValueError(
                    "the cache holds no final states, with which this loss compares: build one with "
                    "`teacher build --final`, or take loss ce"
                )
            states.append(row.final[first + 1 : first + 1 + n])
        keys.append(keys[-1] + T)
        queries.append(queries[-1] + n)
    if not pieces:
        raise ValueError(
            f"none of {len(rows)} cached rows has a draft token: that takes a response of at least two tokens"
            + (f" within row_tokens {cut}" if cut else "")
        )
    tokens, aux, positions, at, end = (torch.cat(x) for x in zip(*pieces, strict=True))
    kept = torch.cat(states) if final else None
    return Texts(tokens, aux.transpose(0, 1), positions, keys, queries, at, end, kept)


@dataclass(frozen=True)
class UnrollStep:
    chosen: Tensor  # [n] int64: the indices it was run at, ascending
    hidden: Tensor  # [n, C], before `norm`


def thinned(count: int, steps: int, keep: float, rng: torch.Generator) -> list[Tensor]:
    """The indices of every step: all of `count` at step 0, at step j a share of max(keep^j, LEAST_KEPT), each
    step's among those of the one before (P-EAGLE's COD), since it attends to what they left."""
    drawn = torch.rand(count, generator=rng)
    shares = [1.0] + [max(keep**j, LEAST_KEPT) for j in range(1, steps)]
    return [(drawn < share).nonzero().squeeze(1) for share in shares]


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
    items: list[UnrollStep] = []
    own: list[KeyValues] = []
    masks = draft.masks(target) if draft.config.parallel else None
    for j, chosen in enumerate(indices):
        if j:
            before = items[-1].chosen
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
            given = token if masks is None else masks[0].to(dtype).expand(1, len(chosen), -1)
            hidden, more = run(given, feature, texts.positions[at] + j, first, own, texts.layout(chosen))
            own = [*own, more]
        items.append(UnrollStep(chosen, hidden[0]))
    return items


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
class Vocabulary:
    """What a draft can say, against its target."""

    row_of: Tensor | None  # [V] int64: the draft's row of each token, -1 where it has none; None: the same
    head: Tensor  # [V, C] of the target
    theirs: Tensor  # [draft_vocab, C]: its rows that the draft has too

    @staticmethod
    def of(draft: Eagle3, target: Decoder, dtype: torch.dtype) -> "Vocabulary":
        ids, head = draft.target_ids(), target.dense_head.detach().to(dtype)
        if ids is None:
            return Vocabulary(None, head, head)
        row_of = torch.full((target.config.vocab_size,), -1, device=ids.device)
        row_of[ids] = torch.arange(len(ids), device=ids.device)
        return Vocabulary(row_of, head, head[ids])

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens if self.row_of is None else self.row_of[tokens]


@dataclass(frozen=True)
class UnrollLoss:
    """Of N indices and J steps; `hits` and `alpha` are 0 where `valid` is."""

    loss: Tensor  # scalar
    hits: Tensor  # [N, J] bool: the draft's first choice is the label
    run: Tensor  # [N, J] bool: of a thinned unrolling
    valid: Tensor  # [N, J] bool: it was run, and there is a label
    alpha: Tensor | None  # [N, J]: of soft labels, the chance of acceptance; 0 where they have no weight


def unrolled_loss(
    draft: Eagle3, steps: Sequence[UnrollStep], texts: Texts, vocabulary: Vocabulary, kind: str, decay: float
) -> UnrollLoss:
    """The mean over all steps' draft tokens of the loss `kind`, a draft token of step j weighing decay^j.

    Draft tokens that the draft cannot make right have no weight: hard labels (ce alone) outside its
    vocabulary; with soft labels, places where the target's first choice is outside.
    """
    labels = vocabulary.rows(texts.labels)
    final = texts.final if needs_target(kind) else None
    known = labels >= 0
    if final is not None:
        final = final.to(steps[0].hidden.dtype)
        if vocabulary.row_of is not None:
            known = vocabulary.rows(top_tokens(final, vocabulary.head)) >= 0
    shape = len(labels), len(steps)
    run = torch.zeros(shape, dtype=torch.bool, device=labels.device)
    for j, step in enumerate(steps):
        run[step.chosen, j] = True
    ahead = torch.arange(len(labels), device=labels.device)[:, None] + torch.arange(
        len(steps), device=run.device
    )
    valid = run & (ahead < texts.end[:, None])
    # a row for every draft token that has a weight or may be right, those of one label side by side
    index, step_of, place = _guesses(steps, valid)
    of = index + step_of
    of, order = of.sort(stable=True)
    useful = known[of] | (labels[of] >= 0)
    of, order = of[useful], order[useful]
    index, step_of = index[order], step_of[order]
    states = draft.norm(torch.cat([step.hidden for step in steps])[place[order]])
    weights = decay**step_of * known[of]
    weights = weights / weights.sum().clamp(min=1e-9)
    head = vocabulary.theirs if draft.lm_head is None else draft.lm_head.weight
    assert isinstance(head, Tensor)
    theirs = None if final is None else vocabulary.theirs
    loss, rows = weighted_losses(kind, weights, states, head, labels, final, theirs, of=of)
    hits = torch.zeros_like(valid)
    hits[index, step_of] = rows.hits
    alpha = None
    if rows.accept is not None:
        alpha = torch.zeros_like(valid, dtype=torch.float32)
        alpha[index, step_of] = rows.accept * known[of]
    return UnrollLoss(loss, hits, run, valid, alpha)


def _guesses(steps: Sequence[UnrollStep], valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every valid draft token: its index, its step, and its row among all steps' rows."""
    index = torch.cat([step.chosen for step in steps])
    step_of = torch.cat([torch.full_like(step.chosen, j) for j, step in enumerate(steps)])
    place = valid[index, step_of].nonzero().squeeze(1)
    return index[place], step_of[place], place


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

    def evaluate() -> dict[str, Any]:
        metrics = course.validate(cache, kept) if kept else {}
        if held_out:
            metrics["tau"] = course.tau(held_out[: recipe.eval_prompts])
        return metrics

    if learn(draft, recipe, folder, "eagle3", loss_of, evaluate, by_adam=BY_ADAM, stop_after=stop_after):
        values = provenance(recipe, draft.config, target, cache, folder) | {"started_from": started_from}
        with published(folder / "draft") as new:
            save_draft(draft, new)
            write_provenance(new, values)
    return draft.requires_grad_(False)
