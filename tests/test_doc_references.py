"""Files, functions and classes that the docs name exist: `drafts/tree.py: DDTree.begin` is there."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import typer

import outpace.cli.main  # noqa: F401 - its commands
from outpace.cli.app import app

ROOT = Path(__file__).parents[1]
PLACES = (ROOT, ROOT / "outpace", ROOT / "tests", ROOT / "docs")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LOG = ROOT / "docs" / "log.md"  # names functions as they were on the day; its files must be there
PAGES = [page for page in PAGES if page != LOG]
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"^([\w/.-]+\.(?:py|c|toml|sh))(?:: *(.+))?$")
DOTTED = re.compile(r"^([A-Z]\w+)\.(\w+)(?:\(.*\))?$")


def names_of(path):
    """Functions, classes and assigned names, as "name" and "Class.name"."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        names |= defined(node)
        if isinstance(node, ast.ClassDef):
            inner = [n for child in node.body for n in defined(child)]
            inner += [
                target.attr
                for child in ast.walk(node)
                if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
                for target in [child]
            ]
            names |= {f"{node.name}.{name}" for name in inner} | set(inner)
    return names


def defined(node):
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


NAMES = {path: names_of(path) for path in sorted((ROOT / "outpace").rglob("*.py"))}
CLASSES = {name for names in NAMES.values() for name in names if "." not in name and name[0].isupper()}
MEMBERS = {name for names in NAMES.values() for name in names if "." in name}


def located(name):
    return next((place / name for place in PLACES if (place / name).is_file()), None)


def wrong(span):
    """What of one code span of a page is not there; None where all is."""
    file = FILE.match(span)
    if file and ("/" in file[1] or file[2]):
        path = located(file[1])
        if path is None:
            return f"no file {file[1]}"
        if path.suffix != ".py" or not file[2]:
            return None
        names = names_of(path)
        parts = [part.strip().removesuffix("()").lstrip(".") for part in file[2].split(",")]
        missing = [part for part in parts if re.fullmatch(r"[\w.]+", part) and part not in names]
        return f"{file[1]} has no {', '.join(missing)}" if missing else None
    member = DOTTED.match(span)
    if member and member[1] in CLASSES and f"{member[1]}.{member[2]}" not in MEMBERS:
        return f"{member[1]} has no {member[2]}"
    return None


def test_python_in_the_pages_imports_what_is_there():
    seen = 0
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outpace."):
                    module = importlib.import_module(node.module)
                    assert [a.name for a in node.names if not hasattr(module, a.name)] == [], page.name
                    seen += 1
    assert seen > 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert [message for span in CODE.findall(text) if (message := wrong(span))] == []


def test_every_file_that_the_log_names_is_there():
    places = (*PLACES, *(path for path in (ROOT / "outpace").iterdir() if path.is_dir()))
    text = re.sub(r"```.*?```", "", LOG.read_text(), flags=re.DOTALL)
    files = {file[1] for span in CODE.findall(text) if (file := FILE.match(span))}
    assert len(files) > 20
    assert sorted(file for file in files if not any((place / file).is_file() for place in places)) == []


def options_of(command):
    """Every flag of a command and of those below it."""
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return flags.union(*map(options_of, getattr(command, "commands", {}).values()))


OPTIONS = options_of(typer.main.get_command(app)) | {"--help"}


def unknown_flags(text):
    """Flags of code spans that no command has. A span with another program's flag names the program."""
    spans = [span for span in CODE.findall(text) if span.startswith("--")]
    return sorted({flag for span in spans for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span)} - OPTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_flag_that_a_page_names_is_there(page):
    assert unknown_flags(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)) == []
    assert unknown_flags("`--no-such-flag 3` and `vllm --other`") == ["--no-such-flag"]


def test_what_is_not_there_is_noticed():
    assert wrong("decode/generate.py: generate") is None
    assert wrong("decode/generate.py: generate, nothing") == "decode/generate.py has no nothing"
    assert wrong("decode/nothing.py: generate") == "no file decode/nothing.py"
    assert wrong("Adaptive.width") is None
    assert wrong("Adaptive.nothing") == "Adaptive has no nothing"
