"""The command calibrate, and which controller a request gets: --speculate, --num-speculative-tokens."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli.app import (
    AsJson,
    Branch,
    Depth,
    DraftWeights,
    OwnDraft,
    Target,
    TreeColumns,
    app,
    console,
    integer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outpace.decode.controller import Controller
    from outpace.decode.costs import Costs
    from outpace.drafts.base import Draft as AnyDraft
    from outpace.models.decoder import Decoder

QUICK = 5.0  # seconds that a request may spend on its own cost table
METHODS = ("auto", "off", "always")

Method = Annotated[
    str,
    typer.Option(
        "--speculate",
        help="Speculation: auto (the fastest draft length on this machine, or autoregressive), always "
        "(the draft's full length) or off (autoregressive).",
    ),
]
Verify = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens", help="Draft tokens per step, fixed. Default: chosen by the controller."
    ),
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Folder of cost tables. Default: outpace in the user's cache folder.")
]


@app.command()
def calibrate(
    target: Target = "default",
    draft: OwnDraft = None,
    draft_weights: DraftWeights = None,
    tree: TreeColumns = 0,
    depth: Depth = 0,
    branch: Branch = 0,
    rule: Annotated[
        str, typer.Option("--acceptance", help="Acceptance rule: greedy, match, rejection, block, gumbel.")
    ] = "greedy",
    contexts: Annotated[
        str, typer.Option(help="Context lengths (cached tokens) to measure at.")
    ] = "256,2048",
    batches: Annotated[str, typer.Option(help="Batch sizes to measure.")] = "1",
    seconds: Annotated[float, typer.Option(help="Measuring time in seconds, approximate.")] = 20.0,
    force: Annotated[
        bool, typer.Option("--force", help="New measurement even where a table exists.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG file for a plot of the costs.")] = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of drafting and verifying on this machine, for --speculate auto.

    Run it while the machine is otherwise idle. The table belongs to this target, draft, machine, number of
    threads and rule; a changed one is measured again. A request whose rule has none uses the greedy
    one.

    [bold]Examples[/bold]: outpace calibrate default --num-draft-tokens 16 --contexts 512,4096,16384
    outpace calibrate gpt-oss-20b --draft DRAFT --batches 1,8 --plot costs.png
    outpace calibrate default --draft dflash --acceptance gumbel
    """
    from outpace.decode.costs import cache_folder, fingerprint, table_path, write_costs
    from outpace.decode.request import COST_RULES
    from outpace.loading import open_draft, open_target, own_draft

    if rule not in COST_RULES:
        raise ValueError(f"--acceptance {rule}: it must be one of {', '.join(COST_RULES)}")
    if not seconds > 0:
        raise ValueError(f"--seconds {seconds}: give some time to measure in")
    places = [integer(part, "--contexts") for part in contexts.split(",")]
    rows = [integer(part, "--batches") for part in batches.split(",")]
    loaded, tokenizer = open_target(target)
    shape = {"tree": tree, "depth": depth, "branch": branch}
    bound = open_draft(draft or own_draft(target), loaded, tokenizer, **shape, quantize=draft_weights)
    if bound is None:
        raise ValueError("there is nothing to calibrate without a draft: name one with --draft")
    folder = cache_dir or cache_folder()
    path = table_path(folder, fingerprint(loaded, bound, rule))
    costs, why = (None, None) if force else kept(loaded, bound, folder, rule)
    if why:
        Console(stderr=True).print(why, style="dim", highlight=False, soft_wrap=True)
    if plot is not None and not plot.parent.is_dir():
        raise ValueError(f"--plot {plot}: there is no folder {plot.parent}")
    if costs is None:
        path.parent.mkdir(parents=True, exist_ok=True)  # what cannot be kept is better known beforehand
        costs = _measured(loaded, bound, tokenizer, rule, places, rows, seconds, quiet=as_json)
        write_costs(costs, folder)
    if plot is not None:
        _draw(costs, plot)
    if as_json:
        print(json.dumps(as_json_table(costs) | {"file": str(path)}))
        return
    _show(costs)
    console.print(f"kept in {path}", style="dim", highlight=False, soft_wrap=True)


def kept(target: "Decoder", draft: "AnyDraft", folder: Path, rule: str) -> "tuple[Costs | None, str | None]":
    """-> the table kept for this target, draft, machine and rule, or why one that lies there is not used."""
    from outpace.checkpoint.base import LoadError
    from outpace.decode.costs import fingerprint, read_costs

    try:
        return read_costs(folder, fingerprint(target, draft, rule)), None
    except LoadError as error:
        return None, f"{error}; measuring again"


def controller_for(
    target: "Decoder",
    draft: "AnyDraft | None",
    tokenizer: "Tokenizer",
    rule: str,
    method: str,
    verify: int | None,
    cache_dir: Path | None = None,
) -> "tuple[AnyDraft | None, Controller | None, str]":
    """What a request asked for -> its draft, its controller, and what people are told of it. `rule`: the
    request's.

    Raises ValueError for what cannot be had.
    """
    from outpace.decode.controller import Adaptive, Fixed

    if method not in METHODS:
        raise ValueError(f"--speculate {method}: it must be one of {', '.join(METHODS)}")
    if verify is not None and (method == "off" or draft is None):
        raise ValueError(
            f"--num-speculative-tokens {verify}: there are no draft tokens to verify without a draft"
        )
    if draft is None or method == "off":
        return None, None, "autoregressive decoding"
    if verify is not None:
        if not 1 <= verify < draft.block_size:
            raise ValueError(
                f"--num-speculative-tokens {verify}: this draft proposes 1 to {draft.block_size - 1} tokens"
            )
        return draft, Fixed(verify + 1), f"draft length {verify} in every step"
    if method == "always":
        return draft, None, "full draft length in every step"
    costs, note = _table_for_auto(target, draft, tokenizer, rule, cache_dir)
    return draft, None if costs is None else Adaptive(costs), note


