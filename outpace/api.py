"""The Python API: load a target and a draft, generate text, stream it."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, overload

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from outpace.checkpoint.shipped import own_draft
from outpace.config import cache_folder
from outpace.decode.auto import auto_controller
from outpace.decode.controller import Adaptive, Controller
from outpace.decode.generate import steps
from outpace.decode.grammar import Grammar, Vocabulary, at_once
from outpace.decode.params import DEFAULTS
from outpace.decode.params import SamplingParams as SamplingParams
from outpace.decode.partial import Partial
from outpace.decode.request import GREEDY, BatchRows, Request
from outpace.decode.reuse import PrefixCache
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft
from outpace.loading import open_chat, open_draft, open_on_device, open_target
from outpace.models.cuda_graphs import LENGTH, GraphTarget
from outpace.models.decoder import Decoder, Target
from outpace.ops.dispatch import find_activation_dtype, find_device, find_kv_cache_dtype
from outpace.ops.sampling import generator
from outpace.text.chat_format import ChatFormat, ChatPart
from outpace.text.messages import FINAL
from outpace.text.tokenizer import encode_prompt

Message = Mapping[str, Any]  # {"role": "user", "content": "Hi"}, as in the OpenAI API
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A target and its tokenizer, as `load` returns them. `name` is what it was loaded by, `layers` the
    number of layers kept (None: all). On a GPU `graphs` runs its steps, and `declined` says why drafts are
    not used, where the output would not be the target's."""

    name: str
    target: Decoder
    tokenizer: Tokenizer
    layers: int | None = None
    graphs: GraphTarget | None = None
    declined: str | None = None
    # by acceptance rule and number of threads
    _controllers: dict[tuple[str, int], Controller | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # for grammars, by the tokens that end a text
    _vocabularies: dict[frozenset[int], Vocabulary] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def grammar(self, schema: Mapping[str, Any], chat: ChatFormat | None = None) -> Grammar:
        """Of output in the form of a JSON schema; of a chat, after the reasoning. Raises ValueError for a
        schema that cannot be followed, and without llguidance."""
        begins = at_once if chat is None else chat.answer_begins
        return Grammar.of(self._vocabulary(self.eos if chat is None else chat.answer_ends), schema, begins)

    def read_grammar(self, text: str, ends: frozenset[int]) -> Grammar:
        """Of output in llguidance's language that one of the tokens `ends` ends. Raises as `grammar`."""
        return Grammar.read(self._vocabulary(ends), text)

    def _vocabulary(self, ends: frozenset[int]) -> Vocabulary:
        if ends not in self._vocabularies:
            self._vocabularies[ends] = Vocabulary(self.tokenizer, self.target.config.vocab_size, ends)
        return self._vocabularies[ends]

    @property
    def executor(self) -> Target:
        """What decodes."""
        return self.graphs or self.target

    @property
    def eos(self) -> frozenset[int]:
        return frozenset(self.target.config.eos_token_ids)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the largest logits of a token."""

    token: int
    text: str
    logit: float


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """One prompt's output.

    Attributes:
        text: The generated text; of a chat, the answer without the model's reasoning.
        tokens: The generated token ids, end token included.
        prompt_tokens: Tokens of the prompt.
        finish_reason: "stop" (an end token or a stop string), "length", or "abort" (a stream ended early).
        tau: Mean number of tokens committed per forward of the target, 1 without a draft; 0 if the prefill
            alone produced everything.
        tokens_per_second: After the first token, of this row; rows of a batch are decoded together.
        trace: Draft lengths, accepted tokens and times of every step, of the whole batch.
        first_token_seconds: From the start of the generation to the first token.
        step_seconds: From the end of one step to that of the next.
        parts: Of a chat, its messages: reasoning, tool calls, the answer.
        top_logits: For each token the largest logits, descending; empty unless requested.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    tau: float
    tokens_per_second: float
    trace: Trace
    first_token_seconds: float
    step_seconds: list[float]
    parts: list[ChatPart]
    top_logits: list[list[Candidate]]

    def as_json(self) -> dict[str, Any]:
        """Text, tokens and measurements; without fields that do not apply."""
        trace = self.trace
        values: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "tau": round(self.tau, 4),
            "accept_rate": round(trace.accept_rate, 4),
            "rounds": trace.rounds,
            "tokens_per_s": round(self.tokens_per_second, 2),
            "first_token_seconds": round(self.first_token_seconds, 5),
            "seconds": {part: round(seconds, 5) for part, seconds in trace.seconds.items()},
        }
        values |= trace.partial_as_json()
        if trace.predicted:
            rate, error = trace.predicted_tokens_per_s, trace.prediction_error
            values["predicted"] = {"tokens_per_s": round(rate, 2), "error": round(error, 4)}
        if self.parts:
            values["parts"] = [part.as_json() for part in self.parts]
        if self.top_logits:
            values["top_logits"] = [
                [{"token": c.token, "text": c.text, "logit": round(c.logit, 4)} for c in candidates]
                for candidates in self.top_logits
            ]
        return values

    def timing(self) -> dict[str, float]:
        """Seconds of the prefill, of the first token and of a step, and tokens per second."""
        ordered = sorted(self.step_seconds) or [0.0]
        times = {
            "prefill": self.trace.seconds["prefill"],
            "first_token": self.first_token_seconds,
            "round_mean": sum(ordered) / len(ordered),
            "round_p50": ordered[len(ordered) // 2],
            "round_p95": ordered[int(0.95 * len(ordered))],
        }
        rounded = {name: round(seconds, 6) for name, seconds in times.items()}
        return rounded | {"tokens_per_s": round(self.tokens_per_second, 2)}

    def summary(self) -> str:
        """The measurements in one line."""
        trace = self.trace
        seconds = ", ".join(f"{part} {1e3 * value:.0f} ms" for part, value in trace.seconds.items())
        text = (
            f"{self.prompt_tokens} + {len(self.tokens)} tokens, {self.tokens_per_second:.0f} tokens/s, "
            f"tau {self.tau:.2f} over {trace.rounds} steps, "
            f"first token after {1e3 * self.first_token_seconds:.0f} ms ({seconds})"
        )
        if trace.provisional:
            confirmed, passed = trace.confirmed
            text += (
                f"; partial KV: {trace.partial_forwards} forwards, {confirmed} of {passed} tokens confirmed"
            )
        if trace.predicted:
            rate, error = trace.predicted_tokens_per_s, trace.prediction_error
            text += f"; {rate:.0f} tokens/s predicted, {error:+.0%} from measured"
        return text


@dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """One token of a streamed output: its `text` ("" while a character is incomplete, or for reasoning), and
    whether a draft proposed it. Of a chat, `part` is what it adds to a message, reasoning included.
    `finish_reason` is set on the last piece."""

    text: str
    token: int
    drafted: bool
    part: ChatPart | None = None
    finish_reason: FinishReason | None = None


def load(
    name: str = "default",
    *,
    layers: int | None = None,
    kv_cache_dtype: str = "auto",
    activation_dtype: str = "auto",
    device: str = "cpu",
    deterministic: bool = False,
    sequences: int = 1,
    length: int = LENGTH,
    tensor_parallel_size: int = 1,
) -> Model:
    """A target by name or path.

    Args:
        name: A folder of safetensors, a GGUF file, or the embedded model, "default".
        layers: Number of layers to keep, for debugging.
        kv_cache_dtype: Of cached keys and values: "float32", "float16", "bfloat16"; "auto": by the device.
        activation_dtype: Of what weights multiply: "float32", "bfloat16"; "auto": by the device.
        device: "cpu", "cuda", "cuda:N", or "auto": a GPU where there is one.
        deterministic: On a GPU, steps of one shape, so that drafts may be exact in bfloat16.
        sequences, length: A GPU must have memory for so many sequences of so many tokens.
        tensor_parallel_size: Number of processes that torchrun started, which hold a part of the target each;
            all of them make the same calls and get the same outputs.

    Raises:
        LoadError: The path is missing, damaged or of another format (a ValueError).
        ValueError: The device is not there, or has too little memory: what would fit is said. There is no
            such dtype, the target cannot be divided so, or torchrun started another number of processes.
    """
    place, graphs, why = find_device(device), None, None
    kv_dtype, dtype = find_kv_cache_dtype(kv_cache_dtype), find_activation_dtype(activation_dtype, place)
    if place.type == "cpu":
        target, tokenizer = open_target(name, layers, tensor_parallel_size, kv_dtype, dtype)
    elif tensor_parallel_size != 1:
        raise ValueError(f"tensor_parallel_size {tensor_parallel_size}: one process holds a target on a GPU")
    else:
        graphs, tokenizer, why = open_on_device(
            name, place, sequences, length, layers, deterministic, kv_dtype
        )
        target = graphs.decoder
    return Model(name=name, target=target, tokenizer=tokenizer, layers=layers, graphs=graphs, declined=why)


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
        name: "ngram", "none", an embedded draft such as "dflash", the path of a DFlash, an EAGLE-3
            or a suffix index; None for the best one known for the whole target, if any.
        model: The target.
        num_draft_tokens: Nodes of the draft tree, root included; 0 proposes a chain (suffix: its usual tree).
        num_steps: Depth of an EAGLE-3's proposal; 0 is its usual one.
        topk: Children per node of a tree; 0 is the usual number.
        quantize: "q8_0" packs the draft's weights.

    Raises:
        ValueError: The path is no draft, does not fit the target, or has no such option.
    """
    if name is None:
        name = own_draft(model.name) if model.layers is None else "none"
    shape = {"num_draft_tokens": num_draft_tokens, "num_steps": num_steps, "topk": topk}
    return open_draft(name, model.target, model.tokenizer, **shape, quantize=quantize)


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
    sampling: SamplingParams = DEFAULTS,
) -> GenerationOutput | list[GenerationOutput]:
    """Generates text; the draft changes the speed and not the output.

    Args:
        model: The target.
        prompt: A string, a list of token ids, a list of messages, or a list of those (a batch).
        draft: A loaded draft or its name, which then proposes its full length in every step; None for the
            best one known for the target, in the length that measured costs say is fastest; False for
            autoregressive decoding.
        sampling: Sampling parameters and limits.

    Returns:
        One output, or a list of them for a batch.

    Raises:
        ValueError: The prompt is empty or too long, or the model has no chat format for messages.
    """
    batch = _is_batch(prompt)
    prompts: Sequence[Prompt] = prompt if batch else [prompt]  # type: ignore[assignment,list-item]
    rows, trace = [OutputRow(model, each, sampling) for each in prompts], Trace()
    for _ in _decode(model, rows, draft, sampling, trace):
        pass
    outputs = [row.output(trace, b) for b, row in enumerate(rows)]
    return outputs if batch else outputs[0]


def stream(
    model: Model,
    prompt: Prompt,
    *,
    draft: Draft | str | bool | None = None,
    sampling: SamplingParams = DEFAULTS,
    chat: ChatFormat | None = None,
    controller: Controller | None = None,
    partial: Partial | None = None,
    rng: torch.Generator | None = None,
    prefix_cache: PrefixCache | None = None,
) -> "TokenStream":
    """Like `generate` for one prompt, token by token as they are committed.

    Args:
        model: The target.
        prompt: A string, a list of token ids or a list of messages.
        draft: As in `generate`.
        sampling: Sampling parameters and limits.
        chat: The chat format that made the prompt's token ids, and reads the output.
        controller: Chooses the draft length of each step; None as `draft` says.
        partial: Verifies on partial KV first; needs a draft and no controller.
        rng: Random generator, instead of `sampling.seed`.
        prefix_cache: KV of the text before, of the target and this draft: its beginning is not read again.

    Raises:
        ValueError: As `generate`, and for a batch.
    """
    if _is_batch(prompt):
        raise ValueError("stream takes one prompt: use generate for a batch")
    row, trace = OutputRow(model, prompt, sampling, chat), Trace()
    decoding = _decode(model, [row], draft, sampling, trace, controller, partial, rng, prefix_cache)
    return TokenStream(row, decoding, trace)


class TokenStream:
    """An iterator over the `StreamPiece`s of one output."""

    def __init__(self, row: "OutputRow", decoding: Iterator[None], trace: Trace) -> None:
        self._row, self._trace = row, trace
        self._pieces = (piece for _ in decoding for piece in row.take())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamPiece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the generation."""
        self._pieces.close()

    def finish(self) -> GenerationOutput:
        """Ends the generation; -> the output so far, which becomes history in its chat."""
        self.close()
        return self._row.output(self._trace, 0)


def _decode(
    model: Model,
    rows: "list[OutputRow]",
    draft: Draft | str | bool | None,
    sampling: SamplingParams,
    trace: Trace,
    controller: Controller | None = None,
    partial: Partial | None = None,
    rng: torch.Generator | None = None,
    prefix_cache: PrefixCache | None = None,
) -> Iterator[None]:
    if model.declined is not None and (partial is None or partial.mode == "lossless"):
        draft, controller, partial = False, None, None
    if draft is True:
        raise ValueError("draft=True: name a draft, or leave it out for the best one known")
    free = draft is None and controller is None and partial is None
    if draft is None or isinstance(draft, str):
        draft = load_draft(draft, model)
    request = sampling.request(frozenset().union(*(row.eos for row in rows)))
    request = replace(request, grammars=tuple(filter(None, (row.grammar() for row in rows))))
    if free and draft:
        controller = _controller(model, draft, request, sampling.seed)
    if rng is None:
        seed, group = sampling.seed, model.target.group
        if seed is None:
            seed = secrets.randbits(63) if group is None else group.leaders(secrets.randbits(63))
        rng = generator(seed, model.target.device)
    for row in rows:
        row.stop, row.began = request.stop, time.perf_counter()
    return steps(
        model.executor,
        [row.prompt for row in rows],
        request,
        draft or None,
        BatchRows(len(rows), request, lambda b, tokens: rows[b].add(tokens)),
        trace,
        controller=controller,
        partial=partial,
        rng=rng,
        on_logits=(lambda b, logits: rows[b].add_logits(logits)) if sampling.top_logits else None,
        prefix_cache=prefix_cache,
    )


def _controller(model: Model, draft: Draft, request: Request, seed: int | None) -> Controller | None:
    """A new one with this machine's costs, which are looked up once. With a seed, only where the draft length
    leaves the text as it is: elsewhere the seed's text would depend on the costs."""
    rule = request.effective_rule
    if seed is not None and rule not in (GREEDY, "gumbel"):
        return None
    key = rule, torch.get_num_threads()
    if key not in model._controllers:
        model._controllers[key], _ = auto_controller(
            model.executor, model.tokenizer, draft, rule, cache_folder()
        )
    known = model._controllers[key]
    # one serves one generation at a time, and threads may share a model
    return Adaptive(known.costs) if isinstance(known, Adaptive) else known


def _is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], int | Mapping)


