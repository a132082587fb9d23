"""Our forward of a GGUF file against llama.cpp's of the same file: an engine that shares no code with us.

llama.cpp's answers for the plain files are kept in golden/llama_cpp.json, so that they are compared where it
is not installed, too. `python tests/models/test_gguf_llama_cpp.py` writes them again.
"""

import dataclasses
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.formats.convert import write_gguf
from outpace.models.load import build, entries, load_target, named_tensors
from outpace.models.save import fused, save_target
from outpace.ops.quant import Quant

try:
    import llama_cpp
except ImportError:
    llama_cpp = None
live = pytest.mark.skipif(llama_cpp is None, reason="llama-cpp-python is not installed: make oracle")

GOLDEN = Path(__file__).parent / "golden" / "llama_cpp.json"
POSITIONS, GREEDY = 256, 48
WIDE = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512}


def model(family, **changes):
    """As GGUF can say it. YaRN's range is truncated, as llama.cpp always does."""
    config = tiny.config(family, window=family == "gpt_oss", max_position_embeddings=4096, **changes)
    config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, truncate=True))
    if family == "qwen3_moe":
        config = dataclasses.replace(config, moe_layers=(True,) * config.num_layers)
    made = build(config)
    tiny.randomise(named_tensors(made))
    return made.eval()


def engine(path):
    """float32 keys and values: the default float16 alone moves a random model's top-1."""
    kind = gguf.GGMLQuantizationType.F32.value
    how = {"type_k": kind, "type_v": kind, "flash_attn": False, "n_threads": 2, "verbose": False}
    return llama_cpp.Llama(str(path), n_ctx=512, n_batch=512, logits_all=True, **how)


def their_logits(path, tokens):
    it = engine(path)
    it.eval(tokens)
    return torch.from_numpy(np.array(it.scores[: len(tokens)]))


def their_greedy(path, prompt):
    """-> tokens, and the gap between the two largest logits at each."""
    it = engine(path)
    it.eval(prompt)
    items, gaps = [], []
    for _ in range(GREEDY):
        last = torch.from_numpy(np.array(it.scores[it.n_tokens - 1]))
        top = last.topk(2).values
        gaps.append(float(top[0] - top[1]))
        items.append(int(last.argmax()))
        it.eval(items[-1:])
    return items, gaps


@torch.inference_mode()
def our_logits(path, tokens):
    target = load_target(path)
    return target.logits(target(torch.tensor([tokens])).hidden)[0]


def text():
    return tiny.tokens(1, POSITIONS)[0].tolist()


def test_the_golden_answers_are_ours(tmp_path):
    """All four families, 256 positions past every window, and greedy text to the token."""
    golden = json.loads(GOLDEN.read_text())
    assert set(golden) == set(tiny.FAMILIES)
    for family, value in golden.items():
        write_gguf(model(family), tmp_path / "it.gguf", type="f32")
        ours = our_logits(tmp_path / "it.gguf", text())
        assert (ours.argmax(-1) == torch.tensor(value["top_1"])).float().mean() >= 0.99, family
        top = ours.max(-1).values
        assert (top - torch.tensor(value["top_logit"])).abs().max() < 2e-3, family
        request = Request(max_new_tokens=GREEDY)
        greedy = generate(load_target(tmp_path / "it.gguf"), [text()[:32]], request).tokens[0]
        same_until(greedy, value["greedy"], value["gaps"])


