"""`outpace serve`: what it refuses before it listens."""

import pytest
from test_cli import run

from outpace.cli.serve import _check_memory, _drafts, _speculative
from outpace.serve.engine import EngineConfig


def test_a_cache_that_does_not_fit_says_what_would():
    config = EngineConfig(max_num_seqs=8, max_model_len=4096)
    _check_memory(2_000_000_000, 10**15, config, 2.0)
    with pytest.raises(
        ValueError, match=r"^KV of 8 sequences of 4,096 tokens take 4.00 GB, and 2.10.*seqs 4"
    ):
        _check_memory(4_000_000_000, 1, config, 2.1)
    with pytest.raises(ValueError, match="use a smaller --max-model-len"):
        _check_memory(4_000_000_000, 1, config, 0.1)
    for kv, steps in ((10**15, 1), (1, 10**15)):
        with pytest.raises(ValueError, match=r"^KV and steps of 8 .* are allowed"):
            _check_memory(kv, steps, config, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dflash", "is no JSON"),
        ("[]", "an object with a method"),
        ('{"model": "x"}', "an object with a method"),
        ('{"method": "ngram", "width": 3}', "unknown key 'width'"),
    ],
)
def test_a_speculative_config_that_is_none(text, message):
    with pytest.raises(ValueError, match=message):
        _speculative(text)


def test_prompt_lookup_is_always_there():
    assert _drafts(None, "none")[1] is None and list(_drafts(None, "none")[0]) == ["ngram"]  # type: ignore[arg-type]


def test_sequences_that_nobody_has_memory_for_name_the_option(monkeypatch, capsys):
    words = "serve", "default", "--speculative-config", "none", "--max-num-seqs", "1000000"
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2 and "KV of 1,000,000 sequences of 4,096 tokens" in err
    assert "a smaller --max-num-seqs or --max-model-len" in err
