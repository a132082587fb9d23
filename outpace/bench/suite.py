"""Recipes that name methods, and the set-up of the suites that compare them: drafts, costs, prompts."""

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench.methods import Case, LoadedMethod, MethodSpec, load_method, run_case
from outpace.bench.metrics import PLAIN
from outpace.bench.prompts import held_out_prompts
from outpace.bench.run import Groups, Method, Results, Run, at_least, check_known
from outpace.config import load_settings
from outpace.decode.calibrate import calibrate
from outpace.decode.costs import FORMAT, Costs, from_json
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.tasks.families import FAMILIES
from outpace.text.corpus import Document

TEXTS = ("held-out", "random")
PASSES = 3  # calibrations of each cost table, one after the other; the fastest one counts


@dataclass(frozen=True, kw_only=True)
class SuiteRecipe:
    """Fields of recipes/drafts/suite*.toml. `methods`: by name, the fields of `bench/methods.py:
    MethodSpec`.

    drafts: `prompts` prompts, `repeats` times, every method at every temperature under each of its rules.
    lossless: the same methods over `lossless_prompts` prompts, greedy and with coupled noise. controller:
    each method with a controller against fixed `widths` (root included, up to the draft's own), after
    `controller_prompts` prompts of every kind of `texts`. answers: every method on `problems` held-out
    problems of each of `families`, reasoning `effort`, up to the answer's end or `longest_answer` tokens."""

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
    families: tuple[str, ...] = tuple(FAMILIES)
    problems: int = 12
    effort: Literal["low", "medium", "high"] = "medium"
    longest_answer: int = 1024
    calibrate_s: float = 24.0  # seconds of calibration per method with a controller and rule
    specs: dict[str, MethodSpec] = field(init=False)

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("a suite compares methods: its recipe needs a table [methods.NAME]")
        if PLAIN in self.methods:
            raise ValueError(f"no method may be called {PLAIN!r}: autoregressive decoding always runs")
        specs = {}
        for name, value in self.methods.items():
            try:
                specs[name] = load_settings(MethodSpec, None, value, source="its table")
            except ValueError as error:
                raise ValueError(f"method {name!r}: {error}") from error
        object.__setattr__(self, "specs", specs)
        at_least(self, "suite", prompts=1, prompt_tokens=1, batch=1, repeats=1, lossless_prompts=1)
        at_least(self, "suite", lossless_batch=1, controller_prompts=1, problems=1)
        check_known("suite", "families", self.families, tuple(FAMILIES))
        for name in ("new_tokens", "lossless_tokens", "longest_answer"):
            if getattr(self, name) < 2:
                raise ValueError(f"suite: {name} {getattr(self, name)}: nothing to time after the first")
        for kind in ("", "controller_", "lossless_"):
            count, batch = f"{kind}prompts", "lossless_batch" if kind == "lossless_" else "batch"
            if getattr(self, count) % getattr(self, batch):
                raise ValueError(
                    f"suite: {count} {getattr(self, count)} do not fill batches of {getattr(self, batch)}"
                )
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"suite: temperatures {list(self.temperatures)}: at least one, none below 0")
        if not self.widths or min(self.widths) < 2:
            raise ValueError(f"suite: widths {list(self.widths)}: root included, so at least 2")
        if not self.texts or set(self.texts) - set(TEXTS):
            raise ValueError(f"suite: texts {list(self.texts)}; known: {', '.join(TEXTS)}")

    def as_json(self) -> dict[str, Any]:
        """The fields of the recipe, as JSON reads them back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        read: dict[str, Any] = json.loads(json.dumps(values))
        return read

    def cases(self, temperature: float, rules: Sequence[str] = ()) -> list[Case]:
        """Every method without and with its controller, under its rules (`rules`: under these instead)."""
        cases = []
        for name, spec in self.specs.items():
            for rule in rules or (spec.rules if temperature else ("match",)):
                for steered in spec.controller:
                    cases.append(Case(method=name, temperature=temperature, rule=rule, steered=steered))
        return cases


@dataclass(frozen=True, kw_only=True)
class SuiteRequest:
    """Inputs of a suite. `documents`: held-out text for the prompts; `calibration_text`: token ids for the
    cost tables, from text that is not decoded, `calibration_prompts` for their acceptance rates, where places
    of that text will not do; `drafts`: the folder of the recipe's drafts; `folder`: of the report."""

    target: Decoder
    tokenizer: Tokenizer
    documents: Sequence[Document]
    recipe: SuiteRecipe
    drafts: Path
    calibration_text: Sequence[int]
    folder: Path
    console: Console
    calibration_prompts: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class BenchSetup:
    """`tables`: cost tables of the cases with a controller, by method and cost rule."""

    request: SuiteRequest
    loaded: dict[str, LoadedMethod]
    tables: dict[tuple[str, str], Costs]
    run: Run

    def method(self, case: Case) -> Method:
        loaded = self.loaded.get(case.method)
        draft, partial = (None, None) if loaded is None else (loaded.draft, loaded.spec.partial_kv)
        return run_case(case, self.request.target, draft, self.costs(case), partial)

    def methods(self, cases: Sequence[Case]) -> dict[str, Method]:
        return {case.label: self.method(case) for case in cases}

    def costs(self, case: Case) -> Costs | None:
        return self.tables[case.method, case.request.effective_rule] if case.steered else None

    def prompts(self, text: str, count: int, batch: int) -> Groups:
        prompts = prompts_of(text, count, self.request)
        return [prompts[i : i + batch] for i in range(0, len(prompts), batch)]


