"""The suite device: what an executor guarantees on the device that is there, and how fast it decodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench.prompts import prompts_for
from outpace.bench.report import RATE, TAU, Page, Report, table_of
from outpace.bench.run import Bar, Prompts, Run, at_least, timed
from outpace.decode.exactness import BATCHES, WIDTHS, check_rows
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Draft
from outpace.kv.metadata import FEW
from outpace.models.cuda_graphs import GraphTarget
from outpace.models.decoder import Target
from outpace.models.memory import MemoryPlan
from outpace.ops import mxfp4
from outpace.ops.moe import run_experts
from outpace.text.corpus import Document

PASS, FAIL, ABSENT = "pass", "fail", "not on this device"
PLAIN = "plain"
Check = Callable[[], str | None]  # -> "" for a pass, else why it fails; None: not on this device


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """Speed of `concurrency` sequences at once, of prompts of `prompt_tokens` (problems: of up to so many)
    and answers of up to `new_tokens`; rows of passes of up to `widest` tokens are compared."""

    concurrency: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 64
    new_tokens: int = 64
    widest: int = 32

    def __post_init__(self) -> None:
        at_least(self, "device", prompt_tokens=1, new_tokens=2, widest=2)
        if min(self.concurrency, default=0) < 1 or self.widest > max(WIDTHS):
            raise ValueError(f"device: concurrency of 1 and more, widest of {max(WIDTHS)} at most")


@dataclass(frozen=True, kw_only=True)
class Device:
    """`name`: cpu, cuda or xla; `drafts` by name, which may be of kinds that it does not run; `plan`: of its
    memory, where it was planned."""

    name: str
    target: Target
    drafts: dict[str, Draft]
    plan: MemoryPlan | None = None

    @property
    def methods(self) -> dict[str, Draft | None]:
        return {PLAIN: None, **self.drafts}


def run_device(
    device: Device,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    settings: DeviceSettings,
    folder: Path,
    console: Console,
) -> Report:
    """-> the report. A stopped run continues from folder/progress.jsonl. Raises ValueError for too few
    prompts."""
    prompts = prompts_for(tokenizer, documents, max(settings.concurrency), settings.prompt_tokens)
    inputs = {"device": device.name, "drafts": list(device.drafts), "settings": settings}
    run = Run(device.target.decoder, folder, **inputs)
    cells = [(n, method) for n in settings.concurrency for method in device.methods]
    checks = checks_of(device, prompts, settings)
    with Bar(console, "device", len(cells) + len(checks) + 1) as bar:
        for n, method in cells:
            bar.step(f"{method}, {n} at once")
            run.once(f"{n} {method}", partial(_speed, device, method, prompts[:n], settings))
        checks["drafts write the tokens of autoregressive decoding"] = lambda: _same_tokens(
            run, cells, list(device.drafts)
        )
        for name, check in checks.items():
            bar.step(name)
            run.once(name, partial(_checked, check))
    speeds = [{"concurrency": n, "method": m, **run[f"{n} {m}"], "tokens": None} for n, m in cells]
    return run.report(guarantees=[{"check": name, **run[name]} for name in checks], speeds=speeds)


def checks_of(device: Device, prompts: Prompts, settings: DeviceSettings) -> dict[str, Check]:
    """By the words of the page."""
    target, widths, on_xla = device.target, range(1, settings.widest + 1), device.name == "xla"
    tree = next((d for name, d in device.drafts.items() if name.startswith("tree of ")), None)
    several = prompts[: min(3, len(prompts))]

    def rows(target: Target, widths: Sequence[int], batches: Sequence[int] = ()) -> str:
        return ", ".join(check_rows(target, 1, widths, batches, trees=not on_xla)[:3])

    def graphs(prompts: Prompts, draft: Draft | None) -> str | None:
        return None if on_xla else _graphs(target, prompts, draft, settings)

    def one_shape() -> str | None:
        return None if on_xla else rows(GraphTarget(target.decoder, deterministic=True), (1, 2, 8))

    return {
        f"rows of a pass of 1 to {settings.widest} tokens are one-token steps": lambda: rows(target, widths),
        "a row of 255, 256 and 257 sequences is that of one": (
            lambda: None if on_xla else rows(target, (1,), BATCHES)
        ),
        "rows are equal with --deterministic": one_shape,
        "captured steps write the modules' tokens, one sequence": lambda: graphs(prompts[:1], None),
        "captured steps write the modules' tokens, a draft's chain": (
            lambda: graphs(prompts[:1], next(iter(device.drafts.values()), None))
        ),
        "captured steps write the modules' tokens, a draft's tree": (
            lambda: None if tree is None else graphs(prompts[:1], tree)
        ),
        "captured steps write the modules' tokens, several sequences": lambda: graphs(several, None),
        "packed experts are those of a CPU": lambda: _packed_experts(device),
        "steps are CUDA graphs": lambda: _captured(device),
        "memory is within the plan": lambda: _memory(device),
    }


def _request(settings: DeviceSettings) -> Request:
    return Request(max_new_tokens=settings.new_tokens, stop=frozenset(), prefill_chunk=FEW)


def _checked(check: Check) -> dict[str, Any]:
    why = check()
    return {"result": ABSENT if why is None else FAIL if why else PASS, "detail": why or ""}


def _speed(device: Device, method: str, prompts: Prompts, settings: DeviceSettings) -> dict[str, Any]:
    """The second of two equal runs: the first one captures, or compiles, every shape."""
    draft, stop = device.methods[method], frozenset(device.target.config.eos_token_ids)
    request = replace(_request(settings), stop=stop)
    for _ in range(2):
        done = timed(lambda show: generate(device.target, prompts, request, draft, on_tokens=show))
    trace = done.trace
    return {
        "tokens": done.tokens,
        "tokens_per_s": done.decoded / done.decode_s,
        "tau": trace.tau,
        "accept_rate": trace.accept_rate if draft else None,
    }


def _same_tokens(run: Run, cells: list[tuple[int, str]], drafts: list[str]) -> str | None:
    if not drafts:
        return None
    wrong = [
        f"{m}, {n} at once" for n, m in cells if run[f"{n} {m}"]["tokens"] != run[f"{n} {PLAIN}"]["tokens"]
    ]
    return ", ".join(wrong)


def _graphs(target: Target, prompts: Prompts, draft: Draft | None, settings: DeviceSettings) -> str:
    graphs, request = GraphTarget(target.decoder), _request(settings)
    wanted = generate(target.decoder, prompts, request, draft).tokens
    for turn in ("first", "second"):
        if generate(graphs, prompts, request, draft).tokens != wanted:
            return f"other tokens in the {turn} turn"
    return ""


def _packed_experts(device: Device) -> str | None:
    """MXFP4 through the kernel that unpacks it in registers, in the target's numbers."""
    if device.name != "cuda":
        return None
    rng, place = torch.Generator().manual_seed(1), device.target.device
    up, down = (mxfp4.pack(torch.randn(*size, generator=rng)) for size in ((8, 320, 96), (8, 96, 160)))
    x, weights = (torch.randn(40, n, generator=rng) for n in (96, 3))
    chosen = torch.rand(40, 8, generator=rng).topk(3).indices
    wanted = run_experts(x, chosen, weights, up, None, down, None, 7.0)
    up, down = ((blocks.to(place), scales.to(place)) for blocks, scales in (up, down))
    inputs = x.to(place, device.target.decoder.dtype), chosen.to(place), weights.to(place)
    got = run_experts(*inputs, up, None, down, None, 7.0).float().cpu()
    error = float((got - wanted).abs().max() / wanted.abs().max())
    return "" if error < 0.05 else f"{error:.0%} off"


def _captured(device: Device) -> str | None:
    if device.name != "cuda" or not isinstance(device.target, GraphTarget):
        return None
    return "" if device.target.captured else "none was captured"


def _memory(device: Device) -> str | None:
    if device.name != "cuda" or device.plan is None:
        return None
    most = torch.cuda.max_memory_allocated(device.target.device)
    return "" if most <= device.plan.total else f"{most / 1e9:.2f} GB were taken, and {device.plan}"


check_table = table_of(
    "guarantees", ("check", "check", "{}"), ("result", "result", "{}"), ("detail", "detail", "{}")
)
speed_table = table_of(
    "speeds",
    ("sequences", "concurrency", "{}"),
    ("method", "method", "{}"),
    RATE,
    TAU,
    ("accepted", "accept_rate", "{:.0%}"),
)


def _measured(report: Report) -> str:
    settings = report["settings"]
    return (
        f"on {report['device']}, prompts of up to {settings['prompt_tokens']} tokens, answers of up to "
        f"{settings['new_tokens']}, temperature 0, the draft's full length in every step"
    )


def _body(report: Report) -> list[str]:
    return ["## Guarantees", "", *check_table(report), "## Speed", "", *speed_table(report)]


PAGE = Page("Device", _body, _measured)
