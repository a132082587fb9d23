"""Servers in their own processes, ours and llama.cpp's, and a client that times what they answer."""

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.models.decoder import Decoder

LLAMA_SERVER = "llama-server"
HOW_TO_GET = "make llama-server, or a build of llama.cpp on the PATH"
START_SECONDS = 120

Address = tuple[str, int]  # host and port


@dataclass(frozen=True)
class Answered:
    """One request: seconds from its sending to each chunk, and what the server says of it at the end."""

    times: list[float]
    tokens: int
    steps: int


def find_llama_server() -> str | None:
    """Its program: beside this Python, or on the PATH."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return shutil.which(LLAMA_SERVER, path=os.pathsep.join(places))


def llama_server_version() -> str:
    """In its own words, with the instructions that it was compiled for."""
    program = find_llama_server() or LLAMA_SERVER
    parts = []
    # it names its instructions on the way to a model, even to one that is not there
    for options, wanted in (
        (["--version"], r"^version.*"),
        (["-lv", "5", "--model", os.devnull], r"CPU :.*"),
    ):
        shown = subprocess.run([program, *options], capture_output=True, text=True)
        match = re.search(wanted, shown.stderr + shown.stdout, re.MULTILINE)
        parts.append(match[0].strip(" |") if match else "unknown")
    return ", ".join(parts)


@dataclass(frozen=True)
class Running:
    """A server that takes requests."""

    address: Address
    process: subprocess.Popen[str]

    @property
    def memory(self) -> int:
        """Bytes that it has in memory (Linux)."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def outpace_serve(
    name: str, target: Decoder, rows: int, length: int, waiting: int = 10_000, drafting: bool = True
) -> Iterator[Running]:
    """`outpace serve`, of `rows` sequences of `length` tokens, in the dtypes of `target`, with the draft that
    it would choose or with none. Raises OSError where it does not start."""
    options = ["--port", "0", "--max-num-seqs", str(rows), "--max-model-len", str(length)]
    options += ["--kv-cache-dtype", target.kv_cache_dtype_name]
    options += ["--activation-dtype", target.activation_dtype_name]
    options += [] if drafting else ["--speculative-config", "none"]
    command = [sys.executable, "-m", "outpace", "serve", name, *options, "--max-waiting", str(waiting)]
    with _started(f"outpace serve {name}", command, r"http://([^:]+):(\d+)/v1") as server:
        yield server


@contextmanager
def llama_server(file: Path, rows: int, length: int) -> Iterator[Running]:
    """llama.cpp's, the same. A prompt is looked for in what earlier ones left in their rows, and nowhere
    else. Raises OSError where it does not start."""
    program = find_llama_server()
    if program is None:
        raise OSError(f"{LLAMA_SERVER} is not installed: {HOW_TO_GET}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = ["--model", str(file), "--host", "127.0.0.1", "--port", port]
    sizes = ["--parallel", str(rows), "--ctx-size", str(rows * length)]
    command = [program, *where, *sizes, "--cache-ram", "0", "--no-kv-unified"]
    with _started(LLAMA_SERVER, command, r"listening on http://([^:]+):(\d+)") as server:
        yield server


@contextmanager
def _started(name: str, command: list[str], listening: str) -> Iterator[Running]:
    """The process until the end of the block. `listening`: what it says once it takes requests."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        addresses: list[re.Match[str]] = []
        ready = threading.Event()

        def read() -> None:
            for line in process.stdout or ():  # to its end: a full pipe would stop the server
                lines.append(line)
                del lines[:-20]
                if not addresses and (match := re.search(listening, line)):
                    addresses.append(match)
                    ready.set()
            ready.set()

        reading = threading.Thread(target=read)
        reading.start()
        try:
            if not ready.wait(START_SECONDS) or not addresses:
                raise OSError(f"{name} does not start: {' '.join(lines)[-500:].strip()}")
            yield Running((addresses[0][1], int(addresses[0][2])), process)
        finally:
            process.terminate()
            reading.join()


def ask(address: Address, body: dict[str, Any]) -> Answered:
    """A streamed completion. Raises OSError, with the server's words, for an answer that is none."""
    line = http.client.HTTPConnection(*address, timeout=600)
    began = time.perf_counter()
    line.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = line.getresponse()
    if response.status != 200:
        raise OSError(f"the server answered {response.status}: {response.read().decode()[:300]}")
    times, pieces = [], []
    while piece := response.read1(65536):  # read by lines, a client costs as much as the server
        times.append(time.perf_counter() - began)
        pieces.append(piece)
    line.close()
    events = [event[6:] for event in b"".join(pieces).split(b"\n\n") if event.startswith(b"data: {")]
    last = json.loads(events[-1]) if events else {}
    if not last.get("usage"):
        raise OSError("the server broke off its answer")
    tokens = last["usage"]["completion_tokens"]
    metrics = last.get("metrics", {}).get("speculative_decoding")
    return Answered(times, tokens, metrics["num_spec_steps"] if metrics else tokens - 1)
