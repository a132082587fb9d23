"""Harmony rendered: the reference's own texts, what is dropped, tools as types, and text that stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from talks import (
    LOOKALIKE,
    PLAIN,
    TOKENIZER,
    TOKENS,
    analysis,
    call,
    conversations,
    final,
    golden,
    ids_of,
    result,
    text_of,
    user,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outpace.text.harmony import (
    HarmonyTokens,
    Mark,
    drop_old_analysis,
    has_harmony_tokens,
    prompt_ids,
    render,
)
from outpace.text.messages import (
    Conversation,
    Developer,
    Message,
    Namespace,
    System,
    Tool,
    parse_conversation,
)

CASES = json.loads(golden("cases.json"))
RENDERED = [name for name, case in CASES.items() if case["kind"] == "render"]


@pytest.mark.parametrize("name", RENDERED)
def test_the_references_texts(name):
    conversation = parse_conversation(CASES[name])
    drop = name != "test_preserve_cot.txt"
    assert render(conversation, drop_analysis=drop) == golden(name)
    assert prompt_ids(conversation, TOKENIZER, drop_analysis=drop) == ids_of(golden(name))


def test_there_are_such_texts():
    assert len(RENDERED) == 7


@given(conversations(PLAIN.filter(lambda text: "<" not in text)), st.booleans())
def test_ids_are_those_of_the_whole_text(conversation, prompt):
    """Encoded piece by piece and in one go: no token reaches over a mark or a header's parts."""
    if any(m.name == "<|end|>" for m in conversation.messages):
        return
    ids = prompt_ids(conversation, TOKENIZER, generation_prompt=prompt)
    assert ids == ids_of(render(conversation, generation_prompt=prompt))


@given(LOOKALIKE)
def test_text_never_becomes_a_special_token(text):
    conversation = Conversation(messages=(user(text),))
    ids = prompt_ids(conversation, TOKENIZER, generation_prompt=False)
    assert text_of(ids) == f"<|start|>user<|message|>{text}<|end|>"
    assert [i for i in ids if i < 10] == [TOKENS.ids[m] for m in (Mark.START, Mark.MESSAGE, Mark.END)]


def test_a_name_never_becomes_a_special_token():
    message = Message(
        role="assistant", recipient="a<|message|>b", channel="<|end|>", content="", name="<|call|>"
    )
    ids = prompt_ids(Conversation(messages=(message,)), TOKENIZER, generation_prompt=False)
    marks = [TOKENS.marks[i] for i in ids if i in TOKENS.marks]
    assert marks == [Mark.START, Mark.CHANNEL, Mark.MESSAGE, Mark.CALL]


def test_the_tokenizer_stays_as_it_was():
    before = TOKENIZER.to_str()
    TOKENS.encode(["a <|start|> b"])
    assert TOKENIZER.to_str() == before and not TOKENIZER.encode_special_tokens


U1, A1, F1, U2, A2, F2, U3 = (
    user("u1"),
    analysis("a1"),
    final("f1"),
    user("u2"),
    analysis("a2"),
    final("f2"),
    user("u3"),
)
CALL, RESULT = call("functions.x"), result("functions.x", "7")
SEARCH = call("browser.search", channel="analysis")
FOUND = result("browser.search", "7", channel="analysis")


@pytest.mark.parametrize(
    ("messages", "left", "left_when_looked_at"),
    [
        ((U1, A1), (U1, A1), (U1, A1)),
        ((U1, A1, F1), (U1, F1), (U1, A1, F1)),
        ((U1, A1, F1, U2), (U1, F1, U2), (U1, F1, U2)),
        ((U1, A1, CALL, RESULT), (U1, A1, CALL, RESULT), (U1, A1, CALL, RESULT)),
        # a turn that still calls tools keeps its thoughts, the answered one before it does not
        ((U1, A1, F1, U2, A2, CALL, RESULT), (U1, F1, U2, A2, CALL, RESULT), (U1, F1, U2, A2, CALL, RESULT)),
        ((U1, A1, CALL, RESULT, A2, F2), (U1, CALL, RESULT, F2), (U1, A1, CALL, RESULT, A2, F2)),
        ((U1, A1, F1, U2, A2, F2, U3), (U1, F1, U2, F2, U3), (U1, F1, U2, F2, U3)),
        ((U1, A1, F1, U2, A2, F2), (U1, F1, U2, F2), (U1, F1, U2, A2, F2)),
        # built-in tools are called on the analysis channel: the call goes with its result
        ((U1, A1, SEARCH, FOUND, F1, U2), (U1, F1, U2), (U1, F1, U2)),
        ((U1, A1, SEARCH, FOUND), (U1, A1, SEARCH, FOUND), (U1, A1, SEARCH, FOUND)),
        # a final message to a tool is no answer
        ((U1, A1, final("x", recipient="functions.x")), (U1, A1, final("x", recipient="functions.x")), None),
    ],
)
def test_what_is_kept(messages, left, left_when_looked_at):
    assert tuple(drop_old_analysis(messages)) == left
    if left_when_looked_at is not None:
        assert tuple(drop_old_analysis(messages, generation_prompt=False)) == left_when_looked_at
    shown = render(Conversation(messages=messages), drop_analysis=False)
    assert all(f"<|message|>{m.content}<|" in shown for m in messages)


