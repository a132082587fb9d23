"""The Python API: load a target and a draft, generate text, stream it."""

import datetime
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outpace.checkpoint.open import open_checkpoint, target_path
from outpace.checkpoint.tokenizer import open_template
from outpace.decode.generate import steps
from outpace.decode.request import BatchRows, Request
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft
from outpace.loading import open_draft, open_target, own_draft
from outpace.models.decoder import Decoder
from outpace.ops.sampling import Sampling, generator
from outpace.text.chat_format import ChatFormat
from outpace.text.harmony import speaks_harmony
from outpace.text.harmony_parser import HarmonyChat
from outpace.text.messages import FINAL, System, parse_conversation
from outpace.text.template import TemplateChat
from outpace.text.tokenizer import encode_prompt

Message = Mapping[str, Any]  # {"role": "user", "content": "Hi"}, as the OpenAI API has it
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus sampling; 1 keeps all tokens.
        top_k: Number of most probable tokens kept; 0 keeps all.
        min_p: Drops tokens less probable than this times the most probable one.
        repetition_penalty: Above 1 makes tokens of the prompt and the output less likely; 1 does nothing.
        presence_penalty: Subtracted from the logits of tokens that the output contains; -2 to 2.
        frequency_penalty: Subtracted once for each time that the output contains the token; -2 to 2.
        seed: Of the random draws, for the whole batch; None takes a fresh one.
        max_tokens: Most tokens to generate per prompt.
        stop: Strings that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output, besides the model's own.
        ignore_eos: Generate beyond the model's own end tokens.
        acceptance: Acceptance rule above temperature 0: match, rejection, block or gumbel. All of them keep
            the target's distribution; with gumbel a seed gives one text with any draft, and without one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    acceptance: str = "match"

    def __post_init__(self) -> None:
        """Raises ValueError for values out of range."""
        if not all(self.stop_strings) or (isinstance(self.stop, str) and not self.stop):
            raise ValueError("stop: an empty string would end every output")
        self.request(frozenset())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def request(self, eos: frozenset[int]) -> Request:
        """What the decoding loop takes; `eos`: the model's own end tokens."""
        sampling = Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )
        stop = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos)
        return Request(max_new_tokens=self.max_tokens, sampling=sampling, rule=self.acceptance, stop=stop)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A target and its tokenizer, as `load` returns them. `name` is what it was loaded by."""

    name: str
    target: Decoder
    tokenizer: Tokenizer

    @property
    def eos(self) -> frozenset[int]:
        return frozenset(self.target.config.eos_token_ids)


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """One prompt's output.

    Attributes:
        text: The generated text; of a chat, the answer without the model's reasoning.
        tokens: The generated token ids, end token included.
        prompt_tokens: Tokens of the prompt.
        finish_reason: "stop" (an end token or a stop string) or "length".
        tau: Mean number of tokens committed per forward of the target, 1 without a draft; 0 if the prefill
            alone produced everything.
        tokens_per_second: After the first token, of this row; rows of a batch are decoded together.
        trace: Draft lengths, accepted tokens and times of every step, of the whole batch.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    tau: float
    tokens_per_second: float
    trace: Trace


@dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """One token of a streamed output: its `text` ("" while a character is incomplete, or for reasoning), and
    whether a draft proposed it. `finish_reason` is set on the last piece."""

    text: str
    token: int
    drafted: bool
    finish_reason: FinishReason | None = None


def load(name: str = "default", *, layers: int | None = None) -> Model:
    """A target by name or path.

    Args:
        name: A folder of safetensors, a GGUF file, or "default" for the embedded model.
        layers: Number of layers to keep, for debugging.

    Raises:
        LoadError: The path is missing, damaged or of another format (a ValueError).
    """
    target, tokenizer = open_target(name, layers)
    return Model(name=name, target=target, tokenizer=tokenizer)


