"""Prompts for the teacher: pieces of the training documents, cut at random places."""

from itertools import accumulate

import torch
from tokenizers import Tokenizer

from outpace.text.corpus import Document, split
from outpace.text.tokenizer import encode

CHARACTERS_PER_TOKEN = 16  # generous: what is encoded to find the tokens asked for
TRIES = 1000


class Prompts:
    """Every character of the training documents is as likely as any other to lie in a prompt's first line."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer) -> None:
        """Held-out documents are put aside. Raises ValueError when nothing is left."""
        self.documents, _ = split(documents)
        if not self.documents:
            raise ValueError(
                f"none of the {len(documents)} documents is for training (corpus.split holds one in "
                "twenty out, by name): give more of them"
            )
        self.tokenizer = tokenizer
        self.ends = torch.tensor(list(accumulate(len(d.text) for d in self.documents)))

    def draw(self, length: int, rng: torch.Generator) -> list[int]:
        """`length` token ids from the beginning of a line on. Raises ValueError where no text is so long."""
        for _ in range(TRIES):
            place = torch.randint(int(self.ends[-1]), (1,), generator=rng)
            i = int(torch.searchsorted(self.ends, place, right=True))
            text = self.documents[i].text
            at = int(place) - int(self.ends[i]) + len(text)
            begin = text.rfind("\n", 0, at) + 1
            ids = encode(self.tokenizer, text[begin : begin + CHARACTERS_PER_TOKEN * length])
            if len(ids) >= length:
                return ids[:length]
        raise ValueError(
            f"{TRIES} random places of the training documents were followed by fewer than {length} tokens: "
            "lower prompt_tokens or give longer documents"
        )
