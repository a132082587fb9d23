"""Drafts that others wrote: the published configs, what they leave out, and what must not be guessed."""

import copy
import json
import math
from dataclasses import replace

import draft_samples as samples
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outpace.drafts import (
    format_sglang_eagle3,
    format_speculators,
    format_speculators_eagle3,
    format_transformers,
    format_zlab,
)
from outpace.drafts.faults import Files, find_faults, find_notes
from outpace.drafts.files import FORMATS, detect, read_draft
from outpace.drafts.format_keys import check_types
from outpace.drafts.formats import canonical_rope, dflash_shapes, eagle3_shapes
from outpace.drafts.load import load_dflash
from outpace.export import export_draft
from outpace.models.config import FULL
from outpace.preflight import FOLDERS
from outpace.weights.checkpoint import LoadError

IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
# the sizes of z-lab's DFlash for gpt-oss-20b
ZLAB_GPT_OSS = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 8,
    "num_target_layers": 24,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "hidden_size": 2880,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 7680,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "rope_theta": 150000,
    "rope_scaling": YARN,
    "layer_types": [FULL] * 8,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 8,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "dtype": "bfloat16",
    "transformers_version": "4.57.1",
}
# SpecForge's recipe for an EAGLE-3 of gpt-oss-20b: layers nested only, no rope
SPECFORGE_GPT_OSS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "eagle_config": {IDS: [1, 11, 21], "use_aux_hidden_state": True},
    "hidden_size": 2880,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 17280,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
}
# speculators' EAGLE-3 for gpt-oss-20b
SPECULATORS_GPT_OSS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.2.0",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "openai/gpt-oss-20b"}},
    "draft_vocab_size": 32000,
    "target_hidden_size": None,
    "norm_before_residual": True,
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 2880,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return samples.target_files(tmp_path_factory.mktemp("target"))


@pytest.fixture
def edited(target, tmp_path):
    """edited(draft, format, edit) -> the folder after `edit(config, tensors)`."""

    def make(draft, name, edit):
        folder = tmp_path / name
        export_draft(draft, name, folder, target)
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        edit(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


# ---- the published configs -----------------------------------------------------------------------------


def test_z_labs_gpt_oss_20b():
    """1.46 GiB in bfloat16 were published; the shapes come to that."""
    config, notes = format_zlab.parse(ZLAB_GPT_OSS, "z-lab")
    assert notes == []
    assert config.target_layer_ids == (1, 6, 11, 16, 21) and config.block_size == 8
    assert config.attention_bias and config.mask_token_id == 200000
    assert (config.rope.kind, config.rope.theta, config.rope.truncate) == ("yarn", 150000.0, False)
    size = sum(math.prod(shape) for shape in dflash_shapes(config).values())
    assert 2 * size / 2**30 == pytest.approx(1.46, abs=0.005)
    again = format_zlab.to_hf(config)
    assert format_zlab.parse(again, "again") == (config, [])
    assert again["dflash_config"]["block_size"] == 8 and again[IDS] == [2, 7, 12, 17, 22]


def test_specforges_eagle3_of_gpt_oss_20b():
    """Only SGLang reads these layers; no rope is given, which everyone reads as 10,000."""
    config, notes = format_sglang_eagle3.parse(SPECFORGE_GPT_OSS, "SpecForge", None)
    assert config.layer_ids == (1, 11, 21) and config.target_hidden_size == 2880
    assert config.rope.theta == 10000 and config.max_position_embeddings == 4096
    assert ["nested only" in n for n in notes] == [True, False] and "no rope_theta" in notes[1]
    shapes = eagle3_shapes(config, embedding=False, head=True, mapped=True)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (4096, 5760)
    assert shapes["fc.weight"] == (2880, 8640) and shapes["lm_head.weight"] == (32000, 2880)


def deep(target, layers=24):
    """The tiny target, said to be as deep as gpt-oss-20b."""
    return replace(target, config=replace(target.config, num_layers=layers, layer_types=(FULL,) * layers))


def test_speculators_eagle3_of_gpt_oss_20b(target):
    """No list of layers: everyone's default, by the depth of the target."""
    with pytest.raises(LoadError, match=f"lists no {IDS}: engines choose by the target's depth"):
        format_speculators_eagle3.parse(SPECULATORS_GPT_OSS, "speculators", None)
    config, notes = format_speculators_eagle3.parse(SPECULATORS_GPT_OSS, "speculators", deep(target))
    assert config.layer_ids == (1, 11, 20)  # hidden_states 2, L // 2, L - 3
    assert "hidden_states [2, 12, 21]" in notes[0]
    assert config.norm_before_residual and not config.norm_before_fc and config.rope.theta == 500000


@pytest.mark.parametrize(
    ("architecture", "more", "said"),
    [
        ("DFlash2DraftModel", {}, "a DFlash 2: it has convolutions and a selector"),
        ("DSparkDraftModel", {}, "a DSpark: it has a Markov head"),
        ("Eagle3Qwen3ForCausalLM", {}, "an EAGLE-3 with q/k norms"),
        ("LlamaForCausalLMEagle", {}, "an EAGLE-1"),
        ("LlamaForCausalLM", {}, "is no draft that is known here"),
        ("PEagle", {"speculators_model_type": "peagle"}, "'peagle' is neither a DFlash nor an EAGLE-3"),
    ],
)
def test_other_drafts_are_named(tmp_path, architecture, more, said):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **more}))
    with pytest.raises(LoadError, match=said):
        detect(tmp_path)


