"""Drafts with parts on disk: they come back as they were, and no engine takes them for something else."""

import json

import draft_samples as samples
import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_dflash import random_draft
from test_dflash_parts import CAUSAL, CONV, PARTS, SELECTOR, drafted

from outpace.checkpoint.open import LoadError
from outpace.drafts.dflash import parts_of
from outpace.formats import zlab
from outpace.formats.export import export_draft
from outpace.formats.load import (
    FORMATS,
    describe_draft,
    load_dflash,
    load_draft,
    read_draft,
    save_draft,
)
from outpace.formats.preflight import preflight
from outpace.formats.spec import DFLASH
from outpace.models.load import named_tensors
from outpace.ops.quant import Quant

SAVED = PARTS | {f"causal, {name}": how for name, how in CAUSAL.items()}


@pytest.mark.parametrize("name", SAVED)
def test_round_trip(name, tmp_path):
    draft = drafted(**SAVED[name], temperatures=(1.0, 0.5, 2.0))
    save_draft(draft, tmp_path, torch.float32)
    again = load_dflash(tmp_path)
    assert describe_draft(again).config == describe_draft(draft).config
    for (name, a), (_, b) in zip(named_tensors(draft), named_tensors(again), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("to", [n for n, f in FORMATS.items() if f.kind == DFLASH])
def test_temperatures_travel_with_every_format(to, tmp_path):
    target = samples.target_files(tmp_path / "target")
    draft = samples.dflash(temperatures=(1.0, 2.0, 0.5, 1.5))
    out = tmp_path / ("draft.gguf" if to == "gguf" else "draft")
    assert not export_draft(draft, to, out, target)
    assert read_draft(out, target)[1].config == draft.config


def test_loading_packs_where_it_is_asked_to(tmp_path):
    save_draft(drafted(**CONV), tmp_path, torch.float32)
    packed = load_draft(tmp_path, quantize="q8_0")
    assert isinstance(packed.fc.weight, Quant) and not isinstance(load_draft(tmp_path).fc.weight, Quant)
    with pytest.raises(ValueError, match="q8_0"):
        load_draft(tmp_path, quantize="fp4")


def test_names_on_disk_are_the_public_ones(tmp_path):
    """Those of z-lab's DFlash 2, as vLLM and SGLang load them."""
    save_draft(drafted(**CONV, **SELECTOR), tmp_path)
    save_draft(random_draft(), tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors").keys()
    held = {n: tuple(t.shape) for n, t in load_file(tmp_path / "model.safetensors").items() if n not in plain}
    wanted = {
        "candidate_selector.hidden_projection.weight": (7, 96),
        "candidate_selector.predecessor_codebook": (tiny.VOCAB, 7),
        "candidate_selector.successor_codebook": (tiny.VOCAB, 7),
    }
    for i in range(3):
        for conv in ("attention_conv", "mlp_conv"):
            wanted[f"layers.{i}.{conv}.base_kernel"] = (2, 2, 96)
            wanted[f"layers.{i}.{conv}.kernel_projection.weight"] = (32, 96)
    assert held == wanted
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["architectures"] == ["DFlash2DraftModel"]
    keys = {"conv_kernel_size": 2, "conv_group_size": 12, "selector_rank": 7, "selector_top_k": 5}
    assert data["dflash_config"].items() >= keys.items() and "outpace" not in data


@pytest.mark.parametrize("name", PARTS)
def test_the_architecture_is_ours_where_an_engine_would_draft_with_half_of_it(name):
    config = drafted(**PARTS[name]).config
    wanted = "DFlash2DraftModel" if name == "DFlash 2" else "OutpaceDFlashDraftModel"
    assert zlab.architecture(config) == wanted
    assert parts_of(config) != "none" == parts_of(random_draft().config)


@pytest.mark.parametrize("to", [n for n, f in FORMATS.items() if f.kind == DFLASH and n != "zlab"])
@pytest.mark.parametrize("parts", [CONV, SELECTOR, {"markov_rank": 6}, {"confidence": True}])
def test_formats_of_plain_drafts_refuse_parts(to, parts, tmp_path):
    draft = samples.dflash(**{**parts, **({"conv_group_size": 12} if "conv_kernel_size" in parts else {})})
    with pytest.raises(ValueError, match="holds a plain DFlash, without"):
        export_draft(draft, to, tmp_path / "out")


def test_causal_full_layers_in_other_formats(tmp_path):
    draft = samples.dflash(causal_full=True)
    for to, value in (("speculators", "no word for causal"), ("transformers", "no causal blocks")):
        with pytest.raises(ValueError, match=value):
            export_draft(draft, to, tmp_path / to)
    target = samples.target_files(tmp_path / "target")
    export_draft(draft, "gguf", tmp_path / "d.gguf", target)
    assert read_draft(tmp_path / "d.gguf", target)[1].config == draft.config
    mixed = samples.dflash(**samples.MIXED, causal=True, causal_full=True)
    export_draft(mixed, "gguf", tmp_path / "mixed.gguf", target)
    assert read_draft(tmp_path / "mixed.gguf", target)[1].config == mixed.config


def test_preflight_names_who_knows_the_parts(tmp_path):
    target = samples.target_files(tmp_path / "target")
    second = samples.dflash(conv_kernel_size=2, conv_group_size=16, selector_rank=6, selector_top_k=16)
    own = samples.dflash(markov_rank=6)
    rows = {}
    for name, draft in (("second", second), ("own", own)):
        export_draft(draft, "zlab", tmp_path / name, target)
        result = preflight(tmp_path / name, target)
        rows[name] = next(row for row in result.rows if row.check == "parts")
    assert rows["second"].message == "convolutions 2 x 16, selector 6 of 16"
    states = {engine: cell.state for engine, cell in rows["second"].cells.items()}
    assert states["SGLang"] == states["vLLM"] == "same" and states["llama.cpp"] == "refuses"
    states = {engine: cell.state for engine, cell in rows["own"].cells.items()}
    assert states["outpace"] == "same" and states["SGLang"] == states["vLLM"] == "refuses"


def test_a_dflash_2_under_the_first_name_is_seen(tmp_path):
    """vLLM chooses its class by the architecture: it would drop the parts, or fail."""
    target = samples.target_files(tmp_path / "target")
    draft = samples.dflash(conv_kernel_size=2, conv_group_size=16, selector_rank=6, selector_top_k=16)

    def rename(config, tensors):
        config["architectures"] = ["DFlashDraftModel"]

    result = preflight(samples.edited(tmp_path, target, draft, "zlab", rename), target)
    row = next(row for row in result.rows if row.check == "parts")
    assert row.cells["vLLM"].state == "differs" and row.cells["SGLang"].state == "same"


def test_damaged_parts_are_refused(tmp_path):
    target = samples.target_files(tmp_path / "target")
    words = describe_draft(drafted(draft_vocab_size=31), torch.float32)
    folder = samples.edited(tmp_path, None, words, "zlab", lambda c, t: t["d2t"].fill_(-1))
    with pytest.raises(LoadError, match="does not give 31 different tokens"):
        read_draft(folder)
    for edit, value in (
        (lambda c, t: c["outpace"].update(confidence=1), "confidence"),
        (lambda c, t: c["outpace"].update(temperatures=["1"]), "not a list of decimals"),
        (lambda c, t: t.pop("confidence_head.proj.bias"), "missing in the checkpoint: confidence_head"),
    ):
        with pytest.raises(LoadError, match=value):
            sure = samples.dflash(confidence=True)
            read_draft(samples.edited(tmp_path, target, sure, "zlab", edit), target)
