"""The command plan: memory, speed and cost of a model on a cluster, before anything is rented."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outpace.cli.app import AsJson, Recipe, Set, app, console, recipe_settings, say

if TYPE_CHECKING:
    from outpace.plan.choices import Choices
    from outpace.plan.devices import Device
    from outpace.plan.sizes import Sizes

BUSY = 0.25  # load per core, above which a measurement reads low


@app.command("plan")
def plan(
    model: Annotated[
        str, typer.Argument(help="Model: default, 20b, 120b, qwen3-8b, .., a checkpoint or its config.json.")
    ],
    hardware: Annotated[str, typer.Option(help="Hardware, count and kind: 8xh200, 8xv5e, this.")] = "h200",
    weights: Annotated[
        str, typer.Option(help="Number format of weights that are not MXFP4: bf16, fp8 or q8.")
    ] = "bf16",
    price: Annotated[
        str | None, typer.Option(help="Price in dollars per device-hour: 2.5, or LOW-HIGH. Default: assumed.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Devices that hold one target together; the rest hold further ones.")
    ] = 1,
    context: Annotated[int, typer.Option(help="Context length in tokens.")] = 131072,
    batch: Annotated[int, typer.Option(help="Batch size in sequences, of one target.")] = 1,
    rank: Annotated[int, typer.Option(help="Rank of latent KV in full-attention layers (0 = none).")] = 0,
    index_dim: Annotated[
        int, typer.Option(help="Dimension of the index for sparse attention (0 = none).")
    ] = 0,
    top_k: Annotated[int, typer.Option(help="Tokens attended to per query with the index.")] = 2048,
    draft: Annotated[float, typer.Option(help="Parameters of a draft, head included (0 = none).")] = 0.0,
    tau: Annotated[float, typer.Option(help="Tokens per forward with the draft (0 = unknown).")] = 0.0,
    tokens: Annotated[float, typer.Option(help="Tokens to cache, train on or decode (0 = no hours).")] = 0.0,
    recipe: Recipe = None,
    set_: Set = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory per rank, tokens/s, hours and dollars of decoding, a teacher cache and training.

    Lists every assumption, and what would fit where something does not. `--hardware this` measures this
    machine, and uses the cost table of the model if `outpace calibrate` made one. `--set` changes fields
    without an option: columns, kv_bits, teacher_batch, row_tokens, ..

    [bold]Examples[/bold]: outpace plan 120b --hardware 8xh200 --rank 512 --index-dim 256 --tokens 1e9
    outpace plan 120b --hardware 8xh100 --tensor-parallel-size 2 --draft 8e8 --tokens 1e9 --price 2.5
    outpace plan 20b --hardware rtx-4090 --weights q8 --draft 8e8 --tau 3.5 --context 32768
    outpace plan qwen3-8b --hardware this --json
    """
    from outpace.plan.choices import Choices
    from outpace.plan.devices import DEVICES, parse_hardware
    from outpace.plan.estimate import plan as planned
    from outpace.plan.sizes import sizes_of

    count, name = parse_hardware(hardware)
    sizes, warnings = sizes_of(*_config(model), weights), list[str]()
    given: dict[str, Any] = {"draft_parameters": draft, "tau": tau, "tokens": tokens, "context": context}
    given |= {"batch": batch, "rank": rank, "index_dim": index_dim, "top_k": top_k}
    given["tensor_parallel_size"] = tensor_parallel_size
    choices = recipe_settings(Choices, recipe, set_, **given)
    if name == "this":
        device, measured, warnings = _this_machine(sizes, choices)
        typed = {pair.partition("=")[0] for pair in set_ or []}
        choices = replace(choices, **{key: x for key, x in measured.items() if key not in typed})
    else:
        device = DEVICES[name]
    if price is not None:
        device = replace(device, price=_price(price))
    report = planned(sizes, device, count, choices) | {"warnings": warnings}
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)


