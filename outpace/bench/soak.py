"""The suite soak: a server under thousands of requests, many of them rude, and what is left of it then."""

import json
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench import servers
from outpace.bench.prompts import held_out_prompts
from outpace.bench.report import Page, Report, table_of
from outpace.bench.run import Bar, Run, at_least, seed_for
from outpace.bench.servers import Address, Running
from outpace.bench.soak_clients import TEXT, Visit, random_visit, send, text_of, visit
from outpace.models.decoder import Decoder
from outpace.tasks.prompts import draw_short, harmony_of
from outpace.text.corpus import Document
from outpace.text.harmony import prompt_ids

BATCHES = 20  # of the load; the memory is read after each
MOST_GROWTH = 0.05  # of the memory, from the end of the warm-up on
SLOWED = 1.5  # times as long as without slow readers: the noise of a short measurement is in it
QUEUE = 2  # requests that may wait, where the queue is to be full
TURNS = 3  # with streams that nobody reads, and without
UNREAD = 4096  # bytes on their way to a client that does not read


@dataclass(frozen=True, kw_only=True)
class SoakSettings:
    """`requests` of random kinds by `clients` at once, to a server of `rows` sequences. Memory has to be flat
    after `warm_up` of them, in which the buffers of a step of every size are made. `slow` streams that nobody
    reads are open while `timed` others are."""

    requests: int = 10_000
    warm_up: int = 2_000
    clients: int = 32
    rows: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 64
    slow: int = 16
    timed: int = 40
    seed: int = 1

    def __post_init__(self) -> None:
        least = {"clients": 2, "rows": 1, "prompt_tokens": 1, "new_tokens": 1, "slow": 1, "timed": 1}
        at_least(self, "soak", requests=BATCHES, warm_up=1, **least)

    @property
    def length(self) -> int:
        """Of a sequence: a chat's own words are in it."""
        return 4 * (self.prompt_tokens + self.new_tokens) + 400


def run_soak(
    target: Decoder,
    name: str,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    settings: SoakSettings,
    folder: Path,
    console: Console,
) -> Report:
    """-> the report, with `checks` passed and not. A stopped run continues from folder/progress.jsonl.
    `name`: of a target that has a chat format, for the command that serves it. Raises ValueError for too few
    prompts, OSError where a server does not start."""
    harmony = harmony_of(tokenizer)
    if harmony is None:
        ids = held_out_prompts(tokenizer, documents, 16, settings.prompt_tokens)
        prompts = [tokenizer.decode(prompt) for prompt in ids]
    else:
        problems = draw_short(harmony, 16, settings.seed, settings.prompt_tokens)
        ids = [prompt_ids(problem.prompt(), harmony) for problem in problems]
        prompts = [problem.question for problem in problems]
    run = Run(target, folder, settings=settings)
    with ExitStack() as stack:
        bar = stack.enter_context(Bar(console, "soak", BATCHES + 3))
        if "load" not in run or "killed" not in run:
            first = stack.enter_context(servers.outpace_serve(name, target, settings.rows, settings.length))
            asked = _reference(ids[0])
            run.once("load", lambda: _load(first, asked, prompts, settings, bar))
            bar.step("slow readers")
            run.once("slow", lambda: _slow(first.address, ids[0], settings))
            bar.step("kill -9")
            run.once("killed", lambda: _kill(first, asked, ids[0], settings))
        if "restarted" not in run:
            began = time.perf_counter()
            again = stack.enter_context(servers.outpace_serve(name, target, 1, settings.length, QUEUE))
            same = text_of(again.address, _reference(ids[0])) == run["killed"]["text"]
            seconds = round(time.perf_counter() - began, 2)
            bar.step("a full queue")
            queue = _full_queue(again.address, ids[0], settings)
            run.once("restarted", lambda: {"same": same, "seconds": seconds, "queue": queue})
    parts = {part: run[part] for part in ("load", "slow", "killed", "restarted")}
    short = f"memory is not judged: the first {settings.warm_up:,} requests are warm-up"
    remarks = [short] if parts["load"]["growth"] is None else []
    return run.report(**parts, checks=_checks(parts, settings), remarks=remarks)


def _reference(prompt: list[int]) -> dict[str, Any]:
    """A completion that has one text, whatever else is running."""
    return {"prompt": prompt, "max_tokens": 40, "temperature": 0.9, "seed": 5, "ignore_eos": True}


# ---- the load ----------------------------------------------------------------------------------------


