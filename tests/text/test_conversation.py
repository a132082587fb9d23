"""Conversations from JSON: what people's data looks like, and errors that name the field."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from talks import analysis, call, final, result, user

from outpace.text.harmony import render
from outpace.text.messages import (
    Conversation,
    Developer,
    Message,
    Namespace,
    System,
    Tool,
    parse_conversation,
    parse_tools,
)


def read(*messages, **more):
    return parse_conversation({"messages": list(messages), **more})


def asked(text="hi"):
    return {"role": "user", "content": text}


def called(*calls, **more):
    tool_calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "tool_calls": tool_calls, **more}


def answered(content, **more):
    return {"role": "tool", "content": content, **more}


def test_a_plain_chat():
    result = read(
        {"role": "system", "content": "Be brief."},
        asked(),
        {"role": "assistant", "content": "ho", "thinking": "a greeting"},
    )
    assert result == Conversation(
        developer=Developer(instructions="Be brief."),
        messages=(user("hi"), analysis("a greeting"), final("ho")),
    )
    assert parse_conversation([asked()]) == Conversation(messages=(user("hi"),))


@pytest.mark.parametrize("key", ["thinking", "reasoning_content", "reasoning"])
def test_every_name_of_a_thought(key):
    assert read({"role": "assistant", "content": "b", key: "a"}).messages == (analysis("a"), final("b"))
    assert read({"role": "assistant", "content": None, key: "a"}).messages == (analysis("a"),)


def test_a_call_and_its_result():
    output = read(
        asked(),
        called(("1", "get", '{"at":"SF"}'), content="I look.", reasoning_content="need it"),
        answered({"sunny": True}, tool_call_id="1"),
        {"role": "assistant", "content": "Sunny."},
    )
    assert output.messages == (
        user("hi"),
        analysis("need it"),
        Message(role="assistant", channel="commentary", content="I look."),
        call("functions.get", '{"at":"SF"}'),
        result("functions.get", '{"sunny": true}'),
        final("Sunny."),
    )


@pytest.mark.parametrize("by", ["id", "name", "order"])
def test_calls_made_at_once_get_their_results_one_by_one(by):
    results = {"1": ("a", "one"), "2": ("b", "two")}
    entries = []
    for id, (name, content) in results.items():
        entries.append(
            answered(content, **{"id": {"tool_call_id": id}, "name": {"name": name}, "order": {}}[by])
        )
    if by != "order":
        entries.reverse()
    output = read(called(("1", "a", {}), ("2", "b", {"x": 1})), *entries, asked()).messages
    first = (call("functions.a"), result("functions.a", "one"))
    second = (call("functions.b", '{"x": 1}'), result("functions.b", "two"))
    assert output == (*(first + second if by == "order" else second + first), user("hi"))


def test_calls_without_results_follow_each_other():
    assert read(called(("1", "a", {}), ("2", "b", {}))).messages == (call("functions.a"), call("functions.b"))


def test_ids_that_are_used_again_mean_the_latest_call():
    turn = [called(("1", "a", {})), answered("x", tool_call_id="1")]
    other = [called(("1", "b", {})), answered("y", tool_call_id="1")]
    names = [m.name for m in read(*turn, *other).messages if m.role == "tool"]
    assert names == ["functions.a", "functions.b"]


def test_a_result_by_name_alone():
    named = answered("x", name="get")
    assert read(named).messages == (result("functions.get", "x"),)
    assert read(answered("x", name="browser.search")).messages == (result("browser.search", "x"),)
    python = {
        "role": "assistant",
        "channel": "analysis",
        "recipient": "python",
        "content": "1",
        "content_type": "code",
    }
    output = read(python, answered("x", name="python")).messages
    assert output[1] == result("python", "x", channel="analysis")


def test_harmony_in_plain_messages():
    """The header stated in full, as `cases.json` does it."""
    output = read(
        {"role": "user", "content": "x", "name": "bob"},
        {"role": "assistant", "channel": "analysis", "content": "a"},
        {
            "role": "assistant",
            "channel": "commentary",
            "recipient": "functions.x",
            "content_type": "<|constrain|>json",
            "content": "{}",
        },
        {
            "role": "tool",
            "channel": "final",
            "recipient": "all",
            "name": "functions.x",
            "content": "y",
            "id": "9",
        },
    ).messages
    odd = result("functions.x", "y", channel="final")
    assert output == (user("x", name="bob"), analysis("a"), call("functions.x"), odd)


def test_openai_harmonys_own_json():
    text = [{"type": "text", "text": "hi"}]
    tool = {"name": "get", "description": "Gets.", "parameters": {"type": "object"}}
    result = read(
        {
            "role": "system",
            "name": None,
            "content": [
                {
                    "type": "system_content",
                    "model_identity": "I am.",
                    "reasoning_effort": "High",
                    "conversation_start_date": "2025-06-28",
                    "knowledge_cutoff": None,
                    "channel_config": {"valid_channels": ["final"], "channel_required": True},
                    "tools": {"python": {"name": "python", "description": "Runs.", "tools": []}},
                }
            ],
        },
        {
            "role": "developer",
            "content": [
                {
                    "type": "developer_content",
                    "instructions": "Be brief.",
                    "tools": {"functions": {"name": "functions", "tools": [tool]}},
                }
            ],
        },
        {"role": "user", "name": None, "content": text},
    )
    assert result == Conversation(
        system=System(
            identity="I am.",
            reasoning="high",
            current_date="2025-06-28",
            knowledge_cutoff=None,
            channels=("final",),
            tools=(Namespace(name="python", description="Runs."),),
        ),
        developer=Developer(
            instructions="Be brief.",
            tools=(Tool(name="get", description="Gets.", parameters={"type": "object"}),),
        ),
        messages=(user("hi"),),
    )


def test_a_tool_message_of_openai_harmony_has_the_header_that_it_states():
    """Upstream's test_does_not_drop_if_ongoing_analysis: neither recipient nor channel are filled in."""
    name, text = "functions.lookup_weather", '{"temperature": 20}'
    stated = {"role": "tool", "name": name, "content": [{"type": "text", "text": text}]}
    calls = {
        "role": "assistant",
        "channel": "commentary",
        "recipient": name,
        "content_type": "<|constrain|>json",
        "content": [{"type": "text", "text": "{}"}],
    }
    assert render(read(calls, stated)).endswith(
        f"<|call|><|start|>{name}<|message|>{text}<|end|><|start|>assistant"
    )
    full = stated | {"recipient": "assistant", "channel": "commentary"}
    assert read(calls, full).messages[1] == result(name, text)
    assert read(calls, stated | {"recipient": "all"}).messages[1].recipient is None
    for other in ({"tool_call_id": None, "content": text}, {"content": text}):  # OpenAI's, and plain
        assert read(calls, stated | other).messages[1] == result(name, text)


