"""A suite of methods started: drafts opened and described, costs measured, and the frame of its report."""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer
from torch import nn

from outpace.bench.interleave import Groups
from outpace.bench.machine import machine, provenance, versions
from outpace.bench.metadata import describe_target, parameters
from outpace.bench.methods import Case, Opened, run_case
from outpace.bench.resume import Kept
from outpace.bench.suite import SuiteRecipe, Tables, cost_tables, costs_key, grouped, open_methods, texts_of
from outpace.bench.timing import Method
from outpace.decode.costs import Costs
from outpace.drafts.base import Draft
from outpace.drafts.suffix import Suffix
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors
from outpace.text.corpus import Document


@dataclass(frozen=True, kw_only=True)
class SuiteRequest:
    """Input of a suite. `documents`: the files where the text is decoded; `text`: token ids that costs
    are measured over; `drafts`: the folder that the recipe's drafts lie in; `folder`: where the report
    will."""

    target: Decoder
    tokenizer: Tokenizer
    documents: Sequence[Document]
    recipe: SuiteRecipe
    drafts: Path
    text: Sequence[int]
    folder: Path
    console: Console


@dataclass(frozen=True)
class BenchSetup:
    """`tables`: of the cases with a controller. `kept`: what was measured before a stop, if recipe, target
    and drafts were the same. `frame`: what the report states next to its results."""

    asked: SuiteRequest
    opened: dict[str, Opened]
    tables: Tables
    kept: Kept
    frame: dict[str, Any]
    since: float

    def method(self, case: Case) -> Method:
        return run_case(case, self.asked.target, self.opened.get(case.method), self.costs(case))

    def costs(self, case: Case) -> Costs | None:
        """What its controller reads; None without one."""
        return self.tables[case.method, case.request.effective_rule] if case.steered else None

    def prompts(self, kind: str, count: int, batch: int) -> Groups:
        """`kind` of suite.TEXTS."""
        asked = self.asked
        return grouped(
            texts_of(kind, count, asked.recipe, asked.target, asked.tokenizer, asked.documents), batch
        )

    def report(self, **value: Any) -> dict[str, Any]:
        """The whole report: nothing needs to be kept any longer."""
        self.kept.done()
        return {**self.frame, **value, "seconds": round(time.perf_counter() - self.since, 1)}


def begin(asked: SuiteRequest, cases: Sequence[Case], batch: int, exact: bool = True) -> BenchSetup:
    """cases: every method that will be decoded, `batch` rows at a time, and every one with a controller. Its
    costs are measured as `exact` as timings need them, or as quickly as a count of differences may do.
    Raises ValueError for a draft that is not there or another target's."""
    target, recipe = asked.target, asked.recipe
    since, before = time.perf_counter(), machine(target.device)
    names = {case.method for case in cases}
    opened = open_methods(recipe, names, asked.drafts, target, asked.tokenizer)
    about = {name: describe_method(method) for name, method in opened.items()}
    whose, value = describe_target(target), as_plain_json(recipe)
    kept = Kept(asked.folder, {"recipe": value, "target": whose["fingerprint"], "methods": about})
    tables = cost_tables(recipe, target, opened, cases, asked.text, batch, kept, asked.console, exact=exact)
    frame = {
        **provenance(),
        "machine": before,
        "versions": versions(),
        "target": whose,
        "recipe": value,
        "methods": about,
        "costs": {", ".join(table): kept[costs_key(table)] for table in tables},
    }
    return BenchSetup(asked, opened, tables, kept, frame, since)


def as_plain_json(recipe: SuiteRecipe) -> dict[str, Any]:
    """The recipe as it was asked for, as it reads back from JSON."""
    result = dataclasses.asdict(recipe)
    del result["specs"]
    read: dict[str, Any] = json.loads(json.dumps(result))
    return read


def describe_method(opened: Opened) -> dict[str, Any]:
    """What a reader needs to judge a row: the draft's kind and weights, and what it was trained on."""
    trained = opened.trained
    modules = [m for m in walk(opened.draft) if isinstance(m, nn.Module) and not isinstance(m, Decoder)]
    return {
        "kind": opened.kind,
        "draft": opened.spec.draft,
        "weights": opened.spec.weights,
        "tree": opened.spec.tree,
        **({"partial": opened.spec.partial} if opened.spec.partial else {}),
        "columns": opened.draft.block_size,
        "parameters": sum(map(parameters, modules)),
        "bytes": sum(t.nbytes for m in modules for _, t in named_tensors(m)) + looked_up(opened.draft),
        "trained": {
            "tokens": trained.get("training_tokens"),
            "hours": trained.get("training_hours"),
            "steps": trained.get("steps"),
            "cache_sha256": trained.get("cache_sha256"),
        }
        if trained
        else None,
    }


def looked_up(draft: Draft) -> int:
    """Bytes of the answers that a draft looks up."""
    return draft.answers.text.nbytes + draft.answers.order.nbytes if isinstance(draft, Suffix) else 0


def walk(draft: Any) -> list[Any]:
    """The fields of a bound draft, and of what it wraps."""
    items = []
    for value in vars(draft).values():
        items += [value, *(walk(value) if dataclasses.is_dataclass(value) else [])]
    return items
