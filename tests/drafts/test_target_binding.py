"""A draft and the fingerprint of its target: it travels with every format, and loading compares it."""

import copy
import dataclasses
import json
import logging

import draft_samples as samples
import pytest
import torch

from outpace.checkpoint.open import LoadError
from outpace.formats.export import export_draft, import_draft
from outpace.formats.load import FORMATS, load_draft, read_draft, target_fingerprints
from outpace.formats.spec import DFLASH
from outpace.loading import open_dflash, open_draft, open_target

OTHER = "0123456789abcdef" * 4


def bound(kind, fingerprint):
    draft = samples.dflash() if kind == DFLASH else samples.eagle3()
    return dataclasses.replace(draft, target_fingerprint=fingerprint)


@pytest.mark.parametrize("name", FORMATS)
def test_the_fingerprint_travels_with_every_format(name, target, tmp_path):
    out = tmp_path / ("draft.gguf" if name.startswith("gguf") else "draft")
    export_draft(bound(FORMATS[name].kind, OTHER), name, out, target)
    assert read_draft(out, target)[1].target_fingerprint == OTHER
    with pytest.raises(LoadError, match=f"made for the target with fingerprint {OTHER[:12]}, and .* has "):
        load_draft(out, target=target, tokenizer=target.tokenizer())


@pytest.mark.parametrize("kind", ["DFlash", "EAGLE-3"])
def test_training_s_provenance_binds_a_draft(kind, target, tmp_path):
    """As `generate`, `chat` and `bench` open it."""
    model, tokenizer = open_target(target.path)
    name = "zlab" if kind == DFLASH else "sglang-eagle3"
    export_draft(bound(kind, ""), name, tmp_path / "d")
    record = tmp_path / "d" / "provenance.json"
    record.write_text(json.dumps({"target_fingerprint": target_fingerprints(model)[0]}))
    assert open_draft(str(tmp_path / "d"), model, tokenizer) is not None
    record.write_text(json.dumps({"target_fingerprint": OTHER}))
    with pytest.raises(LoadError, match="name the draft of this target"):
        open_draft(str(tmp_path / "d"), model, tokenizer)
    if kind == DFLASH:
        with pytest.raises(LoadError, match="outpace import DRAFT --target MODEL"):
            open_dflash(str(tmp_path / "d"), tokenizer, target=model)


def test_a_target_of_the_same_sizes_is_another(target, tmp_path):
    model, tokenizer = open_target(target.path)
    export_draft(bound(DFLASH, target_fingerprints(model)[0]), "zlab", tmp_path / "d")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.norm.weight[0] += 1
    with pytest.raises(LoadError, match="is a conversion of the"):
        open_draft(str(tmp_path / "d"), other, tokenizer)


def test_a_draft_without_a_fingerprint_is_warned_of_and_costs_no_hashing(target, tmp_path, caplog):
    def hashed():
        raise AssertionError("the target was hashed")

    files = dataclasses.replace(target, fingerprints=hashed)
    export_draft(bound(DFLASH, ""), "zlab", tmp_path / "d")
    with caplog.at_level(logging.WARNING):
        load_draft(tmp_path / "d", target=files)
    assert "does not name its target by fingerprint" in caplog.text


def test_import_binds_a_draft_to_a_conversion_of_its_target(target, tmp_path):
    export_draft(bound(DFLASH, OTHER), "zlab", tmp_path / "d")
    _, _, notes = import_draft(tmp_path / "d", tmp_path / "new", target)
    assert any("bound to" in note for note in notes)
    model, tokenizer = open_target(target.path)
    assert open_draft(str(tmp_path / "new"), model, tokenizer) is not None


def test_the_embedded_pair_belongs_together():
    model, tokenizer = open_target("default")
    assert open_draft("dflash", model, tokenizer) is not None
