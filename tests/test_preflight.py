"""Preflight: each known slip is planted in files that were right, and seen with the name of who misreads."""

import draft_samples as samples
import gguf
import pytest
import torch
from rich.console import Console

from outpace.checkpoint.shipped import EMBEDDED
from outpace.formats.convert import write_gguf
from outpace.formats.export import export_draft, open_target_files
from outpace.formats.preflight import CHECKS, ENGINES, PreflightCell, preflight, show_preflight

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return samples.target_files(tmp_path_factory.mktemp("target"))


@pytest.fixture
def planted(target, tmp_path):
    """planted(draft, format, edit) -> what preflight finds after `edit(config, tensors)`."""

    def plant(draft, name, edit=lambda config, tensors: None, engines=ENGINES):
        return preflight(samples.edited(tmp_path, target, draft, name, edit), target, engines)

    return plant


def row(result, check):
    return next(r for r in result.rows if r.check == check)


def apart(result, check):
    """Who differs, and what each takes."""
    return {engine: c.message for engine, c in row(result, check).cells.items() if c.state == "differs"}


def faults(result):
    return {r.check: r.fault for r in result.rows if r.fault}


PLAIN = {"rope": samples.ROPES["rounded yarn"]}  # what every engine can say


@pytest.mark.parametrize("name", ["zlab", "transformers", "gguf"])
def test_a_plain_dflash_is_clean_everywhere(name, target, tmp_path):
    out = tmp_path / ("d.gguf" if name == "gguf" else name)
    export_draft(samples.dflash(**PLAIN), name, out, target)
    result = preflight(out, target)
    assert result.clean and not result.refused
    assert [r.check for r in result.rows] == list(CHECKS["DFlash"])
    states = {c.state for r in result.rows for c in r.cells.values()}
    assert states <= {"same", "export", "refuses", ""} and "same" in states and "export" in states


@pytest.mark.parametrize("name", ["sglang-eagle3", "speculators-eagle3", "gguf-eagle3"])
def test_a_plain_eagle3_is_clean_everywhere(name, target, tmp_path):
    out = tmp_path / ("e.gguf" if name.startswith("gguf") else name)
    export_draft(samples.eagle3(), name, out, target)
    assert preflight(out, target).clean


# ---- layers ------------------------------------------------------------------------------------------


def test_nested_layer_ids_only(planted):
    """The worked case of gpt-oss-20b: SGLang reads what was trained, vLLM and llama.cpp their defaults."""
    result = planted(samples.eagle3(layer_ids=(1, 2, 4)), "sglang-eagle3", lambda c, t: c.pop(IDS))
    assert row(result, "layer ids").message == "hs 2, 3, 5"
    assert apart(result, "layer ids") == {"vLLM": "hs 2, 3, 3", "llama.cpp": "hs 2, 3, 3"}
    assert "every place" in row(result, "layer ids").fix and not result.clean


def test_layer_ids_on_top_only(planted):
    result = planted(samples.eagle3(), "sglang-eagle3", lambda c, t: c["eagle_config"].pop(IDS))
    assert apart(result, "layer ids") == {"SGLang": "hs 2, 3, 3", "SpecForge": "hs 2, 3, 3"}


def test_layer_ids_off_by_one_for_vllm(planted):
    """The top-level key counts hidden_states: the layer ids written there are one too low."""
    result = planted(samples.dflash(**PLAIN), "zlab", lambda c, t: c.update({IDS: [0, 2, 4]}))
    assert apart(result, "layer ids") == {"vLLM": "hs 0, 2, 4"}
    assert "hidden_states to read twice, and differently" in result.refused and not result.clean


def test_layers_beyond_the_target(planted):
    def edit(config, tensors):
        config["eagle_config"][IDS], config[IDS] = [1, 2, 7], [2, 3, 8]

    assert "hs 8 is no output" in faults(planted(samples.eagle3(), "sglang-eagle3", edit))["layer ids"]


def test_fc_of_another_width(planted):
    def edit(config, tensors):
        config["dflash_config"]["target_layer_ids"], config[IDS] = [0, 2], [1, 3]

    value = faults(planted(samples.dflash(), "zlab", edit))["hidden sizes"]
    assert "fc takes 288 columns, and 2 states of 96 are 192" in value


# ---- rope, window, who sees whom -----------------------------------------------------------------------


def without_rope(config, tensors):
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key)