def load_draft(
    name: str | None,
    model: Model,
    *,
    num_draft_tokens: int = 0,
    num_steps: int = 0,
    topk: int = 0,
    quantize: str | None = None,
) -> Draft | None:
    """A draft for a target.

    Args:
        name: "ngram", "suffix" or "dflash" (the embedded ones), "none", the path of a DFlash, an EAGLE-3 or a
            suffix index; None for the best one known for the target, if any.
        model: The target.
        num_draft_tokens: Nodes of the draft tree, root included; 0 proposes a chain (suffix: its usual tree).
        num_steps: Depth of an EAGLE-3's proposal; 0 is its usual one.
        topk: Children per node of a tree; 0 is the usual number.
        quantize: "q8_0" packs the draft's weights.

    Raises:
        ValueError: The path is no draft, does not fit the target, or has no such option.
    """
    return open_draft(
        own_draft(model.name) if name is None else name,
        model.target,
        model.tokenizer,
        tree=num_draft_tokens,
        depth=num_steps,
        branch=topk,
        quantize=quantize,
    )


@overload
def generate(  # type: ignore[overload-overlap]
    model: Model, prompt: Prompt, *, draft: Draft | str | bool | None = None, sampling: SamplingParams = ...
) -> GenerationOutput: ...


@overload
def generate(
    model: Model,
    prompt: Sequence[Prompt],
    *,
    draft: Draft | str | bool | None = None,
    sampling: SamplingParams = ...,
) -> list[GenerationOutput]: ...


def generate(
    model: Model,
    prompt: Prompt | Sequence[Prompt],
    *,
    draft: Draft | str | bool | None = None,
    sampling: SamplingParams = SamplingParams(),
) -> GenerationOutput | list[GenerationOutput]:
    """Generates text; the draft changes the speed and not the output.

    Args:
        model: The target.
        prompt: A string, a list of token ids, a list of messages, or a list of those (a batch).
        draft: A loaded draft or its name; None for the best one known for the target, False for
            autoregressive decoding.
        sampling: Sampling parameters and limits.

    Returns:
        One output, or a list of them for a batch.

    Raises:
        ValueError: The prompt is empty or too long, or the model has no chat format for messages.
    """
    batch = _is_batch(prompt)
    prompts: Sequence[Prompt] = prompt if batch else [prompt]  # type: ignore[assignment,list-item]
    rows = [_Row(model, each, sampling) for each in prompts]
    trace = Trace()
    for _ in _decode(model, rows, draft, sampling, trace):
        pass
    outputs = [row.output(trace, b) for b, row in enumerate(rows)]
    return outputs if batch else outputs[0]


def stream(
    model: Model,
    prompt: Prompt,
    *,
    draft: Draft | str | bool | None = None,
    sampling: SamplingParams = SamplingParams(),
) -> Generator[StreamPiece, None, None]:
    """Like `generate` for one prompt, token by token as they are committed. Closing the iterator ends the
    generation."""
    if _is_batch(prompt):
        raise ValueError("stream takes one prompt: use generate for a batch")
    row = _Row(model, prompt, sampling)
    for _ in _decode(model, [row], draft, sampling, Trace()):
        yield from row.take()


def _decode(
    model: Model,
    rows: "list[_Row]",
    draft: Draft | str | bool | None,
    sampling: SamplingParams,
    trace: Trace,
) -> Iterator[None]:
    if draft is True:
        raise ValueError("draft=True: name a draft, or leave it out for the best one known")
    if draft is None or isinstance(draft, str):
        draft = load_draft(draft, model)
    request = sampling.request(frozenset().union(*(row.eos for row in rows)))
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    emitted = BatchRows(len(rows), request, lambda b, tokens: rows[b].add(tokens))
    return steps(
        model.target,
        [row.prompt for row in rows],
        request,
        draft or None,
        emitted,
        trace,
        rng=generator(seed, model.target.device),
    )


def _is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompt, str) or not prompt:
        return False
    return not isinstance(prompt[0], int | Mapping)


