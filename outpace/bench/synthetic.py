"""The suite synthetic: tokens/s of a target under a given acceptance, and the acceptance that breaks even."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench import llama_cpp, plots
from outpace.bench.methods import Case, run_case
from outpace.bench.metrics import PLAIN, ResultCell, result, speed_ratio
from outpace.bench.prompts import held_out_prompts
from outpace.bench.report import MISMATCHED, RATE, SPEEDUP, Page, Report, table_of
from outpace.bench.run import Bar, Method, Prompts, Run, Timed, at_least, interleave
from outpace.drafts.base import Draft
from outpace.drafts.dflash_config import default_layer_ids
from outpace.drafts.synthetic import Synthetic, check_rates, rates_of, tau_of
from outpace.models.decoder import Decoder
from outpace.text.corpus import Document
from outpace.train.dflash import DFlashRecipe, init_dflash

GUMBEL = "gumbel"  # noise of its own for each position: above temperature 0 all methods say the same


@dataclass(frozen=True, kw_only=True)
class SyntheticSettings:
    """Draft tokens are right with one rate at all positions, so that a step in blocks of blocks[i], root
    included, gives taus[i] tokens; `rates`: by name, a rate of each draft token, besides. Temperature 0 and 1
    differ in what a target of random weights says: loops, or anything, which routes to more experts.
    `draft_layers`: a DFlash of so many layers with random weights runs, for its cost; 0: drafting is free."""

    taus: tuple[float, ...] = (4.0, 6.5)
    blocks: tuple[int, ...] = (8, 16)
    rates: dict[str, list[float]] = field(default_factory=dict)
    temperature: float = 0.0
    draft_layers: int = 0
    prompts: int = 2
    prompt_tokens: int = 256
    new_tokens: int = 128
    repeats: int = 3
    seed: int = 1

    def __post_init__(self) -> None:
        at_least(self, "synthetic", prompts=1, prompt_tokens=1, new_tokens=2, repeats=1, draft_layers=0)
        if len(self.taus) != len(self.blocks) or not self.named_rates:
            raise ValueError(
                f"synthetic: taus {list(self.taus)} and blocks {list(self.blocks)}: as many of one as of the "
                "other, and one at least, or rates"
            )
        for rates in self.named_rates.values():
            check_rates(rates)
        if self.temperature < 0:
            raise ValueError(f"synthetic: temperature {self.temperature}: it must not be below 0")

    @property
    def named_rates(self) -> dict[str, tuple[float, ...]]:
        pairs = zip(self.taus, self.blocks, strict=True)
        by_tau = {f"tau {tau:g}, block {block}": rates_of(tau, block) for tau, block in pairs}
        return by_tau | {name: tuple(rates) for name, rates in self.rates.items()}


def run_synthetic(
    target: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    settings: SyntheticSettings,
    folder: Path,
    console: Console,
    file: Path | None = None,
) -> Report:
    """-> the report. `file`: the target's GGUF file, which llama.cpp reads too; None: one is written for it.
    A stopped run continues from folder/progress.jsonl. Raises ValueError for too few prompts."""
    prompts = held_out_prompts(tokenizer, documents, settings.prompts, settings.prompt_tokens)
    groups = [[prompt] for prompt in prompts]
    remarks: list[str] = []
    run = Run(target, folder, settings=settings)
    methods = _methods(target, tokenizer, settings, file, remarks)
    with Bar(console, "synthetic", len(methods) * len(groups) * settings.repeats) as bar:
        cell = ResultCell("synthetic", 1, settings.new_tokens, groups, {})
        runs = interleave("synthetic", methods, groups, settings.new_tokens, settings, run, bar.step)
    cell.runs.update(runs)
    rows = [_row(target, cell, name, settings) for name in methods]
    remarks += getattr(methods.get(llama_cpp.NAME), "remarks", [])
    return run.report(results=rows, remarks=remarks)


def _methods(
    target: Decoder, tokenizer: Tokenizer, settings: SyntheticSettings, file: Path | None, remarks: list[str]
) -> dict[str, Method]:
    case = Case(
        method=PLAIN, temperature=settings.temperature, rule=GUMBEL if settings.temperature else "match"
    )
    autoregressive = run_case(case, target, None)
    known: dict[tuple[int, int, tuple[int, ...]], list[list[int]]] = {}

    def plain(prompts: Prompts, new_tokens: int, seed: int) -> Timed:
        run = autoregressive(prompts, new_tokens, seed)
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, run.tokens, strict=True)]
        known[new_tokens, seed, tuple(prompts[0])] = texts
        return run

    def texts(prompts: Prompts, new_tokens: int, seed: int) -> list[list[int]]:
        """Each prompt with what the target says to it, from the plain run of the turn where it came first."""
        key = new_tokens, seed, tuple(prompts[0])
        if key not in known:
            plain(prompts, new_tokens, seed)
        return known[key]

    methods: dict[str, Method] = {PLAIN: plain}
    for name, rates in settings.named_rates.items():
        inner = _random_draft(target, tokenizer, len(rates) + 1, settings.draft_layers)
        methods[name] = partial(_decode, target, case, rates, inner, texts)
    if not llama_cpp.installed():
        remarks.append(f"{llama_cpp.NAME} left out: it is not installed ({llama_cpp.HOW_TO_GET})")
    elif settings.temperature:
        remarks.append(f"{llama_cpp.NAME} left out: it is compared at temperature 0 alone")
    else:
        methods[llama_cpp.NAME] = llama_cpp.Baseline(target, tokenizer, file)
    return methods


def _decode(
    target: Decoder,
    case: Case,
    rates: tuple[float, ...],
    inner: Draft | None,
    texts: Callable[[Prompts, int, int], list[list[int]]],
    prompts: Prompts,
    new_tokens: int,
    seed: int,
) -> Timed:
    known = texts(prompts, new_tokens, seed)
    draft = Synthetic(known, rates, target.config.vocab_size, seed, inner)
    return run_case(case, target, draft)(prompts, new_tokens, seed)


def _random_draft(target: Decoder, tokenizer: Tokenizer, block_size: int, layers: int) -> Draft | None:
    """A DFlash with random weights, of the target's own sizes."""
    if not layers:
        return None
    theirs = target.config
    recipe = DFlashRecipe(
        num_layers=layers,
        num_heads=theirs.num_heads,
        num_kv_heads=theirs.num_kv_heads,
        head_dim=theirs.head_dim,
        intermediate_size=3 * theirs.hidden_size,
        block_size=block_size,
    )
    config = recipe.config(target, tokenizer, default_layer_ids(theirs.num_layers))
    return init_dflash(config, 1).bind(target)


