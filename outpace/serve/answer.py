"""One choice of a response: what the engine says of it, for whoever waits in the event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.api import OutputRow, StreamPiece
from outpace.serve.sequence import Sequence
from outpace.text.chat_format import ChatPart


@dataclass(frozen=True)
class TokenLogprob:
    """The logarithms of the target's probabilities, before temperature and cuts: of a token, and of the most
    probable ones there."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Answer:
    """`feed` and `end` are called in the engine's thread, all else in the loop's."""

    def __init__(self, row: OutputRow, index: int, top: int | None) -> None:
        self.row, self.index, self.top = row, index, top
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[list[StreamPiece], list[TokenLogprob]] | Exception | None]
        self.events = asyncio.Queue()
        self.sequence: Sequence | None = None
        self.seen: list[StreamPiece] = []  # by whoever waits
        self.parts: list[ChatPart] | None = None  # of a whole answer, once they are read
        self.scored: list[Tensor] = []  # log-probabilities of tokens to come

    def feed(self, tokens: list[int]) -> bool:
        """New tokens; -> whether a stop string ends it."""
        stopped, scores = self.row.add(tokens), self._scores(tokens)
        self._tell((self.row.take(), scores))
        return stopped

    def score(self, logits: Tensor) -> None:
        """logits [n, V] of the next n tokens."""
        self.scored.append(logits.float().log_softmax(-1))

    def end(self, error: Exception | None) -> None:
        self._tell(error)

    def cancel(self) -> None:
        if self.sequence is not None:
            self.sequence.cancelled = True

    async def pieces(self) -> AsyncIterator[tuple[list[StreamPiece], list[TokenLogprob]]]:
        """What comes, round by round. Raises what ended it, if it was an error."""
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            self.seen += event[0]
            yield event

    def _tell(self, event: tuple[list[StreamPiece], list[TokenLogprob]] | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

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