def _table_for_auto(
    target: "Decoder", draft: "AnyDraft", tokenizer: "Tokenizer", rule: str, cache_dir: Path | None
) -> "tuple[Costs | None, str]":
    from outpace.decode.calibrate import quick
    from outpace.decode.costs import cache_folder, write_costs
    from outpace.decode.request import GREEDY

    folder = cache_dir or cache_folder()
    costs, why = kept(target, draft, folder, rule)
    if costs is not None:
        return costs, "draft length chosen by measured costs"
    expected = quick(target, draft, enough=QUICK)
    if expected > QUICK:
        near = None if rule == GREEDY else kept(target, draft, folder, GREEDY)[0]
        if near is not None:
            return near, f"draft length chosen by greedy costs (outpace calibrate --acceptance {rule})"
        message = f"a cost table would take {expected:.0f} s or more (outpace calibrate)"
        return None, f"full draft length in every step: {message}" + (f"; {why}" if why else "")
    costs = _measured(target, draft, tokenizer, rule, [256], [1], 0.5, quiet=True)
    if costs.noisy:
        return None, "full draft length in every step: the machine is too busy to measure costs"
    message = f"draft length chosen by costs measured in about {expected:.1f} s"
    try:
        write_costs(costs, folder)
    except OSError as error:
        message += f", which could not be kept ({error})"
    return costs, message + (f"; {why}" if why else "")


def _measured(
    target: "Decoder",
    draft: "AnyDraft",
    tokenizer: "Tokenizer",
    rule: str,
    contexts: list[int],
    batches: list[int],
    seconds: float,
    quiet: bool,
) -> "Costs":
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from outpace.decode.calibrate import calibrate as measure
    from outpace.text.corpus import read_corpus, split

    wanted, text = max(contexts) + 4096, list[int]()
    for document in split(read_corpus())[1]:
        if len(text) >= wanted:
            break
        text += tokenizer.encode(document.text[:20000], add_special_tokens=False).ids
    columns = (TextColumn("measuring"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=1.0)
        return measure(
            target,
            draft,
            text,
            contexts=contexts,
            batches=batches,
            seconds=seconds,
            rule=rule,
            on_progress=lambda done: bar.update(task, completed=done),
        )


def as_json_table(costs: "Costs") -> dict[str, Any]:
    from dataclasses import asdict

    result = asdict(costs)
    for point, p in zip(result["points"], costs.points, strict=True):
        point["break_even"] = [round(costs.break_even(n, p.context, p.batch), 4) for n in costs.widths]
    return result


def _show(costs: "Costs") -> None:
    message = "; ".join(f"{name} {value}" for name, value in costs.described.items())
    console.print(message, style="dim", highlight=False, soft_wrap=True)
    for p in costs.points:
        title = f"batch {p.batch}, {p.context:,.0f} tokens remembered"
        table = Table(title=title, title_justify="left")
        for name in ("columns", "draft ms", "verify ms", "round ms", "break-even"):
            table.add_column(name, justify="right")
        if costs.touched:
            table.add_column(f"of {costs.touched.experts} experts", justify="right")
            table.add_column("random", justify="right")
        for i, n in enumerate(costs.widths):
            whole = costs.round_seconds(n, p.context, p.batch)
            cells = [f"{1e3 * x:.3f}" for x in (p.draft[i], p.verify[i], whole)]
            even = f"{costs.break_even(n, p.context, p.batch):.2f}"
            table.add_row(str(n), *cells, even, *_experts(costs, i))
        console.print(table)
        console.print(
            f"a round takes {1e3 * p.rest:.3f} ms alongside, autoregressive decoding {1e3 * p.plain:.3f} "
            f"ms per token, "
            f"showing the draft one that it missed {1e3 * p.show:.3f} ms, waking it {1e3 * p.wake:.3f} ms; "
            f"half of the timings lie within {p.spread:.0%}",
            style="dim",
            highlight=False,
        )
    lines = [f"a draft token after a right one was right in {costs.acceptance:.0%} of the cases"]
    if costs.touched:
        lines.append(f"experts beyond one token's: {costs.touched.rho:.2f} of what independent ones would be")
    if costs.noisy:
        lines.append("[bold]the machine was busy: measure again, with --force, when it is not[/bold]")
    for line in lines:
        console.print(line, style="dim", highlight=False)


def _experts(costs: "Costs", i: int) -> list[str]:
    touched = costs.touched
    if touched is None or i >= len(touched.measured):
        return []
    return [f"{touched.measured[i]:.2f}", f"{touched.independent(touched.widths[i]):.2f}"]


def _draw(costs: "Costs", path: Path) -> None:
    """Raises ValueError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'outpace[bench]'") from None
    figure = Figure(figsize=(8, 4), dpi=200, layout="constrained")
    seconds, even = figure.subplots(1, 2)
    for p in costs.points:
        name = f"batch {p.batch}, context {p.context:,.0f}"
        line = seconds.plot(costs.widths, [1e3 * x for x in p.verify], marker="o", label=f"verify, {name}")
        seconds.plot(
            costs.widths[1:],
            [1e3 * x for x in p.draft[1:]],
            linestyle="--",
            color=line[0].get_color(),
            label=f"draft, {name}",
        )
        even.plot(costs.widths, [costs.break_even(n, p.context, p.batch) for n in costs.widths], marker="o")
    seconds.set(xlabel="positions a round", ylabel="ms", ylim=0)
    even.set(xlabel="positions a round", ylabel="tau at which it pays", ylim=0)
    seconds.legend(fontsize=7, frameon=False)
    figure.savefig(path, format="png")
