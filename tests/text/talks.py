"""Conversations for the Harmony tests: the embedded tokenizer, and random messages."""

from pathlib import Path

from hypothesis import strategies as st

import outpace
from outpace.text.harmony import HarmonyTokens, Mark
from outpace.text.messages import Conversation, Developer, Message, System, Tool
from outpace.text.template import ChatTemplate
from outpace.text.tokenizer import encode, read_tokenizer

GOLDEN = Path(__file__).parent / "golden"
TOKENIZER = read_tokenizer(Path(outpace.__file__).parent / "embedded" / "target")
TOKENS = HarmonyTokens(TOKENIZER)


def ids_of(text):
    """Token ids of a text in which the special tokens are meant."""
    return encode(TOKENIZER, text)


def text_of(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def golden(name):
    return (GOLDEN / name).read_text(encoding="utf-8").rstrip("\n")


def user(content, **more):
    return Message(role="user", content=content, **more)


def analysis(content, **more):
    return Message(role="assistant", channel="analysis", content=content, **more)


def final(content, **more):
    return Message(role="assistant", channel="final", content=content, **more)


def call(name, content="{}", **more):
    header = {"channel": "commentary", "content_type": "json", "constrained": True} | more
    return Message(role="assistant", recipient=name, content=content, **header)


def result(name, content, channel="commentary"):
    return Message(role="tool", name=name, recipient="assistant", channel=channel, content=content)


LETTERS = st.characters(codec="utf-8", exclude_categories=("Cs",))
# whole texts, texts that look like the format, and tags cut short
PLAIN = st.text(LETTERS, max_size=30)
LOOKALIKE = st.lists(
    st.one_of(st.sampled_from([*Mark, "<|endoftext|>", "<|MASK|>", "<|", "|>", "assistant", "final"]), PLAIN),
    max_size=5,
).map("".join)
TEXTS = st.one_of(PLAIN, LOOKALIKE)
TOOL_NAMES = st.sampled_from(["functions.x", "functions.get_weather", "browser.search", "python"])
CHANNELS = st.sampled_from(["analysis", "commentary", "final", "größe"])
TYPES = st.sampled_from([(None, False), ("json", False), ("json", True), ("a.b", True), ("code", False)])


@st.composite
def messages(draw, contents=TEXTS):
    role = draw(st.sampled_from(["user", "assistant", "assistant", "tool", "developer"]))
    kind, constrained = draw(TYPES)
    header = {"content_type": kind, "constrained": constrained, "channel": draw(st.none() | CHANNELS)}
    if role == "tool":
        header |= {"name": draw(TOOL_NAMES), "recipient": "assistant"}
    elif role == "assistant":
        header["recipient"] = draw(st.none() | TOOL_NAMES)
    else:
        header["name"] = draw(st.none() | st.sampled_from(["bob", "<|end|>", "a:b", "to=x"]))
    return Message(role=role, content=draw(contents), **header)


@st.composite
def conversations(draw, contents=TEXTS):
    value = tuple(draw(st.lists(messages(contents), max_size=6)))
    tools = (Tool(name="x", description="Does x."),) if draw(st.booleans()) else ()
    text = draw(contents) or None
    developer = Developer(instructions=text, tools=tools) if text or tools else None
    system = System(reasoning="low", current_date="2025-06-28") if draw(st.booleans()) else None
    return Conversation(messages=value, system=system, developer=developer)


def render(source, messages, *, bos_token=None, eos_token=None, **more):
    template = ChatTemplate(source=source, bos_token=bos_token, eos_token=eos_token)
    return template.render(messages, **more)
