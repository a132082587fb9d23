"""Before a draft is served: what every engine would take from its files, where they part, and the fix."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outpace.checkpoint.open import open_checkpoint
from outpace.formats.base import FolderFormat
from outpace.formats.engines import REFUSES, View, description_view
from outpace.formats.errors import Files, find_errors, find_notes
from outpace.formats.fields import ConfigFile
from outpace.formats.gguf import GGUFFormat
from outpace.formats.load import CANONICAL, FORMATS, detect, kind_of, read_draft
from outpace.formats.spec import DFLASH, EAGLE3, EMBEDDING, HEAD, Description, TargetFiles, is_targets, stored

OURS = "outpace"
ENGINES = (OURS, "SGLang", "vLLM", "SpecForge", "speculators", "llama.cpp", "transformers")
CHECKS = {
    DFLASH: (
        *("layer ids", "hidden sizes", "norms", "rope", "positions", "window", "block sees", "parts"),
        *("mask token", "anchor slot", "block size", "vocabulary", "attention bias", "embedding, head"),
        "dtype",
    ),
    EAGLE3: (
        *("layer ids", "hidden sizes", "layers", "norms", "rope", "positions", "window", "one pass"),
        *("vocabulary", "attention bias", "embedding, head", "dtype"),
    ),
}
SHORT = {
    OURS: "ours",
    "SGLang": "SGL",
    "SpecForge": "SF",
    "speculators": "spec",
    "llama.cpp": "l.cpp",
    "transformers": "tf",
}
CONVERTER = "llama.cpp"  # reads HF folders through its own convert_hf_to_gguf


@dataclass(frozen=True)
class PreflightCell:
    """`state`: same, differs, refuses, wrong (as the row's fault states); `export`, the same once exported;
    "" where the engine does not look."""

    state: str
    message: str


@dataclass(frozen=True, kw_only=True)
class PreflightRow:
    check: str
    message: str  # what the draft means
    cells: dict[str, PreflightCell]
    fault: str = ""  # wrong whoever reads it
    note: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    path: str
    format: str
    kind: str
    target: str
    rows: list[PreflightRow]
    refused: str = ""  # why we do not read the files at all
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """No engine takes anything silently otherwise than it is meant."""
        differs = any(c.state == "differs" for row in self.rows for c in row.cells.values())
        return not (differs or self.refused or any(row.fault for row in self.rows))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "clean": self.clean}


def preflight(path: Path, target: TargetFiles, engines: tuple[str, ...] = ENGINES) -> Preflight:
    """Raises LoadError where there is no draft to look at, or a config where the values have no
    known types; ValueError for an engine that is not known."""
    unknown = set(engines) - set(ENGINES)
    if unknown:
        raise ValueError(f"unknown engine {', '.join(sorted(unknown))}; known: {', '.join(ENGINES)}")
    name = detect(path)
    kind = FORMATS[name].kind
    draft, refused, notes = _read(path, target)
    files, views = _open(path, name, target)
    readings = {engine: files.view | view for engine, view in views.items()}
    if draft is not None:
        readings[OURS] = files.view | description_view(draft)
        if isinstance(FORMATS[name], GGUFFormat):
            readings = {engine: readings[OURS] | view for engine, view in readings.items()}
    meant = readings[next(e for e in (OURS, *FORMATS[name].engines) if e in readings)]
    errors, strange = find_errors(files, target, meant), find_notes(files, target)
    rows = []
    for check in CHECKS[kind]:
        cells = {e: _cell(e, check, name, draft, readings.get(e), meant) for e in ENGINES if e in engines}
        error, note = errors.get(check, ""), strange.get(check, "")
        if error:
            cells = {
                e: PreflightCell("wrong", c.message) if c.state == "same" else c for e, c in cells.items()
            }
        value, fix = meant.get(check, ""), _fix(check, name, draft, cells)
        rows.append(PreflightRow(check=check, message=value, cells=cells, fault=error, note=note, fix=fix))
    return Preflight(
        path=str(path), format=name, kind=kind, target=target.path, rows=rows, refused=refused, notes=notes
    )


def _read(path: Path, target: TargetFiles) -> tuple[Description | None, str, list[str]]:
    try:
        _, draft, notes = read_draft(path, target)
    except ValueError as error:
        return None, str(error), []
    return draft, "", notes


def _open(path: Path, name: str, target: TargetFiles) -> tuple[Files, dict[str, View]]:
    """The files as they are, and the reading of each engine that opens them."""
    chosen = FORMATS[name]
    if isinstance(chosen, GGUFFormat):
        header, file = chosen.open(path, target)
        specs = {n: (info.shape, info.format) for n, info in header.tensors.items()}
        return Files(config={}, specs=specs, get=None), chosen.views(file)
    checkpoint = open_checkpoint(path)
    specs = {n.removeprefix("model."): (shape, dtype) for n, shape, dtype in checkpoint.specs()}
    names = {n.removeprefix("model."): n for n in checkpoint.names()}
    for n in (EMBEDDING, HEAD):
        if n in names and is_targets(n, stored(checkpoint, names[n]), target):
            del names[n]
    file = ConfigFile(where=str(path), values=checkpoint.config, target=target, names=names.keys())
    file.check_types()
    return Files(config=checkpoint.config, specs=specs, get=checkpoint.get), chosen.views(file)


def _cell(
    engine: str, check: str, name: str, draft: Description | None, view: View | None, meant: View
) -> PreflightCell:
    if engine == OURS:
        return PreflightCell("", "") if view is None else PreflightCell("same", view.get(check, ""))
    direct = engine in FORMATS[name].engines
    warning = None if draft is None else _warning(engine, check, name if direct else None, draft)
    if view is not None:
        value = view.get(check, "")
        if value.startswith(REFUSES):
            return PreflightCell("refuses", value.removeprefix(REFUSES))
        if value and value != meant.get(check):
            return PreflightCell("differs", value)
        if warning is not None and direct:
            return warning
        return PreflightCell("same" if value or not direct else "", value)
    if draft is None or not _formats_of(engine, draft):
        return PreflightCell("", "")
    return warning or PreflightCell("export", "")


def _formats_of(engine: str, draft: Description) -> list[str]:
    return [n for n, f in FORMATS.items() if f.kind == kind_of(draft) and engine in f.engines]


def _warning(engine: str, check: str, name: str | None, draft: Description) -> PreflightCell | None:
    """What the engine cannot hold, in the format it reads here or would be given."""
    names = [name] if name else _formats_of(engine, draft)[:1]
    for warning in (w for n in names for w in FORMATS[n].warnings(draft)):
        if (warning.engine, warning.check) == (engine, check):
            return PreflightCell("refuses" if warning.fatal else "differs", warning.message)
    return None


def _fix(check: str, name: str, draft: Description | None, cells: dict[str, PreflightCell]) -> str:
    """Nothing fixes what an engine cannot do, however it is written."""
    parted = [e for e, c in cells.items() if c.state == "differs"]
    if draft is not None:
        parted = [e for e in parted if _warning(e, check, name, draft) is None]
    if draft is None or not parted:
        return ""
    direct = [e for e in parted if e in FORMATS[name].engines]
    fixes = []
    folder = isinstance(FORMATS[name], FolderFormat)
    if direct and folder:
        again = CANONICAL[kind_of(draft)]
        fixes.append(f"`outpace import` (or `export --to {again}`) writes it in every place")
    if CONVERTER in parted and folder:
        fixes.append("convert with `outpace export --to gguf`, not with convert_hf_to_gguf")
    return "; ".join(fixes)


def show_preflight(result: Preflight, console: Console) -> None:
    say = partial(console.print, highlight=False)
    marks = {
        "same": "[green]✓[/green]",
        "export": "[dim]→[/dim]",
        "differs": "[bold red]✗[/bold red]",
        "wrong": "[bold red]✗[/bold red]",
        "refuses": "[yellow]![/yellow]",
        "": "[dim]-[/dim]",
    }
    say(f"[bold]{result.kind}[/bold] ({result.format})  {escape(result.path)}")
    engines = (SHORT.get(engine, engine) for engine in result.rows[0].cells)
    table = Table("check", "as it is meant", *engines, box=None, pad_edge=False)
    for row in result.rows:
        style = "red" if row.fault else "yellow" if row.note else ""
        table.add_row(
            row.check,
            f"[{style}]{escape(row.message)}[/{style}]" if style else escape(row.message),
            *(marks[cell.state] for cell in row.cells.values()),
        )
    say(table)
    if result.refused:
        say(f"[bold red]outpace refuses these files:[/bold red] {escape(result.refused)}")
    for row in result.rows:
        _show_row(row, say)
    for note in result.notes:
        say(f"[dim]note: {escape(note)}[/dim]")
    exported = any(c.state == "export" for row in result.rows for c in row.cells.values())
    if exported:
        say("[dim]→: after `outpace export`; the engine does not open this format[/dim]")
    say(_summary(result), style="green" if result.clean else "bold red")


def _summary(result: Preflight) -> str:
    if result.clean:
        return "every engine takes the same"
    cells = (item for row in result.rows for item in row.cells.items())
    apart = dict.fromkeys(engine for engine, cell in cells if cell.state == "differs")
    if not apart:
        return "this draft is not right, whoever reads it"
    return f"read differently, and nobody would say so: {', '.join(apart)}"


def _show_row(row: PreflightRow, say: Callable[[str], None]) -> None:
    if row.fault:
        say(f"[bold red]{row.check}:[/bold red] {escape(row.fault)}")
    for state, style in (("differs", "red"), ("refuses", "yellow")):
        for engine, cell in row.cells.items():
            if cell.state == state:
                say(f"[{style}]{row.check}:[/{style}] {engine}: {escape(cell.message)}")
    if row.fix:
        say(f"  fix: {row.fix}")
    if row.note:
        say(f"[yellow]{row.check}:[/yellow] {escape(row.note)}")
