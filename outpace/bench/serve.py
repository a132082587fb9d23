"""The suite serve: a server under load, with and without drafts; latencies and tokens/s over HTTP."""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench import llama_cpp, plots, servers
from outpace.bench.prompts import held_out_prompts
from outpace.bench.report import RATE, Page, Report, table_of
from outpace.bench.run import Bar, Run, at_least, seed_for
from outpace.bench.servers import LLAMA_SERVER, Address, Answered, ask
from outpace.checkpoint.open import is_gguf
from outpace.checkpoint.shipped import target_path
from outpace.models.decoder import Decoder
from outpace.tasks.problem import Problem
from outpace.tasks.prompts import draw_mixed, draw_short, harmony_of
from outpace.text.corpus import Document
from outpace.text.harmony import prompt_ids
from outpace.text.messages import System

OFF, ON = "no draft", "draft"
QUESTIONS, VARIANTS = 32, 50  # the latter for each method
FIRST_DAY = date(2024, 1, 1)
PromptOf = Callable[[int, int], list[int]]  # question and variant -> prompt
COLOURS = {OFF: plots.PALETTE[1], ON: plots.BLUE, LLAMA_SERVER: plots.GREY}


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """At each of `concurrency`, so many clients ask one question after the other, `arrivals` together and two
    each at least; at each of `rates`, `arrivals` questions come at random times, that many a second in the
    mean. A question is a held-out problem, answered to its end or up to `new_tokens`; where the target does
    not speak Harmony, held-out text of `prompt_tokens` that goes on for `new_tokens`."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rates: tuple[float, ...] = ()
    arrivals: int = 32
    prompt_tokens: int = 256
    new_tokens: int = 128
    temperature: float = 0.0
    repeats: int = 7
    seed: int = 1

    def __post_init__(self) -> None:
        least = {"arrivals": 2, "prompt_tokens": 1, "new_tokens": 2, "repeats": 1}
        at_least(self, "serve", **least)
        if not (self.concurrency or self.rates) or min((*self.concurrency, *self.rates), default=1) <= 0:
            raise ValueError("serve: give concurrency or rates, of numbers above 0")

    @property
    def loads(self) -> list[tuple[str, float]]:
        return [("clients", n) for n in self.concurrency] + [("requests/s", rate) for rate in self.rates]


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
    command that serves it. llama-server is measured with it where there is one. Raises ValueError for too
    few prompts, OSError where a server does not start."""
    most = int(max((*settings.concurrency, settings.arrivals if settings.rates else 1)))
    prompts = _prompts(tokenizer, documents, min(most, QUESTIONS), settings)
    remarks: list[str] = []
    with ExitStack() as stack:
        file = stack.enter_context(_peers_file(target, name, tokenizer, remarks))
        methods = [OFF, ON, *([LLAMA_SERVER] if file else [])]
        run, loads = Run(target, folder, settings=settings, methods=methods), settings.loads
        bar = stack.enter_context(Bar(console, "serve", len(methods) * len(loads) * settings.repeats))
        todo = [
            (f"{kind} {load:g}, repeat {repeat}", kind, load, repeat)
            for repeat in range(settings.repeats)
            for kind, load in loads
        ]
        addresses: dict[str, Address] = {}
        if any(key not in run for key, *_ in todo):
            length = settings.prompt_tokens + settings.new_tokens + 1
            for method in (OFF, ON):
                own = servers.outpace_serve(name, target, most, length, drafting=method == ON)
                addresses[method] = stack.enter_context(own).address
            if file:
                peer = stack.enter_context(servers.llama_server(file, most, length))
                addresses[LLAMA_SERVER] = peer.address
        for key, kind, load, repeat in todo:
            run.once(key, lambda: _turn(addresses, kind, load, repeat, prompts, settings))  # noqa: B023
            for method in methods:
                bar.step(f"{method}, {kind} {load:g}")
    rows = [_row(run, settings, kind, load, method) for kind, load in loads for method in methods]
    return run.report(results=rows, remarks=remarks)


