"""The prompts every number is measured on: held-out problems, or text that is cut at line starts."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.tasks.prompts import harmony_of, problem_prompts
from outpace.text.corpus import Document

SEED = 1


def prompts_for(
    tokenizer: Tokenizer, documents: Sequence[Document], count: int, length: int
) -> list[list[int]]:
    """Problems of at most `length` ids for a model that speaks Harmony, for others `held_out_prompts`."""
    harmony = harmony_of(tokenizer)
    if harmony is None:
        return held_out_prompts(tokenizer, documents, count, length)
    return problem_prompts(harmony, count, SEED, length)


def held_out_prompts(
    tokenizer: Tokenizer, documents: Sequence[Document], count: int, length: int
) -> list[list[int]]:
    """`count` prompts of exactly `length` ids. Deterministic, and spread: one of every document that is
    long enough, in an order decided by the documents' names, then a second of each, and so on.

    Raises ValueError when the documents do not hold that many.
    """
    walks = deque(_cuts(tokenizer, d, length) for d in sorted(documents, key=_shuffled))
    items: list[list[int]] = []
    while walks and len(items) < count:
        walk = walks.popleft()
        if (prompt := next(walk, None)) is not None:
            items.append(prompt)
            walks.append(walk)
    if len(items) < count:
        raise ValueError(
            f"{len(documents)} held-out documents hold {len(items)} prompts of {length} tokens, not {count}: "
            "ask for fewer or shorter ones, or give more text"
        )
    return items


def answer_lengths(
    target: Decoder, prompts: Sequence[list[int]], stop: frozenset[int], most: int
) -> list[int]:
    """How many tokens autoregressive decoding answers each prompt with, up to a stop token; at least two, for
    what follows the first is timed."""
    request = Request(max_new_tokens=most, stop=stop)
    return [max(2, len(generate(target, [prompt], request).tokens[0])) for prompt in prompts]


def _shuffled(document: Document) -> str:
    return hashlib.sha256(b"prompt " + document.name.encode()).hexdigest()


def _cuts(tokenizer: Tokenizer, document: Document, length: int) -> Iterator[list[int]]:
    """Stretches of one document, in order. Each is encoded by itself, from the start of its first line:
    what a user's prompt that begins there would be."""
    text = document.text
    begin = 0
    while len(text) - begin >= length:  # no token is shorter than a character, byte pieces aside
        # 12 characters a token are more than code ever takes; if not, the whole rest is encoded
        for end in (begin + 12 * length, len(text)):
            encoded = tokenizer.encode(text[begin:end], add_special_tokens=False)
            if len(encoded.ids) > length or end >= len(text):
                break
        if len(encoded.ids) < length:
            return
        yield encoded.ids[:length]
        line = text.find("\n", begin + encoded.offsets[length - 1][1] - 1)
        if line < 0:
            return
        begin = line + 1
