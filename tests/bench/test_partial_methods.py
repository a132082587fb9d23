"""Methods of a suite that decode with partial KV: what their table may say, and that it is done."""

import pytest
import tiny

from outpace.bench.methods import Case, MethodSpec, run_case
from outpace.bench.run import Timed
from outpace.drafts.lookup import NGram

PARTIAL = {"tokens": 20, "block_size": 2, "n_sink_blocks": 1, "n_window_blocks": 2, "n_spec_tokens_buf": 6}


def test_a_method_with_partial_kv():
    model, prompts = tiny.target("gpt_oss"), [tiny.tokens(40, seed=2).tolist()]
    runs = {}
    for name, partial in (("whole", {}), ("partly", PARTIAL), ("lossy", PARTIAL | {"mode": "lossy"})):
        spec = MethodSpec(draft="ngram", controller=(False,), partial=partial)
        case = Case(method=name, temperature=0.0, rule="match")
        runs[name] = run_case(case, model, NGram(), partial=spec.partial_kv)(prompts, 30, 1)
    assert runs["whole"].tokens == runs["partly"].tokens
    assert not runs["whole"].trace.partial_forwards and runs["whole"].trace.confirmed == (0, 0)
    assert runs["partly"].trace.partial_forwards and runs["partly"].trace.confirmed[1] > 0
    assert runs["lossy"].trace.confirmed[0] == runs["lossy"].trace.confirmed[1] > 0
    for run in runs.values():  # as it is kept between a stop and the next start
        assert Timed.from_json(run.as_json()) == run
    near = MethodSpec(draft="ngram", controller=(False,), partial=PARTIAL).partial_kv
    assert near is not None and near.config.static_size == 20


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"partial": PARTIAL}, "controllers know full passes alone"),
        ({"partial": PARTIAL | {"n_retrieval_blocks": 3}}, "`tokens` is the number"),
        ({"partial": {"block_size": 3}}, "`tokens` is the number"),
        ({"partial": {"tokens": "many"}}, "`tokens` is the number"),
        ({"partial": PARTIAL | {"selektor": "quest"}}, "did you mean `selector`"),
        ({"partial": {"tokens": 100}}, "sinks and window alone are 160"),
        ({"partial": PARTIAL | {"mode": "fast"}}, "mode 'fast'"),
    ],
)
def test_tables_that_cannot_be(message, error):
    controller = {} if message["partial"] == PARTIAL else {"controller": (False,)}
    with pytest.raises(ValueError, match=error):
        MethodSpec(draft="ngram", **controller, **message)
