"""Layouts of the kernels' argument structs: read from the C typedefs, and the C compiler's sizes."""

import shutil
import struct
import subprocess

import pytest

from outpace.kernels import bindings
from outpace.kernels.build import FLAGS
from outpace.kernels.layouts import SOURCE, cases, kernels, layout, packers, sources

TEXT = """
typedef struct { floats x, w; int64_t kind; any norm[2]; double eps; const int64_t *start, n; } Outer;
typedef struct { bytes w; Outer inner; float *y, *z; int64_t M; } Nested;  // a comment; with a semicolon
typedef struct { floats x; long n; } Other;
void outer(const Outer *o) {
"""


def test_a_layout_follows_the_typedef():
    assert layout(TEXT, "Outer") == "qqq" + "qq" + "d" + "qq"
    assert layout(TEXT, "Nested") == "q" + layout(TEXT, "Outer") + "qqq"
    assert kernels(TEXT) == {"outer": "Outer"}


@pytest.mark.parametrize("name", ["Missing", "Other"])
def test_an_unknown_struct_or_type_is_refused(name):
    with pytest.raises(ValueError, match="no `typedef"):
        layout(TEXT, name)


def test_a_field_of_another_type_or_place_changes_the_layout():
    before = layout(sources(), "Norm")
    fields = "double eps; int64_t M, C, stride, threads; } Norm;"
    assert fields in sources()
    moved = sources().replace(fields, "int64_t M, C, stride, threads; double eps; } Norm;")
    assert layout(moved, "Norm") != before and sorted(layout(moved, "Norm")) == sorted(before)


def test_every_kernel_has_a_binding_of_its_struct():
    names = kernels(sources())
    assert {"linear", "attend", "moe", "grow", "run"} <= set(names)
    assert set(names.values()) < set(packers(sources()))
    assert cases(sources()).keys() <= set(names)
    if bindings.available():
        assert all(callable(getattr(bindings._c, name)) for name in names)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_compiler_lays_the_structs_out_in_the_same_way(tmp_path):
    checks = [f'#include "{SOURCE}"', "#include <stddef.h>"]
    for name, packer in packers(sources()).items():
        assert packer.size == struct.calcsize(layout(sources(), name))
        checks.append(f'_Static_assert(sizeof({name}) == {packer.size}, "{name}");')
    program = tmp_path / "check.c"
    program.write_text("\n".join(checks))
    command = ["cc", *FLAGS, "-fsyntax-only", str(program)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0
