"""The models that ship in the package are what their provenance states, and decode losslessly."""

import json
import random
from pathlib import Path

import pytest

from outpace.checkpoint.shipped import DRAFTS, EMBEDDED
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.loading import open_draft, open_target
from outpace.models.load import fingerprint
from outpace.tasks.families import FAMILIES
from outpace.text.harmony import HarmonyTokens, prompt_ids

REPORTS = Path(__file__).parents[1] / "reports"


@pytest.fixture(scope="module")
def embedded():
    target, tokenizer = open_target("default")
    return target, tokenizer, {name: open_draft(name, target, tokenizer) for name in DRAFTS}


def size(*names):
    files = (f for name in names for f in (EMBEDDED / name).rglob("*") if f.is_file())
    return sum(f.stat().st_size for f in files)


def test_they_fit_where_they_have_to():
    assert size("target") <= 16e6 and size(*DRAFTS) <= 8e6
    assert {folder.name for folder in EMBEDDED.iterdir()} == {"target", *DRAFTS}


def test_a_gpt_oss_with_every_feature_on(embedded):
    config = embedded[0].config
    assert config.architecture == "GptOssForCausalLM"
    assert config.num_layers >= 6 and config.num_experts >= 8 and config.experts_per_token >= 2
    assert config.sinks and config.attention_bias and not config.tie_word_embeddings
    assert config.rope.kind == "yarn" and config.max_position_embeddings >= 4096
    assert 0 < config.sliding_window < config.max_position_embeddings
    assert {config.window(i) for i in range(config.num_layers)} == {0, config.sliding_window}


def test_provenance_belongs_to_these_weights(embedded):
    target = embedded[0]
    data = json.loads((EMBEDDED / "target" / "provenance.json").read_text())
    assert data["fingerprint"] == fingerprint(target)
    for name in DRAFTS:
        drafted = json.loads((EMBEDDED / name / "provenance.json").read_text())
        assert drafted["target_fingerprint"] == data["fingerprint"]


def test_reports_are_of_these_weights(embedded):
    """Figures of an earlier model are figures of another model."""
    names = "answers", "tasks", "tasks-float16", "memory-answers", "speed", "serve", "soak"
    for name in names:
        report = json.loads((REPORTS / name / "report.json").read_text())
        assert report["target"]["fingerprint"] == fingerprint(embedded[0]), name


def test_every_draft_answers_as_the_target_does(embedded):
    """Held-out problems, whole answers."""
    target, tokenizer, drafts = embedded
    tokens, rng = HarmonyTokens(tokenizer), random.Random(4)
    families = ("addition", "comparison", "dates", "functions")
    problems = [FAMILIES[name].draw(rng, held_out=True) for name in families]
    prompts = [prompt_ids(problem.prompt(), tokens) for problem in problems]
    request = Request(max_new_tokens=200, stop=tokens.stop)
    plain = generate(target, prompts, request)
    assert all(row[-1] in tokens.stop for row in plain.tokens)
    for draft, tau in zip(drafts.values(), (4, 2.5), strict=True):
        drafted = generate(target, prompts, request, draft)
        assert drafted.tokens == plain.tokens and drafted.trace.tau > tau
