"""Requests that nobody should send: the answer is a 4xx that says something, and the server goes on."""

import copy
import http.client
import json
import os
import random
import socket
import urllib.request

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


def instance(rng, schema, defs, depth=0):
    """Something that an OpenAPI schema allows."""
    if "$ref" in schema:
        return instance(rng, defs[schema["$ref"].rpartition("/")[2]], defs, depth)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return instance(rng, rng.choice(schema[union]), defs, depth)
    if "const" in schema or "enum" in schema:
        return schema.get("const", rng.choice(schema.get("enum", [None])))
    match schema.get("type"):
        case "object" if "properties" in schema:
            needed = schema.get("required", ())
            fields = [name for name in schema["properties"] if name in needed or rng.random() < 0.15]
            return {name: instance(rng, schema["properties"][name], defs, depth + 1) for name in fields}
        case "object":
            return copy.deepcopy(
                rng.choice([{}, {"type": "text"}, CHAT["messages"][0], FUNCTION, CHAT["tools"][0]])
            )
        case "array":
            return [instance(rng, schema["items"], defs, depth + 1) for _ in range(rng.randint(0, 2))]
        case "string":
            return rng.choice(["", "x", "solver", "ngram", "<|end|>", "größe"])
        case "integer":
            return rng.choice([-1, 0, 1, 2, 3, 7, 10**6])
        case "number":
            return rng.choice([-1.0, 0.0, 0.5, 1.0, 2.5])
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return copy.deepcopy(rng.choice(VALUES))


def schemas(port):
    """-> of every path that takes a body, its schema; and the definitions."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json") as page:
        api = json.load(page)
    bodies = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, methods in api["paths"].items()
        if "post" in methods
    }
    assert bodies.keys() == BODIES.keys()
    return bodies, api["components"]["schemas"]


@pytest.mark.parametrize("made", ["written", "schema"])
def test_spoilt_bodies_are_refused_or_answered(port, made):
    """Of what is written here, and of what the server's own OpenAPI schema allows."""
    rng, codes = random.Random(5), {}
    bodies, defs = schemas(port)
    for _ in range(COUNT):
        path = rng.choice(list(BODIES))
        if made == "written":
            body = spoilt(rng, BODIES[path])
        else:
            body = {"max_tokens": 2} if path.endswith("completions") else {}
            body |= instance(rng, bodies[path], defs)
            body = spoilt(rng, body) if rng.random() < 0.3 else body
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
    assert codes[400] > COUNT / 4 and codes[200] > COUNT / 30, codes


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
    for name in (str(SOLVER), "../../etc/passwd", "default", "/", "solver/../solver", ""):
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps(BODIES[path] | {"model": name})
        line.request("POST", path, body, {"content-type": "application/json"})
        response = line.getresponse()
        assert response.status == 404
        assert json.loads(response.read())["error"]["message"].endswith("this server has 'solver'")
        line.close()


@pytest.mark.parametrize("token", [-1, 10**9, 2**32, 2**64])
def test_a_token_that_is_none_is_refused_by_its_number(port, token):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"prompt": [5, token]})
    line.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = line.getresponse()
    assert response.status == 400 and f"token id {token} is outside" in response.read().decode()
