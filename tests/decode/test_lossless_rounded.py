"""With activations in bfloat16 every loop states what the target generates that rounds them."""

import pytest
import tiny
import torch
from questions import CHAT
from test_lossless import NEW, PROMPTS
from test_lossless_latent import every_draft_says
from test_lossless_two_bytes import HEADS
from typer.testing import CliRunner

import outpace
from outpace.cli.main import app
from outpace.decode.costs import machine
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.loading import open_draft
from outpace.models.blocks import Linear
from outpace.models.load import build, named_tensors


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_every_draft_says_the_same(family):
    model = build(tiny.config(family, head_dim=HEADS[family]))
    tiny.randomise(named_tensors(model), 4)
    model.to(torch.bfloat16).eval().use_activation_dtype(torch.bfloat16)
    every_draft_says(model, generate(model, PROMPTS, Request(max_new_tokens=NEW)).tokens)


def test_a_loaded_target_generates_with_them():
    exact, rounded = (outpace.load(activation_dtype=name) for name in ("auto", "bfloat16"))
    texts = [outpace.generate(m, CHAT, draft=False).text for m in (exact, rounded)]
    assert texts[0][:20] == texts[1][:20]
    for draft in ("dflash", "eagle3", None):
        assert outpace.generate(rounded, CHAT, draft=draft).text == texts[1]
    kinds = [machine(m.target)["activation_dtype"] for m in (exact, rounded)]
    assert kinds == ["float32", "bfloat16"]


def test_drafts_multiply_in_bfloat16_whatever_the_target_does():
    model = outpace.load()
    draft = open_draft("dflash", model.target, model.tokenizer).draft
    assert draft.rounded and all(m.rounded for m in draft.modules() if isinstance(m, Linear))
    assert not any(m.rounded for m in model.target.modules() if isinstance(m, Linear))


def test_the_command_line_names_them():
    run = CliRunner().invoke(app, ["generate", "default", "x", "--activation-dtype", "float16"])
    assert run.exit_code and "'float16': it must be one of auto, float32, bfloat16" in str(run.exception)