def same_until(ours, theirs, gaps):
    """Equal to the token, but for a tie: what follows one is another text."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            assert gaps[i] < 1e-3, f"token {i}: {a}, llama.cpp states {b} by {gaps[i]:.4f}"
            return


@live
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_live_logits(family, tmp_path):
    write_gguf(model(family), tmp_path / "it.gguf", type="f32")
    theirs, ours = their_logits(tmp_path / "it.gguf", text()), our_logits(tmp_path / "it.gguf", text())
    assert (theirs - ours).abs().max() < 2e-3
    assert (theirs.argmax(-1) == ours.argmax(-1)).float().mean() >= 0.99
    value = json.loads(GOLDEN.read_text())[family]
    assert (theirs.argmax(-1) == torch.tensor(value["top_1"])).float().mean() >= 0.99, (
        "the golden file is stale"
    )


@live
@pytest.mark.parametrize("truncate", [True, False])
def test_truncation_is_what_separates_the_engines(truncate, tmp_path):
    """gpt-oss's published rope: llama.cpp rounds its range, the config does not. Alike with alike agrees."""
    published = {"theta": 150000.0, "factor": 32.0, "original_max_position": 4096, "truncate": truncate}
    rope = dataclasses.replace(tiny.config("gpt_oss").rope, **published)
    made = build(dataclasses.replace(model("gpt_oss").config, rope=rope, head_dim=64))
    tiny.randomise(named_tensors(made))
    write_gguf(made, tmp_path / "it.gguf", type="f32")
    theirs, ours = their_logits(tmp_path / "it.gguf", text()), our_logits(tmp_path / "it.gguf", text())
    apart = (theirs - ours).abs().max()
    assert apart < 2e-3 if truncate else apart > 0.1


FTYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "F16": 1}


def quantise(source, target, ftype):
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.allow_requantize, how.pure, how.nthread = ftype, True, ftype != 0, 1
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), how) == 0


@live
@pytest.mark.parametrize("format", FTYPES)
def test_llama_cpp_unpacks_its_formats_to_our_values(format, tmp_path):
    """A Qwen3 packed by llama.cpp, and unpacked by it to float32: bit-equal weights, equal logits."""
    made = build(dataclasses.replace(model("qwen3").config, **WIDE))
    tiny.randomise(named_tensors(made))
    write_gguf(made, tmp_path / "plain.gguf", type="f32")
    quantise(tmp_path / "plain.gguf", tmp_path / "packed.gguf", FTYPES[format])
    quantise(tmp_path / "packed.gguf", tmp_path / "unpacked.gguf", 0)
    assert_same_weights(tmp_path / "packed.gguf", tmp_path / "unpacked.gguf", format)


@live
def test_mxfp4_by_llama_cpp(tmp_path):
    save_target(model("gpt_oss"), tmp_path / "hf", pack=True)
    write_gguf(load_target(tmp_path / "hf"), tmp_path / "packed.gguf", type="f32")
    quantise(tmp_path / "packed.gguf", tmp_path / "unpacked.gguf", 0)
    assert_same_weights(tmp_path / "packed.gguf", tmp_path / "unpacked.gguf", "MXFP4")


def assert_same_weights(packed, unpacked, format):
    ours, theirs = load_target(packed), load_target(unpacked)
    formats = {m.format for m in ours.modules() if isinstance(m, Quant)}
    assert formats == {format} - {"F16"}
    for entry in entries(ours.config, "dense"):
        assert torch.equal(fused(ours, entry.param).float(), fused(theirs, entry.param)), entry.param
    exact, close = their_logits(unpacked, text()), our_logits(packed, text())
    assert (close - exact).abs().max() < 2e-3
    assert (close.argmax(-1) == exact.argmax(-1)).float().mean() >= 0.99


def write_golden(folder):
    fields = {}
    for family in tiny.FAMILIES:
        path = folder / f"{family}.gguf"
        write_gguf(model(family), path, type="f32")
        logits = their_logits(path, text())
        greedy, gaps = their_greedy(path, text()[:32])
        fields[family] = {
            "top_1": logits.argmax(-1).tolist(),
            "top_logit": [round(x, 4) for x in logits.max(-1).values.tolist()],
            "greedy": greedy,
            "gaps": [round(x, 4) for x in gaps],
        }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(fields))


if __name__ == "__main__":
    import tempfile

    write_golden(Path(tempfile.mkdtemp()))