def test_messages_are_distinguished_by_their_end():
    text = render(Conversation(messages=(U1, CALL, RESULT, F1)), generation_prompt=False)
    assert text == (
        "<|start|>user<|message|>u1<|end|>"
        "<|start|>assistant to=functions.x<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
        "<|start|>functions.x to=assistant<|channel|>commentary<|message|>7<|end|>"
        "<|start|>assistant<|channel|>final<|message|>f1<|end|>"  # <|return|> has no place in a history
    )


def test_a_recipient_beside_the_channel():
    text = render(Conversation(messages=(CALL, RESULT)), generation_prompt=False, recipient_in="channel")
    assert text == (
        "<|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>"
        "<|start|>functions.x to=assistant<|channel|>commentary<|message|>7<|end|>"
    )
    whole = Conversation(messages=(CALL, RESULT))
    assert prompt_ids(whole, TOKENIZER, recipient_in="channel") == ids_of(text + "<|start|>assistant")


@pytest.mark.parametrize(
    ("system", "text"),
    [
        (None, ""),
        (System(identity=None, knowledge_cutoff=None, reasoning=None, channels=()), ""),
        (System(identity="I am.", knowledge_cutoff=None, reasoning=None, channels=()), "I am."),
        (System(identity=None, knowledge_cutoff=None, reasoning="low", channels=()), "Reasoning: low"),
        (
            System(
                identity=None,
                knowledge_cutoff=None,
                current_date="2025-06-28",
                reasoning=None,
                channels=("a",),
            ),
            "Current date: 2025-06-28\n\n# Valid channels: a. Channel must be included for every message.",
        ),
    ],
)
def test_lines_of_the_system_message(system, text):
    wanted = f"<|start|>system<|message|>{text}<|end|>" if text else ""
    assert render(Conversation(system=system), generation_prompt=False) == wanted


@pytest.mark.parametrize("developer", [None, Developer(), Developer(instructions="")])
def test_no_empty_developer_message(developer):
    assert render(Conversation(developer=developer)) == "<|start|>assistant"


def test_built_in_tools_stand_in_the_system_message():
    search = Tool(name="search", parameters={"type": "object", "properties": {"q": {"type": "string"}}})
    tools = (
        Namespace(name="browser", description="Browses.\nCites.", tools=(search,)),
        Namespace(name="python", description="Runs what\nit is sent."),
    )
    system = System(identity=None, knowledge_cutoff=None, reasoning=None, channels=(), tools=tools)
    assert render(Conversation(system=system), generation_prompt=False) == (
        "<|start|>system<|message|># Tools\n\n"
        "## browser\n\n// Browses.\n// Cites.\nnamespace browser {\n\n"
        "type search = (_: {\nq?: string,\n}) => any;\n\n} // namespace browser\n\n"
        "## python\n\nRuns what\nit is sent.<|end|>"
    )


