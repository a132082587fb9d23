"""The checkpoint is wrong in a known way and the reference is right: the doctor names it."""

import dataclasses

import planted
import pytest
import tiny
import torch
from planted import both, each, plant

from outpace.doctor.compare import Reference, compare_layers, side_by_text
from outpace.doctor.engine import walk
from outpace.doctor.examine import Examination, examine
from outpace.formats.convert import write_gguf
from outpace.models.load import load_target
from outpace.models.save import save_target

ROPE = tiny.GPT_OSS["rope_parameters"]
CYCLIC = "cyclic GQA mapping (query head h reads kv head h % K)"
PAIRS = "interleaved RoPE pairs (2i, 2i + 1)"
ATTENTION, MLP = "why attention departs", "why the MLP departs"


@pytest.fixture(scope="module")
def folders(twins, tmp_path_factory):
    """family -> a healthy folder; "packed": gpt-oss with MXFP4 experts, "square": with down matrices
    that are; "clamped": with a clamp that bites."""
    made = {}

    def folder(kind):
        if kind in tiny.FAMILIES:
            return twins(kind)[0]
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            if kind == "packed":
                save_target(load_target(twins("gpt_oss")[0]), made[kind], pack=True)
            elif kind == "square":
                tiny.save_twin("gpt_oss", made[kind], intermediate_size=96)
            else:
                tiny.save_twin("gpt_oss", made[kind], swiglu_limit=0.5)
        return made[kind]

    return folder


def against(folder, reference, other=None, **more):
    what = Examination(path=str(folder), reference=str(reference), other=other, tokens=60, **more)
    return {c.name: c for c in examine(what)}


