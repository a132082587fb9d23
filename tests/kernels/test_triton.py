"""Triton's kernels: right in its interpreter, and compiled for GPUs that are not here."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from in_process import Checked, checks_of

CHECKS = Path(__file__).with_name("triton_checks.py")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: Linux only")


@pytest.fixture(scope="module")
def checked():
    return Checked(CHECKS, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", checks_of(CHECKS))
def test_a_check_passes_in_the_interpreter(checked, name):
    checked.passed(name)


def compiled(kernel, capability, values):
    """The machine code for a GPU that is not here. `values`: Triton's types, and other numbers as they are;
    tensors, and numbers whose type has a star behind it, are multiples of 16, which a call finds out."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    even = [name for name, value in values.items() if "*" in str(value)]
    typed = {name: value.rstrip("*") for name, value in values.items() if isinstance(value, str)}
    signature = {name: typed.get(name, "constexpr") for name in kernel.arg_names}
    fixed = {name: values[name] for name in kernel.arg_names if name not in typed}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(kernel, signature, fixed, aligned)
    return compile(source, target=GPUTarget("cuda", capability, 32)).asm


def ahead(ptx):
    """Copies of 16 bytes to shared memory while others are multiplied; there are no smaller ones."""
    copies = [line for line in ptx.splitlines() if "cp.async" in line and "shared.global" in line]
    assert all("0x10" in line for line in copies)
    return len(copies)


CAPABILITIES = pytest.mark.parametrize("capability", [80, 90, 100])


@CAPABILITIES
@pytest.mark.parametrize("up", [True, False])
def test_experts_compile_to_tensor_cores_and_wide_copies(capability, up, tmp_path, monkeypatch):
    """bfloat16 products, weights by 16 bytes on their way while others are multiplied, nothing spilled."""
    from outpace.kernels.triton_experts import COLUMNS, DEPTH, ROWS, product

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    values = {"x": "*bf16", "out": "*bf16", "bias": "*bf16", "blocks": "*u8", "scales": "*u8"}
    values |= dict.fromkeys(("order", "tile_expert", "tile_first", "tile_end"), "*i64")
    values |= dict.fromkeys(("experts", "N", "G", "k"), "i32") | {"limit": "fp32", "alpha": "fp32"}
    values |= {"weights": None if up else "*fp32", "UP": up, "BIAS": True, "SWIGLU": up}
    code = compiled(product, capability, values | {"BM": ROWS, "BN": COLUMNS, "BK": DEPTH})
    assert code["cubin"][:4] == b"\x7fELF"
    assert code["ptx"].count("mma.sync") == 2 * DEPTH // 16  # of 16 pairs by 16 values
    assert ahead(code["ptx"]) >= 8
    assert "ld.local" not in code["ptx"] and "st.local" not in code["ptx"]


@CAPABILITIES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tree", [False, True])
def test_attention_compiles_to_tensor_cores_and_wide_copies(
    capability, head_dim, tree, tmp_path, monkeypatch
):
    from outpace.kernels.triton_attention import KEYS, QUERIES, attention

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    values = dict.fromkeys(("q", "k", "v", "out", "sinks"), "*bf16") | {"starts": "*i64", "counts": "*i64"}
    values |= {"depth": "*i64", "sees": "*i1"} if tree else {"depth": None, "sees": None}
    values |= dict.fromkeys(("T", "G", "S", "held", "window", "U"), "i32") | {"scale": "fp32"}
    values |= dict.fromkeys(("qb", "qt", "qh", "kb", "kh", "ks", "vb", "vh", "vs"), "i32*")
    values |= {"first": None, "SINKS": True, "FIRST": False, "TREE": tree, "BOTH": False}
    code = compiled(attention, capability, values | {"BM": QUERIES, "BN": KEYS, "D": head_dim})
    assert code["cubin"][:4] == b"\x7fELF" and code["ptx"].count("mma.sync") >= 2 * head_dim // 16
    assert ahead(code["ptx"]) >= 4 and "ld.local" not in code["ptx"] and "st.local" not in code["ptx"]
