"""Drafts that know the answer, and are wrong where they are told to be."""

from dataclasses import dataclass

import torch

from outpace.drafts.proposal import Proposal


@dataclass(frozen=True)
class Scripted:
    """Proposes from `answers` (what each row will say), wrong wherever `wrong(row, position)` is true;
    with `ragged`, rows offer different numbers of guesses, none at all among them."""

    answers: list
    prompts: list
    wrong: object
    block_size: int = 5
    ragged: bool = False
    target_layer_ids: tuple = ()

    def begin(self, batch, length, offset=0):
        return ScriptedSession(self)


class ScriptedSession:
    def __init__(self, draft):
        self.draft = draft
        self.seen = [[] for _ in draft.prompts]
        self.finished = [False] * len(draft.prompts)
        self.round = 0

    def observe(self, tokens, aux, counts):
        assert aux is None
        for b, (ids, count) in enumerate(zip(tokens.tolist(), counts, strict=True)):
            self.seen[b] += ids[:count]
            self.finished[b] = self.round > 0 and not count  # a running row commits at least one

    def propose(self, last):
        draft, rows, counts = self.draft, [], []
        self.round += 1
        for b, (prompt, token) in enumerate(zip(draft.prompts, last.tolist(), strict=True)):
            said = [*self.seen[b][len(prompt) :], token]
            # what was observed is exactly the verified text, in order
            assert self.seen[b][: len(prompt)] == prompt
            assert self.finished[b] or all(x == y for x, y in zip(said, draft.answers[b], strict=False))
            ahead = draft.answers[b][len(said) :][: draft.block_size - 1]
            guesses = [(g + 1) % 97 if draft.wrong(b, len(said) + i) else g for i, g in enumerate(ahead)]
            guesses += [0] * (draft.block_size - 1 - len(guesses))
            count = 1 + (self.round * 2 + b * 3) % draft.block_size if draft.ragged else draft.block_size
            rows.append([token, *guesses])
            counts.append(count)
        width = max(counts)
        return Proposal(torch.tensor([r[:width] for r in rows]), counts)
