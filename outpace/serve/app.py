"""The HTTP surface: OpenAI's endpoints, errors in OpenAI's shape, server-sent events."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Rows
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.api import check_text
from outpace.serve import wire
from outpace.serve.answer import Answer, TokenLogprob
from outpace.serve.engine import QueueFull, RequestTimeout
from outpace.serve.fields import FieldError, check_message
from outpace.serve.metrics import Metrics
from outpace.serve.responses import Kept, ResponsesBody, Writer
from outpace.serve.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    TokenizeBody,
    problem,
)
from outpace.serve.server import Server
from outpace.serve.stream import EventStream, Streamed, ended, response_events, response_failure

LOG = logging.getLogger("outpace.serve")
RETRY_SECONDS = 1
Statuses = dict[int | str, dict[str, Any]]  # what /openapi.json says of answers
ERRORS: Statuses = {
    "4XX": {"model": ErrorBody, "description": "Refused: the message says what, where and why."},
    "5XX": {"model": ErrorBody, "description": "The server failed: its log says more."},
}
STREAMS: Statuses = {200: {"content": {"text/event-stream": {}}}}
DRAINED = 1000  # pieces of a body that is too long, thrown away before the answer


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """`api_key`: asked of /v1, /tokenize and /detokenize as a bearer token. `cors`: origins of pages that may
    ask. `max_body`: bytes of a request."""

    api_key: str | None = None
    cors: tuple[str, ...] = ()
    max_body: int = 4 << 20


def make_app(server: Server, config: AppConfig) -> FastAPI:
    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        server.start()
        yield
        await asyncio.to_thread(server.stop)

    app = FastAPI(
        title="Outpace", version=version("outpace"), lifespan=running, redoc_url=None, responses=ERRORS
    )
    metrics = Metrics(server.engine)
    _add_errors(app)
    _add_information(app, server, metrics)
    _add_completions(app, server, metrics)
    _add_responses(app, server, metrics)
    if config.cors:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Door, config=config)
    return app


class Door:
    """Refuses who has no key, and bodies that are too long, before anything reads them."""

    def __init__(self, app: ASGIApp, config: AppConfig) -> None:
        self.app, self.config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if not self._known(scope["path"], headers):
            refused = _problem(401, "the API key is missing or wrong", "authentication_error")
            await refused(scope, receive, send)
            return
        length, read = headers.get(b"content-length", b"0"), 0
        if not length.isdigit() or int(length) > self.config.max_body:
            await self._too_long(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.config.max_body:
                raise HTTPException(413, f"the body is longer than {self.config.max_body:,} bytes")
            return message

        await self.app(scope, counted, send)

    def _known(self, path: str, headers: dict[bytes, bytes]) -> bool:
        key = self.config.api_key
        if key is None or not path.startswith(("/v1", "/tokenize", "/detokenize")):
            return True
        return hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {key}".encode())

    async def _too_long(self, scope: Scope, receive: Receive, send: Send) -> None:
        # a client that is still sending would see a broken connection instead of the answer
        for _ in range(DRAINED):
            if not (await receive()).get("more_body", False):
                break
        refused = _problem(413, f"the body is longer than {self.config.max_body:,} bytes")
        await refused(scope, receive, send)


def _problem(
    status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 429 else None
    return JSONResponse(wire.error(message, kind, param), status, headers)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def of_fields(request: Request, error: RequestValidationError) -> JSONResponse:
        message, field = problem(list(error.errors()), error.body)
        return _problem(400, message, param=field)

    @app.exception_handler(HTTPException)
    async def of_paths(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _problem(error.status_code, message)

    @app.exception_handler(ValueError)
    async def of_values(request: Request, error: ValueError) -> JSONResponse:
        return _problem(400, str(error))

    @app.exception_handler(FieldError)
    async def of_one_field(request: Request, error: FieldError) -> JSONResponse:
        return _problem(400, str(error), param=error.field)

    @app.exception_handler(QueueFull)
    async def of_load(request: Request, error: QueueFull) -> JSONResponse:
        return _problem(429, str(error), "rate_limit_exceeded")

    @app.exception_handler(RequestTimeout)
    async def of_time(request: Request, error: RequestTimeout) -> JSONResponse:
        return _problem(408, str(error), "timeout")

    @app.exception_handler(Exception)
    async def of_us(request: Request, error: Exception) -> JSONResponse:
        LOG.exception("a request failed")
        return _problem(500, f"{type(error).__name__}: the server's log says more", "server_error")


def _add_information(app: FastAPI, server: Server, metrics: Metrics) -> None:
    served, tokenizer, began = server.served, server.model.tokenizer, int(time.time())

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(Path(__file__).parent / "page.html", media_type="text/html")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/version")
    async def version_of_us() -> dict[str, str]:
        return {"version": version("outpace")}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def numbers() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": served.name, "object": "model", "created": began, "owned_by": "outpace"}
        more = {"max_model_len": server.config.max_model_len, "draft_methods": list(served.drafts)}
        return {"object": "list", "data": [card | more]}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        _check_model(server, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ValueError("give prompt or messages, and not both")
        if body.messages is not None:
            for i, message in enumerate(body.messages):
                check_message(message, f"messages[{i}]")
            tokens = server.tokens_of(body.messages)
        else:
            check_text(server.model, body.prompt or "")
            tokens = tokenizer.encode(body.prompt or "").ids
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.config.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        _check_model(server, body.model)
        vocab_size = server.model.target.config.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"tokens: {token} is outside the vocabulary of {vocab_size}")
        return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _check_model(server: Server, name: str | None) -> None:
    if name is not None and name != server.served.name:
        raise HTTPException(404, f"model {name!r}: this server has {server.served.name!r}")


def _add_completions(app: FastAPI, server: Server, metrics: Metrics) -> None:
    @app.post("/v1/chat/completions", response_model=None, responses=STREAMS)
    async def chat(body: ChatBody, request: Request) -> Response:
        _check_model(server, body.model)
        answers = server.chat(body)
        if body.stream:
            streamed = Streamed("chat.completion.chunk", "chatcmpl", server, body, answers, 1)
            return EventStream(answers, metrics, streamed.events(), streamed.failure)
        scored = await _whole(request, answers, metrics)
        choices = [
            {
                "index": i,
                "message": wire.message(answer),
                "finish_reason": wire.finish_of(answer),
                "logprobs": None if body.top is None else wire.chat_logprobs(server.model, scores),
            }
            for i, (answer, scores) in enumerate(zip(answers, scored, strict=True))
        ]
        values = wire.head("chat.completion", "chatcmpl", server.served.name)
        return JSONResponse(
            values | {"choices": choices, "usage": wire.usage(answers, 1)} | wire.measured(answers)
        )

    @app.post("/v1/completions", response_model=None, responses=STREAMS)
    async def complete(body: CompletionBody, request: Request) -> Response:
        _check_model(server, body.model)
        answers, prompts = server.complete(body), len(body.prompts)
        if body.stream:
            streamed = Streamed("text_completion", "cmpl", server, body, answers, prompts)
            return EventStream(answers, metrics, streamed.events(), streamed.failure)
        scored = await _whole(request, answers, metrics)
        choices = [
            {
                "index": i,
                "text": answer.row.text,
                "finish_reason": wire.finish_of(answer),
                "logprobs": None if body.top is None else wire.text_logprobs(server.model, scores),
            }
            for i, (answer, scores) in enumerate(zip(answers, scored, strict=True))
        ]
        values = wire.head("text_completion", "cmpl", server.served.name)
        return JSONResponse(
            values | {"choices": choices, "usage": wire.usage(answers, prompts)} | wire.measured(answers)
        )


def _add_responses(app: FastAPI, server: Server, metrics: Metrics) -> None:
    kept = Kept()

    @app.post("/v1/responses", response_model=None, responses=STREAMS)
    async def respond(body: ResponsesBody, request: Request) -> Response:
        _check_model(server, body.model)
        before = kept.before(body)
        writer = Writer(body, server.served.name)
        answers = server.chat(body.chat(before))

        def keep() -> None:
            kept.keep(body, before, writer.response)

        if body.stream:
            events = response_events(writer, answers[0], keep)
            return EventStream(answers, metrics, events, partial(response_failure, writer))
        await _whole(request, answers, metrics)
        for piece in answers[0].seen:
            list(writer.add(piece))
        list(writer.end(answers[0]))
        keep()
        return JSONResponse(writer.response | wire.measured(answers))


async def _whole(request: Request, answers: Rows[Answer], metrics: Metrics) -> list[list[TokenLogprob]]:
    """Wait for all; a client that goes away ends them."""

    async def scores_of(answer: Answer) -> list[TokenLogprob]:
        return [score async for _, scores in answer.pieces() for score in scores]

    work = asyncio.gather(*map(scores_of, answers))
    gone: asyncio.Future[Any] = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise HTTPException(499, "the client went away")
        result = work.result()
    except BaseException as error:
        work.cancel()
        for answer in answers:
            answer.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await work
        ended(answers, metrics, "abort" if isinstance(error, HTTPException) else "error")
        raise
    finally:
        gone.cancel()
    ended(answers, metrics)
    return result


async def _gone(request: Request) -> None:
    """Until the client goes away; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
