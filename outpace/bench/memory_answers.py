"""The suite memory-answers: held-out problems answered with latent KV, an index, or partial KV."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench import plots
from outpace.bench.report import KV_BYTES, Columns, Page, Report, table
from outpace.bench.retrofits import (
    BALANCE_TEXTS,
    MARKS,
    RetrofitSizes,
    attach_indexes,
    attach_latents,
    kv_memory,
)
from outpace.bench.run import Bar, Run, at_least
from outpace.bench.tasks import Decode, ProblemSettings, Solution, solve
from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.drafts.lookup import NGram
from outpace.kv.partial import PartialConfig
from outpace.models.decoder import Decoder
from outpace.retrofit import mla
from outpace.retrofit.evaluate import evaluate
from outpace.tasks.families import FAMILIES
from outpace.tasks.lookups import needle_at
from outpace.tasks.problem import Problem
from outpace.tasks.prompts import draw
from outpace.text.harmony import HarmonyTokens, prompt_ids


@dataclass(frozen=True, kw_only=True)
class MemoryAnswersSettings(ProblemSettings, RetrofitSizes):
    """Problems as in `bench/tasks.py: ProblemSettings`. Retrofits as in `bench/retrofits.py: RetrofitSizes`,
    from worked problems that are not held out. `tokens`: of partial KV, its window and sinks included, in
    blocks of `block_size`. `needles` codes behind each of `depths`, shares of documents of `sentences`, ten
    tokens each."""

    problems: int = 50
    needles: int = 6
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    sentences: int = 400
    methods: tuple[str, ...] = ("loss",)
    tokens: tuple[int, ...] = (128, 64)
    block_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("memory-answers")
        at_least(self, "memory-answers", block_size=1, needles=0, sentences=10)
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"memory-answers: depths {list(self.depths)}: shares of a document, 0 to 1")
        _ = [self.partial_kv(tokens, "lossy") for tokens in self.tokens]

    @property
    def states(self) -> int:
        """How many `_states` gives."""
        latents = len(self.fractions) * len(self.methods)
        return 2 + 2 * len(self.tokens) + latents + len(self.shares) + len(self.methods)

    def partial_kv(self, tokens: int, mode: str) -> Partial:
        sizes = {"block_size": self.block_size, "n_sink_blocks": 1, "n_window_blocks": 4}
        return Partial(config=PartialConfig.within(tokens, **sizes), mode=mode)


LOSS_PROBLEMS = 4  # of each family, whose worked answers are read for loss and KL


@dataclass(frozen=True)
class State:
    """A row: how the target decodes, of partial KV the tokens that are looked at, and of latents what they
    lose."""

    name: str
    kind: str
    decode: Decode
    tokens: int | None = None
    lost: list[mla.Error] | None = None

    @property
    def changed(self) -> bool:
        """Whether the target's own forward is another, without a cache."""
        return self.kind in ("latents", "index", "both")


def run_memory_answers(
    target: Decoder, tokenizer: Tokenizer, settings: MemoryAnswersSettings, folder: Path, console: Console
) -> Report:
    """-> the report. `target`: without retrofits. A stopped run continues from folder/progress.jsonl. Raises
    ValueError for a target with retrofits, and for one without Harmony's tokens."""
    if target.config.mla_ranks or target.config.dsa_layers:
        raise ValueError("the suite memory-answers starts from a target without retrofits: name the original")
    tokens, run = HarmonyTokens(tokenizer), Run(target, folder, settings=settings)
    problems = {family: draw(family, settings.problems, settings.seed) for family in settings.families}
    deep = {depth: _needles(depth, settings) for depth in settings.depths} if settings.needles else {}
    prompts = [prompt_ids(p.prompt(settings.effort), tokens) for some in problems.values() for p in some]
    prompt_tokens = sum(map(len, prompts)) / len(prompts)
    few = [problem for some in problems.values() for problem in some[:LOSS_PROBLEMS]]
    read = partial(
        evaluate,
        target,
        [_worked_ids(problem, tokens, settings.effort) for problem in few],
        prompts=[len(prompt_ids(problem.prompt(settings.effort), tokens)) for problem in few],
    )
    rows: list[dict[str, Any]] = []
    original: list[Solution] = []
    before = read()
    with Bar(console, "memory-answers", settings.states * (len(problems) + len(deep))) as bar:
        for state in _states(target, _worked(tokens, settings), settings):
            solutions: dict[str, list[Solution]] = {}
            seconds = 0.0
            for family, some in problems.items():
                bar.step(f"{state.name}, {family}")
                measure = partial(_solved, state.decode, tokens, some, settings)
                took, solved = run.once(f"{state.name}, {family}", measure)
                solutions[family] = [Solution(**solution) for solution in solved]
                seconds += took
            original = original or _all(solutions)
            row = _row(target, state, solutions, original, seconds, prompt_tokens)
            row["needles"] = {}
            for depth, some in deep.items():
                bar.step(f"{state.name}, needles at {depth:g}")
                measure = partial(_solved, state.decode, tokens, some, settings)
                _, solved = run.once(f"{state.name}, needles at {depth:g}", measure)
                row["needles"][f"{depth:g}"] = sum(solution["right"] for solution in solved)
            if state.changed:
                row["quality"] = run.once(f"{state.name}, loss", partial(_quality, read, before))
            rows.append(row)
    rows[0]["quality"] = {"nats": before["nats_per_token"], "kl": 0.0}
    texts = [len(prompt_ids(p.prompt(settings.effort), tokens)) for some in deep.values() for p in some]
    document_tokens = round(fmean(texts), 1) if texts else None
    return run.report(rows=rows, prompt_tokens=round(prompt_tokens, 1), document_tokens=document_tokens)


