"""What people read on a terminal: inspections and gates."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outpace.doctor.checkpoint import Inspection, Report


def show_inspection(inspection: Inspection, console: Console) -> None:
    c = inspection.config
    console.print(f"[bold]{c.architecture}[/bold]  {inspection.folder}", highlight=False)
    windows = sum(bool(c.window(i)) for i in range(c.num_layers))
    sliding = f" ({windows} with a window of {c.sliding_window})" if windows else ""
    experts = f"{c.num_experts} experts, {c.experts_per_token} per token; " if c.num_experts else ""
    console.print(
        f"{c.num_layers} layers{sliding}, width {c.hidden_size}, "
        f"{c.num_heads} heads on {c.num_kv_heads} kv heads of {c.head_dim}; {experts}"
        f"vocabulary {c.vocab_size:,}; positions to {c.max_position_embeddings:,} ({c.rope.kind} rope)",
        highlight=False,
    )
    table = Table("part", "parameters", "bytes", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for part, (parameters, nbytes) in inspection.parts.items():
        table.add_row(part, f"{parameters:,}", f"{nbytes:,}")
    table.add_row("total", f"{inspection.parameters:,}", f"{inspection.nbytes:,}", style="bold")
    console.print(table)
    stored = ", ".join(f"{k} {v:,} bytes" for k, v in inspection.dtypes.items())
    console.print(
        f"active per token: {inspection.active_parameters:,} parameters; stored as {stored}; "
        f"KV cache grows by {inspection.kv_bytes_per_token:,} bytes per token (float32)",
        highlight=False,
    )


def show_report(report: Report, console: Console) -> None:
    """Gate A: what is in the checkpoint, then each finding with what to do about it."""
    if report.inspection is not None:
        show_inspection(report.inspection, console)
    for finding in report.findings:
        style = "red" if finding.fault else "yellow"
        console.print(
            f"[bold {style}]{finding.name}[/bold {style}]: {escape(finding.message)}", highlight=False
        )
        if finding.fix:
            console.print(f"  -> {escape(finding.fix)}", highlight=False)
    if report.passed:
        looked = "every value looked at" if report.deep else "from headers alone; --scan looks at every value"
        console.print(f"names, shapes and dtypes are what the config describes ({looked})", style="green")


def show_gate(gate: Any, console: Console) -> None:
    """One line: pass, FAIL or not run; the name; what was found. Takes a `bench.gates.Gate`."""
    mark = {True: "[green]pass[/green]", False: "[bold red]FAIL[/bold red]", None: "[dim]----[/dim]"}
    console.print(f"{mark[gate.passed]}  {gate.name}: [dim]{gate.message}[/dim]", highlight=False)


def gates_as_json(gates: list[Any]) -> list[dict[str, Any]]:
    return [asdict(gate) for gate in gates]
