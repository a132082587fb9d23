"""Additions to the documentation site: CLI reference, measured reports, checked links to code."""

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from outpace.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+)([^)#]+?)(#[^)]*)?\)")  # a link that leaves docs/
SHOWN = {".png", ".md", ".json"}  # of reports/: pages, plots, data


def on_files(files: Files, config: Any) -> Files:
    """Adds reports/ and the generated CLI reference to the site."""
    for path in sorted((ROOT / "reports").rglob("*")):
        if path.suffix in SHOWN:
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "reference/cli.md", content=cli_reference()))
    return files


def cli_reference() -> str:
    """Every command with its options, as `--help` shows them."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="outpace")
    return get_docs_for_click(obj=command, ctx=context, name="outpace", title="Commands")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to reports stay links; links to code become its path, after a check that it is there."""
    depth = page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        image, text, up, target, anchor = match.groups()
        if up.count("../") != depth + 1:
            return match.group()
        if not (ROOT / target).exists():
            raise PluginError(f"docs/{page.file.src_uri} links to {target}, which is not in the repository")
        if target.startswith("reports/") and Path(target).suffix in SHOWN:
            return f"{image}[{text}]({'../' * depth}{target}{anchor or ''})"
        return f"{text} (`{target}`)"

    return OUTSIDE.sub(link, markdown)
