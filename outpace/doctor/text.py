"""The text the doctor reads to a model: plain English and plain Python, written for it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from outpace.text.tokenizer import encode_prompt

SAMPLE = '''"""Count the words of a text file and print the most common ones."""

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


def sample_tokens(tokenizer: Tokenizer | None, vocab_size: int, most: int, file: Path | None) -> list[int]:
    """The first `most` ids of the sample, or of a file, with what the tokenizer puts in front of a text;
    without a tokenizer ids at random, which serve a comparison and nothing else.

    Raises ValueError for a file of less than two tokens.
    """
    if tokenizer is None:
        rng = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (most,), generator=rng).tolist()
    ids = encode_prompt(tokenizer, SAMPLE if file is None else file.read_text(encoding="utf-8"))[:most]
    if len(ids) < 2:
        raise ValueError(f"{file} holds less than two tokens: nothing can be predicted from it")
    return [i for i in ids if i < vocab_size]