@dataclass
class _Row:
    """One prompt of a batch: its ids, and the output as it grows."""

    model: Model
    source: Prompt
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.chat: ChatFormat | None = None
        self.eos = self.model.eos
        if isinstance(self.source, str):
            self.prompt = encode_prompt(self.model.tokenizer, self.source)
        elif self.source and isinstance(self.source[0], Mapping):
            self.chat = _chat(self.model, self.source)  # type: ignore[arg-type]
            self.prompt, self.eos = self.chat.prompt(), self.chat.stop
        else:
            self.prompt = [int(token) for token in self.source]  # type: ignore[arg-type]
        if not self.prompt:
            raise ValueError("the prompt is empty: give at least one token")
        self._decoder = DecodeStream(skip_special_tokens=True)
        for token in self.prompt[-8:]:  # more than any character has tokens; the first token keeps its space
            self._decoder.step(self.model.tokenizer, token)
        self._held = ""  # text that may be the beginning of a stop string
        self._pieces: list[StreamPiece] = []

    def add(self, tokens: list[int]) -> bool:
        """The tokens of one step, all but the last proposed by the draft; -> whether a stop string came."""
        for i, token in enumerate(tokens):
            self.tokens.append(token)
            drafted = i < len(tokens) - 1
            new, stopped = self._shown(self._text_of(token))
            ended = token in self.sampling.stop_token_ids or (
                token in self.eos and not self.sampling.ignore_eos
            )
            if stopped or ended:
                self.finish = "stop"
            elif len(self.tokens) == self.sampling.max_tokens:
                self.finish = "length"
            if self.finish is not None and not stopped:
                new, self._held = new + self._held, ""
            self.text += new
            self._pieces.append(
                StreamPiece(text=new, token=token, drafted=drafted, finish_reason=self.finish)
            )
            if self.finish is not None:
                return stopped
        return False

    def take(self) -> list[StreamPiece]:
        """The pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def output(self, trace: Trace, b: int) -> GenerationOutput:
        """b: the row's number in the trace."""
        accepted = [step[b] for step in trace.accepted if step[b] >= 0]
        seconds = trace.decode_seconds
        return GenerationOutput(
            text=self.text,
            tokens=self.tokens,
            prompt_tokens=len(self.prompt),
            finish_reason=self.finish or "length",
            tau=(sum(accepted) + len(accepted)) / len(accepted) if accepted else 0.0,
            tokens_per_second=(len(self.tokens) - 1) / seconds if seconds else 0.0,
            trace=trace,
        )

    def _text_of(self, token: int) -> str:
        if self.chat is None:
            return self._decoder.step(self.model.tokenizer, token) or ""
        part = self.chat.feed(token)
        return part.text if part is not None and part.kind == FINAL else ""

    def _shown(self, text: str) -> tuple[str, bool]:
        """-> the text to show now, and whether a stop string ended it."""
        stops = self.sampling.stop_strings
        text, self._held = self._held + text, ""
        items = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if items:
            return text[: min(items)], True
        longest = max((len(stop) for stop in stops), default=1)
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in stops):
                self._held = text[at:]
                return text[:at], False
        return text, False


def _chat(model: Model, messages: Sequence[Message]) -> ChatFormat:
    """A chat with these messages in it."""
    if speaks_harmony(model.tokenizer):
        today = f"{datetime.date.today():%Y-%m-%d}"
        harmony = HarmonyChat(model.tokenizer)
        conversation = parse_conversation(list(messages), system=System(current_date=today))
        harmony.conversation = conversation
        return harmony
    template = open_template(open_checkpoint(target_path(model.name)))
    if template is None:
        raise ValueError(f"{model.name} has neither Harmony's tokens nor a chat template: give a text")
    chat = TemplateChat(model.tokenizer, template, model.eos)
    chat.messages = [dict(message) for message in messages]
    return chat
