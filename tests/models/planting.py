"""Tiny checkpoints of every family on disk, and copies with a fault planted in them."""

import shutil

import tiny
from safetensors.torch import load_file, save_file

from outpace.doctor.checkpoint import validate_checkpoint
from outpace.models.save import save_target

GPT_OSS_EXPERTS = "model.layers.0.mlp.experts."


def save_all(folder):
    """folder/FAMILY for each, gpt-oss packed; and folder/gpt_oss_dense."""
    for family in tiny.FAMILIES:
        model = tiny.target(family, window=family not in ("llama", "qwen3_moe"))
        save_target(model, folder / family, pack=family == "gpt_oss")
    save_target(tiny.target("gpt_oss"), folder / "gpt_oss_dense")
    return folder


def plant(source, folder, tensors=None, **config):
    """A copy of `source` where the tensors went through `tensors` (name -> tensor; changed in place, or a new
    one given back) and where the config.json has these keys (None: not)."""
    shutil.copytree(source, folder)
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        held = tensors(held) or held
        save_file({name: t.contiguous() for name, t in held.items()}, folder / "model.safetensors")
    tiny.write_config(folder, **config)
    return folder


def findings(path, **options):
    return {finding.name: finding for finding in validate_checkpoint(path, **options).findings}


def only(path, name, remedy="", text="", **options):
    """The one finding there is."""
    report = validate_checkpoint(path, **options)
    assert [f.name for f in report.findings] == [name], report.findings
    finding = report.findings[0]
    assert remedy in finding.fix and text in finding.message, finding
    assert report.passed is not finding.fault
    assert report.as_json()["findings"][0]["name"] == name
    return finding
