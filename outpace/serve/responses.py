"""OpenAI's Responses: items in and out, and the events of a stream."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from outpace.api import StreamPiece
from outpace.serve.answer import Answer
from outpace.serve.fields import FieldError, check_parts, check_tool, only
from outpace.serve.schema import (
    Body,
    ChatBody,
    FunctionChoice,
    JsonFormat,
    Named,
    NamedSchema,
    SchemaFormat,
    Speculative,
    TextFormat,
)
from outpace.serve.wire import NAMESPACE, JsonObject, usage
from outpace.text.chat_format import CALL
from outpace.text.messages import ANALYSIS

# what is read of each kind of item, next to its id and status
ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content",),
}
KEPT = 1000  # responses that a later request may go on from
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # what a part of an item is called


class Reasoning(Body):
    effort: Literal["low", "medium", "high"] | None = None
    summary: None = None


class FlatSchema(NamedSchema):
    type: Literal["json_schema"]


class Text(Body):
    format: Annotated[TextFormat | JsonFormat | FlatSchema, Field(discriminator="type")] | None = None

    @property
    def chat(self) -> TextFormat | JsonFormat | SchemaFormat | None:
        """As a chat completion says it."""
        if not isinstance(self.format, FlatSchema):
            return self.format
        named = self.format.model_dump(by_alias=True, exclude={"type"})
        return SchemaFormat(type="json_schema", json_schema=NamedSchema(**named))


class FlatChoice(Named):
    type: Literal["function"]


class ResponsesBody(Body):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | FlatChoice = "auto"
    parallel_tool_calls: bool | None = None  # Harmony makes one call at a time
    reasoning: Reasoning | None = None
    text: Text | None = None
    speculative: bool | Speculative | None = None
    store: bool = True
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # nothing here is encrypted

    @property
    def _tool_choice(self) -> Literal["auto", "none", "required"] | FunctionChoice:
        """As a chat completion says it."""
        if not isinstance(self.tool_choice, FlatChoice):
            return self.tool_choice
        return FunctionChoice(type="function", function=Named(name=self.tool_choice.name))

    def chat(self, before: list[JsonObject]) -> ChatBody:
        """The same question as a chat after the messages `before`. Raises ValueError, naming the item."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatBody(
            messages=[*instructions, *before, *messages_of(self.input)],
            max_completion_tokens=self.max_output_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)] or None,
            tool_choice=self._tool_choice,
            user=self.user,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            response_format=None if self.text is None else self.text.chat,
            speculative=self.speculative,
        )


