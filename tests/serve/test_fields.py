"""Every field that the `openai` client can send is implemented, or refused by its name."""

import copy
import inspect
import json
import logging

import openai
import pytest
from serving import serving
from test_http import post

import outpace

CLIENT = openai.OpenAI(api_key="any")
OWN = {"extra_headers", "extra_query", "extra_body", "timeout"}  # of the client
QUESTION = [{"role": "user", "content": "2 + 2?"}]
FUNCTION = {"name": "f", "description": "It counts.", "parameters": {"type": "object", "properties": {}}}
BASE = {
    "/v1/chat/completions": {"model": "default", "messages": QUESTION, "max_tokens": 2},
    "/v1/completions": {"model": "default", "prompt": "2 + 2", "max_tokens": 2},
    "/v1/responses": {"model": "default", "input": "2 + 2?", "max_output_tokens": 2},
}
SAMPLED = {
    "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "max_tokens": 3, "n": 2, "presence_penalty": 0.5,
    "seed": 3, "stop": ["x"], "stream": False, "stream_options": None, "temperature": 0.5, "top_p": 0.9,
    "user": "me",
}  # fmt: skip
IMPLEMENTED = {
    "/v1/chat/completions": SAMPLED | {
        "model": "default", "messages": QUESTION, "logprobs": True, "max_completion_tokens": 2,
        "parallel_tool_calls": True, "prediction": {"type": "content", "content": "4"},
        "reasoning_effort": "low", "response_format": {"type": "text"}, "tool_choice": "none",
        "tools": [{"type": "function", "function": FUNCTION | {"strict": False}}], "top_logprobs": 0,
    },
    "/v1/completions": SAMPLED | {"model": "default", "prompt": "3", "logprobs": 1, "echo": False},
    "/v1/responses": {
        "model": "default", "input": "3", "include": ["reasoning.encrypted_content"], "instructions": "Hm.",
        "max_output_tokens": 3, "metadata": {"a": "b"}, "parallel_tool_calls": False, "stream": False,
        "previous_response_id": None, "reasoning": {"effort": "low"}, "store": True, "temperature": 0.5,
        "text": {"format": {"type": "text"}}, "tool_choice": "none", "top_p": 0.9, "user": "me",
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
    },
}  # fmt: skip
CREATE = {
    "/v1/chat/completions": CLIENT.chat.completions.create,
    "/v1/completions": CLIENT.completions.create,
    "/v1/responses": CLIENT.responses.create,
}


@pytest.fixture(scope="module")
def address():
    with serving(outpace.load("default")) as (_, address):
        yield address


@pytest.mark.parametrize("path", BASE)
def test_every_field_of_the_client_does_something_or_is_refused(address, path):
    fields = set(inspect.signature(CREATE[path]).parameters) - OWN
    assert fields >= set(IMPLEMENTED[path]) and len(fields) > 15
    for name in sorted(fields):
        known = name in IMPLEMENTED[path]
        code, _, answer = post(address, path, BASE[path] | {name: IMPLEMENTED[path].get(name, "x")})
        if known:
            assert code == 200, (name, answer)
        else:
            assert code == 400 and answer["error"]["param"] == name, (name, answer)
            assert answer["error"]["message"] == f"{name}: this server does not implement it; leave it out"
            assert answer["error"]["type"] == "invalid_request_error"


