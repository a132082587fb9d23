"""Requests that nobody should send: the answer is a 4xx that says something, and the server goes on."""

import copy
import http.client
import json
import os
import random
import socket
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serving import serving

import outpace
from outpace.checkpoint.shipped import target_path
from outpace.serve.engine import EngineConfig

COUNT = int(os.environ.get("HOSTILE", "300"))
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT = {
    "model": "default", "messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 2,
    "temperature": 0.5, "stop": ["x"], "seed": 3, "n": 1, "logprobs": True, "top_logprobs": 2,
    "stream": False, "tools": [{"type": "function", "function": FUNCTION}],
    "speculative": {"method": "ngram", "num_speculative_tokens": 2},
    "prediction": {"type": "content", "content": "4"}, "stream_options": {"include_usage": True},
}  # fmt: skip
TEXT = {
    "model": "default", "prompt": ["2 + 2", "3"], "max_tokens": 2, "top_k": 3, "min_p": 0.1, "logprobs": 1
}  # fmt: skip
ITEMS = {
    "model": "default", "max_output_tokens": 2, "instructions": "Be brief.", "reasoning": {"effort": "low"},
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
    with serving(outpace.load("default"), config) as (server, address):
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


def asked(port, path, body):
    """-> the status, and the text."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
    response = line.getresponse()
    text = response.read().decode()
    line.close()
    return response.status, text


def test_spoilt_bodies_are_refused_or_answered(port):
    rng, codes = random.Random(5), Counter()
    for _ in range(COUNT):
        path = rng.choice(list(BODIES))
        body = spoilt(rng, BODIES[path])
        status, text = asked(port, path, body)
        codes[status] += 1
        assert status in (200, 400, 404), (path, body, text)
        if status != 200:
            problem = json.loads(text)["error"]
            assert problem["message"] and problem["type"] == "invalid_request_error", (path, body)
    assert codes[400] > COUNT / 4 and codes[200] > COUNT / 30, codes


def short(body):
    """For this model, and of few tokens, where it says how many."""
    if isinstance(body, dict):
        if isinstance(body.get("model", ""), str):
            body["model"] = "default"
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], 2)
    return body


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_the_server_keeps_to_its_openapi_schema(port, mode):
    """Requests that the schema allows, and such as it does not: statuses, types and forms of the answers are
    those of the schema, and what it forbids is refused. What it allows may be refused: no schema says that a
    prompt is too long."""
    api = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
    operations = [operation.ok() for operation in api.get_all_operations()]
    bodies = {operation.path for operation in operations if operation.method == "post"}
    assert bodies == BODIES.keys()
    codes = Counter()

    @settings(max_examples=COUNT // 2, suppress_health_check=list(HealthCheck))
    @given(strategies.data())
    def ask(data):
        operation = data.draw(strategies.sampled_from(operations))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        case.body = short(case.body)
        response = case.call()
        codes[response.status_code] += 1
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    ask()
    assert codes.keys() <= {200, 400, 404} and codes[400] > COUNT / 8, codes
    assert mode is GenerationMode.NEGATIVE or codes[200] > COUNT / 20, codes


def test_bytes_that_are_no_http(port):
    rng = random.Random(6)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    good = head + b'Content-Length: 9\r\n\r\n{"a": 1}\n'
    for i in range(COUNT // 5):
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


@pytest.mark.parametrize("path", BODIES)
def test_a_request_picks_no_file_as_its_model(port, path):
    for name in (str(target_path("default")), "../../etc/passwd", "dflash", "/", "default/../default", ""):
        status, text = asked(port, path, BODIES[path] | {"model": name})
        assert status == 404
        assert json.loads(text)["error"]["message"].endswith("this server has 'default'")


@pytest.mark.parametrize("token", [-1, 10**9, 2**32, 2**64])
def test_a_token_that_is_none_is_refused_by_its_number(port, token):
    status, text = asked(port, "/v1/completions", {"prompt": [5, token]})
    assert status == 400 and f"token id {token} is outside" in text
