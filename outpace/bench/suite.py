"""What the comparing suites share: one recipe that names the methods, and the prompts they all run."""

import dataclasses
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer
from torch import nn

from outpace.bench.machine import parameters
from outpace.bench.methods import PLAIN, Case, MethodSpec, Opened, open_method, run_case
from outpace.bench.prompts import held_out_prompts
from outpace.bench.run import Groups, Kept, Method, Run
from outpace.config import load_settings
from outpace.decode.calibrate import calibrate
from outpace.decode.costs import FORMAT, Costs, from_json
from outpace.drafts.base import Draft
from outpace.drafts.lookup import Suffix
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint, named_tensors
from outpace.text.corpus import Document

TEXTS = ("held-out", "random")
Tables = dict[tuple[str, str], Costs]  # by method, and one of decode.request.COST_RULES
PASSES = 3  # over all tables, one after the other: a busy minute of the machine meets one pass of some


@dataclass(frozen=True, kw_only=True)
class SuiteRecipe:
    """Fields of recipes/drafts/*.toml. `methods`: by name, the fields of bench.methods.MethodSpec.

    drafts: `prompts` prompts, `repeats` times, every method at every temperature under each of its rules.
    lossless: the same methods over `lossless_prompts` prompts, greedy and with coupled noise.
    controller: each steered method alongside itself at fixed `widths` (root included; those that a draft
    has), after `controller_prompts` prompts of held-out text, and as many of `random` tokens.
    """

    methods: dict[str, dict[str, Any]]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 16
    prompt_tokens: int = 256
    new_tokens: int = 256
    batch: int = 1
    repeats: int = 3
    seed: int = 1
    lossless_prompts: int = 64
    lossless_tokens: int = 256
    lossless_batch: int = 8
    controller_prompts: int = 6
    widths: tuple[int, ...] = (2, 4, 6, 8, 12, 16)
    texts: tuple[str, ...] = TEXTS
    calibrate_s: float = 24.0  # per method with a controller and rule, in passes of which the calmest is kept
    specs: dict[str, MethodSpec] = field(init=False)

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("a suite compares methods: its recipe needs a table [methods.NAME]")
        if PLAIN in self.methods:
            raise ValueError(f"no method may be called {PLAIN!r}: autoregressive decoding always runs")
        values = {}
        for name, value in self.methods.items():
            try:
                values[name] = load_settings(MethodSpec, None, value, source="its table")
            except ValueError as error:
                raise ValueError(f"method {name!r}: {error}") from error
        object.__setattr__(self, "specs", values)
        counts = ("prompts", "prompt_tokens", "batch", "repeats")
        for name in (*counts, "lossless_prompts", "lossless_batch", "controller_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"suite: {name} {getattr(self, name)} must be at least 1")
        for name in ("new_tokens", "lossless_tokens"):
            if getattr(self, name) < 2:
                raise ValueError(f"suite: {name} {getattr(self, name)}: nothing to time after the first")
        batched = (
            ("prompts", "batch"),
            ("controller_prompts", "batch"),
            ("lossless_prompts", "lossless_batch"),
        )
        for count, batch in batched:
            if getattr(self, count) % getattr(self, batch):
                raise ValueError(
                    f"suite: {count} {getattr(self, count)} do not fill batches of {getattr(self, batch)}"
                )
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"suite: temperatures {list(self.temperatures)}: at least one, none below 0")
        if not self.widths or min(self.widths) < 2:
            raise ValueError(f"suite: widths {list(self.widths)}: root included, so at least 2")
        unknown = [text for text in self.texts if text not in TEXTS]
        if unknown or not self.texts:
            raise ValueError(f"suite: texts {list(self.texts)}; known: {', '.join(TEXTS)}")


def open_methods(
    recipe: SuiteRecipe, names: Collection[str], drafts: Path, target: Decoder, tokenizer: Tokenizer
) -> dict[str, Opened]:
    whose = fingerprint(target)
    specs = [(name, spec) for name, spec in recipe.specs.items() if name in names]
    return {name: open_method(name, spec, drafts, target, tokenizer, whose) for name, spec in specs}


def calibration_text(tokenizer: Tokenizer, documents: Sequence[Document], tokens: int = 8192) -> list[int]:
    """The first so many ids of real text, files one after the other."""
    items: list[int] = []
    for document in documents:
        items += tokenizer.encode(document.text, add_special_tokens=False).ids
        if len(items) >= tokens:
            break
    return items[:tokens]


