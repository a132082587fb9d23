"""Output in the form of a JSON schema: tokens that would leave it are cut from the target's logits.

llguidance knows which tokens may follow. A draft's tokens are verified against the cut logits, so that the
text is the one that autoregressive decoding writes under the same schema.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.drafts.base import Proposal
from outpace.drafts.sampler import DraftSampler

if TYPE_CHECKING:
    from outpace.decode.acceptance import AcceptanceRule, VerifyResult

HOW_TO_GET = "pip install 'outpace[structured]'"
# one way to write a value, as json.dumps does: a model in doubt may else write blanks for ever
FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LONGEST = 2**16  # characters of a schema: it is read while others wait


class Vocabulary:
    """The tokens of a model as llguidance wants them. Made once for a model: of 200,000 it takes a second."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> None:
        """`size`: of the logits. `ends`: tokens that may come where a value is complete. Raises ValueError
        without llguidance."""
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError(f"output by a JSON schema needs llguidance: {HOW_TO_GET}")
        from llguidance import LLTokenizer

        self.size, self.ends = size, ends
        self.known: Any = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(ends))


def at_once(tokens: Sequence[int]) -> bool:
    """`Grammar.begins` of output that is nothing else."""
    return not tokens


@dataclass(frozen=True)
class Grammar:
    """What a row may write. `begins`: whether the part of the output that the schema is for begins after
    these tokens of it; what comes before, such as reasoning, is free."""

    vocabulary: Vocabulary
    start: Any  # llguidance's matcher, before the first token
    begins: Callable[[Sequence[int]], bool]

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, schema: Mapping[str, Any], begins: Callable[[Sequence[int]], bool]
    ) -> "Grammar":
        """Raises ValueError for a schema that is wrong, too large, or has what llguidance does not know."""
        from llguidance import LLMatcher

        return cls.read(vocabulary, LLMatcher.grammar_from_json_schema(schema_text(schema)), begins)

    @classmethod
    def read(
        cls, vocabulary: Vocabulary, text: str, begins: Callable[[Sequence[int]], bool] = at_once
    ) -> "Grammar":
        """`text`: in llguidance's language, with JSON schemas inside. Raises ValueError as `of`."""
        from llguidance import LLMatcher

        start = LLMatcher(vocabulary.known, text, log_level=0)
        start.compute_bitmask()
        if start.is_error():
            raise ValueError(f"the JSON schema cannot be followed: {_first_lines(start)}")
        return cls(vocabulary, start, begins)


def schema_text(schema: Mapping[str, Any]) -> str:
    """A schema as llguidance reads it, of the one form that values are written in. Raises ValueError for one
    that is too large."""
    try:
        text = json.dumps({**schema, "x-guidance": FORM})
    except RecursionError:
        raise ValueError("the JSON schema is nested too deeply") from None
    if len(text) > LONGEST:
        raise ValueError(f"the JSON schema has {len(text):,} characters; the limit is {LONGEST:,}")
    return text


def _first_lines(matcher: Any) -> str:
    """An error without the dump of the parser's state."""
    text = " ".join(matcher.get_error().partition("<state>")[0].split())
    return "no text has its form" if text.startswith("NoExtension") else text


class Where(Enum):
    BEFORE, INSIDE, PAST = range(3)  # of the part that the schema is for