# what openai_harmony 0.0.8 writes for these
TYPES = [
    (None, "()"),
    ({}, "(_: any)"),
    ({"type": "object", "properties": {}}, "(_: {\n})"),
    ({"type": ["integer", "null"]}, "(_: number | null)"),
    ({"type": "array"}, "(_: Array<any>)"),
    ({"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}, "(_: boolean[][])"),
    ({"anyOf": [{"type": "string"}]}, "(_: any)"),
    ({"type": "string", "enum": [1, 2]}, "(_: string)"),
    (
        {
            "type": "object",
            "required": ["at"],
            "properties": {
                "at": {
                    "type": "object",
                    "description": "Where.",
                    "properties": {
                        "x": {"type": "number", "default": 1.5},
                        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
                    },
                },
                "unit": {"type": "string", "enum": ["m", "km"], "default": "m", "nullable": True},
            },
        },
        """(_: {
// Where.
at:     // Where.
{
    x?: number, // default: 1.5
    tags?: "a" | "b"[],
    },
unit?: "m" | "km" | null, // default: m
})""",
    ),
    (
        {
            "type": "object",
            "properties": {
                "v": {
                    "oneOf": [
                        {"type": "string", "description": "words", "nullable": True},
                        {
                            "type": "array",
                            "items": {"type": "integer"},
                            "description": "numbers",
                            "default": [1],
                        },
                    ],
                    "description": "words",
                }
            },
        },
        "(_: {\nv?:\n | string | null\n | number[] // numbers default: [1]\n,\n})",
    ),
    (
        {"oneOf": [{"type": "string", "default": "a"}, {"type": "string", "enum": ["b"], "default": "b"}]},
        '(_: \n | string // default: "a"\n | "b" // default: "b")',
    ),
]


@pytest.mark.parametrize(("parameters", "signature"), TYPES)
def test_schemas_as_types(parameters, signature):
    developer = Developer(tools=(Tool(name="f", description="One.\nTwo.", parameters=parameters),))
    assert render(Conversation(developer=developer), generation_prompt=False) == (
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        f"// One.\n// Two.\ntype f = {signature} => any;\n\n}} // namespace functions<|end|>"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "oneOf", "properties", "required", "enum", "items", "default", "description"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["type", "oneOf", "properties", "required", "items", "enum"]), JSON))
def test_no_schema_stops_the_rendering(schema):
    assert render(Conversation(developer=Developer(tools=(Tool(name="f", parameters=schema),))))


def test_other_tokenizers_are_refused():
    plain = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    assert not has_harmony_tokens(plain) and has_harmony_tokens(TOKENIZER)
    with pytest.raises(ValueError, match=r"no <\|start\|> token: this model does not use Harmony"):
        HarmonyTokens(plain)
    plain.add_special_tokens([str(mark) for mark in Mark])
    with pytest.raises(ValueError, match="not a byte-level one"):
        HarmonyTokens(plain)
    plain.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert HarmonyTokens(plain).stop == {6, 7}


def test_the_bytes_of_a_token():
    for character, name in zip(sorted(pre_tokenizers.ByteLevel.alphabet()), range(256), strict=True):
        assert len(TOKENS.text_bytes(TOKENIZER.token_to_id(character))) == 1, name
    every = [TOKENS.text_bytes(TOKENIZER.token_to_id(c)) for c in pre_tokenizers.ByteLevel.alphabet()]
    assert sorted(every) == [bytes([b]) for b in range(256)]
    text = "größe 🙂\x00\n"
    assert b"".join(TOKENS.text_bytes(i) for i in ids_of(text)).decode() == text
    assert [TOKENS.text_bytes(i) for i in (TOKENS.ids[Mark.START], -1, 10**6, 2**70)] == [None] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "robot"}, "known are system, developer, user"),
        ({"role": "user", "name": "two words"}, "name 'two words': it must be one word"),
        ({"role": "assistant", "channel": ""}, "channel '': it must be one word"),
        ({"role": "assistant", "channel": "to=x"}, "would be read as a recipient"),
        ({"role": "tool"}, "a tool's message needs the tool's name"),
        ({"role": "tool", "name": "user:x"}, "would be read as something else"),
        ({"role": "tool", "name": "to=x"}, "would be read as something else"),
        ({"role": "assistant", "constrained": True}, "constrained, but no content_type"),
        ({"role": "assistant", "content_type": "a.b"}, "would be read as a recipient"),
    ],
)
def test_messages_that_could_not_be_read_back(fields, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Message(content="", **fields)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="reasoning 'hard': known are low, medium, high"):
        System(reasoning="hard")
    with pytest.raises(ValueError, match="tool name 'a b': it must be one word"):
        Tool(name="a b")
