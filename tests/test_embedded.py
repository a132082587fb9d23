"""The model that ships in the package: it is what its provenance states, and it decodes losslessly."""

import json
from pathlib import Path

import pytest

from outpace.bench.prompts import held_out_prompts
from outpace.checkpoint.open import EMBEDDED
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.loading import open_draft, open_target
from outpace.models.load import fingerprint
from outpace.text.corpus import read_corpus, split

REPORTS = Path(__file__).parents[1] / "reports"
MOST_BYTES = 24 * 2**20


@pytest.fixture(scope="module")
def embedded():
    target, tokenizer = open_target("default")
    return target, tokenizer, open_draft("dflash", target, tokenizer)


def test_it_fits_where_it_has_to():
    assert sum(f.stat().st_size for f in EMBEDDED.rglob("*") if f.is_file()) <= MOST_BYTES


def test_it_is_a_gpt_oss_with_every_feature_on(embedded):
    config = embedded[0].config
    assert config.architecture == "GptOssForCausalLM"
    assert config.num_layers >= 8 and config.num_experts >= 8 and config.experts_per_token >= 2
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


def test_speculative_decoding_of_held_out_text_is_lossless(embedded):
    target, tokenizer, draft = embedded
    prompts = held_out_prompts(tokenizer, split(read_corpus())[1], 3, 150)
    request = Request(max_new_tokens=100)
    value = generate(target, prompts, request)
    drafted = generate(target, prompts, request, draft)
    assert drafted.tokens == value.tokens
    assert drafted.trace.tau > 1.6  # it did learn something
