"""The house rules, read from the source text: imports run down, files are small and say what they are."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "outpace"


def floors(readme: str) -> dict[str, int]:
    """The README's import line, read from the bottom up: folder or file -> floor; neighbours share one."""
    line = re.search(r"^Imports run down: `([^`]+)`$", readme, re.MULTILINE)
    assert line is not None, "README.md: no line `Imports run down: ...`"
    rows = [re.findall(r"\w+", row) for row in reversed(line.group(1).split(">"))]
    return {name: floor for floor, row in enumerate(rows) for name in row} | {"__main__": len(rows)}


FLOORS = floors((ROOT / "README.md").read_text(encoding="utf-8"))
MOST_LINES = 600
BANNED_FOLDERS = {"utils", "util", "common", "core", "helpers", "misc"}
# joined here so that this file does not hold them; absolute paths of one machine have no place either
PRIVATE = re.compile(
    "|".join(("/" + "work/", "/" + "root/", "/" + "home/[a-z]", "/opt/" + "pypi", r"\." + "library/")),
    re.IGNORECASE,
)

Sources = dict[str, str]  # dotted module name -> text


def sources() -> Sources:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(module: str, text: str) -> list[tuple[str, int, bool]]:
    """(module imported, line, inside a function) for every import of outpace, wherever it is:
    in functions, in `if TYPE_CHECKING`, relative ones too."""
    tree = ast.parse(text)
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    items = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            names = [f"{base}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [
                a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
        items += [(n, node.lineno, id(node) in late) for n in names if n.split(".")[0] == "outpace"]  # type: ignore[attr-defined]
    return items


def resolve(name: str, modules: Sources) -> str:
    """The module an imported name lives in: `outpace.ops.rope.rotate` -> `outpace.ops.rope`; "" for none."""
    parts = name.split(".")
    while len(parts) > 1:
        if ".".join(parts) in modules:
            return ".".join(parts)
        parts.pop()
    return "" if name.count(".") > 1 else "outpace"


def place(module: str) -> str:
    """The folder (or top-level file) a module belongs to: the name that has a floor."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "outpace"


def import_faults(modules: Sources) -> list[str]:
    faults = []
    for module, text in modules.items():
        here = place(module)
        if module == "outpace.__init__":
            continue
        if here not in FLOORS:
            faults.append(f"{module}: `{here}` has no floor; give it one in FLOORS")
            continue
        for name, line, late in imports(module, text):
            target = resolve(name, modules)
            where = f"{module}:{line} imports {name}"
            there = place(target)
            if not target:
                faults.append(f"{where}: no such module")
            elif target == "outpace":
                faults.append(f"{where}: nobody imports the package root")
            elif there not in FLOORS:
                faults.append(f"{where}: `{there}` has no floor")
            elif here != there and FLOORS[there] > FLOORS[here]:
                faults.append(f"{where}: up from floor {FLOORS[here]} to {FLOORS[there]}")
            elif here != there and FLOORS[there] == FLOORS[here]:
                faults.append(f"{where}: a neighbour on floor {FLOORS[here]}")
            elif there == "kernels" and here not in ("kernels", "ops", "kv"):
                faults.append(f"{where}: only ops and kv open kernels")
            if late and here != "cli":
                faults.append(f"{where}: inside a function; imports are at the top of a file")
    return faults


def circles(modules: Sources) -> list[str]:
    """One line per circle of imports, over all modules."""
    graph = {m: {resolve(n, modules) for n, _, _ in imports(m, text)} - {m} for m, text in modules.items()}
    entries, done = [], set()

    def walk(module, path):
        if module in path:
            entries.append(" -> ".join([*path[path.index(module) :], module]))
            return
        if module in done:
            return
        for following in sorted(graph.get(module, ())):
            walk(following, [*path, module])
        done.add(module)

    for module in graph:
        walk(module, [])
    return entries


def file_faults(name: str, text: str) -> list[str]:
    """`name` is the path inside the repository."""
    faults = []
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        faults.append(f"{name}: {len(lines)} lines; split it, the limit is {MOST_LINES}")
    if name == "outpace/__init__.py":  # the public API
        return faults
    if name.endswith("__init__.py"):
        if text.strip():
            faults.append(f"{name}: not empty")
        return faults
    first = lines[0] if lines else ""
    opening = re.compile(r'r?"""\S.*') if name.endswith(".py") else re.compile(r"(//|/\*) ?\S.*")
    if not opening.fullmatch(first):
        faults.append(f"{name}: does not open with one line that states what it is")
    if name.endswith(".py") and not re.search(r'[.:!?)]"*$', first):
        faults.append(f"{name}: its first line is not a whole sentence")
    return faults


def tracked() -> list[Path]:
    """Files of the repository: what git tracks or would, or all that is there without git."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        files = [ROOT / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [p for part in ("outpace", "tests") for p in (ROOT / part).rglob("*")]
    return [p for p in files if p.is_file() and "__pycache__" not in p.parts]


CODE = [p for p in tracked() if p.suffix in (".py", ".c", ".h")]


def test_imports_run_down_the_floors():
    assert import_faults(sources()) == []


def test_the_readme_names_every_folder_and_file():
    there = {p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__"}
    there |= {p.name for p in PACKAGE.iterdir() if any(p.glob("*.py"))}
    assert there == set(FLOORS)


def test_no_circles():
    assert circles(sources()) == []


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_are_small_and_say_what_they_are(path):
    assert file_faults(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) == []


def test_no_catch_all_folders():
    names = {part for path in tracked() for part in path.relative_to(ROOT).parts[:-1]}
    names |= {path.stem for path in CODE}
    assert not names & BANNED_FOLDERS


def test_no_private_places():
    for path in tracked():
        if path.suffix in (".safetensors", ".png", ".json"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        match = PRIVATE.search(text)
        assert match is None, f"{path.relative_to(ROOT)} names {match.group()!r}"


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


# ---- the tests of the tests: a planted fault is found -------------------------------------------

TREE = {
    "outpace.__init__": "",
    "outpace.kv.__init__": "",
    "outpace.kv.base": '"""A."""',
    "outpace.text.tokenizer": '"""A."""',
    "outpace.kernels.cpu": '"""A."""',
    "outpace.ops.rope": '"""A."""',
    "outpace.models.a": '"""A."""\nfrom outpace.ops.rope import rotate\nfrom outpace.kv import base\n',
    "outpace.models.b": '"""A."""\nfrom outpace.models.a import x\n',
    "outpace.drafts.d": '"""A."""\nimport outpace.models.a\n',
    "outpace.cli": '"""A."""\ndef f():\n    from outpace.drafts.d import x\n',
}


def planted(module: str, text: str) -> list[str]:
    return import_faults(TREE | {module: f'"""A."""\n{text}\n'})


def test_a_clean_tree_has_no_faults():
    assert import_faults(TREE) == [] and circles(TREE) == []


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        ("outpace.ops.x", "from outpace.models.a import y", "up from floor 2 to 4"),
        ("outpace.ops.x", "import outpace.models.a as a", "up from floor 2 to 4"),
        ("outpace.ops.x", "from outpace.text import tokenizer", "a neighbour"),
        ("outpace.models.x", "from outpace import ops", "package root"),
        ("outpace.models.x", "import outpace", "package root"),
        ("outpace.models.x", "from outpace.kernels.cpu import linear", "only ops and kv"),
        ("outpace.models.x", "from ..drafts.d import x", "up from floor 4 to 5"),
        ("outpace.models.x", "def f():\n    from outpace.ops.rope import rotate", "inside a function"),
        ("outpace.models.x", "if TYPE_CHECKING:\n    from outpace.drafts.d import D", "up from floor 4 to 5"),
        ("outpace.models.x", "m = importlib.import_module('outpace.drafts.d')", "up from floor 4 to 5"),
        (
            "outpace.models.x",
            "try:\n    import outpace.cli\nexcept ImportError:\n    pass",
            "up from floor 4 to 11",
        ),
        ("outpace.sundry.x", "", "has no floor"),
        ("outpace.models.x", "from outpace.ops.nowhere import y", "no such module"),
    ],
)
def test_a_planted_import_is_detected(module, text, message):
    faults = planted(module, text)
    assert len(faults) == 1 and message in faults[0]


def test_a_planted_circle_is_detected():
    tree = TREE | {"outpace.models.a": '"""A."""\nfrom outpace.models.b import x\n'}
    assert circles(tree) == ["outpace.models.a -> outpace.models.b -> outpace.models.a"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("outpace/ops/x.py", '"""A."""\n' + "x = 1\n" * MOST_LINES, "the limit is"),
        ("outpace/ops/x.c", "// A.\n" + "int x;\n" * MOST_LINES, "the limit is"),
        ("outpace/ops/x.py", "import torch\n", "does not open"),
        ("outpace/ops/x.py", '"""\nA.\n"""\n', "does not open"),
        ("outpace/ops/x.c", "#include <math.h>\n", "does not open"),
        ("outpace/ops/__init__.py", "from outpace.ops.rope import rotate\n", "not empty"),
    ],
)
def test_a_planted_file_is_detected(name, text, message):
    assert message in file_faults(name, text)[0]


def test_a_planted_place_is_detected():
    assert PRIVATE.search("see /" + "work/thing") and not PRIVATE.search("see work/thing and homework/")
