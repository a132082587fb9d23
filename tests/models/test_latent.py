"""Latent KV: at full rank it is the target; cached it is what it is uncached; it saves what it states."""

import json

import pytest
import tiny
import torch
from latents import latent_target
from safetensors import safe_open

from outpace.checkpoint.open import LoadError
from outpace.doctor.checkpoint import inspect_target
from outpace.kernels import bindings
from outpace.kv.latent import LatentCache
from outpace.models.latent import LatentMaps
from outpace.models.load import fingerprint, load_target, parse_config
from outpace.models.save import save_target

SHAPES = [(family, window) for family in tiny.FAMILIES for window in (True, False)]


def whole(model, tokens):
    return model.logits(model(tokens).hidden)


def in_chunks(model, tokens, size, counts=None, offset=0):
    cache, items = model.make_cache(len(tokens), tokens.shape[1] + 3, slack=9, offset=offset), []
    for i in range(0, tokens.shape[1], size):
        items.append(model(tokens[:, i : i + size], cache).hidden)
    return model.logits(torch.cat(items, 1))


@pytest.mark.parametrize(("family", "window"), SHAPES)
@torch.inference_mode()
def test_full_rank_is_the_target(family, window):
    """Rotation on read, biases, sinks and the q/k norm included: within 2e-4, as the dtype allows."""
    model, latent = latent_target(family, window=window)
    tokens = tiny.tokens(2, 60, seed=4)
    wanted = whole(model, tokens)
    assert (whole(latent, tokens) - wanted).abs().max() < 2e-4
    for size in (1, 7, 60):
        assert (in_chunks(latent, tokens, size) - wanted).abs().max() < 2e-4
    assert (
        in_chunks(latent, tokens, 9, offset=70000) - in_chunks(model, tokens, 9, offset=70000)
    ).abs().max() < 2e-4


@pytest.mark.parametrize(("family", "window"), SHAPES)
@torch.inference_mode()
def test_cached_and_not_say_the_same_at_low_rank(family, window):
    model, latent = latent_target(family, 7, window)
    tokens = tiny.tokens(2, 60, seed=4)
    wanted = whole(latent, tokens)
    assert (wanted - whole(model, tokens)).abs().max() > 0.1  # something is lost
    alone = in_chunks(latent, tokens, 1)
    assert (alone - wanted).abs().max() < 2e-4
    if model.config.head_dim % 8 == 0:  # the kernels' rows do not depend on how many there are
        assert torch.equal(in_chunks(latent, tokens, 5), alone)


@pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")
@torch.inference_mode()
def test_no_value_is_made_of_a_single_latent_where_the_kernel_runs(monkeypatch):
    """Sums of latents go through W_v_lat, sinks and all; elsewhere values come first. Both say the same."""
    _, latent = latent_target("gpt_oss", 7)
    tokens = tiny.tokens(2, 40, seed=4)
    late = in_chunks(latent, tokens, 5)
    asked = []
    expand = LatentMaps.expand
    monkeypatch.setattr(LatentMaps, "expand", lambda *given: asked.append(given) or expand(*given))
    assert torch.equal(in_chunks(latent, tokens, 5), late) and not asked
    monkeypatch.setattr(LatentCache, "_late", lambda *given: False)
    assert (in_chunks(latent, tokens, 5) - late).abs().max() < 2e-5 and asked


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
@torch.inference_mode()
def test_rows_of_different_lengths(family):
    _, latent = latent_target(family, 9)
    tokens, counts = tiny.tokens(2, 20, seed=5), [20, 6]
    cache = latent.make_cache(2, 40, slack=16)
    latent(tokens, cache, counts=counts)
    more = tiny.tokens(2, 4, seed=6)
    result = latent(more, cache).hidden
    for b, n in enumerate(counts):
        alone = latent(torch.cat((tokens[b, :n], more[b]))[None]).hidden[0, n:]
        assert (result[b] - alone).abs().max() < 2e-5
    cache.rewind([11, 6])
    cache.select([1, 0])
    result = latent(more, cache).hidden
    for b, (row, n) in enumerate(((1, 6), (0, 11))):
        alone = latent(torch.cat((tokens[row, :n], more[b]))[None]).hidden[0, n:]
        assert (result[b] - alone).abs().max() < 2e-5


