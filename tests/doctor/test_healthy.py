"""What is right passes: every family against transformers and against its GGUF, and the default model."""

import pytest
import tiny

from outpace.doctor.examine import Examination, examine
from outpace.formats.convert import write_gguf
from outpace.models.load import load_target


def verdicts(**what):
    return {c.name: c.status for c in examine(Examination(tokens=60, **what))}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_against_transformers(family, twins):
    result = verdicts(path=str(twins(family)[0]), reference="hf")
    assert set(result.values()) <= {"pass", "skipped"}, result
    for name in (
        "engine against a plain forward",
        "layers against the reference",
        "logits against the reference",
    ):
        assert result[name] == "pass"
    assert result["tokenizer"] == "skipped"


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
    """Also where one side's numbers are rounded: the cost of a format is no mistake."""
    tiny.save_twin(family, tmp_path / "folder", **AS_GGUF[family])
    write_gguf(load_target(tmp_path / "folder"), tmp_path / "it.gguf", type=type)
    result = verdicts(path=str(tmp_path / "folder"), reference="gguf", other=str(tmp_path / "it.gguf"))
    assert result["layers against the reference"] == "pass", result
    assert result["embedding against the reference"] == "pass", result
    assert "fail" not in result.values(), result


def test_the_default_without_a_reference():
    values = {c.name: c for c in examine(Examination(path="default"))}
    other = {name: c.status for name, c in values.items() if c.status != "pass"}
    assert other == {"chat template": "skipped"}
    assert len(values) >= 20
    for name in ("column order of down", "column order of gate and up", "pairing of gate and up rows"):
        assert values[name].evidence["z"] > 8
    assert "clearly worse" in values["known mistakes"].message


def test_the_default_against_transformers():
    pytest.importorskip("accelerate")
    values = {c.name: c for c in examine(Examination(path="default", reference="hf", layers=3))}
    assert values["layers against the reference"].status == "pass"
    assert len(values["layers against the reference"].evidence) == 3
    assert values["prediction of a text"].status == "skipped"  # three layers say nothing
