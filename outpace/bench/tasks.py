"""The suite tasks: generated problems that are held out from training, answered whole and checked exactly."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench import plots
from outpace.bench.report import Page, Report, table_of
from outpace.bench.run import Bar, Run, at_least, check_known
from outpace.decode.generate import generate
from outpace.decode.request import Generation, Request
from outpace.models.decoder import Decoder
from outpace.tasks.families import FAMILIES
from outpace.tasks.problem import Call, Problem
from outpace.tasks.prompts import draw
from outpace.text.harmony import HarmonyTokens, prompt_ids
from outpace.text.harmony_parser import HarmonyParser, Parsed, answer
from outpace.text.messages import Conversation

SHOWN = 3  # wrong answers of a family that the report quotes


@dataclass(frozen=True, kw_only=True)
class ProblemSettings:
    """`problems` of each of `families` in the sizes that are trained, `batch` at once, with reasoning
    `effort`. An answer is cut off after `max_new_tokens`."""

    families: tuple[str, ...] = tuple(FAMILIES)
    problems: int = 500
    effort: Literal["low", "medium", "high"] = "medium"
    batch: int = 20
    max_new_tokens: int = 1024
    seed: int = 1

    def __post_init__(self) -> None:
        at_least(self, "tasks", problems=1, batch=1, max_new_tokens=1)
        check_known("tasks", "families", self.families, tuple(FAMILIES))


@dataclass(frozen=True, kw_only=True)
class TasksSettings(ProblemSettings):
    """And `longer` problems of each family, of a size beyond those that are trained."""

    longer: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "tasks", longer=0)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What a model answered to `question`: right or not, in how many tokens, and whether it was cut off."""

    question: str
    wanted: str
    answer: str
    right: bool
    tokens: int
    finished: bool


