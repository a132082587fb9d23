"""A chat's history and prompts in Harmony: answers fed in, cut off, calling, speaking for others."""

import pytest
from talks import TOKENIZER, TOKENS, analysis, call, final, ids_of, result, user

from outpace.text.chat_format import ChatPart
from outpace.text.harmony import Mark, prompt_ids
from outpace.text.harmony_parser import HarmonyChat
from outpace.text.messages import Conversation, Developer, Message, System

ANSWER = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
CALLS = '<|channel|>commentary to=functions.x <|constrain|>json<|message|>{"a": 1}<|call|>'


def open_chat(**more):
    return HarmonyChat(TOKENIZER, **more)


def feed(chat, text):
    """-> what streamed, and the answer's parts."""
    chat.prompt()
    streamed = [part for token in ids_of(text) if (part := chat.feed(token)) is not None]
    return streamed, chat.end()


def spoken(chat):
    return chat.conversation.messages


def test_an_answer_becomes_history_without_its_thoughts():
    chat = open_chat(system=System(reasoning="low"), developer=Developer(instructions="Be brief."))
    chat.add_user("2 + 2?")
    streamed, parts = feed(chat, ANSWER)
    assert [(p.kind, p.text, p.index) for p in streamed] == [
        ("analysis", "h", 0),
        ("analysis", "m", 0),
        ("final", "4", 1),
    ]
    assert [(p.kind, p.text, p.index) for p in parts] == [("analysis", "hm", 0), ("final", "4", 1)]
    chat.add_user("sure?")
    wanted = Conversation(
        system=System(reasoning="low"),
        developer=Developer(instructions="Be brief."),
        messages=(user("2 + 2?"), analysis("hm"), final("4"), user("sure?")),
    )
    assert chat.prompt() == prompt_ids(wanted, TOKENIZER)
    assert "hm" not in TOKENIZER.decode(chat.prompt())


def test_a_call_gets_its_result():
    chat = open_chat()
    chat.add_user("x")
    with pytest.raises(ValueError, match="no call waits for a result"):
        chat.add_tool_result("7")
    _, parts = feed(chat, CALLS)
    assert parts == [ChatPart(kind="call", to="functions.x", text='{"a": 1}', index=0)]
    chat.add_tool_result("7")
    assert spoken(chat) == (user("x"), call("functions.x", '{"a": 1}'), result("functions.x", "7"))
    with pytest.raises(ValueError, match="no call waits"):
        chat.add_tool_result("8")
    feed(chat, "<|channel|>analysis to=python code<|message|>1<|call|>")
    chat.add_tool_result("1")
    assert spoken(chat)[-1] == result("python", "1", channel="analysis")


def test_taking_back_and_beginning_anew():
    chat = open_chat(developer=Developer(instructions="Be brief."))
    empty = chat.prompt()
    chat.add_user("x")
    chat.add_user("y")
    chat.remove_last()
    assert spoken(chat) == (user("x"),)
    chat.reset()
    assert chat.prompt() == empty


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<|channel|>analysis<|message|>h", ()),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|chan", (analysis("hm"),)),
        (ANSWER.removesuffix("<|return|>"), (analysis("hm"), final("4"))),
        (CALLS.removesuffix("<|call|>"), ()),
        (
            "<|channel|>commentary<|message|>I lo",
            (Message(role="assistant", channel="commentary", content="I lo"),),
        ),
        ("<|channel|>final<|message|>", ()),
        ("no format at all", ()),
        ("<|channel|>final<|message|>a<|endoftext|>", (final("a"),)),
    ],
)
def test_what_is_kept_of_an_answer_that_was_cut_off(text, kept):
    chat = open_chat()
    feed(chat, text)
    assert spoken(chat) == kept


def test_the_model_may_not_speak_for_others():
    chat = open_chat()
    _, parts = feed(chat, ANSWER.replace("return", "end") + "<|start|>user<|message|>and 3 + 3?<|end|>")
    assert [p.kind for p in parts] == ["analysis", "final", "other"]
    assert spoken(chat) == (analysis("hm"), final("4"))


def test_where_it_stops():
    stops = {TOKENS.ids[Mark.RETURN], TOKENS.ids[Mark.CALL], TOKENIZER.token_to_id("<|endoftext|>")}
    assert open_chat().stop == stops
