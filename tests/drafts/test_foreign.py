"""Drafts that others wrote: the published configs, what they leave out, and what must not be proposed."""

import json
import math
from dataclasses import replace

import draft_samples as samples
import pytest

from outpace.checkpoint.open import LoadError
from outpace.formats import gguf, sglang_eagle3, speculators, zlab
from outpace.formats.export import export_draft
from outpace.formats.fields import ConfigFile
from outpace.formats.load import detect, read_draft
from outpace.formats.spec import DFlashDraft, canonical_rope, dflash_shapes, eagle3_shapes
from outpace.models.config import FULL

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


def parsed(parse, hf, target=None):
    file = ConfigFile(where="a draft", values=hf, target=target)
    return parse(file), file.notes


# ---- the published configs -----------------------------------------------------------------------------


def test_z_labs_gpt_oss_20b():
    """1.46 GiB in bfloat16 were published; the shapes come to that."""
    config, notes = parsed(zlab.parse, ZLAB_GPT_OSS)
    assert notes == []
    assert config.target_layer_ids == (1, 6, 11, 16, 21) and config.block_size == 8
    assert config.attention_bias and config.mask_token_id == 200000
    assert (config.rope.kind, config.rope.theta, config.rope.truncate) == ("yarn", 150000.0, False)
    size = sum(math.prod(shape) for shape in dflash_shapes(config).values())
    assert 2 * size / 2**30 == pytest.approx(1.46, abs=0.005)
    again = zlab.to_hf(DFlashDraft(config=config, tensors={}))
    assert parsed(zlab.parse, again) == (config, [])
    assert again["dflash_config"]["block_size"] == 8 and again[IDS] == [2, 7, 12, 17, 22]


def test_specforges_eagle3_of_gpt_oss_20b():
    """Only SGLang reads these layers; no rope is given, which everyone reads as 10,000."""
    config, notes = parsed(sglang_eagle3.parse, SPECFORGE_GPT_OSS)
    assert config.layer_ids == (1, 11, 21) and config.target_hidden_size == 2880
    assert config.rope.theta == 10000 and config.max_position_embeddings == 4096
    assert ["nested only" in n for n in notes] == [True, False] and "no rope_theta" in notes[1]
    shapes = eagle3_shapes(config, embedding=False, head=True, mapped=True)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (4096, 5760)
    assert shapes["fc.weight"] == (2880, 8640) and shapes["lm_head.weight"] == (32000, 2880)


def deep(target, layers=24):
    """The tiny target, stated to be as deep as gpt-oss-20b."""
    return replace(target, config=replace(target.config, num_layers=layers, layer_types=(FULL,) * layers))


def test_speculators_eagle3_of_gpt_oss_20b(target):
    """No list of layers: everyone's default, by the depth of the target."""
    with pytest.raises(LoadError, match=f"lists no {IDS}: engines choose by the target's depth"):
        parsed(speculators.parse_eagle3, SPECULATORS_GPT_OSS)
    config, notes = parsed(speculators.parse_eagle3, SPECULATORS_GPT_OSS, deep(target))
    assert config.layer_ids == (1, 11, 20)  # hidden_states 2, L // 2, L - 3
    assert "hidden_states [2, 12, 21]" in notes[0]
    assert config.norm_before_residual and not config.norm_before_fc and config.rope.theta == 500000


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        ("DSparkDraftModel", {}, "a DSpark: it has a Markov head"),
        ("Eagle3Qwen3ForCausalLM", {}, "an EAGLE-3 with q/k norms"),
        ("LlamaForCausalLMEagle", {}, "an EAGLE-1"),
        ("LlamaForCausalLM", {}, "is no draft that is known here"),
        ("MtpDraft", {"speculators_model_type": "mtp"}, "'mtp' is neither a DFlash nor an EAGLE-3"),
    ],
)
def test_other_drafts_are_named(tmp_path, architecture, more, message):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **more}))
    with pytest.raises(LoadError, match=message):
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
    _, result, notes = read_draft(folder, target)
    samples.same(draft, result)
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
    _, result, notes = read_draft(path, known)
    samples.same(draft, result)
    assert [n for n in notes if "its rope is taken" in n] == notes
    with pytest.raises(LoadError, match=r"name the target"):
        read_draft(path)


@pytest.mark.parametrize("key", ["sample_from_anchor", "selector_rank", "logit_scale"])
def test_a_gguf_of_its_successors(target, tmp_path, key):
    value = {"sample_from_anchor": True, "selector_rank": 256, "logit_scale": 0.5}[key]
    draft = samples.dflash()
    keys = gguf.dflash_keys(draft.config) | {f"dflash.{key}": value}
    gguf.write_file(tmp_path / "d.gguf", "dflash", keys, {}, draft.config)
    with pytest.raises(LoadError, match=f"dflash.{key} is not supported"):
        read_draft(tmp_path / "d.gguf", target)


def test_a_rope_of_factors_is_kept_where_the_targets_is_another(target, tmp_path):
    draft = samples.eagle3(rope=samples.ROPES["llama3"])
    path = tmp_path / "e.gguf"
    export_draft(draft, "gguf", path, target)
    path.write_bytes(path.read_bytes().replace(b"outpace.draft", b"someone.draft"))
    _, result, notes = read_draft(path, target)
    assert result.config.rope.kind == "factors" and "which only GGUF can say" in notes[0]
    with pytest.raises(ValueError, match="one factor per frequency"):
        export_draft(result, "sglang-eagle3", tmp_path / "e")
    export_draft(result, "gguf", tmp_path / "again.gguf", target)
    samples.same(result, read_draft(tmp_path / "again.gguf")[1])


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
    _, result, notes = read_draft(folder)
    samples.same(samples.eagle3(), result)
    assert notes == ["t2d is not in the files: made from d2t"]


def test_sglangs_older_norms_per_state(edited):
    draft = samples.eagle3(fc_norm=True)

    def edit(config, tensors):
        config["use_aux_norm"] = config.pop("fc_norm")
        for i, place in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{place}.weight"] = tensors.pop(f"fc_norm.{i}.weight")

    samples.same(draft, read_draft(edited(draft, "sglang-eagle3", edit))[1])


def test_keys_that_nobody_reads_are_reported(edited):
    def edit(config, tensors):
        config["flavour"] = config["dflash_config"]["colour"] = "blue"

    _, result, notes = read_draft(edited(samples.dflash(), "zlab", edit))
    samples.same(samples.dflash(), result)
    assert len(notes) == 2 and "flavour" in notes[0] and "dflash_config.colour" in notes[1]
