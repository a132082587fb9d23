"""What the texts of a teacher cache begin with: stretches of raw text, or chats up to the model's turn."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from tokenizers import Tokenizer

from outpace.ops.sampling import seeded, shuffled
from outpace.text.corpus import Document, corpus_hash, split
from outpace.text.tokenizer import encode

CHARACTERS_PER_TOKEN = 16  # a generous bound on the text to encode
TRIES = 1000
PROMPT = 1  # stream of random numbers


class Prompts(Protocol):
    """`digest`: of all that prompts are drawn from; `template`: how they were made of it; `stop`: tokens that
    end a response besides the target's own; `longest`: tokens of a prompt, None for as many as asked for."""

    @property
    def digest(self) -> str: ...
    @property
    def template(self) -> str: ...
    @property
    def stop(self) -> frozenset[int]: ...
    @property
    def longest(self) -> int | None: ...

    def most_tokens(self, lengths: list[int]) -> int:
        """At most so many tokens are in the prompts of texts that ask for prompts of these lengths."""
        ...

    def draw(self, text: int, length: int, seed: int) -> list[int]:
        """The prompt of a text by its number: `length` tokens, where the kind of prompt has no length."""
        ...


class TextPrompts:
    """Stretches of the training documents, uniformly over their characters."""

    template, stop, longest = "none: raw text", frozenset[int](), None

    def __init__(self, documents: list[Document], tokenizer: Tokenizer) -> None:
        """Held-out documents are left out. Raises ValueError when none is left."""
        self.documents, _ = split(documents)
        if not self.documents:
            raise ValueError(
                f"none of the {len(documents)} documents is for training (corpus.split holds one in "
                "twenty out, by name): give more of them"
            )
        self.tokenizer = tokenizer
        self.ends = torch.tensor(list(accumulate(len(d.text) for d in self.documents)))

    @property
    def digest(self) -> str:
        return corpus_hash(self.documents)

    def most_tokens(self, lengths: list[int]) -> int:
        return sum(lengths)

    def draw(self, text: int, length: int, seed: int) -> list[int]:
        """`length` token ids from the beginning of a line. Raises ValueError if no text is that long."""
        rng = seeded(seed, PROMPT, text)
        for _ in range(TRIES):
            place = torch.randint(int(self.ends[-1]), (1,), generator=rng)
            i = int(torch.searchsorted(self.ends, place, right=True))
            source = self.documents[i].text
            at = int(place) - int(self.ends[i]) + len(source)
            begin = source.rfind("\n", 0, at) + 1
            ids = encode(self.tokenizer, source[begin : begin + CHARACTERS_PER_TOKEN * length])
            if len(ids) >= length:
                return ids[:length]
        raise ValueError(
            f"{TRIES} random places of the training documents were followed by fewer than {length} tokens: "
            "lower prompt_tokens or give longer documents"
        )


@dataclass(frozen=True)
class ChatPrompts:
    """Prompts as given, in an order that the seed decides; in another order again where there are more texts.
    Raises ValueError for none."""

    prompts: Sequence[Sequence[int]]
    stop: frozenset[int] = field(default_factory=frozenset)
    template: str = "chat"

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("no prompts: give a file with one conversation on every line")

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr([list(ids) for ids in self.prompts]).encode()).hexdigest()

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    def most_tokens(self, lengths: list[int]) -> int:
        known = sorted(map(len, self.prompts), reverse=True)
        rounds, rest = divmod(len(lengths), len(known))
        return rounds * sum(known) + sum(known[:rest])

    def draw(self, text: int, length: int, seed: int) -> list[int]:
        (i,) = shuffled(text, 1, len(self.prompts), seed, PROMPT)
        return list(self.prompts[i])