def cost_tables(
    recipe: SuiteRecipe,
    target: Decoder,
    opened: dict[str, Opened],
    cases: Sequence[Case],
    text: Sequence[int],
    batch: int,
    kept: Kept,
    console: Console,
    exact: bool,
) -> Tables:
    """Of every case with a controller: measured over the contexts and the batch that will be decoded, and
    rule as they will be, once a run. `text`: token ids that the suite does not decode. exact: in PASSES, at
    more than one context and batch, as timings need it; otherwise once, which a choice of positions needs."""
    contexts, batches, turns = [recipe.prompt_tokens], {batch}, 1
    if exact:
        contexts.append(recipe.prompt_tokens + recipe.new_tokens)
        batches.add(1)
        turns = PASSES
    wanted = list(dict.fromkeys((c.method, c.request.effective_rule) for c in cases if c.steered))
    missing = [table for table in wanted if costs_key(table) not in kept]
    passes: dict[tuple[str, str], list[Costs]] = {table: [] for table in missing}
    for turn in range(turns):
        for name, rule in missing:
            with console.status(f"calibrating {name}, {rule}, pass {turn + 1} of {turns}"):
                passes[name, rule].append(
                    calibrate(
                        target,
                        opened[name].draft,
                        text,
                        contexts=contexts,
                        batches=sorted(batches),
                        seconds=recipe.calibrate_s / PASSES,
                        rule=rule,
                    )
                )
    for table, costs in passes.items():
        calmest = min(costs, key=lambda result: sum(result.points[0].verify))
        kept[costs_key(table)] = json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(calmest)}))
    return {table: from_json(kept[costs_key(table)], costs_key(table)) for table in wanted}


def costs_key(table: tuple[str, str]) -> str:
    """What it is kept as, of method and rule."""
    return f"costs of {', '.join(table)}"


def cases_of(recipe: SuiteRecipe, temperature: float, steered: bool = True) -> list[Case]:
    """Autoregressive decoding first, with coupled noise too where a method is verified with it; then every
    method, also with its controller if `steered`."""
    if temperature == 0:
        entries = [Case(method=PLAIN, temperature=0.0, rule="match")]
    else:
        rules = {rule for spec in recipe.specs.values() for rule in spec.rules} & {"gumbel"}
        entries = [Case(method=PLAIN, temperature=temperature, rule=r) for r in ("match", *sorted(rules))]
    for name, spec in recipe.specs.items():
        for rule in spec.rules if temperature else ("match",):
            for control in spec.controller:
                if steered or not control:
                    case = Case(method=name, temperature=temperature, rule=rule, steered=control)
                    entries.append(case)
    return entries


def texts_of(
    kind: str,
    count: int,
    recipe: SuiteRecipe,
    target: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
) -> list[list[int]]:
    """ "held-out": text nobody was trained on. "random": tokens drawn evenly, which no draft predicts."""
    if kind == "held-out":
        return held_out_prompts(tokenizer, documents, count, recipe.prompt_tokens)
    drawn = random.Random(recipe.seed)
    ids = sorted(set(range(target.config.vocab_size)) - set(target.config.eos_token_ids))
    return [drawn.choices(ids, k=recipe.prompt_tokens) for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class SuiteRequest:
    """Input of a suite. `documents`: the files whose text is decoded; `text`: token ids that costs
    are measured over; `drafts`: the folder of the recipe's drafts; `folder`: where the report
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
    """`tables`: costs of the cases with a controller."""

    asked: SuiteRequest
    opened: dict[str, Opened]
    tables: Tables
    run: Run

    def method(self, case: Case) -> Method:
        opened = self.opened.get(case.method)
        draft, partial = (None, None) if opened is None else (opened.draft, opened.spec.near)
        return run_case(case, self.asked.target, draft, self.costs(case), partial)

    def costs(self, case: Case) -> Costs | None:
        """What its controller reads; None without one."""
        return self.tables[case.method, case.request.effective_rule] if case.steered else None

    def prompts(self, kind: str, count: int, batch: int) -> Groups:
        """`kind` of suite.TEXTS."""
        asked = self.asked
        prompts = texts_of(kind, count, asked.recipe, asked.target, asked.tokenizer, asked.documents)
        return [prompts[i : i + batch] for i in range(0, len(prompts), batch)]


def begin(asked: SuiteRequest, cases: Sequence[Case], batch: int, exact: bool = True) -> BenchSetup:
    """cases: every method that will be decoded, `batch` rows at a time, and every one with a controller. Its
    costs are measured as `exact` as timings need them, or as quickly as a count of differences may do.
    Raises ValueError for a draft that is not there or another target's."""
    target, recipe = asked.target, asked.recipe
    names = {case.method for case in cases}
    opened = open_methods(recipe, names, asked.drafts, target, asked.tokenizer)
    about = {name: describe_method(method) for name, method in opened.items()}
    run = Run(target, asked.folder, recipe=as_plain_json(recipe), methods=about)
    tables = cost_tables(
        recipe, target, opened, cases, asked.text, batch, run.kept, asked.console, exact=exact
    )
    run.frame["costs"] = {", ".join(table): run.kept[costs_key(table)] for table in tables}
    return BenchSetup(asked, opened, tables, run)


def as_plain_json(recipe: SuiteRecipe) -> dict[str, Any]:
    """The recipe as it was asked for, as it reads back from JSON."""
    result = dataclasses.asdict(recipe)
    del result["specs"]
    read: dict[str, Any] = json.loads(json.dumps(result))
    return read


def describe_method(opened: Opened) -> dict[str, Any]:
    """What a reader needs to understand a row: the draft's kind and weights, and what it was trained on."""
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
