"""Conversations -> training rows in Harmony: token ids with a loss mask."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from outpace.text.harmony import (
    HarmonyTokens,
    Mark,
    RecipientIn,
    drop_old_analysis,
    message_pieces,
    settings_pieces,
)
from outpace.text.messages import Conversation, Message, System, parse_conversation

T = TypeVar("T")
LONGEST_LINE = 64 * 2**20  # bytes: what one conversation may take in a file


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """`mask[i]`: `ids[i]` is the assistant's, and the loss of predicting it from ids[:i] counts.

    `turn`: the turn of the conversation that is trained on, from 0. `line`: the conversation's line in its
    file, from 1; 0 without a file.
    """

    ids: list[int]
    mask: list[bool]
    turn: int
    line: int = 0

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.mask)

    def spans(self) -> Iterator[tuple[bool, list[int]]]:
        """The row cut where the mask changes: supervised or not, and the ids."""
        begin = 0
        for i in range(1, len(self.ids) + 1):
            if i == len(self.ids) or self.mask[i] != self.mask[begin]:
                yield self.mask[begin], self.ids[begin:i]
                begin = i

    def as_json(self) -> dict[str, Any]:
        return {"line": self.line, "turn": self.turn, "ids": self.ids, "mask": [int(m) for m in self.mask]}


def rows(
    conversation: Conversation, tokens: HarmonyTokens, *, recipient_in: RecipientIn = "role", line: int = 0
) -> list[TrainingRow]:
    """One row for every turn with a supervised message of the assistant.

    A turn ends with an answer (a message on the final channel). Its row is the prompt as the model gets it,
    with the analysis of earlier turns dropped, and then the whole turn. Earlier turns are context: each has a
    row of its own, with its analysis and `<|return|>`. Within a turn nothing is dropped, so that one row
    serves all its calls.

    Supervised is the model's own output: the header after `<|start|>assistant`, the content, and the token
    that ends the message: `<|end|>` between messages, `<|call|>` and `<|return|>` at a stop. After an
    `<|end|>` the model also writes the next `<|start|>assistant`. Not supervised are settings, users, tools,
    `<|start|>assistant` at the end of a prompt, and messages with `supervised` False.
    """
    training_rows = []
    messages = conversation.messages
    ends = [i + 1 for i, message in enumerate(messages) if message.is_answer]
    if not ends or ends[-1] < len(messages):
        ends.append(len(messages))  # a turn without an answer: cut off, or still calling tools
    head = tokens.encode(settings_pieces(conversation))
    for turn, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        context, current = drop_old_analysis(messages[:begin]), messages[begin:end]
        if not any(m.role == "assistant" and m.supervised for m in current):
            continue
        ids = list(head)
        for message in context:
            ids += tokens.encode(message_pieces(message, recipient_in=recipient_in))
        mask = [False] * len(ids)
        for part, own in _turn(current, recipient_in):
            new = tokens.encode(part)
            ids += new
            mask += [own] * len(new)
        training_rows.append(TrainingRow(ids=ids, mask=mask, turn=turn, line=line))
    return training_rows


def with_next(row: TrainingRow, conversation: Conversation, tokens: HarmonyTokens) -> TrainingRow:
    """The row, and behind it the only turn of another conversation with the same settings, as if a history
    kept its analysis: `<|return|>` ends the last answer alone."""
    (turn,) = rows(conversation, tokens)
    settings = len(tokens.encode(settings_pieces(conversation)))
    ids = [*row.ids[:-1], tokens.ids[Mark.END], *turn.ids[settings:]]
    return replace(row, ids=ids, mask=[*row.mask[:-1], False, *turn.mask[settings:]])


def _turn(messages: Sequence[Message], recipient_in: RecipientIn) -> Iterator[tuple[list[str], bool]]:
    """The pieces of a turn, and whether they are supervised."""
    before: Message | None = None
    for message in messages:
        end = Mark.RETURN if message.is_answer else None
        pieces = list(message_pieces(message, end, recipient_in))
        own = message.role == "assistant" and message.supervised
        goes_on = before is not None and before.role == "assistant" and not before.is_call
        yield pieces[:2], own and goes_on
        yield pieces[2:], own
        before = message


def read_conversations(path: Path, system: System | None = None) -> Iterator[tuple[int, Conversation]]:
    """Line numbers and conversations of a JSONL file. `system`: as `parse_conversation` takes it. Raises
    ValueError that names the file, the line and the field."""
    return read_lines(path, partial(parse_conversation, system=system))


def read_lines(path: Path, parse: Callable[[Any], T]) -> Iterator[tuple[int, T]]:
    """Line numbers (from 1) and what `parse` makes of each line of a JSONL file, one line in memory at a
    time; empty lines are passed over. Raises ValueError that names the file and the line."""
    if Path(path).is_dir() or not Path(path).exists():  # a pipe is read too
        what = "a folder" if Path(path).is_dir() else "not there"
        raise ValueError(f"{path} is {what}: name a JSONL file with a conversation on every line")
    with Path(path).open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            try:
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"longer than {LONGEST_LINE:,} bytes: write one conversation per line")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield number, parse(_json(text))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def read_rows(
    path: Path, tokens: HarmonyTokens, *, system: System | None = None, recipient_in: RecipientIn = "role"
) -> Iterator[TrainingRow]:
    """`rows` of every conversation in a JSONL file, in order."""
    for line, conversation in read_conversations(path, system):
        yield from rows(conversation, tokens, recipient_in=recipient_in, line=line)


def _json(text: str) -> Any:
    try:
        data = json.loads(text)
        if "\\ud" in text.lower():  # an escape may name half of a surrogate pair, which is no character
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{half!r} is half of a surrogate pair: write the whole character") from None
    return data