def _tool(tool: JsonObject, place: str) -> JsonObject:
    if tool.get("type") != "function":
        raise FieldError(f"{place}.type", f"{tool.get('type')!r}: this server has functions alone")
    check_tool(tool, place)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def messages_of(given: str | list[JsonObject]) -> list[JsonObject]:
    """Items as the messages of a chat."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [message for i, item in enumerate(given) for message in _messages(item, f"input[{i}]")]


def _messages(item: JsonObject, place: str) -> list[JsonObject]:
    kind = item.get("type", "message")
    only(item, place, "type", "id", "status", *ITEMS.get(kind if isinstance(kind, str) else "", item))
    check_parts(item.get("content"), f"{place}.content")
    match kind:
        case "message":
            return [{"role": item.get("role"), "content": item.get("content")}]
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            return [{"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}]
        case "function_call_output":
            if not isinstance(output := item.get("output"), str):
                raise ValueError(f"{place}.output: it must be a text")
            return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": output}]
        case "reasoning":
            if not isinstance(parts := item.get("content") or [], list):
                raise FieldError(f"{place}.content", "it must be a list of parts")
            text = "".join(_reasoning(part, f"{place}.content[{i}]") for i, part in enumerate(parts))
            return [{"role": "assistant", "reasoning": text}] if text else []
    raise FieldError(f"{place}.type", f"{kind!r}: known are {', '.join(ITEMS)}")


def _reasoning(part: Any, place: str) -> str:
    match part:
        case {"type": "reasoning_text", "text": str(text), **more} if not more:
            return text
    raise FieldError(place, "a part of reasoning has the type reasoning_text and a text")


class Kept:
    """The conversations of the last responses, by id: what `previous_response_id` goes on from."""

    def __init__(self) -> None:
        self.messages: OrderedDict[str, list[JsonObject]] = OrderedDict()

    def before(self, body: ResponsesBody) -> list[JsonObject]:
        if body.previous_response_id is None:
            return []
        if body.previous_response_id not in self.messages:
            raise ValueError(
                f"previous_response_id {body.previous_response_id!r} is not kept here (any more)"
            )
        return self.messages[body.previous_response_id]

    def keep(self, body: ResponsesBody, before: list[JsonObject], response: JsonObject) -> None:
        if not body.store:
            return
        answered = messages_of(response["output"])
        self.messages[response["id"]] = [*before, *messages_of(body.input), *answered]
        while len(self.messages) > KEPT:
            self.messages.popitem(last=False)


class Writer:
    """A response as it grows, and the events that tell of it."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self.number, self.part = 0, -1
        self.response: JsonObject = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"],
            "tools": body.tools,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "usage": None,
        }

    def begin(self) -> Iterator[JsonObject]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def add(self, piece: StreamPiece) -> Iterator[JsonObject]:
        """The events of one more token."""
        part = piece.part
        if part is None:
            return
        text = piece.text if part.kind == "final" else part.text
        if part.index != self.part and (part.text or part.kind == CALL):
            yield from self._close()
            yield from self._open(part.kind, part.to, part.index)
        if not text:
            return
        item, where = self.response["output"][-1], self._where()
        if item["type"] == "function_call":
            item["arguments"] += text
            yield self._event("response.function_call_arguments.delta", **where, delta=text)
            return
        item["content"][0]["text"] += text
        more: JsonObject = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(
            f"response.{PARTS[item['type']]}.delta", **where, content_index=0, delta=text, **more
        )

    def end(self, answer: Answer) -> Iterator[JsonObject]:
        yield from self._close(cut=answer.row.finish == "length")
        of_chat = usage([answer], 1)
        reasoning = [i["content"][0]["text"] for i in self.response["output"] if i["type"] == "reasoning"]
        tokens = len(answer.row.model.tokenizer.encode("".join(reasoning), add_special_tokens=False).ids)
        self.response["usage"] = {
            "input_tokens": of_chat["prompt_tokens"],
            "input_tokens_details": of_chat["prompt_tokens_details"],
            "output_tokens": of_chat["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": tokens},
            "total_tokens": of_chat["total_tokens"],
        }
        status = "incomplete" if answer.row.finish == "length" else "completed"
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["status"] = status
        yield self._event(f"response.{status}", response=self.response)

    def _open(self, kind: str, to: str | None, index: int) -> Iterator[JsonObject]:
        self.part = index
        if kind == CALL:
            item: JsonObject = {
                "type": "function_call",
                "id": f"fc_{secrets.token_hex(12)}",
                "call_id": f"call_{secrets.token_hex(12)}",
                "name": (to or "").removeprefix(NAMESPACE),
                "arguments": "",
            }
        elif kind == ANALYSIS:
            item = {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": []}
        else:
            item = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "content": []}
            item["role"] = "assistant"
        item["status"] = "in_progress"
        self.response["output"].append(item)
        yield self._event("response.output_item.added", output_index=self._where()["output_index"], item=item)
        if item["type"] != "function_call":
            item["content"].append(_part(item["type"], ""))
            part = item["content"][0]
            yield self._event("response.content_part.added", **self._where(), content_index=0, part=part)

    def _close(self, cut: bool = False) -> Iterator[JsonObject]:
        if self.part < 0:
            return
        item, where = self.response["output"][-1], self._where()
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **where, **done)
        else:
            part = item["content"][0]
            more: JsonObject = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{PARTS[item['type']]}.done"
            yield self._event(name, **where, content_index=0, text=part["text"], **more)
            yield self._event("response.content_part.done", **where, content_index=0, part=part)
        item["status"] = "incomplete" if cut else "completed"
        self.part = -1
        yield self._event("response.output_item.done", output_index=where["output_index"], item=item)

    def _where(self) -> JsonObject:
        output = self.response["output"]
        return {"item_id": output[-1]["id"], "output_index": len(output) - 1}

    def _event(self, kind: str, **values: Any) -> JsonObject:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **values}


def _part(kind: str, text: str) -> JsonObject:
    part: JsonObject = {"type": PARTS[kind], "text": text}
    return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})
