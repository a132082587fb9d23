"""A checkpoint's chat template: found, and rendered to the text that the model continues."""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outpace.text.chat_format import ChatPart
from outpace.text.messages import ANALYSIS, FINAL
from outpace.text.sandbox import Sandbox
from outpace.text.tokenizer import encode

MOST_SOURCE = 2**20  # characters of a template; the longest published ones have 30,000
MOST_CONFIG = 32 * 2**20  # bytes of a tokenizer_config.json; with its added tokens some have 3 MiB
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names for one thing, in order of preference


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template, with the texts of the begin and end tokens that it may write."""

    source: str
    bos_token: str | None = None
    eos_token: str | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """See `render`."""
        return render(self.source, messages, bos_token=self.bos_token, eos_token=self.eos_token, **more)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
    **kwargs: Any,
) -> str:
    """The text of a conversation, as transformers' `apply_chat_template` writes it.

    messages: dicts of JSON values, mostly `role` and `content`; tools: JSON schemas; kwargs: what else the
    template reads (`enable_thinking`, `reasoning_effort`, `documents`). The template cannot reach Python,
    and is bounded: 16 Mi characters, 10 seconds, ranges of 100,000.

    Raises ValueError, with the template's line, for a template that is wrong, refuses the messages
    (`raise_exception`) or runs past a bound; and for values that JSON has not.
    """
    if len(template) > MOST_SOURCE:
        raise ValueError(f"a chat template of {len(template):,} characters; the limit is {MOST_SOURCE:,}")
    sandbox = Sandbox()
    sandbox.filters["tojson"] = sandbox.bounded("tojson", _tojson)
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    entries = [_with_thoughts(_plain(m, f"messages[{i}]"), i) for i, m in enumerate(messages)]
    given = {"messages": entries, "tools": _plain(list(tools), "tools") if tools is not None else None}
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    given |= {key: token for key, token in tokens.items() if token is not None}
    given |= {"documents": None, "add_generation_prompt": add_generation_prompt}
    given |= {key: _plain(value, key) for key, value in kwargs.items()}
    try:
        text: str = sandbox.template(template).render(given)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid in line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ValueError("the chat template is nested too deeply") from error
    except Exception as error:  # a template's mistakes raise whatever Python does
        raise ValueError(f"the chat template stops{_line(error)}: {error or type(error).__name__}") from error
    return text


def read_template(folder: Path, name: str = "default") -> str | None:
    """The chat template of a checkpoint folder: chat_template.jinja, else what tokenizer_config.json holds,
    one text or several with names. None where there is none, or none of that name.

    Raises ValueError for files that are no template.
    """
    folder = Path(folder)
    alone = folder / "chat_template.jinja"
    if name != "default":
        alone = folder / "additional_chat_templates" / f"{name}.jinja"
    if alone.is_file():
        return _read(alone, MOST_SOURCE)
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
        data = json.loads(_read(path, MOST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not an object")
    return data


def _read(path: Path, most: int) -> str:
    if path.stat().st_size > most:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; no such file needs more than {most:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON's types alone: other objects would bring methods that no sandbox knows."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {str(key): _plain(one, f"{where}.{key}") for key, one in value.items()}
        case list() | tuple():
            return [_plain(one, f"{where}[{i}]") for i, one in enumerate(value)]
    raise ValueError(
        f"{where} is a {type(value).__name__}, which JSON has not: give texts, numbers, lists, dicts"
    )


def _with_thoughts(message: Any, i: int) -> dict[str, Any]:
    """Thoughts under the two names that templates read, whichever they came by."""
    if not isinstance(message, dict):
        raise ValueError(f"messages[{i}] is a {type(message).__name__}, not an object with role and content")
    thoughts = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML's escapes, which Jinja's own filter writes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _line(error: Exception) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


THINK = ("<think>", "</think>")


class TemplateChat:
    """`talk.Talk` by a chat template (text/template.py). What is between `<think>` and `</think>`, where
    the model has such tokens, is analysis, and is given back to the template as `reasoning_content`."""

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

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def give_result(self, text: str) -> None:
        """A template's calls are part of its text: there is none to find."""
        self.messages.append({"role": "tool", "content": text})

    def take_back(self) -> None:
        self.messages.pop()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = [*self._begin]
        self._listen([])

    def prompt(self) -> list[int]:
        text = self.template.render(self.messages, tools=self.tools, **self.variables)
        ids = encode(self.tokenizer, text)
        self._listen(ids)
        return ids

    def feed(self, token: int) -> ChatPart | None:
        self._done = token in self._stop
        if token in self._marks and None not in self._marks:
            self._thinking = token == self._marks[0]
            return None
        text = self._decoder.step(self.tokenizer, token) or ""
        kind = ANALYSIS if self._thinking else FINAL
        if not self._said[kind]:  # the template's own line breaks around a thought
            text = text.lstrip("\n")
        if not text:
            return None
        self._said[kind] += text
        return ChatPart(kind=kind, text=text, index=0 if self._thinking else 1)

    def end(self) -> list[ChatPart]:
        thought, text = self._said[ANALYSIS], self._said[FINAL]
        if text:
            more = {"reasoning_content": thought} if thought else {}
            self.messages.append({"role": "assistant", "content": text, **more})
        kinds = [(ANALYSIS, 0, bool(text) or not self._thinking), (FINAL, 1, self._done)]
        value = self._said
        self._listen([])
        return [
            ChatPart(kind=kind, text=value[kind], index=i, finished=finished)
            for kind, i, finished in kinds
            if value[kind]
        ]

    def _listen(self, prompt: list[int]) -> None:
        """For an answer. Some templates end inside a thought."""
        marks = [token for token in prompt if token in self._marks and token is not None]
        self._thinking = bool(marks) and marks[-1] == self._marks[0]
        self._said = {ANALYSIS: "", FINAL: ""}
        self._done = False
        self._decoder = DecodeStream(skip_special_tokens=True)
