"""A chat by a template: prompts from history, thoughts apart from answers, cut off or not."""

import pytest

from outpace.text.chat_format import ChatPart
from outpace.text.template import ChatTemplate, TemplateChat
from outpace.text.tokenizer import encode, train_bpe

CHATML = ChatTemplate(
    source="{% for t in tools or [] %}<tool>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = train_bpe(["some words of a chat " * 9], 280)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def open_chat(tokenizer, **more):
    return TemplateChat(tokenizer, CHATML, frozenset({tokenizer.token_to_id("<|im_end|>")}), **more)


def feed(chat, tokenizer, text):
    chat.prompt()
    streamed = [p for token in encode(tokenizer, text) if (p := chat.feed(token)) is not None]
    return streamed, chat.end()


def prompt(chat, tokenizer):
    return tokenizer.decode(chat.prompt(), skip_special_tokens=False)


def test_turns(tokenizer):
    chat = open_chat(tokenizer, instructions="Be brief.", tools=[{"function": {"name": "f"}}])
    begin = "<tool>f<|im_start|>system\nBe brief.<|im_end|>\n"
    chat.add_user("one")
    assert prompt(chat, tokenizer) == begin + "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    streamed, parts = feed(chat, tokenizer, "<think>\nhm 🙂\n</think>\n\nyes<|im_end|>")
    assert parts == [
        ChatPart(kind="analysis", text="hm 🙂\n", index=0),
        ChatPart(kind="final", text="yes", index=1),
    ]
    for part in parts:
        assert "".join(p.text for p in streamed if p.index == part.index) == part.text
    chat.add_tool_result("7")
    assert prompt(chat, tokenizer) == (
        begin + "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n[hm 🙂\n]yes<|im_end|>\n"
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    )
    chat.remove_last()
    chat.remove_last()
    chat.remove_last()
    assert prompt(chat, tokenizer) == begin + "<|im_start|>assistant\n"
    chat.add_user("two")
    chat.reset()
    assert prompt(chat, tokenizer) == begin + "<|im_start|>assistant\n"


def test_a_prompt_that_opens_the_reasoning(tokenizer):
    def answer(opening, text):
        source = CHATML.source.replace("{{ opening }}", opening)
        chat = TemplateChat(tokenizer, ChatTemplate(source=source), open_chat(tokenizer).stop)
        return [(part.kind, part.text) for part in feed(chat, tokenizer, text)[1]]

    assert answer("<think>\n", "hm</think>yes<|im_end|>") == [("analysis", "hm"), ("final", "yes")]
    assert answer("<think>\n\n</think>\n\n", "yes<|im_end|>") == [("final", "yes")]


def test_reasoning_in_a_message_opens_none(tokenizer):
    chat = open_chat(tokenizer)
    chat.add_user("what does <think> mean?")
    chat.prompt()
    assert chat.feed(encode(tokenizer, "a")[0]).kind == "final"


def test_answers_that_are_cut_off(tokenizer):
    chat = open_chat(tokenizer)
    _, parts = feed(chat, tokenizer, "<think>h")
    assert parts == [ChatPart(kind="analysis", text="h", index=0, finished=False)] and chat.messages == []
    _, parts = feed(chat, tokenizer, "<think>h</think>y")
    assert [p.finished for p in parts] == [True, False]
    assert chat.messages == [{"role": "assistant", "content": "y", "reasoning_content": "h"}]


def test_a_tokenizer_without_thoughts():
    plain = train_bpe(["some words of a chat " * 9], 280)
    chat = TemplateChat(plain, CHATML, frozenset())
    _, parts = feed(chat, plain, "<think>x</think>")
    assert [(p.kind, p.text) for p in parts] == [("final", "<think>x</think>")]
