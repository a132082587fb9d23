"""Decoding against llama.cpp on the same GGUF file, in the same run, interleaved.

One token and several tokens over a cache of 256, a prompt of 512 tokens, batches of one token a row, and
answers to held-out problems by every method (text of a target without Harmony); ours goes through `generate`,
llama.cpp's through its C functions. Each uses the number of threads, and the dtype of keys and values
(float16 or float32), that suit it best; llama.cpp with or without flash attention, too. Answers of ours are
made with float32. Steps of ours are timed with activations in bfloat16 as well (--activation-dtype), in
columns of their own. With --busy, another process computes on one core meanwhile.
Needs llama-cpp-python (make oracle).
Run: python -m benchmarks.against_llama_cpp [--target default] [--out reports/llama-cpp] [--busy]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outpace  # noqa: F401 - before torch is loaded: it sets how long torch's threads spin

# isort: split
import torch

from benchmarks.small_moe import median
from outpace.bench import llama_cpp
from outpace.bench.llama_cpp import PROMPT, SETTINGS, LlamaCpp, load_model
from outpace.bench.machine import describe_target, machine, provenance, versions
from outpace.bench.prompts import SEED, answer_lengths, held_out_prompts
from outpace.checkpoint.save import write_json
from outpace.decode.auto import measure_costs
from outpace.decode.controller import Adaptive
from outpace.decode.costs import Costs
from outpace.decode.generate import generate
from outpace.decode.request import GREEDY, Request
from outpace.drafts.dflash import BoundDFlash
from outpace.formats.convert import convert_target
from outpace.loading import open_draft, open_target
from outpace.models.decoder import Output
from outpace.ops.dispatch import find_kv_cache_dtype
from outpace.tasks.prompts import harmony_of, problem_prompts, problem_text
from outpace.text.corpus import read_corpus, split

CONTEXT, NEW = 256, 128
PLAIN, DEFAULT = "autoregressive", "default"
KV_DTYPES = "float32", "float16"
ANSWERED, LONGEST = 12, 256  # problems of a turn, and the tokens of an answer at most
METHODS = {  # of text: the draft, and the positions of its trees (0: a chain)
    PLAIN: (None, 0),
    DEFAULT: ("dflash", 0),  # the draft length by measured costs
    "dflash": ("dflash", 0),
    "dflash, tree of 16": ("dflash", 16),
    "eagle3": ("eagle3", 0),
}
Methods = dict[str, tuple[str | None, int]]


@dataclass(frozen=True)
class Kinds:
    """What is timed: steps of so many tokens, batches of so many rows, each `times` times, a prompt less."""

    widths: tuple[int, ...] = (1, 8, 16)
    batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    times: int = 15
    prompts: int = 5


Question = tuple[list[int], int]  # a prompt, and how many tokens follow it


def questions(target: Any, tokenizer: Any, repeats: int) -> list[list[Question]]:
    """Of each turn: problems with the lengths of their answers, or one text."""
    documents, harmony = split(read_corpus())[1], harmony_of(tokenizer)
    if harmony is None:
        return [[(prompt, NEW)] for prompt in held_out_prompts(tokenizer, documents, repeats, CONTEXT)]
    prompts = problem_prompts(harmony, ANSWERED * repeats, SEED, CONTEXT)
    answers = list(zip(prompts, answer_lengths(target, prompts, harmony.stop, LONGEST), strict=True))
    return [answers[i : i + ANSWERED] for i in range(0, len(answers), ANSWERED)]


def ours(target: Any, asked: Question, draft: Any, costs: Costs | None) -> tuple[list[int], float]:
    """Greedy tokens of `generate`, and the seconds from the first on."""
    prompt, count = asked
    first = 0.0

    def on_tokens(row: int, tokens: list[int]) -> None:
        nonlocal first
        first = first or time.perf_counter()

    options: dict[str, Any] = {"on_tokens": on_tokens, "controller": costs and Adaptive(costs)}
    out = generate(target, [prompt], Request(max_new_tokens=count), draft, **options)
    return out.tokens[0], time.perf_counter() - first


def theirs_text(it: LlamaCpp, asked: Question) -> tuple[list[int], float]:
    """The same of llama.cpp."""
    rows, _, seconds = it.generate([asked[0]], asked[1])
    return rows[0], seconds


def rate(answers: list[tuple[list[int], float]]) -> float:
    """Tokens/s of all answers together."""
    return sum(len(tokens) - 1 for tokens, _ in answers) / sum(seconds for _, seconds in answers)


def timed(call: Callable[[], Any], times: int) -> float:
    """Median seconds, after one call to warm up."""
    call()
    return median(call, times)


def count_of(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def chosen(out: Output) -> torch.Tensor:
    """[B, T]: the most probable tokens, as the loop takes them."""
    assert out.logits is not None
    return out.logits.argmax(-1) if out.best is None else out.best


@torch.inference_mode()
def our_steps(target: Any, ids: list[int], kinds: Kinds) -> dict[str, float]:
    """Seconds of each kind of step, the logits and the choice included."""
    result = {}
    cache = target.make_cache(1, CONTEXT + PROMPT, slack=32)
    tokens = torch.tensor([ids])
    target(tokens[:, :CONTEXT], cache)
    for n in kinds.widths:

        def step(n: int = n) -> None:
            chosen(target(tokens[:, :n], cache, logits=True)).tolist()
            cache.rewind([CONTEXT])

        result[count_of(n, "token")] = timed(step, kinds.times)

    def prompt() -> None:
        hidden = target(tokens[:, :PROMPT], target.make_cache(1, PROMPT)).hidden
        target.logits(hidden[:, -1:]).argmax(-1).tolist()

    result[f"prompt of {PROMPT}"] = timed(prompt, kinds.prompts)
    for B in kinds.batches:
        cache = target.make_cache(B, CONTEXT + 4, slack=2)
        target(tokens[:, :CONTEXT].expand(B, -1), cache)

        def rows(B: int = B, cache: Any = cache) -> None:
            chosen(target(tokens[:, :1].expand(B, -1), cache, logits=True)).tolist()
            cache.rewind([CONTEXT] * B)

        result[f"batch of {B}"] = timed(rows, kinds.times)
    return result


def open_rounding(path: Path) -> Any:
    """With activations in bfloat16, over float16 keys and values; a switch would unmake all steps."""
    target, _ = open_target(str(path), None, 1, torch.float16, torch.bfloat16)
    return target


def their_steps(it: LlamaCpp, many: LlamaCpp, ids: list[int], kinds: Kinds) -> dict[str, float]:
    """`it` for one sequence, `many` for batches."""
    result = {}
    it.forget(0)
    it.decode(ids[:CONTEXT], 0, logits=False)
    for n in kinds.widths:

        def step(n: int = n) -> None:
            it.decode(ids[:n], CONTEXT)
            for i in range(n):
                it.choice(i)
            it.forget(CONTEXT)

        result[count_of(n, "token")] = timed(step, kinds.times)

    def prompt() -> None:
        it.forget(0)
        it.decode(ids[:PROMPT], 0, logits=False)
        it.choice(PROMPT - 1)

    result[f"prompt of {PROMPT}"] = timed(prompt, kinds.prompts)
    rows_at_most = max(kinds.batches, default=0)
    for row in range(rows_at_most):
        many.forget(0, row)
    if kinds.batches:
        many.decode(ids[:CONTEXT], 0, logits=False)
    for row in range(1, rows_at_most):
        many.share(row)
    for B in kinds.batches:

        def rows(B: int = B) -> None:
            many.decode_rows([ids[0]] * B, CONTEXT)
            for i in range(B):
                many.choice(i)
            for row in range(B):
                many.forget(CONTEXT, row)

        result[f"batch of {B}"] = timed(rows, kinds.times)
    return result


@contextmanager
def busy_core(on: bool) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    process = subprocess.Popen(command) if on else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def drafts_for(source: str, target: Any, methods: Methods) -> dict[str, Any]:
    """The drafts of `source`, bound to `target`: the same weights out of another file."""
    original, tokenizer = open_target(source)
    drafts: dict[str, Any] = {}
    for name, (draft_name, nodes) in methods.items():
        draft = draft_name and open_draft(draft_name, original, tokenizer, num_draft_tokens=nodes)
        drafts[name] = draft.draft.bind(target) if isinstance(draft, BoundDFlash) else draft
    return drafts


# by setting: seconds of each kind of step, or tokens/s of each method
Measured = defaultdict[str, defaultdict[str, list[float]]]
Best = tuple[float, str]  # a median, and the setting that it was measured with


def measured() -> Measured:
    return defaultdict(lambda: defaultdict(list))


def best(values: Measured, name: str, choose: Callable[..., Any]) -> Best:
    chosen: Best = choose((statistics.median(items[name]), setting) for setting, items in values.items())
    return chosen


def compare(source: str, path: Path, threads: list[int], repeats: int, methods: Methods) -> dict[str, Any]:
    """-> {"steps": milliseconds of both by kind, "text": tokens/s of llama.cpp and of every method}: each
    with the setting that suits it best."""
    kinds = Kinds()
    target, tokenizer = open_target(str(path))
    rounding = open_rounding(path)
    drafts = drafts_for(source, target, methods)
    turns, ids = questions(target, tokenizer, repeats), step_tokens(tokenizer)
    model = load_model(path)
    engines = {
        name: [LlamaCpp(model, batch, CONTEXT + PROMPT, *how) for batch in (1, max(kinds.batches))]
        for name, how in SETTINGS.items()
    }
    costs: dict[int, Costs] = {}
    mine, rounded, theirs, our_rates, their_rates = (measured() for _ in range(5))
    texts = defaultdict[tuple[str, int], list[list[int]]](list)  # of the prompts, by who wrote them
    for turn in turns:
        for n in threads:
            torch.set_num_threads(n)
            label = count_of(n, "thread")
            for dtype in KV_DTYPES:
                target.kv_cache_dtype = find_kv_cache_dtype(dtype)
                collect(mine[f"{label}, {dtype} KV"], our_steps(target, ids, kinds))
            collect(rounded[label], our_steps(rounding, ids, kinds))
            target.kv_cache_dtype = None
            if DEFAULT in drafts and n not in costs:
                costs[n] = measure_costs(target, tokenizer, drafts[DEFAULT], GREEDY, [CONTEXT], [1], 0.5)
            for name, draft in drafts.items():
                answers = [ours(target, q, draft, costs[n] if name == DEFAULT else None) for q in turn]
                collect(our_rates[label], {name: rate(answers)})
                texts[name, n] += [tokens for tokens, _ in answers]
            for setting, (it, many) in engines.items():
                for engine in (it, many):
                    engine.use_threads(n)
                collect(theirs[f"{label}, {setting}"], their_steps(it, many, ids, kinds))
                answers = [theirs_text(it, q) for q in turn]
                collect(their_rates[f"{label}, {setting}"], {llama_cpp.NAME: rate(answers)})
                texts[setting, n] += [tokens for tokens, _ in answers]
    own = texts[PLAIN, threads[0]]
    assert all(texts[name, n] == own for name in drafts for n in threads), "a draft changed the text"
    baseline = best(their_rates, llama_cpp.NAME, max)
    return {
        "steps": {
            kind: step_row(best(mine, kind, min), best(theirs, kind, min))
            | by_dtype(mine, kind)
            | rounded_row(best(rounded, kind, min), best(theirs, kind, min))
            for kind in mine[f"{label}, {KV_DTYPES[0]} KV"]
        },
        "text": {llama_cpp.NAME: text_row(baseline, baseline)}
        | {name: text_row(best(our_rates, name, max), baseline) for name in drafts},
        "tokens_until_llama_cpp_differs": {
            name: [until_different(a, b) for a, b in zip(texts[name, threads[0]], own, strict=True)]
            for name in SETTINGS
        },
    }


def step_tokens(tokenizer: Any) -> list[int]:
    harmony = harmony_of(tokenizer)
    if harmony is None:
        return held_out_prompts(tokenizer, split(read_corpus())[1], 1, PROMPT)[0]
    return problem_text(harmony, PROMPT, SEED)


def collect(into: defaultdict[str, list[float]], values: dict[str, float]) -> None:
    for name, value in values.items():
        into[name].append(value)


def until_different(a: list[int], b: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def step_row(mine: Best, theirs: Best) -> dict[str, Any]:
    return {
        "outpace_ms": round(mine[0] * 1e3, 3),
        "outpace_setting": mine[1],
        "llama_cpp_ms": round(theirs[0] * 1e3, 3),
        "llama_cpp_setting": theirs[1],
        "ratio": round(theirs[0] / mine[0], 3),
    }


def rounded_row(rounded: Best, theirs: Best) -> dict[str, Any]:
    return {
        "outpace_rounded_ms": round(rounded[0] * 1e3, 3),
        "ratio_rounded": round(theirs[0] / rounded[0], 3),
    }


def by_dtype(mine: Measured, kind: str) -> dict[str, float]:
    """Milliseconds of ours with keys and values of each dtype."""

    def fastest(dtype: str) -> float:
        return min(statistics.median(items[kind]) for setting, items in mine.items() if dtype in setting)

    return {f"outpace_{dtype}_ms": round(fastest(dtype) * 1e3, 3) for dtype in KV_DTYPES}


def text_row(rate: Best, baseline: Best) -> dict[str, Any]:
    return {
        "tokens_per_s": round(rate[0], 1),
        "setting": rate[1],
        "ratio": round(rate[0] / baseline[0], 3),
    }


def report_header() -> dict[str, Any]:
    """Commit, machine, versions, and what both engines were compiled for."""
    theirs = {"llama-cpp-python": llama_cpp.llama.__version__}
    return {
        **provenance(),
        "machine": machine(torch.device("cpu")),
        "versions": versions() | theirs,
        "builds": llama_cpp.builds(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="default", help="a folder or a GGUF file")
    parser.add_argument("--type", default="bf16", help="number format of the matrices in the GGUF file")
    counts = sorted({1, len(os.sched_getaffinity(0))})
    parser.add_argument("--threads", type=int, nargs="+", default=counts, help="numbers of threads to try")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="another process computes meanwhile")
    parser.add_argument("--no-drafts", action="store_true", help="autoregressive decoding alone")
    parser.add_argument("--out", type=Path, help="folder for report.json")
    options = parser.parse_args()
    if not llama_cpp.installed():
        parser.error(f"llama-cpp-python is not installed: {llama_cpp.HOW_TO_GET}")
    header = report_header()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.target)
        try:
            if path.suffix != ".gguf":
                path = Path(folder) / "target.gguf"
                convert_target(options.target, path, options.type)
            header["target"] = describe_target(open_target(str(path))[0])
        except ValueError as error:
            parser.error(str(error))
        with busy_core(options.busy):
            methods = {PLAIN: METHODS[PLAIN]} if options.no_drafts else METHODS
            report = header | compare(options.target, path, options.threads, options.repeats, methods)
    report["busy"] = options.busy
    print(json.dumps(report, indent=2))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "report.json", report)


if __name__ == "__main__":
    main()
