"""Triton's products of experts: right in its interpreter, and compiled for GPUs that are not here."""

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


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("up", [True, False])
def test_it_compiles_to_tensor_cores_and_wide_copies(capability, up, tmp_path, monkeypatch):
    """bfloat16 products, weights by 16 bytes on their way while others are multiplied, nothing spilled."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from outpace.kernels.triton_experts import COLUMNS, DEPTH, ROWS, product

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tensors = {"x": "*bf16", "out": "*bf16", "bias": "*bf16", "blocks": "*u8", "scales": "*u8"}
    tensors |= dict.fromkeys(("order", "tile_expert", "tile_first", "tile_end"), "*i64")
    fixed = {"UP": up, "BIAS": True, "SWIGLU": up, "BM": ROWS, "BN": COLUMNS, "BK": DEPTH}
    if up:
        fixed["weights"] = None
    else:
        tensors["weights"] = "*fp32"
    numbers = dict.fromkeys(("experts", "N", "G", "k"), "i32") | {"limit": "fp32", "alpha": "fp32"}
    signature = {
        name: tensors.get(name) or numbers.get(name) or "constexpr"
        for name in product.arg_names
        if name in fixed or name in tensors or name in numbers
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(product.arg_names) if name in tensors}
    source = ASTSource(product, signature, fixed, aligned)
    code = compile(source, target=GPUTarget("cuda", capability, 32)).asm
    assert code["cubin"][:4] == b"\x7fELF"
    assert code["ptx"].count("mma.sync") == 2 * DEPTH // 16  # of 16 pairs by 16 values
    wide = [
        line for line in code["ptx"].splitlines() if "cp.async.cg.shared.global" in line and "0x10" in line
    ]
    assert len(wide) >= 8
    assert "ld.local" not in code["ptx"] and "st.local" not in code["ptx"]
