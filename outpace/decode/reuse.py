"""What a target and its draft remember of a text, for the next text that begins alike."""

from collections.abc import Sequence
from typing import cast

import torch

from outpace.drafts.base import Draft, DraftSession, RowsSession
from outpace.drafts.deferred import Deferred
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder


def reusable(held: Sequence[int], prompt: Sequence[int], known: int | None) -> int:
    """How many tokens of a prompt's beginning can be taken from a text that is remembered: one at least is
    left, for its logits. `known`: tokens of it that a draft which reads hidden states remembers, None without
    one; the newest state it may not have, as its pair lacks the next token."""
    most = 0
    for a, b in zip(held, prompt[:-1], strict=False):
        if a != b:
            break
        most += 1
    return most if known is None else max(min(most - 1, known), 0)


class PrefixCache:
    """The KV of a conversation, the target's and its draft's, from one answer to the next: a prompt that
    begins like the text before it is not read again.

    Its tokens are those of a fresh start: all of it is dense, and read in chunks that have the bits of single
    tokens. That holds on the CPU; it makes place for twice the text that it is asked to hold, and starts
    afresh where a text outgrows it.
    """

    def __init__(self, target: Decoder, draft: Draft | None = None) -> None:
        """Raises ValueError for a target that remembers something else than keys and values, or elsewhere."""
        if target.device.type != "cpu":
            raise ValueError("only on the CPU has a token the same bits in every chunk")
        target.make_cache(1, 1, slack=1).of([0], [0])  # refuses what cannot be taken up in the middle
        self.target, self.draft = target, draft
        self.cache: KVCache | None = None
        self.rows: RowsSession | None = None  # of a draft that reads hidden states
        self.deferred: Deferred | None = None
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.view: KVCache | None = None  # of `cache`, for the newest text
        self.known = 0  # tokens of a prompt that its text began with

    def begin(self, prompt: Sequence[int], output: list[int], length: int) -> tuple[KVCache, int]:
        """A text begins with `prompt`, goes on with what will be in `output`, and has `length` tokens at
        most, those of a proposal included; -> its cache, and how many tokens of the prompt that holds."""
        if self.cache is None or self.cache.length < length:
            self.cache = self.target.make_cache(1, 2 * length, slack=2 * length)
            self.rows = self.deferred = self.view = None
        if self.deferred is not None:
            self.deferred.flush()
        read = None if self.draft is None or not self.draft.target_layer_ids else 0
        if self.rows is not None:
            read = self.rows.lengths[0]
        # behind the tokens that were emitted the cache may hold a proposal: a step may have been broken off
        held = [] if self.view is None else (self.prompt + self.output)[: self.view.lengths[0]]
        self.known = reusable(held, prompt, read)
        self.prompt, self.output, self.view = list(prompt), output, self.cache.of([0], [self.known])
        return self.view, self.known

    def session(self) -> DraftSession | None:
        """Of the draft, which has observed the tokens in the cache."""
        if self.draft is None:
            return None
        assert self.cache is not None
        if not self.draft.target_layer_ids:  # it reads text, which is there
            session: DraftSession = self.draft.begin(1, self.cache.length)
            if self.known:
                session.observe(torch.tensor([self.prompt[: self.known]]), None, [self.known])
            return session
        if self.rows is None:
            self.rows = cast(RowsSession, self.draft.begin(1, self.cache.length, slack=self.cache.length))
        self.rows.rewind([self.known])
        return self.rows