def _load(
    server: Running, asked: dict[str, Any], prompts: list[str], settings: SoakSettings, bar: Bar
) -> dict[str, Any]:
    text, memory, failures = text_of(server.address, asked), [], list[str]()
    manners: Counter[str] = Counter()
    _fill_rows(server.address, asked, settings)
    began = time.perf_counter()
    with ThreadPoolExecutor(settings.clients) as pool:
        for batch in range(BATCHES):
            bar.step(f"requests, {batch + 1} of {BATCHES}")
            rng = random.Random(seed_for(settings.seed, batch, 0))
            count = (batch + 1) * settings.requests // BATCHES - batch * settings.requests // BATCHES
            visits = [random_visit(rng, prompts, settings.new_tokens) for _ in range(count)]
            manners.update(each.manner for each in visits)
            failures += filter(None, pool.map(lambda each: visit(server.address, each), visits))
            if text_of(server.address, asked) != text:
                failures.append(f"batch {batch}: the text of the reference is another one")
            _until_idle(server.address)
            memory.append(server.memory)
    seconds = time.perf_counter() - began
    left = gauges(server.address)
    return {
        "requests": settings.requests,
        "seconds": round(seconds, 1),
        "manners": dict(manners),
        "failed": len(failures),
        "failures": failures[:20],
        "memory_mib": [round(nbytes / 2**20, 1) for nbytes in memory],
        "growth": _growth(memory, settings),
        "left": left,
        "rows_at_once": _fill_rows(server.address, asked, settings),
    }


def _growth(memory: list[int], settings: SoakSettings) -> float | None:
    """Of the memory after each batch, from the end of the warm-up on; None: the run is all warm-up."""
    warm = -(-settings.warm_up * BATCHES // settings.requests)
    return round(max(memory[warm:]) / memory[warm - 1] - 1, 4) if warm < BATCHES else None


def _fill_rows(address: Address, asked: dict[str, Any], settings: SoakSettings) -> int:
    """Long answers in all rows, which touches their memory; -> how many ran at once."""
    long = asked | {"max_tokens": settings.length - len(asked["prompt"]), "stream": True}
    most = 0
    with ThreadPoolExecutor(settings.rows) as pool:
        asking = [pool.submit(visit, address, Visit(TEXT, long)) for _ in range(settings.rows)]
        while not all(future.done() for future in asking):
            most = max(most, int(gauges(address)["num_requests_running"]))
            time.sleep(0.02)
        wrong = [problem for future in asking if (problem := future.result())]
    if wrong:
        raise OSError(wrong[0])
    return most


def gauges(address: Address) -> dict[str, float]:
    """What runs and waits now, by the server's own page."""
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=60) as page:
        text = page.read().decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: float(re.search(rf"^outpace_{name} (\S+)", text, re.M)[1]) for name in names}  # type: ignore[index]


def _until_idle(address: Address, seconds: float = 60) -> None:
    """Or until it is clear that it never is: the report has what is left then."""
    end = time.monotonic() + seconds
    while any(gauges(address).values()) and time.monotonic() < end:
        time.sleep(0.02)


# ---- slow readers, a full queue, a kill ----------------------------------------------------------------


def _slow(address: Address, prompt: list[int], settings: SoakSettings) -> dict[str, Any]:
    """Streams that nobody reads: their rows are free once they have run, and others take no longer. Measured
    in turns, since a busy machine slows either: the shortest times of all turns are compared."""
    # its log-probabilities are more than what lies between the server and a client
    long = _reference(prompt) | {"max_tokens": 3 * settings.new_tokens, "stream": True, "logprobs": 20}
    alone, during = [_fastest(address, prompt, settings.timed)], []
    left: Counter[str] = Counter()
    whole = []
    for _ in range(TURNS):
        unread = [send(address, Visit(TEXT, long | {"seed": i}), UNREAD) for i in range(settings.slow)]
        _until_idle(address)
        left.update(gauges(address))
        during.append(_fastest(address, prompt, settings.timed))
        whole.append(sum(line.getresponse().read().endswith(b"data: [DONE]\n\n") for line in unread))
        for line in unread:
            line.close()
        alone.append(_fastest(address, prompt, settings.timed))
    slowed = round(min(during) / min(alone), 3)
    seconds = {"alone": alone, "during": during}
    return {"left": dict(left), "whole": min(whole), "seconds": seconds, "slowed": slowed}


