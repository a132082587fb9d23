"""The door of config.json: every key, with every kind of wrong value, gives an error that names the key."""

import copy
import json
import time

import pytest
import tiny

from outpace.doctor.checkpoint import validate_checkpoint
from outpace.models import config as config_values
from outpace.models.load import parse_config
from outpace.models.published import PUBLISHED
from outpace.models.save import save_target

WRONG = ("4", "", -3, 0, 1.5, [], [4], {}, True, 1e30, 10**30, float("nan"), float("inf"))
FINE = {  # keys for which some of these are values like any other
    "rms_norm_eps": (),
    "rope_theta": (1.5,),
    "swiglu_limit": (1.5,),
    "eos_token_id": (0, [], [4]),
    "bos_token_id": (0,),
    "pad_token_id": (0,),
    "sliding_window": (0,),
    "max_window_layers": (0,),
    "dsa_min_context": (0,),
    "dsa_sinks": (0,),
    "dsa_top_k": (1.5,),
    "layer_types": ([],),
    "mlp_only_layers": ([], [4]),
    "architectures": ([],),
    "swiglu_alpha": (1.5,),
}
OTHER = ("mla_layers", "dsa_layers", "mla_latent_dim", "rope_parameters", "rope_scaling")  # tested below
FLAGS = [key for key, rule in config_values.KEYS.items() if rule is config_values.FLAG]
KEYS = [key for key in config_values.KEYS if key not in (*FLAGS, *OTHER)]
CASES = [(k, v) for k in KEYS for v in WRONG if repr(v) not in map(repr, FINE.get(k, ()))]
CASES += [(key, v) for key in FLAGS for v in ("true", 1, 0, [], {})]
CASES += [(key, v) for key in OTHER[:2] for v in ("4", 4, True, {}, ["4"], [1.5])]
CASES += [("mla_latent_dim", v) for v in ("4", 0, -3, [0], ["4"], [4, 2.5], {"a": 1}, 10**30)]
BASE = tiny.QWEN3_MOE | {"layer_types": None, "swiglu_limit": None}


def refused(hf, key):
    with pytest.raises(ValueError) as caught:
        parse_config(hf)
    given = str(caught.value)
    assert f"`{key}` is " in given and "it should be " in given and len(given) < 300 and given.isprintable()


@pytest.mark.parametrize(("key", "value"), CASES, ids=lambda v: ascii(v)[:24])
def test_wrong_values(key, value):
    refused(BASE | {key: value}, key)


@pytest.mark.parametrize("value", [v for v in WRONG if v not in ({},)], ids=str)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_rope_that_is_no_object(key, value):
    refused(BASE | {key: value}, key)


ROPE_FINE = dict.fromkeys(config_values.ROPE_KEYS, (1.5,)) | {
    "factors": ([4],),
    "rope_type": ("4", ""),
    "type": ("4", ""),
    "truncate": (True,),
    "original_max_position_embeddings": (),
    "mscale": (),
    "mscale_all_dim": (),
}
ROPE = [(k, v) for k, fine in ROPE_FINE.items() for v in WRONG if repr(v) not in map(repr, fine)]
ROPE += [("factors", v) for v in ([0.0], [-1.0], [1.0, float("nan")], [float("inf")], ["1"], [True])]
ROPE += [("factors", v) for v in ([1.0] * 40000, [None], [[1.0]], {"0": 1.0})]


@pytest.mark.parametrize(("key", "value"), ROPE, ids=lambda v: ascii(v)[:24])
def test_wrong_values_of_rope(key, value):
    hf = copy.deepcopy(tiny.GPT_OSS)
    hf["rope_parameters"][key] = value
    refused(hf, f"rope_parameters.{key}")


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "num_experts",
    ],
)
@pytest.mark.parametrize("null", [True, False])
def test_keys_that_must_be_there(key, null):
    hf = {k: v for k, v in BASE.items() if k != key} | ({key: None} if null else {})
    with pytest.raises(ValueError, match="num_local_experts" if key == "num_experts" else key):
        parse_config(hf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; it should be silu: nothing else is supported"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
        ({"num_experts_per_tok": 6}, "6 experts per token of 5"),
        ({"hidden_size": 4, "head_dim": None}, "head_dim 0 is below 2"),
        ({"num_experts": 4096, "num_hidden_layers": 1024}, "4096 experts in each layer"),
        ({"architectures": ["\u001b[2J"]}, "`architectures`"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 1.0}}, "rope_parameters.mscale"),
        (
            {"rope_parameters": {"rope_type": "factors", "factors": [1.0] * 3}},
            "3 rope factors for a head_dim",
        ),
        ({"rope_parameters": {"rope_type": "factors"}}, "0 rope factors"),
        ({"rope_scaling": {"rope_type": "default", "factors": [1.0] * 8}}, "rope type 'default': 0 are"),
        ({"rope_parameters": {"low_freq_factor": 4, "high_freq_factor": 4}}, "not below high_freq_factor"),
    ],
)
def test_values_that_do_not_go_together(changes, message):
    with pytest.raises(ValueError) as caught:
        parse_config(BASE | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_pass(name):
    assert parse_config(PUBLISHED[name]).num_layers == PUBLISHED[name]["num_hidden_layers"]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_null_is_the_default(family):
    """Writers differ in which keys they leave out and which they set to null."""
    hf = tiny.HF[family]
    for key in ("head_dim", "num_key_value_heads", "rms_norm_eps", "bos_token_id", "sliding_window"):
        without = {k: v for k, v in hf.items() if k != key}
        try:
            parsed = parse_config(without)
        except ValueError:
            continue  # a key it needs
        assert parse_config(without | {key: None}) == parsed, key


def test_the_largest_that_is_let_through_is_compared_in_time(tmp_path):
    """A config may promise anything: nothing of it is allocated, and nothing takes long."""
    save_target(tiny.target("qwen3_moe", window=False), tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data |= {"num_hidden_layers": 1024, "layer_types": None, "num_experts": 64, "vocab_size": 2**24}
    data |= {
        "intermediate_size": 2**24,
        "moe_intermediate_size": 2**24,
        "head_dim": 2**16,
        "mlp_only_layers": [],
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    started = time.perf_counter()
    assert {f.name for f in validate_checkpoint(tmp_path).findings} >= {"num_hidden_layers", "vocab_size"}
    assert time.perf_counter() - started < 20