def test_json_nested_too_deeply():
    deep = {"type": "object"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"x": deep}}
    too_deep = "is nested more than 64 levels deep: flatten it"
    with pytest.raises(ValueError, match=f"the schema of tool 'f' {too_deep}"):
        Tool(name="f", parameters=deep)
    with pytest.raises(ValueError, match=rf"tools\[0\]: the schema of tool 'f' {too_deep}"):
        parse_tools([{"name": "f", "parameters": deep}])
    for value in (asked() | {"metadata": deep}, called(("1", "a", deep))):
        with pytest.raises(ValueError, match=f"the conversation {too_deep}"):
            read(value)


def test_settings_stand_over_the_default():
    default = System(current_date="2025-06-28")
    assert parse_conversation([asked()]).system is None
    assert parse_conversation([asked()], system=default).system == default
    values = {"messages": [], "reasoning": "high", "system": {"identity": None}}
    wanted = System(current_date="2025-06-28", identity=None, reasoning="high")
    assert parse_conversation(values, system=default).system == wanted
    assert parse_conversation({"messages": [], "reasoning_effort": "low"}).system == System(reasoning="low")


def test_instructions_from_every_place_are_one():
    result = read(
        {"role": "developer", "content": "three"},
        {"role": "system", "content": [{"type": "text", "text": "four"}]},
        asked(),
        {"role": "system", "content": "late"},
        system="one",
        developer={"instructions": "two"},
    )
    assert result.developer == Developer(instructions="one\n\ntwo\n\nthree\n\nfour")
    assert result.messages == (user("hi"), Message(role="developer", content="# Instructions\n\nlate"))


def test_tools_in_every_shape():
    wanted = (Tool(name="f", description="d", parameters={"type": "object"}),)
    inner = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    for item in ({"type": "function", "function": inner}, {"type": "function", **inner}, inner):
        assert parse_tools([item]) == wanted
        assert read(tools=[item]).developer == Developer(tools=wanted)
        assert read(developer={"tools": [item]}).developer == Developer(tools=wanted)
    assert parse_tools([{"name": "f"}]) == (Tool(name="f"),)


def test_what_shall_not_be_learned():
    result = read(
        {"role": "assistant", "content": "b", "thinking": "a", "weight": 0},
        called(("1", "a", {}), weight=0),
        {"role": "assistant", "content": "c", "weight": 1},
    ).messages
    assert [m.supervised for m in result] == [False, False, False, True]