@contextmanager
def _peers_file(
    target: Decoder, name: str, tokenizer: Tokenizer, remarks: list[str]
) -> Iterator[Path | None]:
    """The target as llama-server reads it; None where it cannot run, and `remarks` gets the reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if servers.find_llama_server() is None:
                raise ValueError(f"it is not installed ({servers.HOW_TO_GET})")
            path = target_path(name)
            if not is_gguf(path):
                path = Path(folder) / "target.gguf"
                llama_cpp.write_file(target, tokenizer, path)
        except ValueError as error:  # what GGUF cannot say, too
            remarks.append(f"{LLAMA_SERVER} left out: {error}")
            yield None
            return
        remarks.append(f"{LLAMA_SERVER}, {servers.llama_server_version()}")
        yield path


def _prompts(
    tokenizer: Tokenizer, documents: Sequence[Document], count: int, settings: ServeSettings
) -> PromptOf:
    """A variant is another prompt from the date on that ends the system message's first words, or of a text
    from its first token on: what comes after lies in no cache."""
    harmony, longest = harmony_of(tokenizer), settings.prompt_tokens
    if harmony is None:
        texts = held_out_prompts(tokenizer, documents, count, longest)
        return lambda i, variant: [10 + variant, *texts[i % count][1:]]

    def prompt(problem: Problem, variant: int) -> list[int]:
        today = System(current_date=(FIRST_DAY + timedelta(days=variant)).isoformat())
        return prompt_ids(replace(problem.prompt(), system=today), harmony)

    (one,) = draw_mixed(1, settings.seed)
    longer = len(prompt(one, 0)) - len(prompt_ids(one.prompt(), harmony))  # by the message with the date
    short = draw_short(harmony, count, settings.seed, longest - longer)
    return lambda i, variant: prompt(short[i % count], variant)


def _turn(
    addresses: dict[str, Address],
    kind: str,
    load: float,
    repeat: int,
    prompts: PromptOf,
    settings: ServeSettings,
) -> dict[str, Any]:
    """One load with every method, one after the other; the first rotates."""
    names, turn = list(addresses), {}
    first = repeat % len(names)
    for method in names[first:] + names[:first]:
        rng = random.Random(seed_for(settings.seed, repeat, int(100 * load)))
        count = max(2 * int(load), settings.arrivals) if kind == "clients" else settings.arrivals
        bodies = []
        for i in range(count):
            # another variant each time, never the other method's
            variant = len(names) * rng.randrange(VARIANTS) + names.index(method)
            bodies.append(_body(method, prompts(i, variant), i, settings))
        began = time.perf_counter()
        if kind == "clients":
            asked = _closed(addresses[method], bodies, int(load))
        else:
            asked = _open(addresses[method], bodies, load, rng)
        turn[method] = _measured(asked, time.perf_counter() - began)
    return turn


def _body(method: str, prompt: list[int], seed: int, settings: ServeSettings) -> dict[str, Any]:
    asked = {
        "prompt": prompt,
        "max_tokens": settings.new_tokens,
        "temperature": settings.temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return asked | ({"cache_prompt": True} if method == LLAMA_SERVER else {})


def _closed(address: Address, bodies: list[dict[str, Any]], clients: int) -> list[Answered]:
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda body: ask(address, body), bodies))


def _open(address: Address, bodies: list[dict[str, Any]], rate: float, rng: random.Random) -> list[Answered]:
    """Poisson arrivals."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        sent = []
        for body in bodies:
            sent.append(pool.submit(ask, address, body))
            time.sleep(rng.expovariate(rate))
        return [future.result() for future in sent]


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
    own = [turn[method] for turn in turns]
    first = [x for turn in own for x in turn["first"]]
    between = [x for turn in own for x in turn["between"]]
    # the first token of a request is the prompt's, not a step's
    tau = sum(t["tokens"] - len(t["first"]) for t in own) / sum(t["steps"] for t in own)
    return {
        "load": f"{load:g} {kind}",
        "method": method,
        "tokens_per_s": round(median(map(_rate, own)), 1),
        "speedup": _over(turns, method, OFF),
        "over_llama_server": _over(turns, method, LLAMA_SERVER),
        "tau": None if method == LLAMA_SERVER else round(tau, 3),
        "first_ms": [round(1e3 * x, 1) for x in _p50_p99(first)],
        "between_ms": [round(1e3 * x, 2) for x in _p50_p99(between)],
    }


def _rate(turn: dict[str, Any]) -> float:
    return float(turn["tokens"] / turn["seconds"])


def _over(turns: list[dict[str, Any]], method: str, other: str) -> float | None:
    """Of the tokens/s, the median of the repeats' ratios."""
    if other not in turns[0]:
        return None
    return round(median(_rate(turn[method]) / _rate(turn[other]) for turn in turns), 3)


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
    ("over llama-server", "over_llama_server", "{:.2f}x"),
    ("tau", "tau", "{:.2f}"),
    ("first token, p50 and p99", "first_ms", "{:.0f}, {:.0f} ms"),
    ("between tokens, p50 and p99", "between_ms", "{:.2f}, {:.2f} ms"),
)


def _measured_line(report: Report) -> str:
    s = report["settings"]
    return (
        f"over HTTP, prompts of up to {s['prompt_tokens']} tokens, each with another date, answers of up "
        f"to {s['new_tokens']}, temperature {s['temperature']:g}, {s['repeats']} repeats, the client on the "
        "same cores"
    )


def _plot(report: Report) -> Any:
    rows = report["results"]
    drawn, (axes,) = plots.figure(1, 1, 3.4, "A server under load")
    loads = list(dict.fromkeys(r["load"] for r in rows))
    for method in report["methods"]:
        axes.plot(
            loads,
            [r["tokens_per_s"] for r in rows if r["method"] == method],
            "o-",
            color=COLOURS[method],
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
