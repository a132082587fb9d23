"""EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): a draft unrolled on its own states.

Index t of a text pairs the target's states at t with token t + 1. Step 0 reads the true feature, step j >= 1
the draft's own output of step j - 1 at the same index, or P-EAGLE's mask (arXiv 2602.01469); its token is
t + 1 + j, its rotary position t + j, its label token t + 2 + j. Indices, keys and states do not move from
step to step: tokens, labels and positions do. `ops/unrolled.py` states whom a query sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.drafts.eagle3 import Eagle3
from outpace.models.decoder import Decoder
from outpace.ops.unrolled import Unrolled, unrolled_attend
from outpace.train.anchors import AnchorSample
from outpace.train.losses import needs_target, top_tokens, weighted_losses

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