def test_no_rope_in_a_dflash(planted):
    result = planted(samples.dflash(), "zlab", without_rope)
    assert "no rope_theta" in result.refused
    assert row(result, "rope").cells["SGLang"].message == "theta 1e+06"
    assert apart(result, "rope") == {"llama.cpp": "theta 10000"}


def test_no_rope_in_an_eagle3_is_read_alike_but_noted(planted):
    """SpecForge's gpt-oss config: no rope, 4,096 positions, for a target of 135,168 with YaRN."""
    result = planted(samples.eagle3(), "sglang-eagle3", without_rope)
    assert result.clean
    assert "the target has 15,000" in row(result, "rope").note
    assert "135,168" in row(result, "positions").note


def test_the_rope_given_twice(planted):
    result = planted(samples.dflash(**PLAIN), "zlab", lambda c, t: c.update(rope_scaling=None))
    assert "gives the rope twice, and differently" in result.refused
    assert set(apart(result, "rope")) == {"vLLM", "llama.cpp"}


def test_yarn_that_llama_cpp_would_round(planted):
    result = planted(samples.dflash(), "zlab")
    assert set(apart(result, "rope")) == {"llama.cpp"}
    assert "export --to gguf" in row(result, "rope").fix


def test_the_export_to_gguf_does_not_round_it(target, tmp_path):
    export_draft(samples.dflash(), "gguf", tmp_path / "d.gguf", target)
    assert preflight(tmp_path / "d.gguf", target).clean


def test_a_window_off_by_one(planted):
    """vLLM prefers swa_window_size, SGLang and z-lab read sliding_window."""
    draft = samples.dflash(**PLAIN, **samples.WINDOWS)
    result = planted(draft, "zlab", lambda c, t: c["dflash_config"].update(swa_window_size=6))
    assert apart(result, "window") == {"vLLM": "6 in layers 0, 1, 2", "llama.cpp": "6 in layers 0, 1, 2"}
    assert "swa_window_size 6" in result.refused


def test_windows_that_vllm_alone_reads(planted):
    def edit(config, tensors):
        config["dflash_config"].update(use_swa=True, swa_window_size=8)

    result = planted(samples.dflash(**PLAIN), "zlab", edit)
    wide = "8 in layers 0, 1, 2"
    assert row(result, "window").cells["SGLang"] == PreflightCell("same", "none")
    assert apart(result, "window") == {"vLLM": wide, "llama.cpp": wide}
    assert "use_swa True" in result.refused


def test_transformers_counts_its_window_without_the_token_itself(planted):
    result = planted(samples.dflash(**PLAIN, **samples.WINDOWS), "transformers")
    assert row(result, "window").cells["transformers"] == PreflightCell("same", "7 in layers 0, 1, 2")


def test_a_window_that_nobody_reads(planted):
    draft = samples.dflash(**PLAIN, **samples.WINDOWS)
    result = planted(draft, "zlab", lambda c, t: c.update(use_sliding_window=False))
    assert row(result, "window").cells["SGLang"].state == "refuses"
    assert apart(result, "window") == {"llama.cpp": "none"}
    assert "Set use_sliding_window to true" in result.refused


def test_a_window_in_speculators_own_code(planted):
    result = planted(samples.dflash(**PLAIN, **samples.WINDOWS), "speculators")
    assert "anchors it at the block's start" in apart(result, "window")["speculators"]
    assert result.refused == ""


@pytest.mark.parametrize(
    ("edit", "differs"),
    [
        (lambda c, t: c.pop("is_causal"), {"llama.cpp": "both ways"}),
        (
            lambda c, t: (c.pop("is_causal"), c["dflash_config"].update(causal=False)),
            {"vLLM": "both ways", "llama.cpp": "both ways"},
        ),
    ],
    ids=["silence", "where only vLLM looks"],
)
def test_windows_without_is_causal(planted, edit, differs):
    """Trained both ways, the file silent: SGLang and z-lab's code take windows as causal."""
    draft = samples.dflash(**PLAIN, **samples.WINDOWS)
    result = planted(draft, "zlab", edit)
    assert row(result, "block sees").cells["SGLang"].message == "back only"
    assert apart(result, "block sees") == differs


def test_speculators_silence_about_causality(planted):
    draft = samples.dflash(**PLAIN, **samples.WINDOWS)
    result = planted(draft, "speculators", lambda c, t: c.pop("sliding_window_non_causal"))
    assert "without sliding_window_non_causal" in result.refused
    assert apart(result, "block sees") == {"speculators": "back only"}