# ---- what others leave out, or say in another way ---------------------------------------------------------


def without_our_words(config, tensors):
    config.pop("outpace")


@pytest.mark.parametrize("name", ["speculators", "transformers"])
def test_a_dflash_that_does_not_say_how_deep_its_target_is(edited, target, name):
    folder = edited(samples.dflash(), name, without_our_words)
    with pytest.raises(LoadError, match="how many layers its target has: name the target"):
        read_draft(folder)
    samples.same(samples.dflash(), read_draft(folder, target)[1])


def test_the_targets_copies_are_known_by_their_values(edited, target):
    """speculators' files of others: an embedding that is the target's is not the draft's own."""
    draft = samples.eagle3()
    folder = edited(draft, "speculators-eagle3", without_our_words)
    _, found, notes = read_draft(folder, target)
    samples.same(draft, found)
    assert any("embed_tokens.weight left out: it is the target's" in note for note in notes)
    _, alone, notes = read_draft(folder)
    assert alone.own_embedding and any("name the target to have the two compared" in n for n in notes)


@pytest.mark.parametrize("variant", ["yarn", "rounded yarn", "llama3", "linear", "some windows"])
def test_a_gguf_of_others(target, tmp_path, variant):
    """Without our record: llama.cpp's keys alone, and of the target's size and rope what they leave open."""
    draft = samples.dflash(**samples.DFLASHES[variant])
    rope = canonical_rope(draft.config.rope)
    known = replace(target, config=replace(target.config, rope=rope))
    path = tmp_path / "d.gguf"
    export_draft(draft, "gguf", path, target)
    path.write_bytes(path.read_bytes().replace(b"outpace.draft", b"someone.draft"))
    _, found, notes = read_draft(path, known)
    samples.same(draft, found)
    assert [n for n in notes if "whose rope is taken" in n] == notes
    with pytest.raises(LoadError, match=r"name the target"):
        read_draft(path)


def test_a_rope_of_factors_is_kept_where_the_targets_is_another(target, tmp_path):
    draft = samples.eagle3(rope=samples.ROPES["llama3"])
    path = tmp_path / "e.gguf"
    export_draft(draft, "gguf", path, target)
    path.write_bytes(path.read_bytes().replace(b"outpace.draft", b"someone.draft"))
    _, found, notes = read_draft(path, target)
    assert found.config.rope.kind == "factors" and "which only GGUF can say" in notes[0]
    with pytest.raises(ValueError, match="one factor per frequency"):
        export_draft(found, "sglang-eagle3", tmp_path / "e")
    export_draft(found, "gguf", tmp_path / "again.gguf", target)
    samples.same(found, read_draft(tmp_path / "again.gguf")[1])


def test_a_record_that_was_damaged(target, tmp_path):
    export_draft(samples.dflash(), "gguf", tmp_path / "d.gguf", target)
    raw = (tmp_path / "d.gguf").read_bytes()
    for there, instead in ((b'"rms_norm_eps"', b'"rms_norm_epz"'), (b'"widened": {', b'"widened": [')):
        (tmp_path / "x.gguf").write_bytes(raw.replace(there, instead))
        with pytest.raises(LoadError, match="damaged"):
            read_draft(tmp_path / "x.gguf")


def test_a_mask_by_its_text(edited, target):
    def edit(config, tensors):
        del config["dflash_config"]["mask_token_id"]

    folder = edited(samples.dflash(), "zlab", edit)
    with pytest.raises(LoadError, match=r"knows no '<\|MASK\|>'"):
        read_draft(folder)
    samples.same(samples.dflash(), read_draft(folder, target)[1])


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_names_with_prefixes(edited, prefix):
    def edit(config, tensors):
        for name in list(tensors):
            if name not in ("d2t", "t2d"):
                tensors[prefix + name.replace("midlayer", "layers.0")] = tensors.pop(name)

    samples.same(samples.eagle3(), read_draft(edited(samples.eagle3(), "sglang-eagle3", edit))[1])


