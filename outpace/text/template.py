"""Chat templates: found in a checkpoint, rendered in a sandbox, and encoded so that contents stay text."""

import json
import re
import sys
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outpace.text.chat_format import ChatPart, SchemaText
from outpace.text.messages import ANALYSIS, FINAL, MAX_DEPTH
from outpace.text.sandbox import SANDBOX
from outpace.text.tokenizer import PlainEncoder, encode_with_offsets

MAX_SOURCE = 2**20  # characters of a template; the longest published ones have 30,000
MAX_CONFIG = 32 * 2**20  # bytes of a tokenizer_config.json; with its added tokens some have 3 MiB
MAX_OUTPUT = 16 * 2**20  # characters
SECONDS = 10.0
MEMORY = 2**30  # bytes of address space
REASONING = ("reasoning_content", "thinking", "reasoning")  # names for one thing, in order of preference


@dataclass(frozen=True)
class StandIns:
    """Characters in the place of special tokens' punctuation in message contents.

    With stand-ins for `<`, `|` and `>` no content can form `<|im_end|>`, whatever a template cuts out of it
    or puts around it, and the output shows which characters are a message's. The replacements are symbols
    that occur nowhere else in the input, one for each character, so that positions stay the same.
    """

    chars: dict[str, str] = field(default_factory=dict)  # original -> stand-in
    # what the assistant's own text may contain: tokens that are not special, such as <think>, <tool_call>
    own_tokens: re.Pattern[str] | None = None

    @classmethod
    def choose(cls, tokenizer: Tokenizer, text: str) -> "StandIns":
        """For contents that are all in `text`. Raises ValueError where it uses every symbol there is."""
        added = tokenizer.get_added_tokens_decoder().values()
        used = set(text)
        free = (c for c in map(chr, range(0x2800, sys.maxunicode)) if c not in used and _is_symbol(c))
        chars = {}
        for char in sorted({c for token in added for c in _punctuation(token.content)}):
            if (stand_in := next(free, None)) is None:
                raise ValueError("the messages use every symbol of Unicode: leave some out")
            chars[char] = stand_in
        names = sorted((token.content for token in added if not token.special), key=len, reverse=True)
        own = "|".join(map(re.escape, names))
        return cls(chars, re.compile(f"({own})") if own else None)

    def replace(self, text: str, assistants: bool = False) -> str:
        if assistants and self.own_tokens:
            parts = self.own_tokens.split(text)
            return "".join(part if i % 2 else self.replace(part) for i, part in enumerate(parts))
        for char, stand_in in self.chars.items():
            text = text.replace(char, stand_in)
        return text

    def restore(self, text: str) -> str:
        for char, stand_in in self.chars.items():
            text = text.replace(stand_in, char)
        return text


def _punctuation(token: str) -> set[str]:
    """Characters to replace so that no content forms the token. Quotes and backslashes have a meaning in
    JSON, and `_`, `-` and `.` are common in names and numbers."""
    marks = {c for c in token if not (c.isalnum() or c.isspace() or c in "_-.'\"\\")}
    return marks or set(token)