def test_a_false_that_older_vllm_applies_to_full_layers(planted):
    result = planted(
        samples.dflash(**PLAIN), "speculators", lambda c, t: c.update(sliding_window_non_causal=False)
    )
    assert apart(result, "block sees") == {"vLLM": "back only"}


# ---- tokens --------------------------------------------------------------------------------------------


def test_a_mask_that_text_is_made_of(planted, target):
    word = target.tokenizer().encode("for").ids[0]
    result = planted(
        samples.dflash(**PLAIN), "zlab", lambda c, t: c["dflash_config"].update(mask_token_id=word)
    )
    assert "which text is made of" in faults(result)["mask token"]
    assert {c.state for c in row(result, "mask token").cells.values()} <= {"wrong", "export", ""}


def test_a_mask_beyond_the_vocabulary(planted):
    result = planted(samples.dflash(), "zlab", lambda c, t: c["dflash_config"].update(mask_token_id=290))
    assert "290 is outside the target's vocabulary" in faults(result)["mask token"] and result.refused


def test_a_mask_where_llama_cpp_does_not_look(planted):
    def edit(config, tensors):
        config["mask_token_id"] = config["dflash_config"].pop("mask_token_id")

    assert apart(planted(samples.dflash(**PLAIN), "zlab", edit), "mask token") == {"llama.cpp": "none"}


@pytest.mark.parametrize("key", ["sample_from_anchor", "shift_label"])
def test_another_anchor_slot(planted, key):
    result = planted(samples.dflash(**PLAIN), "zlab", lambda c, t: c["dflash_config"].update({key: True}))
    assert "proposes from another slot" in faults(result)["anchor slot"] and key in result.refused


def test_block_sizes_that_differ(planted):
    result = planted(samples.dflash(**PLAIN), "zlab", lambda c, t: c.update(block_size=8))
    assert "block_size twice, and differently" in result.refused
    assert row(result, "block size").cells["SGLang"].message == "5"


def test_d2t_that_is_absolute(planted):
    def edit(config, tensors):
        tensors["d2t"] += torch.arange(37)

    result = planted(samples.eagle3(), "sglang-eagle3", edit)
    assert "write offsets" in faults(result)["vocabulary"] and "write offsets" in result.refused


def test_t2d_that_marks_other_tokens(planted):
    result = planted(samples.eagle3(), "sglang-eagle3", lambda c, t: t.update(t2d=t["t2d"].roll(1)))
    assert "not those that t2d marks" in faults(result)["vocabulary"]


# ---- tensors ---------------------------------------------------------------------------------------------


def test_biases_in_an_eagle3(planted):
    bias = {"midlayer.self_attn.q_proj.bias": torch.zeros(24)}
    result = planted(samples.eagle3(), "sglang-eagle3", lambda c, t: t.update(bias))
    assert "q_proj.bias" in faults(result)["attention bias"]
    assert "SGLang would drop" in result.refused


def test_biases_that_the_config_promises(planted):
    result = planted(samples.dflash(**PLAIN), "zlab", lambda c, t: c.update(attention_bias=True))
    assert "hold no biases" in faults(result)["attention bias"] and "missing" in result.refused


def test_a_biased_draft_is_only_refused_by_llama_cpp_and_transformers(planted):
    """z-lab's gpt-oss-20b draft: fine in SGLang and vLLM; the others say no, nobody misreads it."""
    result = planted(samples.dflash(**PLAIN, attention_bias=True), "zlab")
    cells = row(result, "attention bias").cells
    assert result.clean and {e for e, c in cells.items() if c.state == "refuses"} == {
        "llama.cpp",
        "transformers",
    }


def test_an_own_embedding(planted):
    def edit(config, tensors):
        tensors["embed_tokens.weight"] = torch.ones(samples.VOCAB, 96)

    result = planted(samples.dflash(**PLAIN), "zlab", edit)
    assert set(apart(result, "embedding, head")) == {"vLLM", "llama.cpp"}
    assert "that is not the target's" in result.refused


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_precision_that_is_not_the_tensors(planted, dtype):
    draft = samples.dflash(torch.bfloat16, **PLAIN)
    result = planted(draft, "zlab", lambda c, t: c.update(dtype=dtype))
    assert result.clean and f"config.json specifies {dtype}" in row(result, "dtype").note


# ---- norms -----------------------------------------------------------------------------------------------


def test_norms_that_sglang_does_not_have(planted):
    result = planted(samples.eagle3(norm_before_residual=True, norm_before_fc=True), "sglang-eagle3")
    assert apart(result, "norms") == dict.fromkeys(("SGLang", "SpecForge"), "eps 1e-05, raw residual")