def test_a_missing_t2d_is_made(edited):
    folder = edited(samples.eagle3(), "sglang-eagle3", lambda c, t: t.pop("t2d"))
    _, found, notes = read_draft(folder)
    samples.same(samples.eagle3(), found)
    assert notes == ["t2d is not in the files: made from d2t"]


def test_sglangs_older_norms_per_state(edited):
    draft = samples.eagle3(fc_norm=True)

    def edit(config, tensors):
        config["use_aux_norm"] = config.pop("fc_norm")
        for i, place in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{place}.weight"] = tensors.pop(f"fc_norm.{i}.weight")

    samples.same(draft, read_draft(edited(draft, "sglang-eagle3", edit))[1])


def test_keys_that_nobody_reads_are_said(edited):
    def edit(config, tensors):
        config["flavour"] = config["dflash_config"]["colour"] = "blue"

    _, found, notes = read_draft(edited(samples.dflash(), "zlab", edit))
    samples.same(samples.dflash(), found)
    assert len(notes) == 2 and "flavour" in notes[0] and "dflash_config.colour" in notes[1]


# ---- what must not be guessed -----------------------------------------------------------------------------


def inside(key, **said):
    return lambda c, t: c[key].update(said)


def on_top(**said):
    return lambda c, t: c.update(said)


REFUSED = {  # name -> format, edit, what is said
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
    "everything causal": ("zlab", on_top(is_causal=True), "full_attention layers causal too"),
    "sinks": ("zlab", inside("dflash_config", attention_sink_bias=True), "attention_sink_bias = True"),
    "a selector": ("zlab", inside("dflash_config", selector_rank=256), "selector_rank = 256"),
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
    "two layers": ("sglang-eagle3", on_top(num_hidden_layers=2), "2 layers"),
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
    name, edit, said = REFUSED[case]
    draft = samples.dflash() if FORMATS[name].kind == "DFlash" else samples.eagle3()
    folder = edited(draft, name, edit)
    with pytest.raises(ValueError, match=said) as told:
        read_draft(folder)
    assert len(str(told.value)) < 600


def test_windows_whose_causality_is_not_said(edited):
    silent = edited(samples.dflash(**samples.WINDOWS), "zlab", inside("dflash_config", causal=False))
    assert not read_draft(silent)[1].config.causal  # is_causal says so too
    nested = edited(
        samples.dflash(**samples.WINDOWS),
        "zlab",
        lambda c, t: (c.pop("is_causal"), c["dflash_config"].update(causal=False)),
    )
    with pytest.raises(LoadError, match="Write is_causal: false"):
        read_draft(nested)


def test_an_eagle3_is_not_run_yet(target, tmp_path):
    export_draft(samples.eagle3(), "sglang-eagle3", tmp_path / "e")
    with pytest.raises(LoadError, match="is an EAGLE-3"):
        load_dflash(tmp_path / "e")


# ---- damage -----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def configs(target):
    """Format -> a config.json that is right, and its parser."""
    d, e = samples.dflash(**samples.MIXED), samples.eagle3()
    return {
        "zlab": (format_zlab.to_hf(d.config), format_zlab.parse),
        "speculators": (format_speculators.to_hf(d.config, target), format_speculators.parse),
        "transformers": (format_transformers.to_hf(d.config), format_transformers.parse),
        "sglang-eagle3": (format_sglang_eagle3.to_hf(e), format_sglang_eagle3.parse),
        "speculators-eagle3": (format_speculators_eagle3.to_hf(e, target), format_speculators_eagle3.parse),
    }


def places(config):
    return [(config, key) for key in config] + [
        (inner, key) for inner in config.values() if isinstance(inner, dict) for key in inner
    ]


@pytest.mark.parametrize("name", FOLDERS)
def test_any_value_anywhere_is_read_or_refused(target, name):
    """And what preflight says of it is said, not raised."""
    good, parse = configs(target)[name]
    more = (False, None) if name == "zlab" else (target,)

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def read(data):
        config = copy.deepcopy(good)
        for _ in range(data.draw(st.integers(1, 2))):
            where, key = data.draw(st.sampled_from(places(config)))
            where[key] = data.draw(JSON)
        try:
            parse(copy.deepcopy(config), "fuzz", *more)
        except ValueError as error:
            assert len(str(error)) < 700
        try:
            check_types("fuzz", config)
        except ValueError:
            return
        files = Files(config=config, specs={}, get=None)
        for meant in FOLDERS[name](config, set(), target.config).values():
            assert all(isinstance(words, str) for words in meant.values())
            find_faults(files, target, meant)
        find_notes(files, target)

    read()