class Place:
    """Where one row's output stands, token by token, and back again."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar, self.matcher = grammar, grammar.start.deep_copy()
        self.where = Where.INSIDE if grammar.begins([]) else Where.BEFORE
        self.tokens: list[int] = []
        self.steps: list[tuple[Where, bool]] = []  # where each token was written, and if the matcher took it

    def go(self, token: int) -> bool:
        """One token on; False, and nothing is changed, where the schema does not let it follow."""
        before, taken = self.where, False
        if before is Where.INSIDE:
            if token in self.grammar.vocabulary.ends:
                if not self.matcher.is_accepting():
                    return False
                self.where = Where.PAST
            elif self.matcher.try_consume_tokens([token]):
                taken = True
            else:
                return False
        self.tokens.append(token)
        self.steps.append((before, taken))
        if before is Where.BEFORE and self.grammar.begins(self.tokens):
            self.where = Where.INSIDE
        return True

    def back(self) -> None:
        self.tokens.pop()
        self.where, taken = self.steps.pop()
        if taken:
            self.matcher.rollback(1)

    def allowed(self) -> Tensor | None:
        """[V] bool: the tokens that may come next; None: all of them. Raises ValueError where the schema is
        too large to go on with."""
        if self.where is not Where.INSIDE:
            return None
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self.grammar.vocabulary.size].astype(bool)
        if self.matcher.is_error() or not allowed.any():
            raise ValueError(
                f"the JSON schema leaves no next token: {self.matcher.get_error() or 'none fits'}"
            )
        return torch.from_numpy(allowed)

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write them; a model may choose others for
        the same text."""
        return list(self.matcher.compute_ff_tokens()) if self.where is Where.INSIDE else []

    def fork(self) -> "Place":
        forked = copy(self)
        forked.matcher = self.matcher.deep_copy()
        forked.tokens, forked.steps = list(self.tokens), list(self.steps)
        return forked


class Constrained:
    """An acceptance rule over what the rows' grammars leave of the target's logits. Any rule, any draft, any
    tree: with masks of its own at every position of a proposal."""

    def __init__(self, rule: "AcceptanceRule", grammars: Sequence[Grammar]) -> None:
        self.rule, self.places = rule, [Place(grammar) for grammar in grammars]

    @property
    def sampler(self) -> DraftSampler:
        return self.rule.sampler

    def draw(self, logits: Tensor, best: Tensor | None = None) -> Tensor:
        cut = torch.zeros(logits.shape, dtype=torch.bool)
        for place, row in zip(self.places, cut, strict=True):
            _cut(place, row)
        tokens = self.rule.draw(*_without(logits, cut, best))
        for place, token in zip(self.places, tokens.tolist(), strict=True):
            place.go(token)
        return tokens

    def verify(self, proposal: Proposal, logits: Tensor, best: Tensor | None = None) -> "VerifyResult":
        cut = torch.zeros(logits.shape, dtype=torch.bool)
        for b, place in enumerate(self.places):
            tokens, above = proposal.host_tokens[b], proposal.above[b][: proposal.counts[b]]
            _cut_from(0, place, tokens, above, cut[b])
        result = self.rule.verify(proposal, *_without(logits, cut, best))
        for place, committed in zip(self.places, result.tokens, strict=True):
            for token in committed:
                place.go(token)
        return result

    def fork(self) -> "Constrained":
        forked = copy(self)
        forked.rule, forked.places = self.rule.fork(), [place.fork() for place in self.places]
        return forked

    def select(self, batch_indices: list[int]) -> None:
        self.rule.select(batch_indices)
        self.places = [self.places[b] for b in batch_indices]


def _cut(place: Place, row: Tensor) -> None:
    """row [V] bool: True where the token may not come."""
    allowed = place.allowed()
    if allowed is not None:
        torch.logical_not(allowed, out=row)


def _cut_from(at: int, place: Place, tokens: list[int], above: list[int], cut: Tensor) -> None:
    """cut [N, V], at position `at` of a proposal, where `place` stands, and at all that follow it. What the
    schema refuses is not accepted, and so what follows that does not matter."""
    _cut(place, cut[at])
    for child in range(at + 1, len(above)):
        if above[child] == at and place.go(tokens[child]):
            _cut_from(child, place, tokens, above, cut)
            place.back()


def _without(logits: Tensor, cut: Tensor, best: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The logits without what is cut, and their argmax where it is known still."""
    if not cut.any():
        return logits, best
    return logits.masked_fill(cut.to(logits.device), -torch.inf), None
