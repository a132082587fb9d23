"""A draft of one's own in 40 lines: it proposes the word that last followed the last token, again and again.

    python examples/custom_draft.py

A draft can propose anything. The target verifies it, so a bad one costs time and never changes the output.
"""

from itertools import pairwise

import torch
from torch import Tensor

import outpace
from outpace.drafts.base import Proposal
from outpace.drafts.sampler import DraftSampler


class LastFollower:
    """Proposes up to 3 tokens. It reads no hidden states of the target and has nothing to rewind."""

    block_size = 4  # widest proposal, the last verified token included
    target_layer_ids: tuple[int, ...] = ()  # layers of the target where the hidden states it reads

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "Session":
        return Session(batch)


class Session:
    def __init__(self, batch: int) -> None:
        self.text: list[list[int]] = [[] for _ in range(batch)]

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        """The next counts[b] verified tokens of every sequence, prompt first."""
        for text, row, count in zip(self.text, tokens.tolist(), counts, strict=True):
            text += row[:count]

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        """At most `width` tokens per sequence, beginning with the last verified one."""
        rows = []
        for text, token in zip(self.text, last.tolist(), strict=True):
            followers, row = dict(pairwise(text)), [token]
            while len(row) < width and row[-1] in followers:
                row.append(followers[row[-1]])
            rows.append(row)
        counts = [len(row) for row in rows]
        padded = [row + [0] * (max(counts) - len(row)) for row in rows]
        return Proposal(torch.tensor(padded, device=last.device), counts)

    def select(self, batch_indices: list[int]) -> None:
        self.text = [self.text[b] for b in batch_indices]

    def rewind(self, lengths: list[int]) -> None:
        self.text = [text[:length] for text, length in zip(self.text, lengths, strict=True)]


def main() -> None:
    model = outpace.load("default")
    question = (
        'Rename the key "page" of this JSON to "age": {"page": "blue", "unit": "red", "year": "Nairobi"}'
    )
    chat = [{"role": "user", "content": question}]
    output = outpace.generate(model, chat, draft=LastFollower())
    assert output.tokens == outpace.generate(model, chat, draft=False).tokens
    print(output.text)
    print(f"tau {output.tau:.2f}: tokens per forward of the target")


if __name__ == "__main__":
    main()