def test_keys_that_hold_nothing_or_are_the_data_sets_own():
    messages = {
        "role": "user",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "id": "x",
        "metadata": {"a": 1},
    }
    assert read(messages, id="7", source="somewhere").messages == (user("hi"),)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("text", "a conversation is a JSON object with a list of `messages`"),
        ({"conversations": []}, "a conversation is a JSON object with a list of `messages`"),
        ({"messages": [], "tool": []}, "unknown key `tool`; did you mean `tools`?"),
        (
            {"messages": [], "reasoning": "hard"},
            "conversation: reasoning 'hard': known are low, medium, high",
        ),
        ({"messages": [], "reasoning": 3}, "conversation.reasoning: must be a text, not 3"),
        ({"messages": [], "system": {"date": "x"}}, "system: unknown key `date`; known are identity"),
        ({"messages": [], "system": {"channels": "x"}}, "system.channels: must be a list of names"),
        (
            {"messages": [], "system": {"channel_config": {"channel_required": False}}},
            "system.channel_config: channels that are not required",
        ),
        ({"messages": [], "system": 3}, "system: must be an object, not 3"),
        ({"messages": [], "tools": {}}, "tools: must be a list, not an object"),
        ({"messages": [], "tools": [{"type": "python"}]}, "tools[0]: type 'python': only functions"),
        ({"messages": [], "tools": [{"function": {}}]}, "tools[0]: a function needs a name"),
        ({"messages": [], "tools": [{"name": "a b"}]}, "tools[0]: tool name 'a b': it must be one word"),
        (
            {"messages": [], "tools": [{"name": "a", "parameters": []}]},
            "tools[0].parameters: must be an object",
        ),
        (["hi"], "messages[0]: must be an object, not the text 'hi'"),
        ([{"content": "hi"}], "messages[0].role: None; known are system"),
        ([{"role": "ai", "content": "hi"}], "messages[0].role: 'ai'; known are system"),
        ([{"role": []}], "messages[0].role: []; known are system"),
        ([{"role": "user"}], "messages[0].content: there is no text"),
        ([{"role": "system"}], "messages[0].content: there is no text"),
        ([{"role": "user", "content": 3}], "messages[0].content: must be a text, not 3"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]: a part of type 'image_url': only text is supported",
        ),
        ([{"role": "system", "content": [{"type": []}]}], "messages[0].content[0]: a part of type []"),
        (
            [{"role": "user", "content": [3]}],
            "messages[0].content[0]: must be a part with type and text, not 3",
        ),
        (
            [asked(), {"role": "system", "content": [{"type": "system_content"}]}],
            "messages[1].content[0]: a part of type 'system_content'",
        ),
        (
            [{"role": "user", "content": "x", "thinking": "y"}],
            "messages[0]: unknown key `thinking`; known are role",
        ),
        ([{"role": "user", "content": "x", "name": "a b"}], "messages[0]: name 'a b': it must be one word"),
        ([{"role": "assistant"}], "messages[0]: neither content nor thinking nor tool_calls"),
        (
            [{"role": "assistant", "content": "x", "thinking": "a", "reasoning": "b"}],
            "messages[0]: thinking and reasoning differ: keep one",
        ),
        (
            [{"role": "assistant", "content": "x", "weight": 2}],
            "messages[0].weight: must be 0 (not trained on) or 1, not 2",
        ),
        (
            [{"role": "assistant", "tool_calls": {}, "content": "x", "thinking": 3}],
            "messages[0].thinking: must be a text",
        ),
        (
            [{"role": "assistant", "tool_calls": {"a": 1}}],
            "messages[0].tool_calls: must be a list, not an object",
        ),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]: must be an object, not 3"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name: the name of the function is missing",
        ),
        ([{"role": "assistant", "tool_calls": [{"type": "mcp"}]}], "messages[0].tool_calls[0].type: 'mcp'"),
        (
            [called(("1", "a", {}), recipient="functions.a")],
            "messages[0]: a recipient and tool_calls: give the call once",
        ),
        ([answered("x")], "messages[0]: a result without a call: give the tool's `name`"),
        ([answered("x", tool_call_id="7")], "messages[0].tool_call_id: '7' is the id of no call before it"),
        ([answered(None, name="x")], "messages[0].content: there is no text"),
    ],
)
def test_errors_name_the_field(message, wanted):
    with pytest.raises(ValueError) as error:
        parse_conversation(message)
    assert str(error.value).startswith(wanted)


SAID = {"messages", "tools", "system", "developer", "reasoning", "role", "content", "thinking", "tool_calls"}
HELD = {
    "tool_call_id",
    "function",
    "name",
    "arguments",
    "type",
    "text",
    "id",
    "weight",
    "channel",
    "recipient",
}
KEYS = st.sampled_from(sorted(SAID | HELD | {"content_type", "parameters", "instructions"}))
WORDS = st.sampled_from(
    ["user", "assistant", "tool", "system", "developer", "function", "text", "high", "all", "a b"]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=20,
)
MESSAGE = st.fixed_dictionaries(
    {"role": WORDS}, optional={"content": ANY, "tool_calls": ANY, "weight": ANY, "name": ANY}
)


@given(
    st.fixed_dictionaries(
        {"messages": st.lists(MESSAGE | ANY, max_size=4)}, optional={"tools": ANY, "system": ANY}
    )
)
def test_whatever_json_says_is_read_or_refused(message):
    with contextlib.suppress(ValueError):
        parse_conversation(message)
