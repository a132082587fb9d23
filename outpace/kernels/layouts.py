"""The kernels' names and the layouts of their argument structs, read from the typedefs of the C sources."""

import re
import struct
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu.c")  # includes the other files
TYPEDEF = re.compile(r"^typedef struct \{([^{}]*)\} (\w+);", re.MULTILINE)
KERNEL = re.compile(r"^void (\w+)\(const (\w+) \*\w+\)", re.MULTILINE)
CASE = re.compile(r"case (\d+): (\w+)\(c->with\);")
DECLARATOR = re.compile(r"(\**)\w+(?:\[(\d+)\])?")
CODES = {"floats": "q", "any": "q", "bytes": "q", "int64_t": "q", "double": "d"}  # the first three: pointers


@cache
def sources() -> str:
    """The text of all C files."""
    return "\n".join(path.read_text() for path in sorted(SOURCE.parent.glob("*.c")))


def kernels(text: str) -> dict[str, str]:
    """Name of each exported function -> name of the struct it takes a pointer to."""
    return dict(KERNEL.findall(text))


def cases(text: str) -> dict[str, int]:
    """Name of each kernel that a `Program` can call -> its number in the `switch` of cpu_program.c."""
    return {name: int(number) for number, name in CASE.findall(text)}


@cache
def _bodies(text: str) -> dict[str, str]:
    return {name: body for body, name in TYPEDEF.findall(re.sub(r"//[^\n]*", "", text))}


def layout(text: str, name: str) -> str:
    """The `struct` format of the C struct `name`: "q" for addresses and int64, "d" for doubles.

    Raises ValueError for a struct that `text` does not define and for a field of another type.
    """
    bodies = _bodies(text)
    if name not in bodies:
        raise ValueError(f"no `typedef struct {{..}} {name};` in the C sources")
    codes = ""
    for declaration in filter(None, map(str.strip, bodies[name].split(";"))):
        kind, declarators = declaration.removeprefix("const ").split(maxsplit=1)
        for declarator in declarators.split(","):
            field = DECLARATOR.fullmatch(declarator.strip())
            if field is None:
                raise ValueError(f"struct {name}: cannot read the field {declarator.strip()!r}")
            stars, count = field.groups()
            code = "q" if stars else CODES[kind] if kind in CODES else layout(text, kind)
            codes += code * int(count or 1)
    return codes


def packers(text: str) -> dict[str, struct.Struct]:
    """Every struct that a kernel takes, by its name; plus those of the lists that kernels read."""
    names = {*kernels(text).values(), "Call", "Ring", "Chain", "VerifyPass", "DraftContext"}
    return {name: struct.Struct(layout(text, name)) for name in names}
