"""The command calibrate: measures, shows and plots the cost table of a target and a draft."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli.app import ActivationDtype, AsJson, KVCacheDtype, Target, app, console, integers, say
from outpace.cli.options import DraftOptions, with_options

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.decode.costs import Costs
    from outpace.drafts.base import Draft


@app.command()
@with_options
def calibrate(
    target: Target = "default",
    *,
    options: DraftOptions,
    acceptance: Annotated[
        str, typer.Option(help="Acceptance rule: greedy, match, rejection, block, gumbel.")
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
    kv_cache_dtype: KVCacheDtype = "auto",
    activation_dtype: ActivationDtype = "auto",
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
    from outpace.api import load
    from outpace.config import cache_folder
    from outpace.decode.auto import stored_costs
    from outpace.decode.costs import table_path, write_costs
    from outpace.decode.request import COST_RULES

    if acceptance not in COST_RULES:
        raise ValueError(f"--acceptance {acceptance}: it must be one of {', '.join(COST_RULES)}")
    if not seconds > 0:
        raise ValueError(f"--seconds {seconds}: it must be above 0")
    if plot is not None and not plot.parent.is_dir():
        raise ValueError(f"--plot {plot}: there is no folder {plot.parent}")
    lengths, sizes = integers(contexts, "--contexts"), integers(batches, "--batches")
    for option, values in (("--contexts", lengths), ("--batches", sizes)):
        if min(values) < 1:
            raise ValueError(f"{option} {min(values)}: each must be at least 1")
    model = load(target, kv_cache_dtype=kv_cache_dtype, activation_dtype=activation_dtype)
    draft = options.load_draft(model)
    if draft is None:
        raise ValueError("there is nothing to calibrate without a draft: name one with --draft")
    folder = options.cache_dir or cache_folder()
    costs, unusable = (None, None) if force else stored_costs(model.target, draft, folder, acceptance)
    if unusable:
        Console(stderr=True).print(unusable, style="dim", highlight=False, soft_wrap=True)
    if costs is None:
        (folder / "costs").mkdir(parents=True, exist_ok=True)  # fails before the measurement, not after
        costs = _measured(model, draft, acceptance, lengths, sizes, seconds, quiet=as_json)
        write_costs(costs, folder)
    else:
        note = "measured before, with the contexts and batches of then; --force measures again"
        Console(stderr=True).print(note, style="dim", highlight=False, soft_wrap=True)
    path = table_path(folder, costs.fingerprint)
    if plot is not None:
        _draw(costs, plot)
    if as_json:
        print(json.dumps(_as_json(costs) | {"file": str(path)}))
        return
    _show(costs)
    say(f"saved in {path}", style="dim", soft_wrap=True)


def _measured(
    model: "Model",
    draft: "Draft",
    rule: str,
    contexts: list[int],
    batches: list[int],
    seconds: float,
    quiet: bool,
) -> "Costs":
    """With a progress bar unless `quiet`."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from outpace.decode.auto import measure_costs

    columns = (TextColumn("measuring"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=1.0)

        def show(done: float) -> None:
            bar.update(task, completed=done)

        return measure_costs(model.target, model.tokenizer, draft, rule, contexts, batches, seconds, show)


def _as_json(costs: "Costs") -> dict[str, Any]:
    from dataclasses import asdict

    result = asdict(costs)
    for point, p in zip(result["points"], costs.points, strict=True):
        point["break_even"] = [round(costs.break_even(n, p.context, p.batch), 4) for n in costs.widths]
    return result


def _show(costs: "Costs") -> None:
    lines = ["; ".join(f"{name} {value}" for name, value in costs.described.items())]
    for p in costs.points:
        title = f"batch {p.batch}, {p.context:,.0f} cached tokens"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("positions", "draft ms", "verify ms", "step ms", "break-even"):
            table.add_column(name, justify="right")
        if costs.touched:
            table.add_column(f"of {costs.touched.experts} experts", justify="right")
            table.add_column("independent", justify="right")
        for i, n in enumerate(costs.widths):
            times = (p.draft[i], p.verify[i], costs.round_seconds(n, p.context, p.batch))
            cells = [*(f"{1e3 * x:.3f}" for x in times), f"{costs.break_even(n, p.context, p.batch):.2f}"]
            if costs.touched and i < len(costs.touched.measured):
                touched = costs.touched
                cells += [f"{touched.measured[i]:.2f}", f"{touched.independent(touched.widths[i]):.2f}"]
            table.add_row(str(n), *cells)
        console.print(table)
        lines.append(
            f"{title}: overhead {1e3 * p.rest:.3f} ms per step, autoregressive decoding {1e3 * p.plain:.3f} "
            f"ms per token, pending states {1e3 * p.show:.3f} ms, first proposal after a pause "
            f"{1e3 * p.wake:.3f} ms more, its verify pass and the steps after it {1e3 * p.settle:.3f} ms "
            f"more; half of the timings lie within {p.spread:.0%}"
        )
    lines.append(f"a draft token after an accepted one was accepted in {costs.acceptance:.0%} of the cases")
    if costs.touched:
        lines.append(f"experts beyond one token's: {costs.touched.rho:.2f} of the independent ones")
    if costs.busy:
        lines.append("[bold]the machine was busy: measure again, with --force, when it is not[/bold]")
    for line in lines:
        say(line, style="dim", soft_wrap=True)


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
    seconds.set(xlabel="positions per step", ylabel="ms", ylim=0)
    even.set(xlabel="positions per step", ylabel="break-even tau", ylim=0)
    seconds.legend(fontsize=7, frameon=False)
    figure.savefig(path, format="png")