# ---- the report --------------------------------------------------------------------------------------


def _row(target: Decoder, cell: ResultCell, method: str, settings: SyntheticSettings) -> dict[str, Any]:
    """With `asked`, the tau that the rates give, `break_even`, the tau at which decoding is as fast as plain
    decoding, and `over_llama_cpp`."""
    reference = PLAIN if settings.temperature else None
    theirs = cell.runs.get(llama_cpp.NAME)
    compared = method != llama_cpp.NAME
    row = result(target, cell, method, settings.temperature, reference=reference, compared=compared)
    rates = settings.named_rates.get(method)
    return row | {
        "asked": None if rates is None else round(tau_of(rates), 3),
        "break_even": None if rates is None else round(row["tau"] / row["speedup"], 3),
        "over_llama_cpp": None if theirs is None else round(speed_ratio(cell.runs[method], theirs), 3),
    }


synthetic_table = table_of(
    "results",
    ("synthetic acceptance", "method", "{}"),
    RATE,
    SPEEDUP,
    ("over llama.cpp", "over_llama_cpp", "{:.2f}x"),
    ("tau", lambda r: r["asked"] and r["tau"], "{:.2f}"),
    ("break-even tau", "break_even", "{:.2f}"),
    MISMATCHED,
)
LEGEND = """\
Acceptance is given here, not measured: draft tokens are right as often as the row says. What is measured is
the cost: of the target's steps and, where `draft_layers` is set, of a DFlash of random weights.
Break-even tau: the tokens a step at which decoding would be as fast as without a draft."""


def _body(report: Report) -> list[str]:
    return [*synthetic_table(report), *LEGEND.splitlines(), ""]


def _measured(report: Report) -> str:
    s = report["settings"]
    draft = f"a DFlash of {s['draft_layers']} layers" if s["draft_layers"] else "a draft that costs nothing"
    return (
        f"{s['prompts']} prompts of {s['prompt_tokens']} tokens, {s['new_tokens']} more each, temperature "
        f"{s['temperature']:g}, {s['repeats']} repeats, {draft}"
    )


def _plot(report: Report) -> Any:
    rows = report["results"]
    drawn, (axes,) = plots.figure(1, 1, 0.4 * len(rows) + 1.4, "Tokens/s under synthetic acceptance")
    axes.barh(range(len(rows)), [r["tokens_per_s"] for r in rows], 0.6, color=plots.BLUE)
    plots.named_rows(axes, [r["method"] for r in rows])
    plots.label(axes, "tokens/s")
    return drawn


PAGE = Page("Synthetic acceptance", _body, _measured, plots={"synthetic.png": ("Tokens/s", _plot)})
