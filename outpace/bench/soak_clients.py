"""Clients of a soak test: what they ask, and how they behave while they are answered."""

import json
import random
import socket
import struct
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from outpace.bench.servers import Address

PATIENCE_SECONDS = 120  # without a byte, after which a client takes the server to hang
SLOW_BYTES, SLOW_SECONDS = 512, 0.004  # a slow reader's sips, and the time between them
CHAT, TEXT, ITEMS = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# reads all, and slowly; goes away in the middle, and before the first byte; asks for what is refused
MANNERS = {"reads": 60, "slow": 10, "leaves": 12, "gone": 8, "wrong": 10}
WRONG: tuple[tuple[dict[str, Any], int], ...] = (
    ({"best_of": 2}, 400),
    ({"temperature": -1}, 400),
    ({"max_tokens": 10**6, "max_output_tokens": 10**6}, 400),
    ({"model": "another"}, 404),
    ({"model": "../../etc/passwd"}, 404),
)
DRAFTS: tuple[Any, ...] = (None, False, {"method": "ngram"}, {"method": "ngram", "num_speculative_tokens": 2})
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}},
}


@dataclass(frozen=True)
class Visit:
    """One request, and the manner of the client. `status`: the answer's. `cut`: bytes or milliseconds until
    it goes away."""

    path: str
    body: dict[str, Any]
    manner: str = "reads"
    status: int = 200
    cut: int = 0
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


def random_visit(rng: random.Random, prompts: list[str], new_tokens: int) -> Visit:
    path = rng.choice([CHAT, CHAT, TEXT, ITEMS])
    manner = rng.choices(list(MANNERS), list(MANNERS.values()))[0]
    prompt = rng.choice(prompts)
    prompt = prompt[: rng.randint(1, len(prompt))]
    limit = rng.randint(1, new_tokens)
    body: dict[str, Any] = {"temperature": rng.choice([0, 0.9]), "seed": rng.randrange(100)}
    if (draft := rng.choice(DRAFTS)) is not None:
        body["speculative"] = draft
    if rng.random() < 0.6:
        body["stream"] = True
    match path:
        case "/v1/responses":
            body |= {"input": prompt, "max_output_tokens": limit, "store": rng.random() < 0.5}
        case "/v1/completions":
            body |= {"prompt": prompt, "max_tokens": limit, "n": rng.choice([1, 1, 3])}
        case _:
            body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": limit}
            if rng.random() < 0.1:
                body["response_format"] = SCHEMA
            elif rng.random() < 0.1 and draft is None:
                body["prediction"] = {"type": "content", "content": prompt}
    if manner != "wrong":
        return Visit(path, body, manner, cut=rng.randint(0, 3000))
    change, status = rng.choice(WRONG)
    own = {k: v for k, v in change.items() if not k.startswith("max") or k in body}
    return Visit(path, body | own, manner, status)


def visit(address: Address, asked: Visit) -> str | None:
    """-> what went wrong that this client had not asked for; None: nothing."""
    try:
        if asked.manner in ("leaves", "gone"):
            _leave(address, asked)
            return None
        line = send(address, asked)
        try:
            response = line.getresponse()
            text = _slowly(response) if asked.manner == "slow" else response.read()
        finally:
            line.close()
    except (OSError, HTTPException) as error:
        return f"{asked.manner} {asked.path}: {type(error).__name__}: {error}"
    wrong = _wrong(asked, response.status, text)
    return wrong and f"{asked.manner} {asked.path} {json.dumps(asked.body)[:300]}: {wrong}"


def send(address: Address, asked: Visit, buffer: int | None = None) -> HTTPConnection:
    """`buffer`: bytes that lie between the server and this client, at most."""
    line = HTTPConnection(*address, timeout=PATIENCE_SECONDS)
    if buffer is not None:
        line.sock = socket.socket()
        line.sock.settimeout(PATIENCE_SECONDS)
        line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        line.sock.connect(address)
    line.request("POST", asked.path, json.dumps(asked.body), asked.headers)
    return line


def text_of(address: Address, body: dict[str, Any]) -> str:
    """Of a whole completion. Raises OSError where there is none."""
    line = send(address, Visit(TEXT, body))
    response = line.getresponse()
    answer = json.loads(response.read())
    line.close()
    if response.status != 200:
        raise OSError(f"the server answered {response.status}: {str(answer)[:300]}")
    return str(answer["choices"][0]["text"])


def _leave(address: Address, asked: Visit) -> None:
    line = send(address, asked)
    sock = line.sock
    assert sock is not None
    if asked.manner == "leaves":
        sock.settimeout(PATIENCE_SECONDS)
        if asked.body.get("stream"):
            left = asked.cut
            while left > 0 and (some := sock.recv(min(left, 500))):
                left -= len(some)
        else:
            time.sleep(asked.cut / 30_000)
    if asked.cut % 2:  # with a reset, as a process that is killed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def _slowly(response: HTTPResponse) -> bytes:
    parts = []
    while some := response.read1(SLOW_BYTES):
        parts.append(some)
        time.sleep(SLOW_SECONDS)
    return b"".join(parts)


def _wrong(asked: Visit, status: int, text: bytes) -> str | None:
    shown = text[-300:].decode(errors="replace")
    if status != asked.status:
        return f"{status} instead of {asked.status}: {shown}"
    if status != 200:
        return None if b'"message"' in text else f"an error without a message: {shown}"
    if not asked.body.get("stream"):
        return None if json.loads(text).get("usage") else f"no usage: {shown}"
    last = text.strip().split(b"\n\n")[-1]
    whole = last == b"data: [DONE]" or last.startswith((b"event: response.comp", b"event: response.inc"))
    return None if whole and b'"error": {' not in text else f"the stream broke off: {shown}"