def run_tasks(
    target: Decoder, tokenizer: Tokenizer, settings: TasksSettings, folder: Path, console: Console
) -> Report:
    """-> the report. A stopped run continues from folder/progress.jsonl. Raises ValueError for a target
    without Harmony's tokens."""
    tokens, run = HarmonyTokens(tokenizer), Run(target, folder, settings=settings)
    solved: dict[tuple[str, bool], list[Solution]] = {}
    batches = sum(-(-count // settings.batch) for count in (settings.problems, settings.longer))
    with Bar(console, "tasks", batches * len(settings.families)) as bar:
        for family, longer in product(settings.families, (False, True)):
            solved[family, longer] = []
            count = settings.longer if longer else settings.problems
            problems = draw(family, count, settings.seed, longer)
            for first in range(0, len(problems), settings.batch):
                bar.step(family)
                some = problems[first : first + settings.batch]
                measure = partial(_solved, target, tokens, some, settings)
                solutions = run.once(f"{family}, longer {longer}, from {first}", measure)
                solved[family, longer] += [Solution(**row) for row in solutions]
    rows = [_row(name, solved[name, False], solved[name, True]) for name in settings.families]
    wrong = {name: _wrong(solved[name, False]) for name in settings.families}
    whole = sum(row["right"] for row in rows) / sum(row["of"] for row in rows)
    return run.report(families=rows, accuracy=whole, wrong=wrong)


Decode = Callable[[list[list[int]], Request], Generation]


def solve(
    decode: Decode, tokens: HarmonyTokens, problems: Sequence[Problem], settings: ProblemSettings
) -> list[Solution]:
    """Decode the answers of a batch of problems. A problem with a function gets its result where the model
    calls it as it should, and is wrong where it does not."""
    prompts = [problem.prompt(settings.effort) for problem in problems]
    parsed, lengths = _written(decode, tokens, prompts, settings)
    calling = [i for i, problem in enumerate(problems) if problem.call and calls(parsed[i], problem.call)]
    if calling:
        conversations = [_with_result(prompts[i], parsed[i], problems[i]) for i in calling]
        for i, more, length in zip(calling, *_written(decode, tokens, conversations, settings), strict=True):
            parsed[i], lengths[i] = more, lengths[i] + length
    solutions = []
    for i, (problem, messages, length) in enumerate(zip(problems, parsed, lengths, strict=True)):
        text = answer(messages)
        right = problem.is_right(text) and (problem.call is None or i in calling)
        finished = bool(messages) and messages[-1].finished
        solutions.append(
            Solution(
                question=problem.question,
                wanted=problem.answer,
                answer=text,
                right=right,
                tokens=length,
                finished=finished,
            )
        )
    return solutions


def _solved(
    target: Decoder, tokens: HarmonyTokens, problems: Sequence[Problem], settings: ProblemSettings
) -> list[dict[str, Any]]:
    return [asdict(solution) for solution in solve(partial(generate, target), tokens, problems, settings)]


def _written(
    decode: Decode, tokens: HarmonyTokens, conversations: Sequence[Conversation], settings: ProblemSettings
) -> tuple[list[list[Parsed]], list[int]]:
    """-> what the model wrote after each conversation, and in how many tokens."""
    prompts = [prompt_ids(conversation, tokens) for conversation in conversations]
    request = Request(max_new_tokens=settings.max_new_tokens, stop=tokens.stop)
    written = decode(prompts, request).tokens
    parsers = [HarmonyParser(tokens) for _ in written]
    for parser, row in zip(parsers, written, strict=True):
        parser.feed_all(row)
    return [parser.finish() for parser in parsers], [len(row) for row in written]


def calls(messages: Sequence[Parsed], wanted: Call) -> bool:
    """Whether the output ends with that very call."""
    if not messages or not messages[-1].finished:
        return False
    last = messages[-1].message
    try:
        arguments = json.loads(last.content)
    except ValueError:
        return False
    called = last.is_call and last.recipient == f"functions.{wanted.tool.name}"
    return called and arguments == json.loads(wanted.arguments)


def _with_result(prompt: Conversation, parsed: Sequence[Parsed], problem: Problem) -> Conversation:
    assert problem.call is not None
    result = problem.call.messages()[1]
    return replace(prompt, messages=(*prompt.messages, *(p.message for p in parsed), result))


# ---- the report --------------------------------------------------------------------------------------


def _row(name: str, inside: Sequence[Solution], longer: Sequence[Solution]) -> dict[str, Any]:
    return {
        "family": name,
        "right": sum(s.right for s in inside),
        "of": len(inside),
        "accuracy": sum(s.right for s in inside) / len(inside),
        "longer_right": sum(s.right for s in longer),
        "longer_of": len(longer),
        "tokens": sum(s.tokens for s in inside) / len(inside),
        "cut_off": sum(not s.finished for s in inside),
    }


def _wrong(solutions: Sequence[Solution]) -> list[dict[str, str]]:
    wrong = [s for s in solutions if not s.right][:SHOWN]
    return [{"question": s.question, "wanted": s.wanted, "answer": s.answer} for s in wrong]


task_table = table_of(
    "families",
    ("family", "family", "{}"),
    ("right", lambda r: [r["right"], r["of"]], "{} of {}"),
    ("accuracy", "accuracy", "{:.1%}"),
    ("longer ones", lambda r: [r["longer_right"], r["longer_of"]] if r["longer_of"] else None, "{} of {}"),
    ("tokens an answer", "tokens", "{:.0f}"),
    ("cut off", "cut_off", "{}"),
)


def _measured(report: Report) -> str:
    settings = report["settings"]
    return (
        f"{settings['problems']} held-out problems a family, reasoning effort {settings['effort']}, "
        f"temperature 0; {report['accuracy']:.1%} of all answers are right"
    )


def _body(report: Report) -> list[str]:
    lines = ["## Accuracy", "", *task_table(report)]
    lines += ["An answer is right where its final message is the expected text, character by character.", ""]
    wrong = [(name, w) for name, solutions in report["wrong"].items() for w in solutions[:1]]
    if wrong:
        lines += ["## One wrong answer of each family", ""]
    for name, w in wrong:
        question = w["question"] if len(w["question"]) < 300 else f"...{w['question'][-300:]}"
        lines += [
            f"**{name}**",
            "",
            "```",
            question,
            f"answer: {w['answer']}",
            f"right: {w['wanted']}",
            "```",
            "",
        ]
    return lines


def _plot(report: Report) -> Any:
    rows = report["families"]
    drawn, (axes,) = plots.figure(1, 1, 0.28 * len(rows) + 1.2, "Problems solved, held out from training")
    places = range(len(rows))
    axes.barh([p - 0.19 for p in places], [100 * r["accuracy"] for r in rows], 0.38, color=plots.BLUE)
    longer = [100 * r["longer_right"] / r["longer_of"] if r["longer_of"] else 0 for r in rows]
    axes.barh([p + 0.19 for p in places], longer, 0.38, color=plots.YELLOW)
    plots.named_rows(axes, [r["family"] for r in rows])
    axes.set_xlim(0, 100)
    axes.legend(["sizes that are trained", "longer ones"], frameon=False, fontsize=8, loc="lower left")
    plots.label(axes, "right answers, %")
    return drawn


PAGE = Page("Problems solved", _body, _measured, plots={"tasks.png": ("Accuracy of each family", _plot)})
