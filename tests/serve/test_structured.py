"""JSON schemas over HTTP with the real `openai` client: form, company, and what is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from pydantic import BaseModel
from serving import serving

import outpace
from outpace.decode.grammar import Place
from outpace.serve.sequence import Sequence

QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]
WEATHER_QUESTION = [{"role": "user", "content": "How is the weather in Rome?"}]


class Sum(BaseModel):
    correct: bool
    size: Literal["small", "large"]
    digits: list[Literal[1, 2, 9]]


SCHEMA = Sum.model_json_schema() | {"additionalProperties": False}
SCHEMA["properties"]["digits"] |= {"minItems": 2, "maxItems": 3}
NAMED = {"name": "sum", "schema": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def model():
    return outpace.load("default")


@pytest.fixture(scope="module")
def client(model):
    with serving(model, default="ngram") as (_, address):
        yield openai.OpenAI(base_url=address + "/v1", api_key="any", max_retries=0)


def ask(client, **more):
    given = {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": NAMED}}
    return client.chat.completions.create(model="default", messages=QUESTION, **given | more)


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
        model="default", messages=QUESTION, temperature=0, response_format=Sum, max_completion_tokens=300
    )
    assert isinstance(parsed.choices[0].message.parsed, Sum)


def test_responses_take_a_schema_too(client, alone):
    text = {"format": {"type": "json_schema", **NAMED}}
    got = client.responses.create(model="default", input="What is 12 + 7?", temperature=0, text=text)
    assert got.output_text == alone.text
    plain = client.responses.create(
        model="default", input="What is 12 + 7?", temperature=0, text={"format": {"type": "text"}}
    )
    assert plain.output_text == "19"


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "hours": {"enum": [6, 12]}},
        "required": ["city", "hours"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, {"name": "now"})]


@pytest.mark.parametrize("choice", ["required", "weather", "now"])
def test_a_call_that_is_required_is_made(client, choice):
    named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    how = {"response_format": openai.omit, "tools": TOOLS, "tool_choice": named, "max_tokens": 400}
    got = ask(client, **how)
    message = got.choices[0].message
    assert got.choices[0].finish_reason == "tool_calls" and message.content is None
    function = message.tool_calls[0].function
    assert len(message.tool_calls) == 1 and function.name in ("weather", "now")
    assert choice in ("required", function.name)
    arguments = json.loads(function.arguments)
    if function.name == "weather":
        assert set(arguments) == {"city", "hours"} and arguments["hours"] in (6, 12)
    else:
        assert arguments == {}
    alone = ask(client, **how, extra_body={"speculative": False})
    assert alone.choices[0].message.tool_calls[0].function == function
    assert alone.choices[0].message.reasoning == message.reasoning
    chunks = [c.choices[0].delta for c in ask(client, **how, stream=True)]
    pieces = [call.function for delta in chunks for call in delta.tool_calls or ()]
    assert "".join(piece.arguments or "" for piece in pieces) == function.arguments
    assert [piece.name for piece in pieces if piece.name] == [function.name]


def test_a_strict_function_is_held_to_its_schema_whenever_it_is_called(client):
    """As agent SDKs send it: nobody demands the call."""

    def answered(strict, seed, **more):
        tools = [{"type": "function", "function": WEATHER | {"strict": strict}}, TOOLS[1]]
        given = {"tools": tools, "temperature": 0.7, "seed": seed, "max_tokens": 200}
        got = client.chat.completions.create(model="default", messages=WEATHER_QUESTION, **given, **more)
        message = got.choices[0].message
        return message.content, [call.function for call in message.tool_calls or ()]

    free, held = [], []
    for seed in range(8):
        free += answered(False, seed)[1]
        text, calls = answered(True, seed)
        assert (text, calls) == answered(True, seed, extra_body={"speculative": False})
        assert text or calls
        held += calls

    def well_formed(call):
        if call.name == "now":
            return True
        arguments = json.loads(call.arguments)
        return (
            call.name == "weather" and set(arguments) == {"city", "hours"} and arguments["hours"] in (6, 12)
        )

    assert held and all(map(well_formed, held)) and not all(map(well_formed, free))


def test_a_response_takes_strict_functions(client):
    tools = [{"type": "function", "strict": True, **WEATHER}]
    question = WEATHER_QUESTION[0]["content"]
    got = client.responses.create(model="default", input=question, temperature=0, tools=tools)
    item = got.output[-1]
    assert item.type == "function_call" and json.loads(item.arguments)["hours"] in (6, 12)


def test_responses_require_a_call_too(client):
    flat = [{"type": "function", "strict": True, **WEATHER}]
    for choice in ("required", {"type": "function", "name": "weather"}):
        got = client.responses.create(
            model="default", input="What is 12 + 7?", temperature=0, tools=flat, tool_choice=choice
        )
        item = got.output[-1]
        assert item.type == "function_call" and item.name == "weather"
        assert json.loads(item.arguments)["hours"] in (6, 12)
        shown = got.tool_choice if choice == "required" else got.tool_choice.model_dump()
        assert shown == choice


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice: no function is given"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS},
            "tool_choice: no function is called 'f'",
        ),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "function: it is missing"),
        (
            {"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
            "tool_choice: an answer that has to be a call",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "a"}}}],
            },
            "tool_choice: the JSON schema cannot be followed",
        ),
    ],
)
def test_a_call_that_cannot_be_required_is_refused(client, more, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, **{"response_format": openai.omit} | more)


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