def _fastest(address: Address, prompt: list[int], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        text_of(address, _reference(prompt))
        times.append(time.perf_counter() - began)
    return round(min(times), 5)  # what else the machine does is not in it


def _kill(
    server: Running, asked: dict[str, Any], prompt: list[int], settings: SoakSettings
) -> dict[str, Any]:
    """kill -9 while it answers; -> the reference's text before."""
    text = text_of(server.address, asked)
    long = asked | {"max_tokens": settings.length - len(prompt), "stream": True}
    lines = [send(server.address, Visit(TEXT, long)) for _ in range(settings.rows + 2)]
    lines[0].getresponse().read(200)
    running = gauges(server.address)["num_requests_running"]
    server.process.kill()
    server.process.wait()
    for line in lines:
        line.close()
    return {"text": text, "running": running}


def _full_queue(address: Address, prompt: list[int], settings: SoakSettings) -> dict[str, Any]:
    """All clients at once, where one runs and few may wait: who is sent away comes again when told to."""
    body = _reference(prompt) | {"max_tokens": 2 * settings.new_tokens}
    refused: Counter[str] = Counter()

    def ask(_: int) -> int:
        while True:
            line = send(address, Visit(TEXT, body))
            response = line.getresponse()
            response.read()
            line.close()
            if response.status != 429:
                return response.status
            refused[str(response.headers["Retry-After"])] += 1
            time.sleep(float(response.headers["Retry-After"]))

    with ThreadPoolExecutor(settings.clients) as pool:
        codes = Counter(pool.map(ask, range(settings.clients)))
    return {"answered": codes[200], "other": sum(codes.values()) - codes[200], "refused": dict(refused)}


# ---- the report --------------------------------------------------------------------------------------


def _checks(parts: dict[str, Any], settings: SoakSettings) -> list[dict[str, Any]]:
    load, slow, killed, restarted = (parts[p] for p in ("load", "slow", "killed", "restarted"))
    queue = restarted["queue"]

    def check(what: str, passed: bool, measured: str) -> dict[str, Any]:
        return {"check": what, "passed": passed, "measured": measured}

    left, at_once = json.dumps(load["left"]), load["rows_at_once"]
    freed = not any(slow["left"].values()) and slow["whole"] == settings.slow
    sent_away = sum(queue["refused"].values())
    told = sent_away and "None" not in queue["refused"] and not queue["other"]
    rows = [
        ("no error but those asked for, one text of a seed", not load["failed"], f"{load['failed']} failed"),
        (
            "no row or KV lost",
            not any(load["left"].values()) and at_once == settings.rows,
            f"{left}, then {at_once} of {settings.rows} rows at once",
        ),
        (
            "streams that nobody reads free their rows",
            freed,
            f"{slow['whole']} of {settings.slow} whole when they are read at last",
        ),
        ("slow readers do not slow others", slow["slowed"] <= SLOWED, f"{slow['slowed']:.2f}x the time"),
        (
            "a full queue answers 429 with Retry-After",
            bool(told),
            f"{sent_away} sent away, {queue['answered']} of {settings.clients} answered in the end",
        ),
        (
            "nothing to repair after kill -9",
            restarted["same"],
            f"killed with {killed['running']:.0f} running, the same text {restarted['seconds']:.1f} s later",
        ),
    ]
    if (growth := load["growth"]) is not None:
        measured = f"{growth:+.1%} at most after {settings.warm_up:,} requests"
        rows.insert(1, ("memory flat after the warm-up", growth <= MOST_GROWTH, measured))
    return [dict(zip(("check", "passed", "measured"), row, strict=True)) for row in rows]


def _measured_line(report: Report) -> str:
    s, load = report["settings"], report["load"]
    kinds = ", ".join(f"{count:,} {manner}" for manner, count in load["manners"].items())
    return (
        f"{load['requests']:,} requests by {s['clients']} clients at once ({kinds}) of chats, texts and "
        f"responses, with and without drafts, in {load['seconds']:,.0f} s"
    )


def _failures(report: Report) -> list[str]:
    failures = report["load"]["failures"]
    return ["## Failures", "", *(f"- `{line}`" for line in failures), ""] if failures else []


soak_table = table_of(
    "checks",
    ("check", "check", "{}"),
    ("passed", lambda row: "yes" if row["passed"] else "**no**", "{}"),
    ("measured", "measured", "{}"),
)
PAGE = Page(
    "A server under rude clients",
    lambda report: [*soak_table(report), *_failures(report)],
    _measured_line,
)
