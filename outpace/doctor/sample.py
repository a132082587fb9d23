"""The text that a model is judged by: its own answers to problems, or a plain one."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.tasks.prompts import draw_mixed, harmony_of
from outpace.text.harmony import HarmonyTokens
from outpace.text.sft_rows import rows, with_next
from outpace.text.tokenizer import encode_prompt

PROMPT = 64  # tokens of a plain text that a continuation begins with
FAMILIES, COUNT, SEED = ("addition", "strings", "lists", "units"), 24, 4  # of the problems


@dataclass(frozen=True)
class Sample:
    """`judged` [T-1]: which of tokens[1:] count, in a conversation those that the model itself writes."""

    tokens: list[int]
    judged: Tensor

    @classmethod
    def whole(cls, tokens: list[int]) -> "Sample":
        """A text of which every token counts."""
        return cls(tokens, torch.ones(len(tokens) - 1, dtype=torch.bool))

    @cached_property
    def wanted(self) -> Tensor:
        """The tokens that count."""
        return torch.tensor(self.tokens[1:])[self.judged]

    @property
    def prompt(self) -> list[int]:
        """The text up to the first answer, or its beginning."""
        first = int(self.judged.int().argmax()) + 1
        return self.tokens[: first if first > 1 else PROMPT]


def sample(tokenizer: Tokenizer | None, vocab_size: int, most: int, file: Path | None) -> Sample:
    """The first `most` ids of a conversation where the model speaks Harmony; else of a plain text, or of
    `file`, with what the tokenizer puts in front of a text. Without a tokenizer ids at random, which serve a
    comparison and nothing else.

    Raises ValueError for a file of less than two tokens.
    """
    if tokenizer is None:
        rng = torch.Generator().manual_seed(0)
        return Sample.whole(torch.randint(vocab_size, (most,), generator=rng).tolist())
    harmony = harmony_of(tokenizer) if file is None else None
    conversation = None if harmony is None else _conversation(harmony, most)
    if conversation is not None and max(conversation.tokens) < vocab_size:
        return conversation
    ids = encode_prompt(tokenizer, TEXT if file is None else file.read_text(encoding="utf-8"))[:most]
    if len(ids) < 2:
        raise ValueError(f"{file} holds less than two tokens: nothing can be predicted from it")
    return Sample.whole([i for i in ids if i < vocab_size])


def _conversation(harmony: HarmonyTokens, most: int) -> Sample | None:
    """Problems with their working, one after the other; None where no answer begins within `most` tokens."""
    first, *others = (problem.conversation() for problem in draw_mixed(COUNT, SEED, FAMILIES))
    (row,) = rows(first, harmony)
    for conversation in others:
        row = with_next(row, conversation, harmony)
    judged = torch.tensor(row.mask[1:most])
    return Sample(row.ids[:most], judged) if judged.any() else None


TEXT = '''"""Count the words of a text file and print the most common ones."""

import argparse
from collections import Counter
from pathlib import Path


def count_words(path):
    """Return a Counter of the words in the file, in lower case."""
    counts = Counter()
    with open(path, encoding="utf-8") as file:
        for line in file:
            for word in line.split():
                counts[word.strip(".,;:!?").lower()] += 1
    return counts


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the file to read")
    parser.add_argument("-n", "--number", type=int, default=10, help="how many words to print")
    args = parser.parse_args(argv)
    if not args.path.exists():
        raise FileNotFoundError(f"no such file: {args.path}")
    for word, count in count_words(args.path).most_common(args.number):
        print(f"{count:8d} {word}")


if __name__ == "__main__":
    main()

# The program above reads a file line by line, so that a large file does not have to fit in memory. It was
# written on a rainy afternoon in the library of a small town, where the old man at the next table was
# reading the newspaper. He looked up and asked what the numbers on the screen meant. "They are words," stated
# the young woman, "and how often each of them is used." He thought about it for a while, and then he stated
# that the most common words are always the shortest ones, because people are lazy.
'''
