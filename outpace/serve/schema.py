"""The bodies of requests, in OpenAI's words and vLLM's. An unknown field is refused, never ignored."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outpace.decode.params import SamplingParams

MOST_CHOICES = 16


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Problem(BaseModel):
    """`param`: the field that is wrong, where it is one."""

    message: str
    type: str
    param: str | None
    code: None


class ErrorBody(BaseModel):
    error: Problem


class Speculative(Body):
    """`num_speculative_tokens`: draft tokens of a step, at most."""

    method: str | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=1)


class StreamOptions(Body):
    """`drafted`: every token has its chunk, which says whether a draft had proposed it."""

    include_usage: bool = False
    drafted: bool = False


class TextFormat(Body):
    type: Literal["text"]


class JsonFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    """`strict` is true, whatever it says: an answer always has the schema's form. `name`: for the client."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class Named(Body):
    name: str


class FunctionChoice(Body):
    """The function that the answer has to call."""

    type: Literal["function"]
    function: Named


class Prediction(Body):
    """OpenAI's predicted outputs: text that the answer is expected to repeat."""

    type: Literal["content"] = "content"
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        parts = [part.get("text") for part in self.content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("prediction.content: only parts of text")
        return "".join(map(str, parts))


class Sampled(Body):
    """What both kinds of completion share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    speculative: bool | Speculative | None = None
    user: str | None = None  # of the client's own books: the server's log names it

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """What the answer has to be, if not any text."""
        return None

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Raises ValueError for values out of range. Above temperature 0 noise is the seed's and the place's
        alone (rule "gumbel"), so that a text does not hang on what else is running."""
        names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            max_tokens=max_tokens,
            stop=() if self.stop is None else self.stop,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=self.ignore_eos,
            acceptance="gumbel",
            json_schema=self.json_schema,
            logit_bias=_by_id(self.logit_bias or {}),
            **given,
        )


def _by_id(bias: dict[str, float]) -> dict[int, float]:
    """JSON has no keys but text."""
    for token in bias:
        if not token.isascii() or not token.isdigit():
            raise ValueError(f"logit_bias: {token!r} is no token id")
    return {int(token): value for token, value in bias.items()}


class CompletionBody(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] = False

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def top(self) -> int | None:
        return self.logprobs


class ChatBody(Sampled):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None  # both answered alike: the model makes one call at a time
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    response_format: Format | None = None
    prediction: Prediction | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def json_schema(self) -> dict[str, Any] | None:
        match self.response_format:
            case JsonFormat():
                return {"type": "object"}
            case SchemaFormat(json_schema=named):
                return named.schema_
        return None

    @property
    def strict_functions(self) -> set[str]:
        """Names of those that are called with arguments of the schema's form, whenever they are called."""
        functions = [tool.get("function", tool) for tool in self.tools or ()]
        return {each["name"] for each in functions if each.get("strict") and "name" in each}

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Body):
    """Of a text, or of a chat as the model reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def problem(errors: list[Any], body: Any) -> tuple[str, str | None]:
    """The first of pydantic's errors as a sentence, and the field of the body it is about; of those of a
    union, the one that is furthest inside."""
    error = max(errors, key=lambda error: len(error["loc"]))
    place, inside = list[str](), body
    for part in error["loc"][1:]:  # the names of a union's members are no part of the field
        if isinstance(inside, dict) and part in inside:
            place.append(str(part))
        elif isinstance(inside, list) and isinstance(part, int):
            place[-1] += f"[{part}]"
        else:
            continue
        inside = inside[part]
    if error["type"] == "missing":
        place.append(str(error["loc"][-1]))
    field = ".".join(place) or None
    match error["type"]:
        case "extra_forbidden":
            return f"{field}: this server does not implement it; leave it out", field
        case "json_invalid":
            return f"the body is no JSON: {error['ctx']['error']}", None
        case "missing":
            return f"{field}: it is missing", field
    given = error.get("input")
    shown = json.dumps(given, default=str, ensure_ascii=False)[:80] if not isinstance(given, bytes) else ""
    return f"{field or 'the body'}: {error['msg']}" + (f", not {shown}" if shown else ""), field
