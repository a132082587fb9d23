"""Drafts that know the answer, and are wrong where they are told to be."""

from dataclasses import dataclass

import torch

from outpace.drafts.base import Proposal


@dataclass(frozen=True)
class Scripted:
    """Proposes from `answers` (what each row will say), wrong wherever `wrong(row, position)` is true;
    with `ragged`, rows offer different numbers of draft tokens, none at all among them. What it is shown
    must be the answers, unless it is `patient`: then text may be shown that is taken back."""

    answers: list
    prompts: list
    wrong: object
    block_size: int = 5
    ragged: bool = False
    patient: bool = False
    target_layer_ids: tuple = ()

    def begin(self, batch, length, offset=0, slack=0):
        return ScriptedSession(self)


class ScriptedSession:
    def __init__(self, draft):
        self.draft = draft
        self.rows = list(range(len(draft.prompts)))
        self.seen = [[] for _ in draft.prompts]
        self.round = 0

    def observe(self, tokens, aux, counts):
        assert aux is None
        for b, ids, count in zip(self.rows, tokens.tolist(), counts, strict=True):
            assert count or not self.round  # a running row commits at least one
            self.seen[b] += ids[:count]

    def select(self, batch_indices):
        self.rows = [self.rows[i] for i in batch_indices]

    def rewind(self, lengths):
        for b, length in zip(self.rows, lengths, strict=True):
            self.seen[b] = self.seen[b][:length]

    def propose(self, last, most, sampler):
        draft, rows, counts = self.draft, [], []
        self.round += 1
        for b, token in zip(self.rows, last.tolist(), strict=True):
            prompt = draft.prompts[b]
            items = [*self.seen[b][len(prompt) :], token]
            # what was observed is exactly the verified text, in order
            assert self.seen[b][: len(prompt)] == prompt
            assert draft.patient or all(x == y for x, y in zip(items, draft.answers[b], strict=False))
            assert draft.patient or most == draft.block_size
            ahead = draft.answers[b][len(items) :][: draft.block_size - 1]
            guesses = [(g + 1) % 97 if draft.wrong(b, len(items) + i) else g for i, g in enumerate(ahead)]
            guesses += [0] * (draft.block_size - 1 - len(guesses))
            count = 1 + (self.round * 2 + b * 3) % draft.block_size if draft.ragged else draft.block_size
            rows.append([token, *guesses])
            counts.append(min(count, most))
        width = max(counts)
        return Proposal(torch.tensor([r[:width] for r in rows]), counts)


class Forgetful:
    """A draft that is its own session and remembers nothing: `propose` goes by the last token alone."""

    target_layer_ids = ()

    def begin(self, batch, length, offset=0, slack=0):
        return self

    def observe(self, tokens, aux, counts):
        pass

    def select(self, batch_indices):
        pass