def _needles(depth: float, settings: MemoryAnswersSettings) -> list[Problem]:
    rng = random.Random(f"{settings.seed} {depth}")
    return [needle_at(rng, settings.sentences, depth) for _ in range(settings.needles)]


def _quality(read: Callable[..., dict[str, Any]], before: dict[str, Any]) -> dict[str, float]:
    """Nats per token of worked answers, and KL(original || this)."""
    value = read(before["log_probabilities"])
    return {"nats": value["nats_per_token"], "kl": value["kl"]}


def _all(solutions: dict[str, list[Solution]]) -> list[Solution]:
    return [solution for some in solutions.values() for solution in some]


def _row(
    target: Decoder,
    state: State,
    solutions: dict[str, list[Solution]],
    original: list[Solution],
    seconds: float,
    prompt_tokens: float,
) -> dict[str, Any]:
    every = _all(solutions)
    written = sum(solution.tokens for solution in every)
    lost = {} if state.lost is None else {x: fmean(getattr(e, x) for e in state.lost) for x in ("k", "v")}
    return {
        "name": state.name,
        "kind": state.kind,
        "right": sum(s.right for s in every),
        "of": len(every),
        "lost": lost or None,
        "unchanged": sum(s.answer == o.answer for s, o in zip(every, original, strict=True)),
        "tokens_per_s": round(written / seconds, 1),
        "memory": _memory(target, state, round(prompt_tokens + written / len(every))),
        "families": {family: sum(s.right for s in some) for family, some in solutions.items()},
    }


def _solved(
    decode: Decode, tokens: HarmonyTokens, problems: list[Any], settings: MemoryAnswersSettings
) -> tuple[float, list[dict[str, Any]]]:
    """-> seconds, prompts included, and the solutions."""
    began, solutions = time.perf_counter(), []
    for first in range(0, len(problems), settings.batch):
        solutions += solve(decode, tokens, problems[first : first + settings.batch], settings)
    return time.perf_counter() - began, [asdict(solution) for solution in solutions]


def _worked_ids(problem: Problem, tokens: HarmonyTokens, effort: str) -> list[int]:
    """The prompt, the trace and the answer."""
    return prompt_ids(problem.conversation(effort), tokens, drop_analysis=False, generation_prompt=False)


def _worked(tokens: HarmonyTokens, settings: MemoryAnswersSettings) -> list[list[int]]:
    """Rows of worked problems of all families in turn, that are not held out."""
    rng, texts, ids = random.Random(settings.seed), list[list[int]](), list[int]()
    while len(texts) < settings.rows + BALANCE_TEXTS:
        for family in settings.families:
            problem = FAMILIES[family].draw(rng, held_out=False)
            ids += _worked_ids(problem, tokens, settings.effort)
        while len(ids) >= settings.row_tokens:
            texts.append(ids[: settings.row_tokens])
            ids = ids[settings.row_tokens :]
    return texts[: settings.rows + BALANCE_TEXTS]


def _states(target: Decoder, texts: list[list[int]], settings: MemoryAnswersSettings) -> Iterator[State]:
    """The target in each state in turn; it is the original again at the end."""
    plain = partial(generate, target)
    yield State("original", "original", plain)
    target.kv_cache_dtype = torch.float16
    yield State("float16", "float16", plain)
    target.kv_cache_dtype = None
    for tokens in settings.tokens:
        for mode in ("lossless", "lossy"):
            looking = partial(generate, target, draft=NGram(), partial=settings.partial_kv(tokens, mode))
            yield State(f"partial KV of {tokens} tokens, {mode}", "partial", looking, tokens)
    for name, lost in attach_latents(target, texts, settings):
        yield State(name, "latents", plain, lost=lost)
    for name in attach_indexes(target, texts, settings):
        yield State(name, "index", plain)
    half = replace(settings, fractions=(0.5,), shares=(0.25,))
    for latents, lost in attach_latents(target, texts, half):
        for index in attach_indexes(target, texts, half):
            yield State(f"{latents}; {index}", "both", plain, lost=lost)


