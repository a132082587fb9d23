"""Server-sent events: the answers of a stream as they grow."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outpace.api import StreamPiece
from outpace.serve import wire
from outpace.serve.answer import Answer, TokenLogprob
from outpace.serve.metrics import Metrics
from outpace.serve.responses import Writer
from outpace.serve.schema import ChatBody, Sampled
from outpace.serve.server import Server

LOG = logging.getLogger("outpace.serve")
Chunk = tuple[Answer, StreamPiece, list[TokenLogprob]]


class EventStream(StreamingResponse):
    """`events` as they come, and `failure` of what ends them early. The answers end with the response, even
    where the client goes away before anybody asks for the first event: then nothing of `events` runs."""

    def __init__(
        self,
        answers: Rows[Answer],
        metrics: Metrics,
        events: AsyncIterator[bytes],
        failure: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(self._to_the_end(events, failure), media_type="text/event-stream")
        self.answers, self.metrics = answers, metrics
        self.reason: str | None = "abort"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self.answers:
                answer.cancel()
            ended(self.answers, self.metrics, self.reason)

    async def _to_the_end(
        self, events: AsyncIterator[bytes], failure: Callable[[Exception], bytes]
    ) -> AsyncIterator[bytes]:
        try:
            async for some in events:
                yield some
            self.reason = None  # each answer has its own
        except Exception as error:
            self.reason = "error"
            yield failure(error)


@dataclass
class Streamed:
    """A response in chunks."""

    kind: str
    prefix: str
    server: Server
    body: Sampled
    answers: list[Answer]
    prompts: int

    def __post_init__(self) -> None:
        self.head = wire.head(self.kind, self.prefix, self.server.served.name)
        # the same in every chunk: put together once
        self.opening = json.dumps(self.head, ensure_ascii=False)[:-1]
        self.is_chat = isinstance(self.body, ChatBody)
        options = self.body.stream_options
        self.shows_drafted = options is not None and options.drafted
        self.deltas = [wire.Deltas() for _ in self.answers]

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return f'data: {self.opening}, "choices": [{json.dumps(choice, ensure_ascii=False)}]}}\n\n'.encode()

    def first(self, answer: Answer) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self.chunk({"index": answer.index, "delta": delta, "finish_reason": None})

    def pieces(self, some: list[Chunk]) -> bytes:
        """What has come, text of one answer as one chunk unless the client asks about each token."""
        each = some if self.shows_drafted or any(scores for *_, scores in some) else joined(some)
        return b"".join(filter(None, (self.piece(*chunk) for chunk in each)))

    def piece(self, answer: Answer, piece: StreamPiece, scores: list[TokenLogprob]) -> bytes | None:
        """None where it adds nothing: half a character, a mark."""
        reason = None if piece.finish_reason is None else wire.finish_of(answer)
        choice: dict[str, Any] = {"index": answer.index, "finish_reason": reason}
        if shown := self.shows_drafted:
            choice["drafted"] = piece.drafted
        if self.is_chat:
            delta = self.deltas[answer.index].of(piece)
            logprobs = wire.chat_logprobs(self.server.model, scores) if scores else None
            if not (delta or reason or scores or shown):
                return None
            return self.chunk(choice | {"delta": delta, "logprobs": logprobs})
        logprobs = wire.text_logprobs(self.server.model, scores) if scores else None
        if not (piece.text or reason or scores or shown):
            return None
        return self.chunk(choice | {"text": piece.text, "logprobs": logprobs})

    def last(self) -> bytes:
        values = {"choices": [], "usage": wire.usage(self.answers, self.prompts)}
        return event(self.head | values | wire.measured(self.answers))

    async def events(self) -> AsyncIterator[bytes]:
        """The chunks, as they come."""
        if self.is_chat:
            for answer in self.answers:
                yield self.first(answer)
        async for some in merged(self.answers):
            if chunks := self.pieces(some):
                yield chunks
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self.last()
        yield b"data: [DONE]\n\n"

    @staticmethod
    def failure(error: Exception) -> bytes:
        return event(wire.error(f"{type(error).__name__}: {error}", "server_error"))


async def response_events(writer: Writer, answer: Answer, keep: Callable[[], None]) -> AsyncIterator[bytes]:
    for value in writer.begin():
        yield event(value, value["type"])
    async for some in merged([answer]):
        for _, piece, _ in some:
            for value in writer.add(piece):
                yield event(value, value["type"])
    last = list(writer.end(answer))
    keep()  # whoever has read the last event may ask to go on from it
    for value in last:
        yield event(value, value["type"])


def response_failure(writer: Writer, error: Exception) -> bytes:
    """What a client gets in place of the rest."""
    failed = {"type": "error", "code": "server_error", "param": None, "sequence_number": writer.number}
    return event(failed | {"message": f"{type(error).__name__}: {error}"}, "error")


def event(value: Any, name: str | None = None) -> bytes:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


async def merged(answers: Rows[Answer]) -> AsyncIterator[list[Chunk]]:
    """The pieces of all, as they come: those of a round together."""
    if len(answers) == 1:
        async for pieces, scores in answers[0].pieces():
            yield _chunks(answers[0], pieces, scores)
        return
    queue: asyncio.Queue[list[Chunk] | Exception | None] = asyncio.Queue()

    async def forward(answer: Answer) -> None:
        try:
            async for pieces, scores in answer.pieces():
                queue.put_nowait(_chunks(answer, pieces, scores))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(answer)) for answer in answers]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


def joined(some: list[Chunk]) -> Iterator[Chunk]:
    """Neighbouring pieces of one answer's message as one."""

    def place(chunk: Chunk) -> tuple[int, int | None]:
        answer, piece, _ = chunk
        return answer.index, None if piece.part is None else piece.part.index

    for _, group in groupby(some, place):
        chunks = list(group)
        answer, last, _ = chunks[-1]
        if len(chunks) > 1:
            pieces = [piece for _, piece, _ in chunks]
            part = last.part and replace(last.part, text="".join(p.part.text for p in pieces if p.part))
            last = replace(last, text="".join(p.text for p in pieces), part=part)
        yield answer, last, []


def _chunks(answer: Answer, pieces: list[StreamPiece], scores: list[TokenLogprob]) -> list[Chunk]:
    return [(answer, piece, scores[i : i + 1]) for i, piece in enumerate(pieces)]


def ended(answers: Rows[Answer], metrics: Metrics, reason: str | None = None) -> None:
    """One line of the log for each answer, without its text, and the counters. `reason`: of all; None: each
    has its own."""
    for answer in answers:
        sequence = answer.sequence
        assert sequence is not None
        own = reason or wire.finish_of(answer)
        metrics.ended(sequence, own)
        times = sequence.times
        line = {
            "reason": own,
            "prompt_tokens": len(sequence.prompt),
            "cached_tokens": sequence.reused,
            "tokens": len(sequence.tokens),
            "drafted": sequence.drafted,
            "accepted": sequence.accepted,
            "first_token_s": round(times.get("first", times["arrived"]) - times["arrived"], 4),
            "seconds": round(times.get("ended", time.perf_counter()) - times["arrived"], 4),
        }
        LOG.info(json.dumps(line if answer.user is None else line | {"user": answer.user}))
