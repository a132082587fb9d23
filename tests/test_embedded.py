"""The models that ship in the package are what their provenance states, and decode losslessly."""

import json
import random
from pathlib import Path

import pytest

from outpace.bench.prompts import held_out_prompts
from outpace.checkpoint.shipped import EMBEDDED
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.loading import open_draft, open_target
from outpace.models.load import fingerprint
from outpace.tasks.families import FAMILIES
from outpace.text.corpus import read_corpus, split
from outpace.text.harmony import HarmonyTokens, prompt_ids

REPORTS = Path(__file__).parents[1] / "reports"
MOST_BYTES = 24 * 2**20
SOLVER_DRAFTS = "solver/dflash", "solver/eagle3"


@pytest.fixture(scope="module")
def embedded():
    target, tokenizer = open_target("default")
    return target, tokenizer, open_draft("dflash", target, tokenizer)


@pytest.fixture(scope="module")
def solver():
    target, tokenizer = open_target("solver")
    return target, tokenizer, {name: open_draft(name, target, tokenizer) for name in SOLVER_DRAFTS}


def size(*names):
    files = (f for name in names for f in (EMBEDDED / name).rglob("*") if f.is_file())
    return sum(f.stat().st_size for f in files)


def test_they_fit_where_they_have_to():
    assert size("target", "dflash", "suffix") <= MOST_BYTES
    assert size("solver/target") <= 16e6 and size(*SOLVER_DRAFTS) <= 8e6


@pytest.mark.parametrize(("name", "layers"), [("default", 8), ("solver", 6)])
def test_a_gpt_oss_with_every_feature_on(embedded, solver, name, layers):
    config = (embedded if name == "default" else solver)[0].config
    assert config.architecture == "GptOssForCausalLM"
    assert config.num_layers >= layers and config.num_experts >= 8 and config.experts_per_token >= 2
    assert config.sinks and config.attention_bias and not config.tie_word_embeddings
    assert config.rope.kind == "yarn" and config.max_position_embeddings >= 4096
    assert 0 < config.sliding_window < config.max_position_embeddings
    assert {config.window(i) for i in range(config.num_layers)} == {0, config.sliding_window}


def test_provenance_belongs_to_these_weights(embedded):
    target, _, draft = embedded
    data = json.loads((EMBEDDED / "target" / "provenance.json").read_text())
    assert data["fingerprint"] == fingerprint(target)
    drafted = json.loads((EMBEDDED / "dflash" / "provenance.json").read_text())
    assert drafted["target_fingerprint"] == data["fingerprint"]
    assert draft.target_layer_ids == tuple(drafted["config"]["target_layer_ids"])


def test_reports_of_what_ships_are_of_these_weights(embedded):
    """Figures of an earlier model are figures of another model."""
    reports = [p for part in ("embedded", "drafts/embedded") for p in (REPORTS / part).rglob("report.json")]
    assert len(reports) >= 5
    for path in [*reports, REPORTS / "bench" / "report.json"]:
        value = json.loads(path.read_text())["target"]["fingerprint"]
        assert value == fingerprint(embedded[0]), path.relative_to(REPORTS)


def test_provenance_of_the_solver_belongs_to_these_weights(solver):
    data = json.loads((EMBEDDED / "solver/target/provenance.json").read_text())
    assert data["fingerprint"] == fingerprint(solver[0])
    for name in SOLVER_DRAFTS:
        drafted = json.loads((EMBEDDED / name / "provenance.json").read_text())
        assert drafted["target_fingerprint"] == data["fingerprint"]


def test_reports_of_the_solver_are_of_these_weights(solver):
    reports = list((REPORTS / "solver").rglob("report.json"))
    assert len(reports) >= 4
    for path in reports:
        assert json.loads(path.read_text())["target"]["fingerprint"] == fingerprint(solver[0]), path


def test_the_solver_answers_with_every_draft_as_without(solver):
    """Held-out problems, whole answers."""
    target, tokenizer, drafts = solver
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


def test_speculative_decoding_of_held_out_text_is_lossless(embedded):
    target, tokenizer, draft = embedded
    prompts = held_out_prompts(tokenizer, split(read_corpus())[1], 3, 150)
    request = Request(max_new_tokens=100)
    value = generate(target, prompts, request)
    drafted = generate(target, prompts, request, draft)
    assert drafted.tokens == value.tokens
    assert drafted.trace.tau > 1.6  # it did learn something
