"""The suite serve: a server under load, with and without drafts; latencies and tokens/s over HTTP."""

import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench import plots
from outpace.bench.prompts import held_out_prompts
from outpace.bench.report import RATE, Page, Report, table_of
from outpace.bench.run import Bar, Run, at_least, seed_for
from outpace.models.decoder import Decoder
from outpace.text.corpus import Document

OFF, ON = "no draft", "draft"
METHODS: dict[str, bool] = {OFF: False, ON: True}  # by name, what a request says of speculation


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """At each of `concurrency`, so many clients ask one question after the other, `arrivals` together and two
    each at least; at each of `rates`, `arrivals` questions come at random times, that many a second in the
    mean."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rates: tuple[float, ...] = ()
    arrivals: int = 32
    prompt_tokens: int = 256
    new_tokens: int = 128
    temperature: float = 0.0
    repeats: int = 3
    seed: int = 1

    def __post_init__(self) -> None:
        least = {"arrivals": 2, "prompt_tokens": 1, "new_tokens": 2, "repeats": 1}
        at_least(self, "serve", **least)
        if not (self.concurrency or self.rates) or min((*self.concurrency, *self.rates), default=1) <= 0:
            raise ValueError("serve: give concurrency or rates, of numbers above 0")

    @property
    def loads(self) -> list[tuple[str, float]]:
        return [("clients", n) for n in self.concurrency] + [("requests/s", rate) for rate in self.rates]


@dataclass(frozen=True)
class Answered:
    """One request: seconds from its sending to each chunk, and what the server says of it at the end."""

    times: list[float]
    tokens: int
    steps: int


def run_serve(
    target: Decoder,
    name: str,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    settings: ServeSettings,
    folder: Path,
    console: Console,
) -> Report:
    """-> the report. A stopped run continues from folder/progress.jsonl. `name`: of the target, for the
    command that serves it. Raises ValueError for too few prompts, OSError where the server does not start."""
    most = int(max((*settings.concurrency, settings.arrivals if settings.rates else 1)))
    prompts = held_out_prompts(tokenizer, documents, min(most, 32), settings.prompt_tokens)
    run = Run(target, folder, settings=settings)
    loads = settings.loads
    with Bar(console, "serve", len(METHODS) * len(loads) * settings.repeats) as bar:
        todo = [
            (f"{kind} {load:g}, repeat {repeat}", kind, load, repeat)
            for repeat in range(settings.repeats)
            for kind, load in loads
        ]
        if any(key not in run for key, *_ in todo):
            length = settings.prompt_tokens + settings.new_tokens + 1
            with _served(name, most, length) as (host, port):
                for key, kind, load, repeat in todo:
                    run.once(key, lambda: _turn(host, port, kind, load, repeat, prompts, settings))  # noqa: B023
                    for method in METHODS:
                        bar.step(f"{method}, {kind} {load:g}")
    rows = [_row(run, settings, kind, load, method) for kind, load in loads for method in METHODS]
    return run.report(results=rows)


@contextmanager
def _served(name: str, rows: int, length: int) -> Iterator[tuple[str, int]]:
    """`outpace serve` in its own process -> where it listens."""
    options = ["--port", "0", "--max-num-seqs", str(rows), "--max-model-len", str(length)]
    command = [sys.executable, "-m", "outpace", "serve", name, *options, "--max-waiting", "10000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        reading.start()  # a full pipe would stop the server
        try:
            for line in process.stdout:
                if address := re.search(r"http://([^:]+):(\d+)/v1", line):
                    yield address[1], int(address[2])
                    break
            else:
                process.wait()
                reading.join(timeout=5)
                raise OSError(f"outpace serve {name} does not start: {' '.join(errors)[-500:].strip()}")
        finally:
            process.terminate()


def _turn(
    host: str,
    port: int,
    kind: str,
    load: float,
    repeat: int,
    prompts: list[list[int]],
    settings: ServeSettings,
) -> dict[str, Any]:
    """One load with every method, one after the other; the first rotates."""
    names = list(METHODS)
    turn = {}
    for method in names[repeat % 2 :] + names[: repeat % 2]:
        rng = random.Random(seed_for(settings.seed, repeat, int(100 * load)))

        def body(i: int, method: str = method, rng: random.Random = rng) -> dict[str, Any]:
            # another first token each time, never the other method's: nothing of the prompt lies in the cache
            first = 10 + 2 * rng.randrange(75) + names.index(method)
            return {
                "prompt": [first, *prompts[i % len(prompts)][1:]],
                "max_tokens": settings.new_tokens,
                "temperature": settings.temperature,
                "seed": i,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "speculative": METHODS[method],
            }

        began = time.perf_counter()
        if kind == "clients":
            count = max(2 * int(load), settings.arrivals)
            asked = _closed(host, port, [body(i) for i in range(count)], int(load))
        else:
            asked = _open(host, port, [body(i) for i in range(settings.arrivals)], load, rng)
        seconds = time.perf_counter() - began
        turn[method] = _measured(asked, seconds)
    return turn


def _closed(host: str, port: int, bodies: list[dict[str, Any]], clients: int) -> list[Answered]:
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda body: _ask(host, port, body), bodies))


def _open(
    host: str, port: int, bodies: list[dict[str, Any]], rate: float, rng: random.Random
) -> list[Answered]:
    """Poisson arrivals."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        sent = []
        for body in bodies:
            sent.append(pool.submit(_ask, host, port, body))
            time.sleep(rng.expovariate(rate))
        return [future.result() for future in sent]


