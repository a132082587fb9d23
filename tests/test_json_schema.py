"""A JSON schema from Python and on the command line."""

import json

import pytest
from test_cli import run

import outpace

SCHEMA = {"type": "array", "items": {"enum": [1, 20, 300]}, "minItems": 2, "maxItems": 4}


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    path = tmp_path_factory.mktemp("schema") / "numbers.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def is_of_the_schema(text):
    value = json.loads(text)
    return 2 <= len(value) <= 4 and set(value) <= {1, 20, 300}


def test_rows_of_a_batch_and_a_draft():
    model = outpace.load()
    sampling = outpace.SamplingParams(json_schema=SCHEMA, max_tokens=60)
    prompts = ["numbers = ", "def f(x):\n    return "]
    outputs = outpace.generate(model, prompts, sampling=sampling, draft="dflash")
    assert all(is_of_the_schema(o.text) and o.finish_reason == "stop" for o in outputs)
    alone = outpace.generate(model, prompts[1], sampling=sampling, draft=False)
    assert alone.tokens == outputs[1].tokens


def test_the_command(monkeypatch, capsys, schema):
    code, out, _ = run(monkeypatch, capsys, "generate", "default", "x = ", "--json-schema", schema, "-n", 60)
    assert code == 0 and is_of_the_schema(out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "holds a list: a schema is an object"),
        ('{"type": "strng"}', "the JSON schema cannot be followed: Invalid type: strng"),
    ],
)
def test_a_file_that_is_no_schema(monkeypatch, capsys, tmp_path, text, message):
    (tmp_path / "wrong.json").write_text(text)
    code, _, err = run(
        monkeypatch, capsys, "generate", "default", "x", "--json-schema", tmp_path / "wrong.json"
    )
    assert code == 2 and message in err