def check_text(model: Model, text: str) -> None:
    """Raises ValueError for text that is not Unicode, or cannot fit the model's positions; before it is
    tokenised, which takes long for long texts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid UTF-8 (character {error.start:,}): convert it first"
        ) from None
    positions = model.target.config.max_position_embeddings
    if len(text) > positions:
        longest = max(map(len, model.tokenizer.get_vocab()))
        if len(text) > positions * longest:
            raise ValueError(
                f"a prompt of {len(text):,} characters has {len(text) // longest:,} tokens or more (none is "
                f"longer than {longest} characters); this model's positions end at {positions:,}"
            )


@dataclass
class OutputRow:
    """One prompt of a batch: its ids, and the output as it grows."""

    model: Model
    source: Prompt
    sampling: SamplingParams
    chat: ChatFormat | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    top: list[list[Candidate]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            check_text(self.model, self.source)
            self.prompt = encode_prompt(self.model.tokenizer, self.source)
        elif self.source and isinstance(self.source[0], Mapping):
            self.chat = self._chat(self.source)  # type: ignore[arg-type]
            self.prompt = self.chat.prompt()
        else:
            self.prompt = [int(token) for token in self.source]  # type: ignore[arg-type]
        if not self.prompt:
            raise ValueError("the prompt is empty: give at least one token")
        self.eos = self.model.eos if self.chat is None else self.chat.stop
        self.stop: frozenset[int] = frozenset()
        self.began = self.first = 0.0  # when it began, and its first token came
        self._decoder = DecodeStream(skip_special_tokens=True)
        for token in self.prompt[-8:]:  # more than any character has tokens; the first token keeps its space
            if token in range(self.model.target.config.vocab_size):  # others are refused with their number
                self._decoder.step(self.model.tokenizer, token)
        self._pending = ""  # text that may be the beginning of a stop string
        self._message = -1  # the newest one of a chat's
        self._parts: list[ChatPart] | None = None
        self._pieces: list[StreamPiece] = []

    def _chat(self, messages: Sequence[Message]) -> ChatFormat:
        for message in messages:
            if isinstance(message.get("content"), str):
                check_text(self.model, message["content"])
        return open_chat(self.model.name, self.model.tokenizer, self.model.eos, messages=list(messages))

    def grammar(self) -> Grammar | None:
        schema = self.sampling.json_schema
        return None if schema is None else self.model.grammar(schema, self.chat)

    def add(self, tokens: list[int]) -> bool:
        """The tokens of one step, all but the last proposed by the draft; -> whether a stop string came."""
        self.first = self.first or time.perf_counter()
        for i, token in enumerate(tokens):
            self.tokens.append(token)
            last = token in self.stop or len(self.tokens) == self.sampling.max_tokens
            part, text = self._read(token, last)
            new, stopped = self._before_stop(text, part)
            if stopped or token in self.stop:
                self.finish = "stop"
            elif last:
                self.finish = "length"
            if self.finish is not None and not stopped:
                new, self._pending = new + self._pending, ""
            self.text += new
            drafted = i < len(tokens) - 1
            self._pieces.append(
                StreamPiece(text=new, token=token, drafted=drafted, part=part, finish_reason=self.finish)
            )
            if self.finish is not None:
                return stopped
        return False

    def add_logits(self, logits: Tensor) -> None:
        """logits [n, V] of the next n tokens; the last ones may not be kept."""
        values, ids = logits.float().topk(min(self.sampling.top_logits or 0, logits.shape[-1]))
        decode = self.model.tokenizer.decode
        for tokens, sizes in zip(ids.tolist(), values.tolist(), strict=True):
            self.top.append(
                [
                    Candidate(token=t, text=decode([t], skip_special_tokens=False), logit=x)
                    for t, x in zip(tokens, sizes, strict=True)
                ]
            )

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
            finish_reason=self.finish or "abort",
            tau=(sum(accepted) + len(accepted)) / len(accepted) if accepted else 0.0,
            tokens_per_second=max(len(self.tokens) - 1, 0) / seconds if seconds else 0.0,
            trace=trace,
            first_token_seconds=(self.first or time.perf_counter()) - self.began,
            step_seconds=[
                s for s, step in zip(trace.step_seconds, trace.accepted, strict=True) if step[b] >= 0
            ],
            parts=self.parts(),
            top_logits=self.top[: len(self.tokens)],
        )

    def parts(self) -> list[ChatPart]:
        """Of a chat, the messages of the output, which is over: it becomes history."""
        if self._parts is None:
            self._parts = [] if self.chat is None else self.chat.end()
        return self._parts

    def _read(self, token: int, last: bool) -> tuple[ChatPart | None, str]:
        """-> what a token adds to a chat's messages, and to the text."""
        if self.chat is None:
            return None, self._decoder.step(self.model.tokenizer, token) or ""
        part = self.chat.feed(token)
        if part is None and last:  # what an end alone tells: text outside of messages, a call without text
            part = next((part for part in self.parts() if part.index > self._message), None)
        return part, part.text if part is not None and part.kind == FINAL else ""

    def _before_stop(self, text: str, part: ChatPart | None) -> tuple[str, bool]:
        """-> the text to show now, and whether a stop string ended it. None spans two messages."""
        stops = self.sampling.stop_strings
        if part is not None and part.index != self._message:
            before, self._pending, self._message = self._pending, "", part.index
            text, stopped = self._before_stop(text, None)
            return before + text, stopped
        text, self._pending = self._pending + text, ""
        places = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if places:
            return text[: min(places)], True
        longest = max((len(stop) for stop in stops), default=1)
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in stops):
                self._pending = text[at:]
                return text[:at], False
        return text, False