def _config(model: str) -> tuple[str, dict[str, Any]]:
    """A name or a path -> what it is called, and its config.json. Raises ValueError for neither."""
    from outpace.checkpoint.open import is_gguf, open_checkpoint
    from outpace.checkpoint.shipped import DEFAULT, target_path
    from outpace.checkpoint.strict_json import read_object
    from outpace.models.published import PUBLISHED

    name = {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"}.get(model.lower(), model.lower())
    if name in PUBLISHED:
        return name, PUBLISHED[name]
    path = target_path(model) if model == DEFAULT else Path(model)
    if is_gguf(path):
        return path.name, open_checkpoint(path).config
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{model}: no such model or file; models are {', '.join((DEFAULT, *PUBLISHED))}")
    return model if model == DEFAULT else path.parent.name or model, read_object(path)


def _price(text: str) -> tuple[float, float]:
    low, dash, high = text.partition("-")
    try:
        pair = float(low), float(high if dash else low)
    except ValueError:
        raise ValueError(f"--price {text}: one number or two, such as 2.5 or 2.5-4") from None
    if not 0 <= pair[0] <= pair[1] < float("inf"):
        raise ValueError(f"--price {text}: the lower one first, such as 2.5-4")
    return pair


def _this_machine(sizes: "Sizes", choices: "Choices") -> "tuple[Device, dict[str, Any], list[str]]":
    """-> this machine as measured, fields of the plan that a measurement gives, and warnings."""
    import torch

    from outpace.bench.machine import machine, multiply_rate, read_bandwidth
    from outpace.config import cache_folder
    from outpace.decode.costs import stored_for
    from outpace.plan.devices import Device

    with console.status("measuring this machine"):
        known = machine(torch.device("cpu"))
        device = Device("this", (known["memory_gib"] or 0) * 2**30, read_bandwidth(), multiply_rate())
        measured, warnings = dict[str, Any](), list[str]()
        costs = stored_for(sizes.config, cache_folder())
        if costs is None:
            measured["layer_overhead"] = _embedded_overhead(device, choices)
        else:
            point = min(costs.points, key=lambda p: (p.batch != 1, abs(p.context - choices.context)))
            at = replace(choices, context=round(point.context), batch=point.batch)
            measured["layer_overhead"] = _overhead(sizes, device, at, point.plain)
            if costs.touched:
                measured["expert_overlap"] = min(max(costs.touched.rho, 0.0), 1.0)
    if known.get("load_1min", 0) > BUSY * known["cores"]:
        warnings.append(
            f"this machine was busy while it was measured (load {known['load_1min']} on {known['cores']} "
            "cores): the real speeds are higher; run again when it is idle"
        )
    return device, measured, warnings


def _overhead(sizes: "Sizes", device: "Device", choices: "Choices", seconds: float) -> float:
    """Seconds per layer of a measured autoregressive step, less the time of its bytes or products."""
    from outpace.plan.choices import TYPICAL
    from outpace.plan.speed import step_seconds

    working = step_seconds(sizes, device, replace(choices, layer_overhead=0.0), TYPICAL)
    return max(seconds - working, 0.0) / sizes.config.num_layers


def _embedded_overhead(device: "Device", choices: "Choices") -> float:
    """`_overhead` of the embedded model, from 32 steps."""
    from outpace.api import SamplingParams, generate, load
    from outpace.plan.sizes import sizes_of

    sampling = SamplingParams(max_tokens=33, ignore_eos=True)
    model = load()
    generate(model, "import os", draft=False, sampling=sampling)  # warm-up
    output = generate(model, "import os", draft=False, sampling=sampling)
    seconds = statistics.median(output.step_seconds)
    return _overhead(sizes_of(*_config("default")), device, replace(choices, context=32, batch=1), seconds)


def _bytes(n: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:,.2f} {unit}"
    return f"{n:,.0f} B"


def _range(pair: list[float], unit: str = "") -> str:
    return " to ".join(f"{x:,.1f}" if x < 100 else f"{x:,.0f}" for x in pair) + unit


def _show(report: dict[str, Any]) -> None:
    model, after = report["model"], report["memory"]["after"]
    device = report["hardware"]
    table = Table("", "as it is", *(("with the retrofit",) if after else ()), title=_title(model, device))

    def row(name: str, group: str, text: Any) -> None:
        table.add_row(name, *(text(side) for side in report[group].values() if side))

    row("weights per rank", "memory", lambda m: _bytes(m["weights"]))
    row("KV, bytes per token", "memory", lambda m: f"{m['kv_bytes_per_token']:,.0f}")
    row(f"KV of {report['choices']['context']:,} tokens", "memory", lambda m: _bytes(m["kv"]))
    row("total per rank, draft included", "memory", lambda m: _bytes(m["total"]))
    row("read per step and rank", "decode", lambda d: _bytes(d["bytes_per_step"]))
    row("tokens/s, bound", "decode", lambda d: f"{d['bound_tokens_per_s']:,.0f}")
    row("tokens/s, range", "decode", lambda d: _range(d["expected_tokens_per_s"]))
    row("tokens/s, estimate", "decode", lambda d: f"{d['estimated_tokens_per_s']:,.0f}")
    if report["choices"]["draft_parameters"]:
        row("verification / step, bytes", "decode", lambda d: f"{d['verify_over_step']:.2f}")
        row("drafting / step, bytes", "decode", lambda d: f"{d['draft_over_step']:.2f}")
    if report["choices"]["tau"]:
        row("speedup by the draft", "decode", lambda d: f"{d['speedup']:.2f}x")
    console.print(table)
    console.print(_jobs_table(report))
    for job in report["jobs"].values():
        if not job["fits"]:
            console.print(job["fix"], style="bold red", highlight=False, soft_wrap=True)
    if report["trainable_parameters"]:
        console.print(f"trainable parameters: {report['trainable_parameters'] / 1e6:,.1f} million")
    if report["teacher_cache_bytes"]:
        say(f"the teacher cache takes {_bytes(report['teacher_cache_bytes'])} of disk")
    for line in report["assumptions"]:
        say(f"- {line}", style="dim")
    for warning in report["warnings"]:
        say(f"warning: {warning}", style="yellow")


def _jobs_table(report: dict[str, Any]) -> Table:
    tokens = report["choices"]["tokens"]
    title = f"all {report['hardware']['devices']} devices" + (f", {tokens:,.0f} tokens" if tokens else "")
    table = Table("", "targets x ranks", "memory per rank", "tokens/s", title=title)
    for heading in ("hours", "cost") if tokens else ():
        table.add_column(heading)
    for name, job in report["jobs"].items():
        cells = [f"{job['targets']} x {job['ranks_of_a_target']}", _bytes(job["memory_per_rank"])]
        cells.append(_range(job["tokens_per_s"]))
        if tokens:
            cells += [_range(job["hours"]), f"${_range(job['cost'])}" if "cost" in job else "no --price"]
        table.add_row(name, *cells)
    return table


def _title(model: dict[str, Any], device: dict[str, Any]) -> str:
    whole, active = (model[name] / 1e9 for name in ("parameters", "active_parameters"))
    layers = f"{model['full_attention_layers']} of {model['layers']} layers with full attention"
    on = f"one target on {device['name']}"
    return f"{model['name']}: {whole:,.2f} billion parameters, {active:,.2f} active, {layers}; {on}"