def _memory(target: Decoder, state: State, length: int) -> dict[str, float]:
    memory = kv_memory(target, length)
    if state.tokens is not None:
        memory["bytes_read"] *= min(1.0, state.tokens / length)
    return memory


# ---- the report --------------------------------------------------------------------------------------


def _lost(row: dict[str, Any]) -> list[float] | None:
    return None if row["lost"] is None else [row["lost"]["k"], row["lost"]["v"]]


COLUMNS: Columns = (
    ("", "name", "{}"),
    *KV_BYTES,
    ("lost of keys, values", _lost, "{:.1%}, {:.1%}"),
    ("loss", "quality.nats", "{:.4f}"),
    ("KL", "quality.kl", "{:z.4f}"),
    ("right", lambda r: [r["right"], r["of"]], "{} of {}"),
    ("same answer", lambda r: r["unchanged"] / r["of"], "{:.1%}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
)
LEGEND = """\
- KV, bytes: what a token adds to the memory of layers with full attention; read: what a step looks at, for
  each token of a text as long as the mean of these, keys of an index included.
- lost of keys, values: the share of their variance that latents leave out, in the mean of the layers.
- loss, KL: of worked answers to held-out problems, nats per token, and against the original's distribution.
- right: of all families. same answer: the final message is the original's, right or wrong.
- tokens/s: of a batch, prompts included.
- partial KV verifies draft tokens of an n-gram lookup on part of the cache; lossless: a full pass confirms
  them, so that the answers are the original's; lossy: it does not, as published.
"""


def memory_answers_table(report: Report) -> list[str]:
    return table(COLUMNS, report["rows"])


def memory_answers_by_family(report: Report) -> list[str]:
    """Right answers, a column for every state."""
    names = [row["name"] for row in report["rows"]]
    by_family = [
        {"family": family} | {row["name"]: row["families"][family] for row in report["rows"]}
        for family in report["rows"][0]["families"]
    ]
    columns: Columns = (("family", "family", "{}"), *((n, itemgetter(n), "{}") for n in names))
    return table(columns, by_family)


def needles_by_depth(report: Report) -> list[str]:
    """Right answers, a column for every depth."""
    settings = report["settings"]
    depths = [f"{depth:g}" for depth in settings["depths"]]
    columns: Columns = (
        ("", "name", "{}"),
        ("KV, bytes", "memory.bytes_per_token", "{:,.0f}"),
        *((f"at {100 * float(d):g} %", lambda r, d=d: r["needles"].get(d), "{}") for d in depths),  # type: ignore[misc]
        ("all", lambda r: [sum(r["needles"].values()), settings["needles"] * len(depths)], "{} of {}"),
    )
    return table(columns, report["rows"])


def _body(report: Report) -> list[str]:
    lines = [*memory_answers_table(report), "## Right answers by family", ""]
    lines += [*memory_answers_by_family(report), LEGEND]
    if not report["settings"]["needles"]:
        return lines
    about = f"Codes in documents of {report['document_tokens']:,.0f} tokens, by depth"
    return [*lines, f"## {about}", "", *needles_by_depth(report)]


def _measured(report: Report) -> str:
    settings = report["settings"]
    return (
        f"{settings['problems']} held-out problems of each of {len(settings['families'])} families, "
        f"reasoning effort {settings['effort']}, temperature 0, in batches of {settings['batch']}; "
        f"prompts of {report['prompt_tokens']:.0f} tokens in the mean"
    )


def _plot(report: Report) -> Any:
    figure, panels = plots.figure(1, 2, 3.8, "Bytes per token against answers")
    measures: tuple[tuple[str, Callable[[Any], float]], ...] = (
        ("right answers, %", lambda r: 100 * r["right"] / r["of"]),
        ("same answer as the original, %", lambda r: 100 * r["unchanged"] / r["of"]),
    )
    own = {
        "float16": ("^", plots.GREY),
        "partial": ("v", plots.YELLOW),
        "both": ("P", plots.PURPLE),
    }
    for axes, (name, value) in zip(panels, measures, strict=True):
        for kind in dict.fromkeys(row["kind"] for row in report["rows"]):
            rows = [row for row in report["rows"] if row["kind"] == kind]
            mark, colour = (MARKS | own)[kind]
            x = [row["memory"]["bytes_read"] for row in rows]
            axes.plot(x, [value(row) for row in rows], mark, color=colour, label=kind, markersize=5)
        plots.label(axes, "bytes read per token of context", name)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 103)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


PAGE = Page(
    "Answers with less memory",
    _body,
    _measured,
    {"memory-answers.png": ("Bytes against answers", _plot)},
)