def _ask(host: str, port: int, body: dict[str, Any]) -> Answered:
    """Raises OSError, with the server's words, for an answer that is none."""
    line = http.client.HTTPConnection(host, port, timeout=600)
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
    if "usage" not in last:
        raise OSError("the server broke off its answer")
    steps = last["metrics"]["speculative_decoding"]["num_spec_steps"]
    return Answered(times, last["usage"]["completion_tokens"], steps)


def _measured(asked: list[Answered], seconds: float) -> dict[str, Any]:
    """Of one burst: seconds to the first token, and between the tokens of a request, of each request."""
    return {
        "seconds": seconds,
        "tokens": sum(t.tokens for t in asked),
        "steps": sum(t.steps for t in asked),
        "first": [t.times[0] for t in asked],
        "between": [(t.times[-1] - t.times[0]) / (t.tokens - 1) for t in asked if t.tokens > 1],
    }


# ---- the report --------------------------------------------------------------------------------------


def _row(run: Run, settings: ServeSettings, kind: str, load: float, method: str) -> dict[str, Any]:
    turns = [run[f"{kind} {load:g}, repeat {repeat}"] for repeat in range(settings.repeats)]
    rates = {name: [t[name]["tokens"] / t[name]["seconds"] for t in turns] for name in METHODS}
    own = [turn[method] for turn in turns]
    first = [x for turn in own for x in turn["first"]]
    between = [x for turn in own for x in turn["between"]]
    ratios = [a / b for a, b in zip(rates[method], rates[OFF], strict=True)]
    return {
        "load": f"{load:g} {kind}",
        "method": method,
        "tokens_per_s": round(median(rates[method]), 1),
        "speedup": round(median(ratios), 3),
        # the first token of a request is the prompt's, not a step's
        "tau": round(sum(t["tokens"] - len(t["first"]) for t in own) / sum(t["steps"] for t in own), 3),
        "first_ms": [round(1e3 * x, 1) for x in _p50_p99(first)],
        "between_ms": [round(1e3 * x, 2) for x in _p50_p99(between)],
    }


def _p50_p99(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


serve_table = table_of(
    "results",
    ("load", "load", "{}"),
    ("method", "method", "{}"),
    RATE,
    ("over no draft", "speedup", "{:.2f}x"),
    ("tau", "tau", "{:.2f}"),
    ("first token, p50 and p99", "first_ms", "{:.0f}, {:.0f} ms"),
    ("between tokens, p50 and p99", "between_ms", "{:.2f}, {:.2f} ms"),
)


def _measured_line(report: Report) -> str:
    s = report["settings"]
    return (
        f"over HTTP, prompts of {s['prompt_tokens']} tokens, none of them in the cache, {s['new_tokens']} "
        f"more each, temperature {s['temperature']:g}, {s['repeats']} repeats, the client on the same cores"
    )


def _plot(report: Report) -> Any:
    rows = report["results"]
    drawn, (axes,) = plots.figure(1, 1, 3.4, "A server under load")
    loads = list(dict.fromkeys(r["load"] for r in rows))
    for method, colour in zip(METHODS, (plots.GREY, plots.BLUE), strict=True):
        axes.plot(
            loads,
            [r["tokens_per_s"] for r in rows if r["method"] == method],
            "o-",
            color=colour,
            label=method,
        )
    axes.legend()
    plots.label(axes, "load", "tokens/s")
    return drawn


PAGE = Page(
    "A server under load",
    lambda report: [*serve_table(report)],
    _measured_line,
    plots={"serve.png": ("Tokens/s", _plot)},
)
