"""Streams that nobody reads: clients that are gone before the first event, and streams that fail."""

import asyncio
import json

import pytest
from serving import CONFIG
from test_http import until

import outpace
from outpace.serve.app import AppConfig, make_app
from outpace.serve.server import Served, Server

LONG = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "max_tokens": 400,
        "ignore_eos": True,
    },
    "/v1/completions": {"prompt": ["2 + 2", "3"], "max_tokens": 400, "ignore_eos": True},
    "/v1/responses": {"input": "2 + 2?", "max_output_tokens": 400},
}


@pytest.fixture(scope="module")
def model():
    return outpace.load("default")


def asked(app, path, body, gone_after):
    """-> what the application sends for a stream of which the client takes `gone_after` messages."""
    sent = []
    given = iter([{"type": "http.request", "body": json.dumps(body | {"stream": True}).encode()}])

    async def run():
        gone = asyncio.Event()

        async def receive():
            if (message := next(given, None)) is not None:
                return message
            await asyncio.sleep(0) if gone_after == 0 else await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == gone_after:
                gone.set()
            await asyncio.sleep(0.001)

        scope = {
            "type": "http", "asgi": {"spec_version": "2.3"}, "method": "POST", "path": path, "raw_path": b"",
            "query_string": b"", "root_path": "", "scheme": "http", "server": ("x", 1), "client": ("x", 2),
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(run())
    return sent


@pytest.mark.parametrize("gone_after", [0, 1, 3])
@pytest.mark.parametrize("path", LONG)
def test_a_client_that_is_gone_before_the_first_event(model, path, gone_after):
    server = Server(Served(model=model, name="default"), CONFIG)
    app = make_app(server, AppConfig())
    started, add = [], server.engine.add
    server.engine.add = lambda sequence: (started.append(sequence), add(sequence))
    server.start()
    sent = asked(app, path, LONG[path], gone_after)
    assert len(sent) <= gone_after + 1 and started and all(sequence.cancelled for sequence in started)
    until(lambda: not server.engine.running and not server.engine.waiting)
    assert all(len(sequence.tokens) < 400 for sequence in started)
    server.stop()
