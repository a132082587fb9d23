"""One choice of a response: what the engine says of it, for whoever waits in the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.api import OutputRow, StreamPiece
from outpace.serve.sequence import Sequence

HOLD_SECONDS = 0.005  # tokens of a fast model go out together, this long after those before


@dataclass(frozen=True)
class TokenLogprob:
    """The logarithms of the target's probabilities, before temperature and cuts: of a token, and of the most
    probable ones there."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Outbox:
    """What the engine's thread has for the event loop, handed over after a round: to wake the loop for every
    token of every answer would cost more than the tokens. `put` and `hand_over` are the engine's thread's."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.urgent = False
        self.handed = 0.0  # when it was last

    def put(self, answer: "Answer", pieces: list[StreamPiece], scores: list[TokenLogprob]) -> None:
        # the first tokens and the end are waited for
        self.urgent = self.urgent or answer.ended or not answer.told
        answer.told = True
        self.news.append((answer, pieces, scores, answer.ended))

    def hand_over(self) -> None:
        now = time.perf_counter()
        if not self.news or not (self.urgent or now - self.handed >= HOLD_SECONDS):
            return
        news, self.news, self.urgent, self.handed = self.news, [], False, now
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            news[0][0].loop.call_soon_threadsafe(_deliver, news)


class Answer:
    """`feed`, `score` and `end` are called in the engine's thread, all else in the loop's."""

    def __init__(self, row: OutputRow, index: int, top: int | None, outbox: Outbox) -> None:
        self.row, self.index, self.top, self.outbox = row, index, top, outbox
        self.loop = asyncio.get_running_loop()
        self.sequence: Sequence | None = None
        self.user: str | None = None  # as the client calls them
        self.seen: list[StreamPiece] = []  # by whoever waits
        # the engine's thread: log-probabilities of tokens to come, and what went wrong at the end
        self.scored: list[Tensor] = []
        self.told = self.ended = False
        self.error: Exception | None = None
        # the loop's: what has come and is not yet taken
        self.there, self.over = asyncio.Event(), False
        self.new: tuple[list[StreamPiece], list[TokenLogprob]] = [], []

    def feed(self, tokens: list[int]) -> bool:
        """New tokens; -> whether a stop string ends it."""
        stopped, scores = self.row.add(tokens), self._scores(tokens)
        self.outbox.put(self, self.row.take(), scores)
        return stopped

    def score(self, logits: Tensor) -> None:
        """logits [n, V] of the next n tokens."""
        self.scored.append(logits.float().log_softmax(-1))

    def end(self, error: Exception | None) -> None:
        self.ended, self.error = True, error
        self.outbox.put(self, [], [])

    def cancel(self) -> None:
        if self.sequence is not None:
            self.sequence.cancelled = True

    async def pieces(self) -> AsyncIterator[tuple[list[StreamPiece], list[TokenLogprob]]]:
        """What comes, as it comes. Raises what ended it, if it was an error."""
        while self.there.is_set() or not self.over:  # it may be over before anybody waits
            await self.there.wait()
            self.there.clear()
            pieces, scores = self.new
            self.new = [], []
            self.seen += pieces
            if pieces or scores:
                yield pieces, scores
        if self.error is not None:
            raise self.error

    def _scores(self, tokens: list[int]) -> list[TokenLogprob]:
        if self.top is None:
            return []
        rows = torch.cat(self.scored)[: len(tokens)]
        self.scored = []
        values, ids = rows.topk(self.top)
        return [
            TokenLogprob(token, float(row[token]), list(zip(best, sizes, strict=True)))
            for token, row, best, sizes in zip(tokens, rows, ids.tolist(), values.tolist(), strict=True)
        ]


News = tuple[Answer, list[StreamPiece], list[TokenLogprob], bool]  # the last: whether it ends so


def _deliver(news: list[News]) -> None:
    """In the loop."""
    for answer, pieces, scores, ended in news:
        answer.new[0].extend(pieces)
        answer.new[1].extend(scores)
        answer.over = ended
        answer.there.set()