def _is_symbol(char: str) -> bool:
    return unicodedata.category(char) == "So" and char.lower() == char.upper()


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template, with the texts of the begin and end tokens that it may write."""

    source: str
    bos_token: str | None = None
    eos_token: str | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, as transformers' `apply_chat_template` writes it, for people to read:
        `prompt_ids` also tells special tokens from text that looks like them.

        messages: dicts of JSON values, mostly `role` and `content`; tools: JSON schemas; variables: what else
        the template reads (`enable_thinking`, `reasoning_effort`, `documents`). The template runs in a child
        process (text/sandbox.py) and is limited to 10 seconds, 1 GiB and 16 Mi characters.

        Raises ValueError, with the template's line, for a template that is wrong, refuses the messages
        (`raise_exception`) or exceeds a limit; and for values that JSON does not have.
        """
        return self._run(_variables(messages, tools, variables), StandIns(), add_generation_prompt)

    def prompt_ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """`render` as token ids. Only the template's own text gives special tokens: `<|im_end|>` in a
        message, a tool or a variable is encoded as its characters. An assistant's content and reasoning may
        hold added tokens that are not special, such as `<tool_call>`: the model writes them there."""
        values = _variables(messages, tools, variables)
        stand_ins = StandIns.choose(tokenizer, self.source + json.dumps(values, ensure_ascii=False))
        text = self._run(values, stand_ins, add_generation_prompt)
        plain = stand_ins.restore(text)
        added = tokenizer.get_added_tokens_decoder()
        encoding = encode_with_offsets(tokenizer, plain)
        if all(text[a:b] == plain[a:b] for id, (a, b) in encoding if id in added):
            return [id for id, _ in encoding]
        encode_plain = PlainEncoder(tokenizer).encode
        ids, end = [], 0
        for id, (a, b) in encode_with_offsets(tokenizer, text):
            if id in added:
                ids += [*encode_plain(plain[end:a]), id]
                end = b
        return ids + encode_plain(plain[end:])

    def _run(self, variables: dict[str, Any], stand_ins: StandIns, add_generation_prompt: bool) -> str:
        if len(self.source) > MAX_SOURCE:
            raise ValueError(
                f"a chat template of {len(self.source):,} characters; the limit is {MAX_SOURCE:,}"
            )
        replaced = {key: _replaced(value, stand_ins) for key, value in variables.items() if key != "messages"}
        replaced["messages"] = [
            {key: _replaced(value, stand_ins, _is_own(message, key)) for key, value in message.items()}
            for message in variables["messages"]
        ]
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        replaced |= {key: token for key, token in tokens.items() if token is not None}
        replaced["add_generation_prompt"] = add_generation_prompt
        try:
            text: str = SANDBOX.run(
                "render",
                seconds=SECONDS,
                memory=MEMORY,
                source=self.source,
                stand_ins={stand_in: char for char, stand_in in stand_ins.chars.items()},
                variables=replaced,
                characters=MAX_OUTPUT,
            )
        except ValueError as error:
            raise ValueError(f"the chat template {stand_ins.restore(str(error))}") from error
        return text


def _variables(messages: Any, tools: Any, more: dict[str, Any]) -> dict[str, Any]:
    """What a template reads, as copies made of JSON's types. Raises ValueError, naming the place."""
    copies = [_with_reasoning(_json(m, f"messages[{i}]"), i) for i, m in enumerate(messages)]
    given = {"messages": copies, "tools": None if tools is None else _json(list(tools), "tools")}
    return {"documents": None, **given, **{key: _json(value, key) for key, value in more.items()}}


def _json(value: Any, place: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"{place[:80]}.. is nested more than {MAX_DEPTH} levels deep: flatten it")
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): _json(one, f"{place}.{key}", depth + 1) for key, one in value.items()}
        case list() | tuple():
            return [_json(one, f"{place}[{i}]", depth + 1) for i, one in enumerate(value)]
    raise ValueError(
        f"{place} is a {type(value).__name__}, which JSON does not have: give texts, numbers, lists, dicts"
    )


def _with_reasoning(message: Any, i: int) -> dict[str, Any]:
    """Reasoning under the two names that templates read, whichever it came by."""
    if not isinstance(message, dict):
        raise ValueError(f"messages[{i}] is a {type(message).__name__}, not an object with role and content")
    given = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}


def _replaced(value: Any, stand_ins: StandIns, assistants: bool = False) -> Any:
    """A JSON value with stand-ins in all strings but keys that are identifiers: templates name those."""
    match value:
        case str():
            return stand_ins.replace(value, assistants)
        case dict():
            return {
                key if key.isidentifier() else stand_ins.replace(key): _replaced(one, stand_ins, assistants)
                for key, one in value.items()
            }
        case list():
            return [_replaced(one, stand_ins, assistants) for one in value]
    return value


def _is_own(message: dict[str, Any], key: str) -> bool:
    return message.get("role") == "assistant" and key in ("content", *REASONING)


def read_template(folder: Path, name: str = "default") -> str | None:
    """The chat template of a checkpoint folder: chat_template.jinja, else `chat_template` of
    tokenizer_config.json, one text or several with names. None where there is none, or none of that name.

    Raises ValueError for damaged files.
    """
    folder = Path(folder)
    alone = folder / "chat_template.jinja"
    if name != "default":
        alone = folder / "additional_chat_templates" / f"{name}.jinja"
    if alone.is_file():
        return _read(alone, MAX_SOURCE)
    value = _tokenizer_config(folder).get("chat_template")
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    if isinstance(value, list):
        named = {}
        for part in value:
            if not isinstance(part, dict) or not isinstance(part.get("name"), str):
                raise ValueError(f"{where} is a list, and {part!s:.60} in it has no name")
            named[part["name"]] = part.get("template")
        value = named.get(name)
    elif name != "default":
        return None
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where} is of type {type(value).__name__}, not a text")
    return value


