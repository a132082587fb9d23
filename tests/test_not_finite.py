"""Weights that are NaN or Inf: no command ends as if nothing were wrong."""

import json

import pytest
import tiny
import torch
from dflash_drafts import random_dflash
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import nn

from outpace.checkpoint.open import EMBEDDED
from outpace.cli.main import main
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.formats.load import load_draft, save_draft
from outpace.models import load as loading
from outpace.models.load import check_finite, load_target, stored_values
from outpace.models.save import save_target
from outpace.ops.quant import SCALES, Quant
from outpace.ops.sampling import Sampling


def spoil(folder, name, value):
    path = folder / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(path).items()}
    tensors[name].view(-1)[3] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_target_is_refused_with_the_tensors_name(tmp_path, value):
    save_target(tiny.target("qwen3"), tmp_path)
    spoil(tmp_path, "model.layers.1.mlp.down_proj.weight", value)
    with pytest.raises(ValueError, match=r"1\.mlp\.down_proj\.weight holds 1 values that are NaN or Inf"):
        load_target(tmp_path)


def test_a_draft_is_refused_with_the_tensors_name(tmp_path):
    save_draft(random_dflash(tiny.target("qwen3")), tmp_path)
    load_draft(tmp_path)
    spoil(tmp_path, "fc.weight", float("nan"))
    with pytest.raises(ValueError, match=r"fc\.weight holds 1 values that are NaN or Inf"):
        load_draft(tmp_path)


def test_of_a_large_model_small_tensors_are_read(monkeypatch):
    monkeypatch.setattr(loading, "ALL", 1000)
    monkeypatch.setattr(loading, "SMALL", 100)
    broken = torch.tensor([1.0, float("nan")])
    check_finite("it", [("large", broken.repeat(500)), ("numbers", torch.tensor([1]))])
    with pytest.raises(ValueError, match="it: small holds 1 values"):
        check_finite("it", [("large", broken.repeat(500)), ("small", broken)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_the_generation(temperature):
    model = tiny.target("qwen3")
    weight = model.layers[1].mlp.down_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.fill_(float("nan"))
        request = Request(max_new_tokens=3, sampling=Sampling(temperature=temperature))
        with pytest.raises(ValueError, match=r"target's logits are not finite: .* inspect MODEL --scan"):
            generate(model, [[1, 2, 3]], request)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_a_training_that_diverges_says_so_and_saves_nothing(tmp_path, monkeypatch, capsys):
    cache, out = tmp_path / "cache", tmp_path / "run"
    small = ["samples=6", "response_tokens=[24,32]", "prompt_tokens=[16,24]"]
    build = ["outpace", "teacher", "build", "--out", str(cache)]
    monkeypatch.setattr("sys.argv", [*build, *(x for s in small for x in ("--set", s))])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    train = ["outpace", "train", "dflash", "--cache", str(cache), "--out", str(out)]
    settings = ["steps=6", "rows=2", "anchors=4", "lr=1e30", "eval_prompts=1", "eval_new_tokens=4"]
    monkeypatch.setattr("sys.argv", [*train, *(x for s in settings for x in ("--set", s))])
    with pytest.raises(SystemExit) as ended:
        main()
    error = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "is not finite. Training has diverged: lower the learning rate" in error
    assert not (out / "draft").exists()
    monkeypatch.setattr("sys.argv", [*train, "--set", "lr=nan"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "`lr` is nan: it must be finite" in " ".join(
        capsys.readouterr().err.split()
    )


def test_what_ships_is_finite():
    assert json.loads((EMBEDDED / "target" / "config.json").read_text())["architectures"]
    load_target(EMBEDDED / "target")
    load_draft(EMBEDDED / "dflash")


def test_a_packed_target_is_refused_for_its_scales(tmp_path):
    save_target(tiny.target("gpt_oss"), tmp_path, pack=True)
    load_target(tmp_path)
    spoil(tmp_path, "model.layers.2.mlp.experts.down_proj_scales", 255)
    with pytest.raises(ValueError, match=r"2\.mlp\.down\.scales holds 1 values that are NaN or Inf"):
        load_target(tmp_path)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"])
def test_scales_of_blocks_are_read(format):
    """One scale of a block at a time is made NaN: the values of that block become NaN or Inf, no others."""
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    weight = Quant(torch.randint(1, 100, (3, 4 * nbytes), dtype=torch.uint8), format)
    check_finite("it", stored_values(nn.ModuleDict({"w": weight})))
    places = range(0 if format != "Q6_K" else 208, SCALES[format].stop, 1 if format == "MXFP4" else 2)
    for at in places:
        broken = weight.data.clone()
        broken[1, 2 * nbytes + at : 2 * nbytes + at + places.step] = 255
        spoiled = Quant(broken, format)
        assert not spoiled.dense()[1, 2 * values : 3 * values].isfinite().all()
        assert spoiled.dense()[0].isfinite().all()
        with pytest.raises(ValueError, match=r"it: w\.scales holds 1 values"):
            check_finite("it", stored_values(nn.ModuleDict({"w": spoiled})))
