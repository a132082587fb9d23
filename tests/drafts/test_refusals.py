"""Drafts that contradict themselves, ask for something else, or are damaged: refused, with the reason."""

import copy
import dataclasses
import itertools
import json
import random

import draft_samples as samples
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.checkpoint.open import LoadError
from outpace.formats import gguf
from outpace.formats.base import FolderFormat
from outpace.formats.errors import Files, find_errors, find_notes
from outpace.formats.export import export_draft
from outpace.formats.fields import ConfigFile
from outpace.formats.load import FORMATS, build_draft, load_dflash, read_draft

IDS = "eagle_aux_hidden_state_layer_ids"


# ---- what must not be proposed -----------------------------------------------------------------------------


def inside(key, **message):
    return lambda c, t: c[key].update(message)


def on_top(**message):
    return lambda c, t: c.update(message)


REFUSED = {  # name -> format, edit, what is reported
    "ids twice": ("zlab", on_top(**{IDS: [0, 2, 4]}), r"SGLang, z-lab.*\[1, 3, 5\].*vLLM.*\[0, 2, 4\]"),
    "ids in vLLM's key alone": (
        "zlab", lambda c, t: c["dflash_config"].pop("target_layer_ids"), "those less one"
    ),
    "eagle ids twice": ("sglang-eagle3", on_top(**{IDS: [1, 2, 4]}), r"SGLang adds 1.*vLLM and llama.cpp"),
    "ids that are no list": ("sglang-eagle3", on_top(**{IDS: "2,3"}), "not a list of layers"),
    "block size twice": ("zlab", on_top(block_size=4), "block_size twice, and differently"),
    "depth twice": ("zlab", inside("dflash_config", num_target_layers=5), "num_target_layers twice"),
    "mask twice": ("zlab", on_top(mask_token_id=3), "mask_token_id twice"),
    "rope twice": ("zlab", on_top(rope_scaling=None), "the rope twice"),
    "theta twice": ("zlab", on_top(rope_theta=2.0), "rope_theta twice"),
    "a rope of pairs": ("zlab", on_top(is_neox_style=False), "is_neox_style = False is not supported"),
    "half a rope": ("sglang-eagle3", on_top(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "everything causal": (
        "zlab",
        lambda c, t: (c.pop("is_causal"), c["dflash_config"].update(causal=True)),
        "Write is_causal: true",
    ),
    "half a DFlash 2": (
        "zlab", on_top(architectures=["DFlash2DraftModel"]), "needs dflash_config.conv_kernel_size"
    ),
    "sinks": ("zlab", inside("dflash_config", attention_sink_bias=True), "attention_sink_bias = True"),
    "a selector": ("zlab", inside("dflash_config", selector_rank=256), "selector_top_k go together"),
    "a selector elsewhere": ("zlab", on_top(selector_rank=256), "selector_rank = 256"),
    "a hidden head": ("zlab", on_top(outpace={"markov_rank": 9}), "belong to a OutpaceDFlashDraftModel"),
    "Domino": ("zlab", inside("dflash_config", shift_label=True), "shift_label = True"),
    "softcap": ("zlab", on_top(final_logit_softcapping=30.0), "final_logit_softcapping = 30"),
    "gelu": ("zlab", on_top(hidden_act="gelu"), "hidden_act"),
    "windows by use_swa": ("zlab", inside("dflash_config", use_swa=True, swa_window_size=8), "use_swa True"),
    "half a vocabulary": ("zlab", on_top(draft_vocab_size=32), "draft_vocab_size 32"),
    "another width": ("speculators", on_top(target_hidden_size=64), "not the draft's own width"),
    "speculators' half vocabulary": ("speculators", on_top(draft_vocab_size=32), "over 32 of 290"),
    "speculators' Llama": (
        "speculators", inside("transformer_layer_config", model_type="llama"), "'llama' is not supported"
    ),
    "speculators' ids": ("speculators", lambda c, t: c.pop("aux_hidden_state_layer_ids"), "vLLM needs it"),
    "speculators' anchor": ("speculators", on_top(sample_from_anchor=True), "sample_from_anchor = True"),
    "a flag that is a word": ("sglang-eagle3", on_top(norm_output="yes"), "norm_output is 'yes'"),
    "a layer too few": ("sglang-eagle3", on_top(num_hidden_layers=2), "missing in the checkpoint: layers.1"),
    "no mask": ("sglang-eagle3", on_top(parallel_drafting=True), "missing in the checkpoint: mask_"),
    "mask too large": (
        "sglang-eagle3", on_top(parallel_drafting=True, ptd_token_id=samples.VOCAB), "mask_token_id 290"
    ),
    "no flag": ("sglang-eagle3", on_top(parallel_drafting="yes"), "not true or false"),
    "layers of two kinds": (
        "sglang-eagle3",
        on_top(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=7),
        "layers of one kind",
    ),
    "biases": ("sglang-eagle3", on_top(attention_bias=True), "q, k and v have none"),
    "not quite a map": (
        "sglang-eagle3", lambda c, t: t["d2t"].__setitem__(3, t["d2t"][2] - 1), "does not give 37 different"
    ),
    "a map of float": ("sglang-eagle3", lambda c, t: t.update(d2t=t["d2t"].float()), "must be int64"),
    "no map": ("sglang-eagle3", lambda c, t: (t.pop("d2t"), t.pop("t2d")), "needs d2t"),
    "half a map": ("sglang-eagle3", lambda c, t: t.pop("d2t"), "left over in the checkpoint: t2d"),
    "a tensor too many": ("zlab", lambda c, t: t.update(gate=torch.ones(3)), "gate"),
    "a tensor too few": ("zlab", lambda c, t: t.pop("norm.weight"), "norm.weight"),
    "a tensor twice": (
        "zlab", lambda c, t: t.update({"model.norm.weight": t["norm.weight"].clone()}), "again"
    ),
    "fc of two states": (
        "zlab", lambda c, t: t.update({"fc.weight": torch.ones(96, 192)}), r"3 \(target_layer_ids\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_must_not_be_guessed(edited, case):
    name, edit, given = REFUSED[case]
    draft = samples.dflash() if FORMATS[name].kind == "DFlash" else samples.eagle3()
    folder = edited(draft, name, edit)
    with pytest.raises(ValueError, match=given) as note:
        read_draft(folder)
    assert len(str(note.value)) < 600


def test_windows_whose_causality_is_not_given(edited):
    quiet = edited(samples.dflash(**samples.WINDOWS), "zlab", inside("dflash_config", causal=False))
    assert not read_draft(quiet)[1].config.causal  # is_causal reports it too
    nested = edited(
        samples.dflash(**samples.WINDOWS),
        "zlab",
        lambda c, t: (c.pop("is_causal"), c["dflash_config"].update(causal=False)),
    )
    with pytest.raises(LoadError, match="Write is_causal: false"):
        read_draft(nested)


def test_an_eagle3_is_no_dflash(tmp_path):
    export_draft(samples.eagle3(), "sglang-eagle3", tmp_path / "e")
    with pytest.raises(LoadError, match="is an EAGLE-3, where a DFlash is needed"):
        load_dflash(tmp_path / "e")


# ---- damage -----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


DRAFTS = {"DFlash": samples.dflash(**samples.MIXED), "EAGLE-3": samples.eagle3()}
FOLDERS = {name: chosen for name, chosen in FORMATS.items() if isinstance(chosen, FolderFormat)}


def places(config):
    return [(config, key) for key in config] + [
        (inner, key) for inner in config.values() if isinstance(inner, dict) for key in inner
    ]


@pytest.mark.parametrize("name", FOLDERS)
def test_any_value_anywhere_is_read_or_refused(target, name):
    """And what preflight states of it is reported, not raised."""
    chosen = FOLDERS[name]
    good = chosen.to_hf(DRAFTS[chosen.kind], target)
    known = None if name == "zlab" else target

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def read(data):
        config = copy.deepcopy(good)
        for _ in range(data.draw(st.integers(1, 2))):
            where, key = data.draw(st.sampled_from(places(config)))
            where[key] = data.draw(JSON)
        try:
            chosen.parse(ConfigFile(where="fuzz", values=copy.deepcopy(config), target=known))
        except ValueError as error:
            assert len(str(error)) < 700
        file = ConfigFile(where="fuzz", values=config, target=target)
        try:
            file.check_types()
        except ValueError:
            return
        files = Files(config=config, specs={}, get=None)
        for meant in chosen.views(file).values():
            assert all(isinstance(words, str) for words in meant.values())
            find_errors(files, target, meant)
        find_notes(files, target)

    read()


ODD = (None, True, -1, 0, 2**40, 1.5, "x", [], [0], ["x"], [-1.0], {}, {"a": 1})


@pytest.mark.parametrize("rope", ["yarn", "llama3"])
@pytest.mark.parametrize("make", [samples.dflash, samples.eagle3])
def test_any_value_in_the_record_of_a_gguf_draft_is_read_or_refused(target, tmp_path, make, rope):
    path = tmp_path / "draft.gguf"
    draft = make(rope=samples.ROPES[rope])
    export_draft(draft, "gguf", path, target)
    chosen = gguf.DFLASH_FORMAT if make is samples.dflash else gguf.EAGLE3_FORMAT
    header, file = chosen.open(path, target)
    record = json.loads(file.values["outpace.draft"])
    for key, value in itertools.product(record["config"] | record["config"]["rope"], ODD):
        bad = copy.deepcopy(record)
        (bad["config"]["rope"] if key in record["config"]["rope"] else bad["config"])[key] = value
        metadata = header.metadata | {"outpace.draft": json.dumps(bad)}
        changed = dataclasses.replace(header, metadata=metadata)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gguf, "read_header", lambda path, changed=changed: changed)
                build_draft(chosen.read(path, target)[0])
        except ValueError as error:
            assert len(str(error)) < 700


@pytest.mark.parametrize("factors", [[0.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [float("nan"), 1.0, 1.0], [1.0, 1.0]])
def test_rope_factors_of_a_gguf_draft_are_above_zero(target, tmp_path, factors):
    path = tmp_path / "draft.gguf"
    config = samples.dflash().config
    keys = gguf.dflash_keys(config)
    gguf.write_file(path, "dflash", keys, {gguf.ROPE_FACTORS: torch.tensor(factors)}, config)
    path.write_bytes(path.read_bytes().replace(b"outpace.draft", b"someone.draft"))
    with pytest.raises(LoadError, match="must hold 3 finite numbers above 0"):
        read_draft(path, target)


@pytest.mark.parametrize("record", ["outpace.draft", "someone.draft"])
@pytest.mark.parametrize("make", [samples.dflash, samples.eagle3])
def test_flipped_bytes_of_a_gguf_draft_are_read_or_refused(target, tmp_path, make, record):
    path, rng = tmp_path / "draft.gguf", random.Random(3)
    export_draft(make(), "gguf", path, target)
    raw = path.read_bytes().replace(b"outpace.draft", record.encode())
    ends = [raw.index(architecture) for architecture in (b"block_count", record.encode())]
    refused = 0
    for at in [rng.randrange(start, start + 900) for start in ends for _ in range(60)]:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :])
        try:
            read_draft(path, target)
        except ValueError:
            refused += 1
    assert refused > 30
