"""JSON schemas over HTTP with the real `openai` client: form, company, and what is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from pydantic import BaseModel
from serving import SOLVER, serving

import outpace
from outpace.decode.grammar import Place
from outpace.serve.sequence import Sequence

QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]


class Sum(BaseModel):
    correct: bool
    size: Literal["small", "large"]
    digits: list[Literal[1, 2, 9]]


SCHEMA = Sum.model_json_schema() | {"additionalProperties": False}
SCHEMA["properties"]["digits"] |= {"minItems": 2, "maxItems": 3}
NAMED = {"name": "sum", "schema": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def model():
    return outpace.load(str(SOLVER))


@pytest.fixture(scope="module")
def client(model):
    with serving(model, default="ngram") as (_, address):
        yield openai.OpenAI(base_url=address + "/v1", api_key="any", max_retries=0)


def ask(client, **more):
    given = {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": NAMED}}
    return client.chat.completions.create(model="solver", messages=QUESTION, **given | more)


@pytest.fixture(scope="module")
def alone(model):
    sampling = outpace.SamplingParams(max_tokens=400, prefill_chunk=64, json_schema=SCHEMA)
    return outpace.generate(model, QUESTION, draft=False, sampling=sampling)


@pytest.mark.parametrize("speculative", [False, True, {"method": "ngram", "num_speculative_tokens": 2}])
def test_an_answer_has_the_schemas_form_and_is_the_one_alone(client, alone, speculative):
    got = ask(client, extra_body={"speculative": speculative})
    choice = got.choices[0]
    assert choice.finish_reason == "stop" and Sum.model_validate_json(choice.message.content)
    assert choice.message.content == alone.text and choice.message.reasoning
    assert got.usage.completion_tokens == len(alone.tokens)
    drafted = got.usage.completion_tokens_details
    assert (drafted.accepted_prediction_tokens > 0) == bool(speculative)


def test_what_is_forced_is_proposed(client, monkeypatch):
    """Without it, a lookup finds nothing of the schema's names in the text."""
    with_forced = ask(client).usage.completion_tokens_details.accepted_prediction_tokens
    monkeypatch.setattr(Place, "forced", lambda self: [])
    without = ask(client).usage.completion_tokens_details.accepted_prediction_tokens
    assert with_forced >= without + 10


def test_a_stream_adds_up_and_a_pydantic_class_is_parsed(client, alone):
    chunks = list(ask(client, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == alone.text
    parsed = client.chat.completions.parse(
        model="solver", messages=QUESTION, temperature=0, response_format=Sum, max_completion_tokens=300
    )
    assert isinstance(parsed.choices[0].message.parsed, Sum)


def test_responses_take_a_schema_too(client, alone):
    text = {"format": {"type": "json_schema", **NAMED}}
    got = client.responses.create(model="solver", input="What is 12 + 7?", temperature=0, text=text)
    assert got.output_text == alone.text
    plain = client.responses.create(
        model="solver", input="What is 12 + 7?", temperature=0, text={"format": {"type": "text"}}
    )
    assert plain.output_text == "19"


def test_any_object(client):
    got = ask(client, response_format={"type": "json_object"}, max_completion_tokens=300)
    message = got.choices[0].message
    assert message.content.startswith("{")
    if got.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(message.content), dict)


def test_company_changes_nothing_and_seeds_say_what_is_drawn(client):
    def one(i):
        form = None if i % 3 == 0 else {"type": "json_schema", "json_schema": NAMED}
        got = ask(client, temperature=1.2, seed=i, response_format=form or openai.omit, max_tokens=300)
        return got.choices[0].message.content

    single = [one(i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == single
    assert all(Sum.model_validate_json(single[i]) for i in (1, 2, 4, 5))


def test_a_schema_that_breaks_down_ends_its_own_request_alone(client, alone, monkeypatch):
    real = Sequence.verify

    def breaking(sequence, *rest):
        if sequence.seed == 77 and len(sequence.tokens) > 5:
            monkeypatch.setattr(sequence.rule, "verify", fails)
            monkeypatch.setattr(sequence.rule, "draw", fails)
        return real(sequence, *rest)

    def fails(*given):
        raise ValueError("the JSON schema leaves no next token")

    monkeypatch.setattr(Sequence, "verify", breaking)
    with ThreadPoolExecutor(2) as pool:
        other, broken = pool.submit(ask, client), pool.submit(ask, client, seed=77)
        assert other.result().choices[0].message.content == alone.text
        with pytest.raises(openai.OpenAIError, match="leaves no next token"):
            broken.result()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "a"}}}, "Invalid type: a"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema: it is missing"),
        ({"type": "json_schema"}, "json_schema: it is missing"),
        ({"type": "grammar"}, "response_format"),
    ],
)  # fmt: skip
def test_what_is_refused(client, form, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, response_format=form)