def folder_template(folder: Path) -> ChatTemplate | None:
    """`read_template`, with the texts of the begin and end tokens. Raises ValueError likewise."""
    source = read_template(folder)
    if source is None:
        return None
    config = _tokenizer_config(Path(folder))
    texts = {}
    for key in ("bos_token", "eos_token"):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise ValueError(
                f"{folder}/tokenizer_config.json: {key} is of type {type(token).__name__}, not a text"
            )
        texts[key] = token
    return ChatTemplate(source=source, **texts)


def gguf_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template of a GGUF file. Raises ValueError where it is no text."""
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"tokenizer.chat_template is of type {type(source).__name__}, not a text")
    tokens = metadata.get("tokenizer.ggml.tokens") or []

    def text(kind: str) -> str | None:
        i = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return tokens[i] if isinstance(i, int) and 0 <= i < len(tokens) else None

    return ChatTemplate(source=source, bos_token=text("bos"), eos_token=text("eos"))


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        data = json.loads(_read(path, MAX_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not an object")
    return data


def _read(path: Path, limit: int) -> str:
    if path.stat().st_size > limit:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; no such file needs more than {limit:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


THINK = ("<think>", "</think>")


class TemplateChat:
    """`ChatFormat` by a chat template. Text between the tokens `<think>` and `</think>`, where the model has
    them, is reasoning, and goes back to the template as `reasoning_content`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        stop: frozenset[int],
        *,
        instructions: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> None:
        """`variables`: what else the template reads: reasoning_effort, enable_thinking, .."""
        self.tokenizer = tokenizer
        self.template = template
        self.tools = tools
        self.variables = variables
        self._stop = stop
        self._marks = tuple(tokenizer.token_to_id(mark) for mark in THINK)
        self._begin = [{"role": "system", "content": instructions}] if instructions else []
        self.reset()

    @property
    def stop(self) -> frozenset[int]:
        return self._stop

    @property
    def answer_ends(self) -> frozenset[int]:
        return self._stop

    def answer_begins(self, tokens: Sequence[int]) -> bool:
        return list(tokens[-1:]) == [self._marks[1]] if self._reasons else not tokens

    @property
    def call_ends(self) -> frozenset[int]:
        return self._stop

    def call_grammar(self, name: str | None, schema_text: SchemaText) -> str:
        raise ValueError("a chat template does not say how this model calls functions")

    def free_grammar(
        self, strict: Collection[str], answer: Mapping[str, Any] | None, schema_text: SchemaText
    ) -> str:
        return self.call_grammar(None, schema_text)

    def add_user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def add_tool_result(self, text: str) -> None:
        """A template has its own format of calls: any message may be followed by a result."""
        self.messages.append({"role": "tool", "content": text})

    def remove_last(self) -> None:
        self.messages.pop()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = [*self._begin]
        self._start_answer([])

    def prompt(self) -> list[int]:
        ids = self.template.prompt_ids(self.tokenizer, self.messages, tools=self.tools, **self.variables)
        self._start_answer(ids)
        return ids

    def feed(self, token: int) -> ChatPart | None:
        self._done = token in self._stop
        if token in self._marks and None not in self._marks:
            self._thinking = token == self._marks[0]
            return None
        text = self._decoder.step(self.tokenizer, token) or ""
        kind = ANALYSIS if self._thinking else FINAL
        if not self._texts[kind]:  # the template's own line breaks around reasoning
            text = text.lstrip("\n")
        if not text:
            return None
        self._texts[kind] += text
        return ChatPart(kind=kind, text=text, index=0 if self._thinking else 1)

    def end(self) -> list[ChatPart]:
        reasoning, text = self._texts[ANALYSIS], self._texts[FINAL]
        if text:
            more = {"reasoning_content": reasoning} if reasoning else {}
            self.messages.append({"role": "assistant", "content": text, **more})
        kinds = [(ANALYSIS, 0, bool(text) or not self._thinking), (FINAL, 1, self._done)]
        parts = [
            ChatPart(kind=kind, text=self._texts[kind], index=i, finished=finished)
            for kind, i, finished in kinds
            if self._texts[kind]
        ]
        self._start_answer([])
        return parts

    def _start_answer(self, prompt: list[int]) -> None:
        """Some templates open the reasoning in the prompt."""
        marks = [token for token in prompt if token in self._marks and token is not None]
        self._thinking = bool(marks) and marks[-1] == self._marks[0]
        # unless the prompt has closed it, a template that knows of reasoning lets the model begin with it
        known = None not in self._marks and THINK[1] in self.template.source
        self._reasons = known and marks[-1:] != [self._marks[1]]
        self._texts = {ANALYSIS: "", FINAL: ""}
        self._done = False
        self._decoder = DecodeStream(skip_special_tokens=True)
