"""The engine with its thread, its drafts, and the way from a request to its answers."""

import logging
import secrets
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outpace.api import Message, Model, OutputRow
from outpace.decode.controller import Controller
from outpace.decode.grammar import Grammar, schema_text
from outpace.drafts.base import Draft
from outpace.drafts.lookup import Suffix
from outpace.loading import open_chat
from outpace.ops.suffixes import Suffixes
from outpace.serve.answer import Answer, Outbox
from outpace.serve.engine import Engine, EngineConfig
from outpace.serve.fields import check_body
from outpace.serve.schema import ChatBody, CompletionBody, FunctionChoice, Sampled, Speculative
from outpace.serve.sequence import Sequence
from outpace.text.chat_format import ChatFormat

LOG = logging.getLogger("outpace.serve")
PREDICTED = 16  # positions of a step where the client predicts the answer


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: `drafts` by method, `default` the method of requests that name none."""

    model: Model
    name: str
    drafts: Mapping[str, Draft] = field(default_factory=dict)
    default: str | None = None
    controller: Controller | None = None


class Server:
    def __init__(self, served: Served, config: EngineConfig) -> None:
        self.served, self.model, self.config = served, served.model, config
        # wide enough for an answer that the client predicts
        predicted = Suffix(Suffixes.of(torch.zeros(1, dtype=torch.int32)), 1, PREDICTED)
        drafts = [*served.drafts.values(), predicted]
        self.engine = Engine(served.model.executor, config, drafts, served.controller)
        self.outbox = Outbox()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """After the round that is running; sequences that are left end without a reason."""
        self.stopping.set()
        self.thread.join()
        self.engine.end_all(ConnectionError("the server stops"))
        self.outbox.hand_over()

    def _run(self) -> None:
        while not self.stopping.is_set():
            if not self.engine.wait(0.2):
                continue
            try:
                self.engine.step()
            except Exception as error:  # none is known; whoever waits must not wait for ever
                LOG.exception("a round failed")
                self.engine.end_all(error)
            self.outbox.hand_over()

    def chat_of(self, body: ChatBody) -> ChatFormat:
        """Raises ValueError, naming the message and the field, for what is no chat."""
        return self._chat(body.messages, body.functions, body.reasoning_effort or "medium")

    def _chat(
        self, messages: Rows[Message], functions: list[dict[str, Any]] | None, effort: str
    ) -> ChatFormat:
        if not messages:
            raise ValueError("messages: there is none to answer")
        return open_chat(
            self.model.name,
            self.model.tokenizer,
            self.model.eos,
            messages=list(messages),
            functions=functions,
            reasoning=effort,
        )

    def tokens_of(self, messages: Rows[Message]) -> list[int]:
        return self._chat(messages, None, "medium").prompt()

    def chat(self, body: ChatBody) -> list[Answer]:
        """The choices of a chat completion, under way. Raises ValueError and QueueFull."""
        check_body(body)
        limit = body.max_completion_tokens or body.max_tokens
        prediction = None if body.prediction is None else body.prediction.text
        rows = []
        for _ in range(body.n):
            chat = self.chat_of(body)
            rows.append((chat.prompt(), chat))
        return self._begin(body, rows, limit, body.top, prediction)

    def complete(self, body: CompletionBody) -> list[Answer]:
        """The choices of a completion: `n` of each prompt, in order. Raises ValueError and QueueFull."""
        check_body(body)
        if not body.prompts:
            raise ValueError("prompt: there is none")
        rows: list[tuple[Any, ChatFormat | None]]
        rows = [(prompt, None) for prompt in body.prompts for _ in range(body.n)]
        return self._begin(body, rows, body.max_tokens or 16, body.top, None)

    def _begin(
        self,
        body: Sampled,
        rows: Rows[tuple[Any, ChatFormat | None]],
        limit: int | None,
        top: int | None,
        prediction: str | None,
    ) -> list[Answer]:
        """All of them, or none."""
        seed = secrets.randbits(62) if body.seed is None else body.seed
        draft, width = self._draft(body.speculative, prediction)
        made = []
        for i, (source, chat) in enumerate(rows):
            row = OutputRow(self.model, source, body.sampling(limit or 1), chat)
            if limit is None:
                left = self.config.max_model_len - len(row.prompt)
                row.sampling = replace(row.sampling, max_tokens=max(left, 1))
            answer = Answer(row, i, top, self.outbox)
            answer.user = body.user
            answer.sequence = self._sequence(answer, self._grammar(body, row), draft, width, seed + i)
            made.append(answer)
        for answer in made:
            assert answer.sequence is not None
            self.engine.check(answer.sequence)
        try:
            for answer in made:
                assert answer.sequence is not None
                self.engine.add(answer.sequence)
        except Exception:
            for answer in made:
                answer.cancel()
            raise
        return made

    def _grammar(self, body: Sampled, row: OutputRow) -> Grammar | None:
        """What the answer has to be: JSON of a schema, or a call."""
        choice = body.tool_choice if isinstance(body, ChatBody) else None
        if choice in (None, "auto", "none") or row.chat is None:
            strict = body.strict_functions if isinstance(body, ChatBody) and choice != "none" else ()
            if row.chat is None or not strict:
                return row.grammar()
            text = row.chat.free_grammar(strict, row.sampling.json_schema, schema_text)
            return self.model.read_grammar(text, row.chat.answer_ends | row.chat.call_ends)
        if row.sampling.json_schema is not None:
            raise ValueError("tool_choice: an answer that has to be a call has no response_format")
        try:
            name = choice.function.name if isinstance(choice, FunctionChoice) else None
            text = row.chat.call_grammar(name, schema_text)
            return self.model.read_grammar(text, row.chat.call_ends)
        except ValueError as error:
            raise ValueError(f"tool_choice: {error}") from error

    def _sequence(
        self, answer: Answer, grammar: Grammar | None, draft: Draft | None, width: int, seed: int
    ) -> Sequence:
        row = answer.row
        request = replace(row.sampling.request(row.eos), grammars=() if grammar is None else (grammar,))
        row.stop = request.stop
        return Sequence(
            prompt=row.prompt,
            request=request,
            draft=draft,
            width=width,
            seed=seed,
            device=self.model.target.device,
            on_tokens=answer.feed,
            on_end=answer.end,
            on_logits=None if answer.top is None else answer.score,
        )

    def _draft(self, asked: bool | Speculative | None, prediction: str | None) -> tuple[Draft | None, int]:
        """-> the draft of a request, and its most positions. `false` stops every draft."""
        served = self.served
        if asked is False or self.model.declined is not None:
            return None, 0
        method, most = served.default, 0
        if isinstance(asked, Speculative):
            method = asked.method or method
            most = 0 if asked.num_speculative_tokens is None else asked.num_speculative_tokens + 1
        if prediction and not (isinstance(asked, Speculative) and asked.method):
            ids = self.model.tokenizer.encode(prediction, add_special_tokens=False).ids
            text = torch.tensor([*ids, -1], dtype=torch.int32)
            return Suffix(Suffixes.of(text), self.model.target.config.vocab_size, PREDICTED), most
        if method is None or method == "none":
            return None, 0
        if method not in served.drafts:
            known = ", ".join([*served.drafts, "none"])
            raise ValueError(f"speculative.method {method!r}: this server has {known}")
        return served.drafts[method], most
