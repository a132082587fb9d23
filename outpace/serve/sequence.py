"""One request in the engine: its prompt, its limits, and what it has so far."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule
from outpace.decode.generate import next_token
from outpace.decode.grammar import Constrained
from outpace.decode.request import BatchRows, Request, acceptance_rule
from outpace.drafts.base import Draft, DraftSession, Proposal, roots
from outpace.ops.sampling import generator
from outpace.serve.shared_draft import SharedDraft

FORCED = 2  # tokens that a grammar leaves no choice of, and that are worth a step of their own
EndCallback = Callable[[Exception | None], None]


@dataclass(eq=False, kw_only=True)
class Sequence:
    """`request` is of one prompt: above temperature 0 its rule is "gumbel", under which the text hangs on the
    seed alone, not on the draft or the company. `width`: most positions of a proposal, root included; 0: the
    draft's own. `on_tokens` gets the new tokens of each round, and ends the sequence by True; `on_end` comes
    last, with what went wrong. Both run in the engine's thread and must not wait. An error of its draft or of
    its callbacks ends this sequence alone.
    """

    prompt: list[int]
    request: Request
    on_tokens: Callable[[list[int]], bool | None]
    on_end: EndCallback = lambda error: None
    on_logits: Callable[[Tensor], None] | None = None  # [n, V] of the next n tokens; a limit may cut the last
    draft: Draft | None = None
    width: int = 0
    seed: int = 0
    device: torch.device | str = "cpu"  # the target's
    cancelled: bool = False  # by whoever made it, from any thread

    row: int = field(default=-1, init=False)  # of the cache; -1: none yet
    cached: int = field(default=0, init=False)  # tokens of prompt and output in the cache
    reused: int = field(default=0, init=False)  # of them, those that an earlier sequence had put there
    shown: int = field(default=0, init=False)  # tokens that a draft which reads text alone has observed
    rounds: int = field(default=0, init=False)
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)
    failed: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.request.sampling.temperature and self.request.rule != "gumbel":
            raise ValueError(f"rule {self.request.rule!r}: only gumbel's text does not hang on the company")
        self.output = BatchRows(1, self.request, lambda _, tokens: self.on_tokens(tokens))
        self.rule: AcceptanceRule = acceptance_rule(
            self.request, [self.prompt], generator(self.seed, self.device)
        )
        self.session: DraftSession | None = None  # of a draft that reads text alone
        self.shared: SharedDraft | None = None  # its draft, where it reads hidden states
        self.times = {"arrived": time.perf_counter()}  # and "admitted", "first", "ended", once they come

    @property
    def done(self) -> bool:
        return self.output.done[0] or self.failed is not None

    @property
    def tokens(self) -> list[int]:
        """The output."""
        return self.output.emitted[0]

    @property
    def length(self) -> int:
        """Tokens of prompt and output, at most."""
        return len(self.prompt) + self.request.max_new_tokens

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.output.limits[0] - len(self.tokens)

    @property
    def in_cache(self) -> list[int]:
        return (self.prompt + self.tokens)[: self.cached]

    @property
    def _unseen(self) -> list[int]:
        """What is in the cache and a draft which reads text alone has not observed."""
        begin, end = (n - len(self.prompt) for n in (self.shown, self.cached))
        return self.tokens[begin:end] if begin >= 0 else self.in_cache[self.shown :]

    @property
    def constrained(self) -> bool:
        """By a grammar."""
        return isinstance(self.rule, Constrained)

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)

    @property
    def last(self) -> int:
        return self.tokens[-1]

    def enter(self, row: int, reused: int, shared: SharedDraft | None = None) -> None:
        """It has a row of the cache, in which the first `reused` tokens of its prompt lie already, and of
        `shared` where its draft reads hidden states."""
        self.row, self.cached, self.reused, self.shared = row, reused, reused, shared
        self.times["admitted"] = time.perf_counter()
        if self.draft is not None and shared is None:
            self.session = self.draft.begin(1, self.length + self.draft.block_size)

    def most(self, width: int) -> int:
        """Positions of its next proposal, root included, of the `width` that the controller allows."""
        return min(width, self.width or width, 1 if self.draft is None else self.draft.block_size)

    def forced(self, width: int) -> Proposal | None:
        """What its grammar leaves no choice of, which is more certain than any draft; None: too little."""
        if not isinstance(self.rule, Constrained) or self.draft is None:
            return None
        forced = self.rule.places[0].forced()[: min(width, self.width or width) - 1]
        if len(forced) < FORCED:
            return None
        return Proposal(torch.tensor([[self.last, *forced]], device=self.device), [1 + len(forced)])

    def propose(self, width: int) -> Proposal:
        """Of one row, by a draft that reads text alone."""
        last = torch.tensor([self.last], device=self.device)
        alone = roots(last)
        if width == 1 or self.session is None:
            return alone
        try:
            if self.cached > self.shown:  # the text is known: none was shown yet
                new = self._unseen
                self.session.observe(torch.tensor([new], device=self.device), None, [len(new)])
                self.shown = self.cached
            return self.session.propose(last, width, self.rule.sampler)
        except Exception as error:
            self.failed = error
            return alone

    def draw(self, logits: Tensor) -> None:
        """logits [1, V] after the prompt: its first token goes out."""
        with self._own_errors():
            self.emit(self.rule.draw(logits).tolist())

    def take(self, token: int, logits: Tensor) -> list[int]:
        """A step without draft tokens where its request takes the argmax: logits [N, V], the argmax of the
        first of them -> the accepted path."""
        self.score(logits[:1])
        self.count(0, 0)
        self.emit([token])
        return [0]

    def take_steps(self, tokens: list[int]) -> list[int]:
        """The tokens of several such steps, until it is done -> the path of those that were taken."""
        for step, token in enumerate(tokens):
            if self.done:
                return list(range(step))
            self.count(0, 0)
            self.emit([token])
        return list(range(len(tokens)))

    def verify(self, proposal: Proposal, logits: Tensor, best: Tensor | None) -> list[int]:
        """Its row of a step: logits [1, N, V] -> the accepted path; what it commits goes out."""
        n = proposal.counts[0]
        try:
            result = (
                self.rule.verify(proposal, logits, best) if n > 1 else next_token(self.rule, logits, best)
            )
        except Exception as error:  # of its grammar
            self.failed = error
            return [0]
        path = result.path[0]
        self.score(logits[0, path])
        self.count(n - 1, len(path) - 1)
        self.emit(result.tokens[0])
        return path

    def emit(self, tokens: list[int]) -> None:
        self.times.setdefault("first", time.perf_counter())
        with self._own_errors():
            self.output.emit(0, tokens)

    def score(self, logits: Tensor) -> None:
        """logits [n, V] of the next n tokens."""
        if self.on_logits is not None:
            with self._own_errors():
                self.on_logits(logits)

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failed = self.failed or error

    def count(self, proposed: int, accepted: int) -> None:
        self.rounds, self.drafted, self.accepted = (
            self.rounds + 1,
            self.drafted + proposed,
            self.accepted + accepted,
        )
