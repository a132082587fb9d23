"""Requests that nobody should send: the answer is a 4xx that says something, and the server goes on."""

import copy
import http.client
import json
import os
import random
import socket

import pytest
from serving import SOLVER, serving

import outpace
from outpace.serve.engine import EngineConfig

COUNT = int(os.environ.get("HOSTILE", "300"))
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT = {
    "model": "solver", "messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 2,
    "temperature": 0.5, "stop": ["x"], "seed": 3, "n": 1, "logprobs": True, "top_logprobs": 2,
    "stream": False, "tools": [{"type": "function", "function": FUNCTION}],
    "speculative": {"method": "ngram", "num_speculative_tokens": 2},
    "prediction": {"type": "content", "content": "4"}, "stream_options": {"include_usage": True},
}  # fmt: skip
TEXT = {"model": "solver", "prompt": ["2 + 2", "3"], "max_tokens": 2, "top_k": 3, "min_p": 0.1, "logprobs": 1}
ITEMS = {
    "model": "solver", "max_output_tokens": 2, "instructions": "Be brief.", "reasoning": {"effort": "low"},
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ],
}  # fmt: skip
BODIES = {
    "/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": ITEMS,
    "/tokenize": {"messages": [{"role": "user", "content": "x"}]}, "/detokenize": {"tokens": [5, 6]},
}  # fmt: skip
VALUES = (
    None, True, False, 0, 1, -1, 10**30, 1e308, -0.5, "", "x", "\x00", "\ud800", "<|end|>", "x" * 3000, [],
    {}, [[]], [None], {"a": {"b": []}}, ["x", 5], [10**9], [-1], {"type": "text"}, {"type": 5},
)  # fmt: skip


@pytest.fixture(scope="module")
def port():
    config = EngineConfig(max_num_seqs=4, max_model_len=200, max_waiting=40)
    with serving(outpace.load(str(SOLVER)), config) as (server, address):
        yield int(address.rpartition(":")[2])
        assert not server.engine.running and not server.engine.waiting


def places(value, way=()):
    """Every place inside a JSON value."""
    yield way
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*way, key))


def spoilt(rng, body):
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 2)):
        if not body:
            break
        *way, key = rng.choice([way for way in places(body) if way])
        inside = body
        for step in way:
            inside = inside[step]
        match rng.random():
            case x if x < 0.6:
                inside[key] = copy.deepcopy(rng.choice(VALUES))
            case x if x < 0.8 and isinstance(inside, dict):
                inside[rng.choice(["response_format", "functions", "x", "model_", "best_of"])] = 1
            case _:
                del inside[key]
    return body


def test_spoilt_bodies_are_refused_or_answered(port):
    rng, codes = random.Random(5), {}
    for _ in range(COUNT):
        path = rng.choice(list(BODIES))
        body = spoilt(rng, BODIES[path])
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        line.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
        response = line.getresponse()
        text = response.read().decode()
        codes[response.status] = codes.get(response.status, 0) + 1
        assert response.status in (200, 400, 404), (path, body, text)
        if response.status != 200:
            problem = json.loads(text)["error"]
            assert problem["message"] and problem["type"] == "invalid_request_error", (path, body)
        line.close()
    assert codes[400] > COUNT / 4 and codes[200] > COUNT / 20, codes


def test_bytes_that_are_no_http(port):
    rng = random.Random(6)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    good = head + b'Content-Length: 9\r\n\r\n{"a": 1}\n'
    for i in range(60):
        data = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
            line.sendall(bytes(data) if i % 3 else rng.randbytes(200))
            line.shutdown(socket.SHUT_WR)
            answer = line.recv(65536)
        assert not answer.startswith(b"HTTP/1.1 5"), (bytes(data), answer)
    healthy = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    healthy.request("GET", "/health")
    assert healthy.getresponse().status == 200