# kind of checkpoint, the check that speaks, the edit, changes to the config; the mistakes with which our
# weights are read as the reference reads its own, and with which the reference's are read as we read ours
CASES = {
    "cyclic GQA mapping": (
        "gpt_oss", ATTENTION, planted.cyclic_heads, {}, CYCLIC, "cyclic GQA mapping, inverse order"
    ),
    "interleaved RoPE pairs": (
        "llama", ATTENTION, planted.on_q_and_k(planted.to_neighbours), {},
        PAIRS, "q/k rows permuted, halves to pairs",
    ),
    "interleaved rows under a q/k norm": (
        "qwen3", ATTENTION, planted.on_q_and_k(planted.to_neighbours), {},
        "q/k rows permuted, pairs to halves", "q/k rows permuted, halves to pairs",
    ),
    "rows put in halves twice": (
        "gpt_oss", ATTENTION, planted.on_q_and_k(planted.to_halves), {},
        "q/k rows permuted, halves to pairs", PAIRS,
    ),
    "zero sinks": ("gpt_oss", ATTENTION, each("sinks", planted.zeros), {}, None, "sinks of zero"),
    "window parity": (
        "gpt_oss", ATTENTION, None, {"layer_types": tiny.GPT_OSS["layer_types"][::-1]},
        "wrong window parity", "wrong window parity",
    ),
    "a window one too long": (
        "gpt_oss", ATTENTION, None, {"sliding_window": 8},
        "window off by one: one key shorter", "window off by one: one key longer",
    ),
    "no YaRN factor": (
        "gpt_oss", ATTENTION, None, {"rope_parameters": ROPE | {"attention_factor": 1.0}},
        "YaRN's attention factor missing", "YaRN's attention factor missing",
    ),
    "interleaved pairs in half the heads": (
        "gpt_oss", ATTENTION, planted.on_q_and_k(planted.half_to_neighbours), {},
        "interleaved RoPE pairs in the first half of the heads", None,
    ),
    "high nibble first": (
        "packed", MLP, each("_blocks", planted.exchanged), {}, "high nibble first", "high nibble first",
    ),
    "blocks reversed": (
        "packed", MLP, both(each("_blocks", planted.backwards), each("_scales", planted.backwards)), {},
        "blocks of each row reversed", "blocks of each row reversed",
    ),
    "blocks reversed, scales in place": (
        "packed", MLP, each("_blocks", planted.backwards), {},
        "blocks of each row reversed under their scales", "blocks of each row reversed under their scales",
    ),
    "dropped sinks": ("gpt_oss", ATTENTION, each("sinks", planted.lost), {}, None, "sinks dropped"),
    "no YaRN": (
        "gpt_oss", ATTENTION, None, {"rope_parameters": {"rope_theta": 15000.0}},
        None, "no RoPE scaling at all",
    ),
    "q/k norms of one": (
        "qwen3", ATTENTION,
        both(each("q_norm.weight", planted.ones), each("k_norm.weight", planted.ones)), {},
        None, "q/k norm without its weights",
    ),
    "no o bias": ("gpt_oss", ATTENTION, each("o_proj.bias", planted.zeros), {}, None, "missing o bias"),
    "split nibbles": (
        "packed", MLP, each("_blocks", planted.split), {},
        "split nibbles (GGML's order)", "split nibbles undone (interleaved order)",
    ),
    "scale bytes off by one": (
        "packed", MLP, each("_scales", lambda x, config: x + 1), {},
        "scale exponent off by one: halved", "scale exponent off by one: doubled",
    ),
    "packed gate and up rows in halves": (
        "packed", MLP, both(
            each("gate_up_proj_blocks", planted.halves),
            each("gate_up_proj_scales", planted.halves),
            each("gate_up_proj_bias", planted.halves),
        ), {}, "gate and up rows read as halves, not interleaved", None,
    ),
    "gate and up rows in halves": (
        "gpt_oss", MLP, both(
            each("gate_up_proj", planted.dense_halves), each("gate_up_proj_bias", planted.halves)
        ), {}, "gate and up rows read as halves, not interleaved", None,
    ),
    "gate and up exchanged": (
        "gpt_oss", MLP,
        both(each("gate_up_proj", planted.swapped), each("gate_up_proj_bias", planted.swapped)), {},
        "gate and up exchanged", "gate and up exchanged",
    ),
    "gate and up swapped, dense": (
        "llama", MLP, planted.swap_names("gate_proj", "up_proj"), {},
        "gate and up exchanged", "gate and up exchanged",
    ),
    "down transposed": (
        "square", MLP, each("experts.down_proj", lambda x, config: x.mT), {},
        "down matrices transposed", "down matrices transposed",
    ),
    "no down bias": ("gpt_oss", MLP, each("down_proj_bias", planted.zeros), {}, None, "missing down biases"),
    "no clamp": ("clamped", MLP, None, {"swiglu_limit": 1e6}, None, "unclamped SwiGLU"),
    "top-k not renormalised": (
        "qwen3_moe", MLP, None, {"norm_topk_prob": False},
        "top-k weights renormalised", "softmax before top-k",
    ),
    "two at once": (
        "packed", MLP, both(each("_blocks", planted.split), each("_scales", lambda x, config: x + 1)), {},
        "scale exponent off by one: halved + split nibbles (GGML's order)",
        None,  # once one side is explained, the other is not tried in pairs
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_of_the_checkpoint_is_named(case, folders, tmp_path):
    kind, check, edit, value, ours, theirs = CASES[case]
    healthy = folders(kind)
    result = against(plant(healthy, tmp_path / "wrong", edit, **value), healthy)
    why = {k: c for k, c in result.items() if k.startswith("why")}
    assert set(why) == {check}, [(c.name, c.message) for c in result.values()]
    assert result["logits against the reference"].status == "fail"
    evidence = why[check].evidence
    assert evidence["ours"] == ([] if ours is None else [ours]), why[check].message
    assert evidence["theirs"] == ([] if theirs is None else [theirs]), why[check].message


def test_what_no_known_mistake_explains_is_reported_to_be_so(folders, tmp_path):
    rng = torch.Generator().manual_seed(0)

    def shuffled(x, config):
        return x[torch.randperm(len(x), generator=rng)]

    wrong = plant(folders("llama"), tmp_path / "wrong", each("layers.1.self_attn.v_proj.weight", shuffled))
    result = against(wrong, folders("llama"))
    why = result[ATTENTION]
    assert "none of the known mistakes explains it, nor any two of them" in why.message
    assert why.evidence["layers"] == [1] and "differ between the two files: v" in why.message
    assert "layer 1 is the first that departs" in result["layers against the reference"].message
    assert result["logits against the reference"].status == "fail"
    assert "the layers before them do not" in result["logits against the reference"].message


@pytest.fixture(scope="module")
def rounded(twins, tmp_path_factory):
    """gpt-oss in Q8_0."""
    path = tmp_path_factory.mktemp("gguf") / "it.gguf"
    write_gguf(load_target(twins("gpt_oss")[0]), path, type="q8_0")
    return path


@pytest.mark.parametrize(
    "case", ["cyclic GQA mapping", "window parity", "gate and up exchanged", "no o bias"]
)
def test_mistakes_show_through_the_rounding_of_a_format(case, folders, rounded, tmp_path):
    kind, check, edit, value, ours, theirs = CASES[case]
    result = against(plant(folders(kind), tmp_path / "wrong", edit, **value), "gguf", str(rounded))
    evidence = result[check].evidence
    assert evidence["ours"] == ([] if ours is None else [ours]), result[check].message
    assert evidence["theirs"] == ([] if theirs is None else [theirs]), result[check].message
    assert len(evidence["layers"]) == 4


def test_tensors_that_rounding_does_not_explain(folders, rounded, tmp_path):
    """Sinks of zero cost some layers less than Q8_0 does; they are seen all the same."""
    wrong = plant(folders("gpt_oss"), tmp_path / "wrong", each("layers.1.self_attn.sinks", planted.zeros))
    value = against(wrong, "gguf", str(rounded))["layers against the reference"]
    assert value.status == "warn" and value.message.endswith("not the same at all: sinks")


def test_a_small_embedding_shows_the_eps(folders, tmp_path):
    """Layer 0 alone: what the layers add is far larger."""
    small = each("embed_tokens.weight", lambda x, config: 0.02 * x)
    right = plant(folders("gpt_oss"), tmp_path / "right", small)
    wrong = plant(right, tmp_path / "wrong", rms_norm_eps=1e-6)
    evidence = against(wrong, right)[ATTENTION].evidence
    assert evidence["layers"] == [0]
    assert (evidence["ours"], evidence["theirs"]) == (["RMSNorm eps 1e-05"], ["RMSNorm eps 1e-06"])


def test_a_head_that_was_overwritten(folders, tmp_path):
    wrong = plant(folders("llama"), tmp_path / "wrong", planted.copy_head)
    result = against(folders("llama"), wrong)
    assert not [name for name in result if name.startswith("why")]
    assert "explained by tied head" in result["logits against the reference"].message
    assert against(wrong, folders("llama"))["head"].status == "warn"


def test_another_embedding_and_a_longer_one(folders, tmp_path):
    rows = plant(
        folders("qwen3_moe"), tmp_path / "rows", each("embed_tokens.weight", lambda x, config: x.flip(0))
    )
    assert (
        "tokens have other rows"
        in against(rows, folders("qwen3_moe"))["embedding against the reference"].message
    )
    twice = plant(
        folders("qwen3_moe"), tmp_path / "twice", each("embed_tokens.weight", lambda x, config: 2 * x)
    )
    assert (
        "2 times as long" in against(twice, folders("qwen3_moe"))["embedding against the reference"].message
    )


def test_two_different_models_are_not_compared(folders):
    result = against(folders("llama"), folders("qwen3"))
    assert result["configs"].status == "fail" and "two different models" in result["configs"].message
    assert "layers against the reference" not in result


def test_configs_that_differ_are_shown(folders, tmp_path):
    """Not those that turn nothing else: this range ends on whole dimensions unless it is moved."""
    for original, status in ((32, "pass"), (512, "warn")):
        rope = ROPE | {"original_max_position_embeddings": original}
        right = plant(folders("gpt_oss"), tmp_path / f"right{original}", rope_parameters=rope)
        rope = rope | {"truncate": True}
        wrong = plant(folders("gpt_oss"), tmp_path / f"wrong{original}", rope_parameters=rope)
        configs = against(wrong, right)["configs"]
        assert configs.status == status
    assert configs.message == "rope.truncate True here, False there"


def test_transformers_on_another_folder(folders, tmp_path):
    """Its own loader reads the right folder; MXFP4 experts it unpacks by itself."""
    wrong = plant(folders("packed"), tmp_path / "wrong", each("_blocks", planted.split))
    result = against(wrong, "hf", str(folders("packed")), layers=2)
    assert result[MLP].evidence["ours"] == ["split nibbles (GGML's order)"]
    assert result[MLP].evidence["layers"] == [0, 1]


@pytest.mark.parametrize(("ours", "theirs", "message"), [
    (8.0, 3.0, "ours is the one that is wrong"),
    (3.0, 8.0, "the reference is the one that is wrong"),
    (3.0, 3.2, "does not tell"),
    (float("nan"), 3.0, "ours is the one that is wrong"),
])  # fmt: skip
def test_the_text_tells_which_side_is_wrong(ours, theirs, message):
    assert message in side_by_text(ours, theirs)


def test_a_near_tie_of_the_router_is_no_mistake(folders):
    """A few tokens went to other experts on the other side: they say nothing about the MLP."""
    model = load_target(folders("gpt_oss"))
    ids = tiny.tokens(1, 60)[0].tolist()
    ours = walk(model, ids)
    steps = list(ours.layers)
    mlp, chosen = steps[1].mlp.clone(), steps[1].chosen.clone()
    mlp[5:7], chosen[5:7] = mlp[5:7].flip(0), (chosen[5:7] + 1) % 5
    steps[1] = dataclasses.replace(steps[1], mlp=mlp, chosen=chosen)
    reference = Reference(walk=dataclasses.replace(ours, layers=steps))
    layer = compare_layers(model, ours, reference)[1]
    assert not layer.departs and layer.routed_alike == pytest.approx(58 / 60)
    steps[1] = dataclasses.replace(steps[1], mlp=mlp, chosen=ours.layers[1].chosen)
    assert compare_layers(model, ours, reference)[1].departs == ("mlp",)


def test_a_checkpoint_full_of_nan_is_examined_to_the_end(folders, tmp_path):
    broken = each("layers.2.self_attn.o_proj.weight", lambda x, config: x * float("nan"))
    result = against(plant(folders("packed"), tmp_path / "wrong", broken), folders("packed"))
    assert "first out of layer 2" in result["residual stream"].message
    assert "layer 2 is the first that departs" in result["layers against the reference"].message
    assert "none of the known mistakes" in result[ATTENTION].message