def test_a_norm_that_speculators_and_vllm_default_differently(planted):
    result = planted(samples.eagle3(), "speculators-eagle3", lambda c, t: c.pop("norm_before_residual"))
    assert "norm_before_residual is missing" in result.refused
    assert row(result, "norms").cells["vLLM"].message == "eps 1e-05, normed residual"
    assert apart(result, "norms") == {
        "speculators": "eps 1e-05, raw residual",
        "llama.cpp": "eps 1e-05, raw residual",
    }


def test_eagle_3_1_in_llama_cpp(planted):
    result = planted(samples.eagle3(norm_output=True), "sglang-eagle3")
    assert set(apart(result, "norms")) == {"llama.cpp", "SpecForge"}


def test_norm_output_false_takes_the_norm_before_the_head_away_in_specforge(planted):
    plain = planted(samples.eagle3(), "sglang-eagle3")
    assert plain.clean and row(plain, "norms").cells["SpecForge"].state == "same"
    false = planted(samples.eagle3(), "sglang-eagle3", lambda c, t: c.update(norm_output=False))
    assert apart(false, "norms") == {"SpecForge": "eps 1e-05, raw residual, none before the head"}


# ---- another target; one engine; what is shown ------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "check", "fault"),
    [
        ({"num_target_layers": 12}, "hidden sizes", "a target of 12 layers"),
        ({"vocab_size": 97}, "vocabulary", "a vocabulary of 97"),
    ],
)
def test_the_draft_of_another_target(planted, message, check, fault):
    assert fault in faults(planted(samples.dflash(**PLAIN), "zlab", lambda c, t: c.update(message)))[check]


def test_one_engine_at_a_time(planted):
    def look(*engines):
        draft = samples.eagle3(layer_ids=(1, 2, 4))
        return planted(draft, "sglang-eagle3", lambda c, t: c.pop(IDS), engines).clean

    assert look("SGLang") and not look("SGLang", "vLLM")
    with pytest.raises(ValueError, match="unknown engine TGI"):
        look("TGI")


def test_the_embedded_draft():
    """Read alike by the engines that load its format; llama.cpp's converter would round its YaRN, and
    speculators' code knows no such window."""
    result = preflight(EMBEDDED / "dflash", open_target_files("default"))
    assert result.refused == "" and not any(r.fault or r.note for r in result.rows)
    differs = {(r.check, e) for r in result.rows for e, c in r.cells.items() if c.state == "differs"}
    assert differs == {("rope", "llama.cpp"), ("window", "speculators")}


def test_what_is_shown_names_the_slip(planted, capsys):
    result = planted(samples.eagle3(layer_ids=(1, 2, 4)), "sglang-eagle3", lambda c, t: c.pop(IDS))
    show_preflight(result, Console(width=80))
    out = capsys.readouterr().out
    assert "layer ids: vLLM: hs 2, 3, 3" in out and "fix: " in out
    assert "nobody would say so: vLLM, llama.cpp" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_config_cannot_dress_the_table_up(planted, capsys):
    def edit(config, tensors):
        del config["dflash_config"]["mask_token_id"]
        config["dflash_config"]["mask_token"] = "[/red]"

    show_preflight(planted(samples.dflash(**PLAIN), "zlab", edit), Console(width=200))
    assert "the token '[/red]'" in capsys.readouterr().out


def test_a_target_may_be_gguf(target, tmp_path):
    write_gguf(samples.target(), tmp_path / "t.gguf", target.vocabulary(), "f32")
    files = open_target_files(str(tmp_path / "t.gguf"))
    export_draft(samples.dflash(**PLAIN), "gguf", tmp_path / "d.gguf", files)
    assert preflight(tmp_path / "d.gguf", files).clean


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dflash.block_size", 9, "dflash.block_size is 9"),
        ("tokenizer.ggml.mask_token_id", 3, "mask_token_id is 3"),
    ],
)
def test_a_gguf_that_was_edited_after_it_was_written(target, tmp_path, key, value, message):
    """Its record and the keys that llama.cpp reads no longer agree."""
    export_draft(samples.dflash(**PLAIN), "gguf", tmp_path / "d.gguf", target)
    reader = gguf.GGUFReader(tmp_path / "d.gguf", "r+")
    reader.fields[key].parts[-1][0] = value
    del reader
    result = preflight(tmp_path / "d.gguf", target)
    assert message in result.refused and not result.clean