@torch.inference_mode()
def test_switched_off_it_is_the_target_it_was_made_from():
    model, latent = latent_target("gpt_oss", 5)
    tokens = tiny.tokens(2, 30, seed=7)
    lossy = in_chunks(latent, tokens, 6)
    latent.use_mla_kv(False)
    assert torch.equal(in_chunks(latent, tokens, 6), in_chunks(model, tokens, 6))
    assert not any(isinstance(memory, LatentCache) for memory in latent.make_cache(1, 9).layers)
    latent.use_mla_kv(True)
    assert torch.equal(in_chunks(latent, tokens, 6), lossy)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_it_takes_the_bytes_it_claims(family):
    """Of a full-attention layer the rank, and one number per kv head where keys are normed; not 2 K D."""
    model, latent = latent_target(family, 5)
    config = model.config
    slots = 50 + 1  # and one for padding
    full = [i for i in range(config.num_layers) if not config.window(i)]
    width = 5 + config.num_kv_heads * config.qk_norm
    saved = len(full) * 3 * slots * 4 * (2 * config.num_kv_heads * config.head_dim - width)
    assert model.make_cache(3, 50).nbytes - latent.make_cache(3, 50).nbytes == saved > 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_it_is_saved_beside_the_untouched_projections(family, tmp_path):
    model, latent = latent_target(family, 6, window=family in ("gpt_oss", "qwen3"))
    save_target(latent, tmp_path / "latent")
    save_target(model, tmp_path / "plain")
    data = json.loads((tmp_path / "latent" / "config.json").read_text())
    layers = [i for i in range(model.config.num_layers) if not model.config.window(i)]
    assert (data["use_mla_kv"], data["mla_latent_dim"], data["mla_layers"]) == (True, 6, layers)
    config, at = model.config, f"model.layers.{layers[-1]}.self_attn.mla_"
    kv = config.num_kv_heads * config.head_dim
    with (
        safe_open(tmp_path / "latent" / "model.safetensors", "pt") as ours,
        safe_open(tmp_path / "plain" / "model.safetensors", "pt") as theirs,
    ):
        names = list(ours.keys())
        for name in list(theirs.keys()):
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name))
        shapes = {name.removeprefix(at): tuple(ours.get_tensor(name).shape) for name in names if at in name}
    assert shapes == {
        "W_c": (config.hidden_size, 6), "W_k_lat": (6, kv), "W_v_lat": (6, kv), "b_c": (6,), "b_k": (kv,),
        "b_v": (kv,),
    }  # fmt: skip
    again = load_target(tmp_path / "latent")
    assert fingerprint(again) == fingerprint(latent) != fingerprint(model)
    tokens = tiny.tokens(1, 30, seed=8)
    with torch.inference_mode():
        assert torch.equal(whole(again, tokens), whole(latent, tokens))
    seen = inspect_target(tmp_path / "latent")
    assert seen.comparison.missing == []
    assert seen.kv_bytes_per_token == 4 * len(layers) * (6 + config.num_kv_heads * config.qk_norm)
    assert inspect_target(tmp_path / "plain").kv_bytes_per_token == 4 * len(layers) * 2 * kv


def hf(**changes):
    return tiny.HF["gpt_oss"] | {"architectures": ["GptOssForCausalLM"], "use_mla_kv": True} | changes


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({}, "use_mla_kv without mla_layers"),
        ({"mla_layers": [1]}, "lacks `mla_latent_dim`"),
        ({"mla_layers": [1], "mla_latent_dim": [4, 4]}, "one rank for all or one for each"),
        ({"mla_layers": [1, 1], "mla_latent_dim": 4}, "distinct layers below"),
        ({"mla_layers": [99], "mla_latent_dim": 4}, "distinct layers below"),
        ({"mla_layers": [0], "mla_latent_dim": 4}, "layer 0 has a sliding window: it takes no latent"),
        ({"mla_layers": "all", "mla_latent_dim": 4}, "mla_layers"),
        ({"mla_layers": [1], "mla_latent_dim": 0}, "mla_latent_dim"),
        ({"mla_layers": [1], "mla_latent_dim": 2.5}, "mla_latent_dim"),
        ({"mla_layers": [1], "mla_latent_dim": 4, "use_mla_kv": "yes"}, "use_mla_kv"),
    ],
)
def test_configs_that_cannot_be(message, error):
    with pytest.raises(ValueError, match=error):
        parse_config(hf(**message))


def test_tensors_that_the_config_does_not_name_are_left_over(tmp_path):
    _, latent = latent_target("gpt_oss", 6)
    save_target(latent, tmp_path / "latent")
    path = tmp_path / "latent" / "config.json"
    data = json.loads(path.read_text())
    del data["mla_layers"], data["use_mla_kv"]
    path.write_text(json.dumps(data))
    with pytest.raises(LoadError, match=r"left over .*mla_W_c"):
        load_target(tmp_path / "latent")
