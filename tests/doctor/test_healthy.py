"""What is right passes: every family against transformers and against its GGUF, and the default model."""

import pytest
import tiny

from outpace.doctor.examine import Examination, examine
from outpace.formats.convert import write_gguf
from outpace.models.load import load_target


def verdicts(**what):
    return {c.name: c.verdict for c in examine(Examination(tokens=60, **what))}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_against_transformers(family, twins):
    found = verdicts(path=str(twins(family)[0]), reference="hf")
    assert set(found.values()) <= {"pass", "skipped"}, found
    for name in (
        "engine against a plain forward",
        "layers against the reference",
        "logits against the reference",
    ):
        assert found[name] == "pass"
    assert found["tokenizer"] == "skipped"


BLOCKS = {"hidden_size": 96, "intermediate_size": 64}  # rows that come in blocks of 32
AS_GGUF = {  # what its GGUF can say
    "gpt_oss": {},
    "llama": BLOCKS,
    "qwen3": BLOCKS | {"use_sliding_window": False},
    "qwen3_moe": BLOCKS | {"mlp_only_layers": [], "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("type", ["f32", "q8_0"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_against_its_gguf(family, type, tmp_path):
    """Also where one side's numbers are rounded: what a format costs is no mistake."""
    tiny.save_twin(family, tmp_path / "folder", **AS_GGUF[family])
    write_gguf(load_target(tmp_path / "folder"), tmp_path / "it.gguf", type=type)
    found = verdicts(path=str(tmp_path / "folder"), reference="gguf", other=str(tmp_path / "it.gguf"))
    assert found["layers against the reference"] == "pass", found
    assert found["embedding against the reference"] == "pass", found
    assert "fail" not in found.values(), found


def test_the_default_without_a_reference():
    found = {c.name: c for c in examine(Examination(path="default"))}
    other = {name: c.verdict for name, c in found.items() if c.verdict != "pass"}
    assert other == {"chat template": "skipped"}
    assert len(found) >= 20
    for name in ("column order of down", "column order of gate and up", "pairing of gate and up rows"):
        assert found[name].evidence["z"] > 10
    assert "clearly worse" in found["known mistakes"].said


def test_the_default_against_transformers():
    pytest.importorskip("accelerate")
    found = {c.name: c for c in examine(Examination(path="default", reference="hf", layers=3))}
    assert found["layers against the reference"].verdict == "pass"
    assert len(found["layers against the reference"].evidence) == 3
    assert found["prediction of a text"].verdict == "skipped"  # three layers say nothing