CHAT, TEXT, ITEMS = BASE
USER, CALL = QUESTION[0], {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": FUNCTION}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def changed(value, way, **more):
    value = copy.deepcopy(value)
    inside = value
    for step in way:
        inside = inside[step]
    inside.update(more)
    return value


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (CHAT, {"messages": [USER | {"cache_control": {"type": "x"}}]}, "messages[0].cache_control"),
        (CHAT, {"messages": [USER | {"weight": 1}]}, "messages[0].weight"),
        (CHAT, {"messages": [USER | {"id": "m"}]}, "messages[0].id"),
        (CHAT, {"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": [{"role": "system", "content": "x", "name": "y"}, USER]}, "messages[0].name"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": 1}]}]},
            "messages[0].content[0].cache_control",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]}]},
            "messages[0].tool_calls[0].index",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [changed(CALL, ["function"], strict=True)]}]},
            "messages[0].tool_calls[0].function.strict",
        ),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "audio": {"a": 1}}]}, "messages[0].audio"),
        (CHAT, {"tools": [TOOL | {"cache_control": 1}]}, "tools[0].cache_control"),
        (CHAT, {"tools": [changed(TOOL, ["function"], output=1)]}, "tools[0].function.output"),
        (CHAT, {"tools": [changed(TOOL, ["function"], strict="yes")]}, "tools[0].function.strict"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
         "tool_choice.function.x"),
        (CHAT, {"response_format": changed(JSON, ["json_schema"], description="It counts.")},
         "response_format.json_schema.description"),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        (CHAT, {"prediction": {"type": "content", "content": "4", "x": 1}}, "prediction.x"),
        (CHAT, {"prediction": {"type": "content", "content": [{"type": "text", "text": "4", "x": 1}]}},
         "prediction.content[0].x"),
        (CHAT, {"speculative": {"method": "ngram", "x": 1}}, "speculative.x"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        (CHAT, {"prediction": {"content": "4"}, "speculative": False}, "prediction"),
        (CHAT, {"prediction": {"content": "4"}, "speculative": {"method": "ngram"}}, "prediction"),
        (CHAT, {"metadata": {"a": "b"}}, "metadata"),
        (CHAT, {"functions": [FUNCTION]}, "functions"),
        (TEXT, {"tools": [TOOL]}, "tools"),
        (ITEMS, {"input": [{"role": "user", "content": "x", "phase": "y"}]}, "input[0].phase"),
        (
            ITEMS,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}]},
            "input[0].content[0].y",
        ),
        (ITEMS, {"input": [{"type": "reasoning", "encrypted_content": "abc"}]}, "input[0].encrypted_content"),
        (
            ITEMS,
            {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}]},
            "input[0].summary",
        ),
        (ITEMS, {"input": [{"type": "reasoning", "content": [{"type": "x", "text": "y"}]}]},
         "input[0].content[0]"),
        (ITEMS, {"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        (ITEMS, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "x": 1}]},
         "input[0].x"),
        (ITEMS, {"tools": [{"type": "function", **FUNCTION, "strict": 1}]}, "tools[0].strict"),
        (ITEMS, {"tools": [{"type": "function", **FUNCTION, "namespace": "n"}]}, "tools[0].namespace"),
        (ITEMS, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (ITEMS, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (ITEMS, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "description": "y"}}},
         "text.format.description"),
        (ITEMS, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        (ITEMS, {"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
        ("/tokenize", {"messages": [USER | {"x": 1}]}, "messages[0].x"),
    ],
)  # fmt: skip
def test_a_field_inside_another_is_refused_by_its_place(address, path, change, field):
    code, _, answer = post(address, path, BASE.get(path, {}) | change)
    assert code == 400 and answer["error"]["message"].startswith(f"{field}: "), answer
    assert answer["error"]["param"] == field


def test_what_the_server_itself_has_written_is_taken_back(address):
    """With the nulls and empty lists that the client's objects have."""
    client = openai.OpenAI(base_url=address + "/v1", api_key="any", max_retries=0)
    chat = client.chat.completions.create(model="default", messages=QUESTION, temperature=0)
    history = [*QUESTION, chat.choices[0].message.model_dump(), *QUESTION]
    client.chat.completions.create(model="default", messages=history, max_tokens=2)
    made = client.responses.create(model="default", input=QUESTION, temperature=0)
    assert [item.type for item in made.output] == ["reasoning", "message"]
    items = [*QUESTION, *(item.model_dump() for item in made.output), *QUESTION]
    client.responses.create(model="default", input=items, max_output_tokens=2)


def test_the_log_names_the_user(address, caplog):
    with caplog.at_level(logging.INFO, "outpace.serve"):
        for path, body in BASE.items():
            assert post(address, path, body | {"user": f"me at {path}"})[0] == 200
            assert post(address, path, body)[0] == 200
    lines = [json.loads(record.message) for record in caplog.records]
    assert [line.get("user") for line in lines] == [x for path in BASE for x in (f"me at {path}", None)]
