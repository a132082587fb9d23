"""DFlash and EAGLE-3 as parts of a round: what they observe and guess, of tensors alone."""

from copy import copy
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from outpace.decode.round import State, StaticDraft, step_of
from outpace.drafts.base import Draft
from outpace.drafts.dflash import BoundDFlash, DFlashSession
from outpace.drafts.eagle3_decode import BoundEagle3, Eagle3Session
from outpace.drafts.sampler import DraftSampler
from outpace.kv.base import KVCache
from outpace.models.static_step import memories_of
from outpace.ops.quant import dense

Session = TypeVar("Session", DFlashSession, Eagle3Session)


def runs_whole(draft: Draft | None) -> bool:
    """Whether a round of this draft needs no host: a chain of a DFlash or an EAGLE-3, or no draft."""
    if isinstance(draft, BoundEagle3):
        return draft.shape.branch == 1 and not draft.draft.config.parallel
    return draft is None or isinstance(draft, BoundDFlash)


def static_draft(session: DFlashSession | Eagle3Session) -> StaticDraft:
    return StaticDFlash(session) if isinstance(session, DFlashSession) else StaticEagle3(session)


class StaticDFlash(StaticDraft):
    """A block in one pass."""

    head: Tensor | None  # the rows of the target's head that the draft has words for, where these are not all
    ids: Tensor | None

    def __init__(self, session: DFlashSession) -> None:
        super().__init__()
        self.draft, self.session = session.draft, over_buffers(self, session)
        weight = None if session.head.ids is None else session.head.weight
        head = weight if weight is None or isinstance(weight, Tensor) else dense(weight)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("ids", session.head.ids, persistent=False)

    def forward(self, state: State, n: int, sampler: DraftSampler) -> tuple[Tensor, Tensor]:
        session, last = self.session, state.last
        take_buffers(self, session.cache)
        session.weights = [layer.context_weights() for layer in session.layers]
        session.remember(state.aux, step_of(state.aux.shape[2], state.starts - state.kept, state.kept))
        if n == 1:
            return last.new_empty(len(last), 0), torch.zeros((), device=last.device)
        x = session.embedded(last, n)
        step = step_of(x.shape[1], state.starts, torch.full_like(last, x.shape[1]), both_ways=True)
        weight = session.target.head if self.head is None else self.head
        head = replace(session.head, weight=weight, ids=self.ids)
        guessed = self.draft.guess(head, session.denoise(x, step)[:, 1:n], last, sampler)
        return guessed.tokens, guessed.sure.sum()


class StaticEagle3(StaticDraft):
    """A chain, a token after the other."""

    ids: Tensor | None
    rows: Tensor

    def __init__(self, session: Eagle3Session) -> None:
        super().__init__()
        self.draft, self.source, self.session = session.draft, session, over_buffers(self, session)
        self.session.vocab = copy(session.vocab)
        self.register_buffer("ids", session.vocab.ids, persistent=False)
        self.register_buffer("rows", session.vocab.rows, persistent=False)

    def begin(self, state: State, last: Tensor) -> None:
        self.source.flush()
        (newest,) = self.source.pending  # the state of each row's last token, which has no pair yet
        assert newest.aux is not None
        state.aux[:, :, 0] = newest.aux[:, :, 0]
        state.following[:, 0] = last
        state.kept.fill_(1)

    def forward(self, state: State, n: int, sampler: DraftSampler) -> tuple[Tensor, Tensor]:
        session, target, last = self.session, self.session.target, state.last
        take_buffers(self, session.cache)
        session.vocab.ids, session.vocab.rows = self.ids, self.rows
        pairs = step_of(state.aux.shape[2], state.starts - state.kept, state.kept)
        if n == 1:
            session.remember(state.following, state.aux, pairs)
            return last.new_empty(len(last), 0), torch.zeros((), device=last.device)
        embeds, features = self.draft.embed(state.following, target), self.draft.fuse(state.aux)
        newest = (state.kept - 1).clamp(min=0)[:, None, None]
        hidden = session.run(embeds, features, pairs).take_along_dim(newest, dim=1)
        logits, guesses = [], []
        for at in range(1, n):
            logits.append(self.draft.head(hidden, target))
            guesses.append(session.vocab.choose(sampler, logits[-1], at)[0])
            if at + 1 < n:
                step = step_of(1, state.starts + (at - 1), torch.ones_like(last))
                hidden = session.run(self.draft.embed(guesses[-1], target), self.draft.feedback(hidden), step)
        tokens = torch.cat(guesses, 1)
        return tokens, session.vocab.log_probabilities(torch.cat(logits, 1), tokens).cumsum(1).exp().sum()


def over_buffers(module: StaticDraft, session: Session) -> Session:
    """Keys and values become buffers of `module` -> a session for `take_buffers`."""
    for name, memory in memories_of(session.cache).items():
        module.register_buffer(name, memory, persistent=False)
    own = copy(session)
    own.cache = copy(session.cache)
    own.cache.layers = [copy(memory) for memory in session.cache.layers]
    return own


def take_buffers(module: StaticDraft, cache: KVCache) -> None:
    for i, memory in enumerate(cache.layers):
        memory.k, memory.v = getattr(module, f"k{i}"), getattr(module, f"v{i}")