def set_up(request: SuiteRequest, cases: Sequence[Case], batch: int, precise: bool = True) -> BenchSetup:
    """Loads the drafts of `cases` and measures the cost tables of those with a controller, at batch size
    `batch`; `precise` as timings need it, otherwise in one pass. Raises ValueError for a draft that does not
    exist or belongs to another target."""
    target, recipe = request.target, request.recipe
    target_fingerprint = fingerprint(target)
    used = [name for name in recipe.specs if name in {case.method for case in cases}]
    loaded = {
        name: load_method(
            name, recipe.specs[name], request.drafts, target, request.tokenizer, target_fingerprint
        )
        for name in used
    }
    about = {name: method.describe() for name, method in loaded.items()}
    run = Run(target, request.folder, recipe=recipe.as_json(), methods=about)
    tables = _cost_tables(request, loaded, cases, batch, run, precise)
    run.header["costs"] = {", ".join(table): run[_costs_key(table)] for table in tables}
    return BenchSetup(request, loaded, tables, run)


def calibration_text(tokenizer: Tokenizer, documents: Sequence[Document], tokens: int = 8192) -> list[int]:
    """The first `tokens` ids of real text, files one after the other."""
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document.text, add_special_tokens=False).ids
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def _cost_tables(
    request: SuiteRequest,
    loaded: dict[str, LoadedMethod],
    cases: Sequence[Case],
    batch: int,
    results: Results,
    precise: bool,
) -> dict[tuple[str, str], Costs]:
    """By method and cost rule, over the contexts and batch sizes that the suite decodes. Precise: PASSES
    times over all tables, so that a busy minute affects one pass of some, and the fastest is taken."""
    recipe = request.recipe
    contexts, batches, passes = [recipe.prompt_tokens], {batch}, 1
    if precise:
        contexts.append(recipe.prompt_tokens + recipe.new_tokens)
        batches, passes = batches | {1}, PASSES
    tables = list(dict.fromkeys((c.method, c.request.effective_rule) for c in cases if c.steered))
    measured: dict[tuple[str, str], list[Costs]] = {t: [] for t in tables if _costs_key(t) not in results}
    for n in range(passes):
        for name, rule in measured:
            with request.console.status(f"calibrating {name}, {rule}, pass {n + 1} of {passes}"):
                costs = calibrate(
                    request.target,
                    loaded[name].draft,
                    request.calibration_text,
                    contexts=contexts,
                    batches=sorted(batches),
                    seconds=recipe.calibrate_s / PASSES,
                    rule=rule,
                    prompts=request.calibration_prompts,
                )
            measured[name, rule].append(costs)
    for table, candidates in measured.items():
        fastest = min(candidates, key=lambda costs: sum(costs.points[0].verify))
        values = {"format": FORMAT, **dataclasses.asdict(fastest)}
        results[_costs_key(table)] = json.loads(json.dumps(values))
    return {table: from_json(results[_costs_key(table)], _costs_key(table)) for table in tables}


def _costs_key(table: tuple[str, str]) -> str:
    return f"costs of {', '.join(table)}"


def prompts_of(text: str, count: int, request: SuiteRequest) -> list[list[int]]:
    """`text` "held-out": text that nothing was trained on; "random": uniformly drawn tokens, which no draft
    predicts."""
    recipe, config = request.recipe, request.target.config
    if text == "held-out":
        return held_out_prompts(request.tokenizer, request.documents, count, recipe.prompt_tokens)
    rng = random.Random(recipe.seed)
    ids = sorted(set(range(config.vocab_size)) - set(config.eos_token_ids))
    return [rng.choices(ids, k=recipe.prompt_tokens) for _ in range(count)]
