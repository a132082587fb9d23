"""Training rows of generated problems: conversations in Harmony, cut into batches of like lengths."""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.ops.attention import Packed
from outpace.ops.moe import ROUNDED
from outpace.tasks.families import FAMILIES
from outpace.tasks.lookups import asked_for, document
from outpace.tasks.measures import DAYS
from outpace.tasks.problem import Problem
from outpace.tasks.vocabulary import CITIES, COLORS, FIELDS, NAMES, THINGS
from outpace.text.harmony import HarmonyTokens, Mark, message_pieces, settings_pieces
from outpace.text.messages import EFFORTS, Conversation, Developer, System
from outpace.text.sft_rows import TrainingRow, rows, with_next

UNSUPERVISED = -100  # label of a token that is not the model's own
MOST_TURNS = 6
APART = "needles", "functions"  # never beside other problems in a row
INSTRUCTIONS = (
    "Answer briefly.", "Be precise.", "You are a helpful assistant.", "Answer the question.", "Think first.",
    "Give only the answer.", "You solve small problems.", "Always answer in English.", "Be kind.",
)  # fmt: skip
SERIES = 448  # tokens of a row of several problems, at most
LONGEST_PIECE = 400  # characters: a long document has the weight of a short one in the vocabulary
DOCUMENT = "document"  # beside the families' names: of conversations about a long document


@dataclass(frozen=True)
class Example:
    family: str
    row: TrainingRow


@dataclass(frozen=True)
class Batch:
    """Rows of like lengths, padded at their ends: inputs and labels [B, L] int64, `families`, and how many
    tokens each row supervises; or with `packed` rows end to end, inputs and labels [1, N], where only the
    first `tokens` are no padding."""

    inputs: Tensor
    labels: Tensor
    families: tuple[str, ...]
    supervised: tuple[int, ...]
    tokens: int
    packed: Packed | None = None


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What the rows of a step are drawn from. All but `weights` and `longest` are shares of the problems."""

    weights: dict[str, float] = field(default_factory=dict)  # how often a family is drawn; else 1
    low: float = 0.05  # answered without a trace
    turns: float = 0.08  # the last of a conversation of several problems
    settings: float = 0.3  # with other system and developer messages than the model's own
    documents: float = 0.003  # all codes of one document of up to `longest` tokens
    series: float = 0.6  # of the rest: several in a row, each with its trace, after the same settings
    longest: int = 4096

    def __post_init__(self) -> None:
        unknown = sorted(self.weights.keys() - FAMILIES.keys())
        if unknown:
            raise ValueError(f"weights of {unknown[0]!r}: the families are {', '.join(FAMILIES)}")
        for name in ("low", "turns", "settings", "documents", "series"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: a share, from 0 to 1")


class Lessons:
    """Endless problems to learn from."""

    def __init__(self, tokens: HarmonyTokens, mix: Mix) -> None:
        self.tokens, self.mix = tokens, mix
        self.weights = {name: mix.weights.get(name, 1.0) for name in FAMILIES}

    def draw(self, rng: random.Random) -> Example:
        kind = rng.random()
        if kind < self.mix.documents:
            return Example(DOCUMENT, self._about_document(rng))
        effort = "low" if rng.random() < self.mix.low else rng.choice(EFFORTS[1:])
        name = _chosen(rng, self.weights)
        problem = FAMILIES[name].draw(rng, held_out=False)
        if kind < self.mix.documents + self.mix.turns and problem.call is None:
            return Example(name, self._of_turns(rng, effort, problem))
        if problem.call is None and rng.random() < self.mix.series:
            return Example(name, self._series(rng, effort, problem))
        return Example(name, self._row(rng, problem.conversation(effort)))

    def step(self, rng: random.Random, size: int) -> list[Example]:
        """As many as have about `size` tokens together; one at least."""
        drawn: list[Example] = []
        total = 0
        while total < size:
            drawn.append(self.draw(rng))
            total += len(drawn[-1].row.ids)
        return drawn

    def _short(self, rng: random.Random) -> Problem:
        """Of a family that is neither long nor calls a function."""
        short = {name: weight for name, weight in self.weights.items() if name not in APART}
        return FAMILIES[_chosen(rng, short)].draw(rng, held_out=False)

    def _row(self, rng: random.Random, conversation: Conversation) -> TrainingRow:
        """The last turn, with settings that people may give."""
        if rng.random() < self.mix.settings:
            conversation = with_settings(rng, conversation)
        return rows(conversation, self.tokens)[-1]

    def _of_turns(self, rng: random.Random, effort: str, last: Problem) -> TrainingRow:
        """The problem as the last of a conversation; none before it is a long one or calls a function."""
        before = [self._short(rng) for _ in range(rng.randint(1, MOST_TURNS - 1))]
        return self._row(rng, joined([problem.conversation(effort) for problem in (*before, last)]))

    def _series(self, rng: random.Random, effort: str, problem: Problem) -> TrainingRow:
        further = iter(lambda: self._short(rng), None)
        return self._one_after_another(rng, effort, problem, further, SERIES)

    def _about_document(self, rng: random.Random) -> TrainingRow:
        """One document and all its codes, asked for in any order."""
        while True:
            text, codes = document(rng, rng.randint(40, self.mix.longest // 10))
            asked = [asked_for(owner, code) for owner, code in rng.sample(list(codes.items()), len(codes))]
            first = replace(asked[0], question=f"{text}\n{asked[0].question}")
            if not first.held_out:
                return self._one_after_another(rng, rng.choice(EFFORTS[1:]), first, asked[1:])

    def _one_after_another(
        self,
        rng: random.Random,
        effort: str,
        first: Problem,
        further: Iterable[Problem],
        most: float = math.inf,
    ) -> TrainingRow:
        """Problems in a row of at most so many tokens, each with its trace, as if a conversation's history
        kept the analysis."""
        row = self._row(rng, first.conversation(effort))
        for problem in further:
            longer = with_next(row, problem.conversation(effort), self.tokens)
            if len(longer.ids) > most:
                break
            row = longer
        return row


def _chosen(rng: random.Random, weights: dict[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def with_settings(rng: random.Random, conversation: Conversation) -> Conversation:
    """Under the system message of gpt-oss, with a date or without, or under instructions that change nothing;
    functions stay."""
    system, developer = conversation.system, conversation.developer
    if system is not None and rng.random() < 0.8:
        day = date(2024, 1, 1) + timedelta(days=rng.randrange(4000))
        today = day.isoformat() if rng.random() < 0.8 else None
        system = System(reasoning=system.reasoning, current_date=today)
    if rng.random() < 0.3:
        tools = () if developer is None else developer.tools
        developer = Developer(instructions=rng.choice(INSTRUCTIONS), tools=tools)
    return replace(conversation, system=system, developer=developer)


def joined(conversations: Sequence[Conversation]) -> Conversation:
    """One conversation of the turns of several, with the settings of the last."""
    return replace(conversations[-1], messages=sum((c.messages for c in conversations), ()))


LESSONS = *FAMILIES, DOCUMENT


def batches(examples: Sequence[Example], tokens: int, pad: int) -> Iterator[Batch]:
    """Batches of at most `tokens` inputs, padding included, one row at least; short rows first."""
    left = sorted(examples, key=lambda example: len(example.row.ids))
    while left:
        count = 1
        while count < len(left) and (count + 1) * (len(left[count].row.ids) - 1) <= tokens:
            count += 1
        yield batch(left[:count], pad)
        left = left[count:]


def batch(examples: Sequence[Example], pad: int) -> Batch:
    length = max(len(example.row.ids) for example in examples) - 1
    inputs = torch.full((len(examples), length), pad)
    labels = torch.full((len(examples), length), UNSUPERVISED)
    for i, example in enumerate(examples):
        ids, own = torch.tensor(example.row.ids), torch.tensor(example.row.mask[1:])
        inputs[i, : len(own)] = ids[:-1]
        labels[i, : len(own)] = ids[1:].masked_fill(~own, UNSUPERVISED)
    supervised = tuple(sum(example.row.mask[1:]) for example in examples)
    return Batch(inputs, labels, tuple(example.family for example in examples), supervised, inputs.numel())


def packs(examples: Sequence[Example], tokens: int) -> Iterator[Batch]:
    """Batches of about `tokens` inputs at most, one row at least."""
    some, total = list[Example](), 0
    for example in examples:
        if some and total + len(example.row.ids) > tokens:
            yield pack(some)
            some, total = [], 0
        some.append(example)
        total += len(example.row.ids)
    yield pack(some)


def pack(examples: Sequence[Example]) -> Batch:
    """All rows in one, padding as the last of them, and where each lies."""
    single = [batch([example], 0) for example in examples]
    lengths = [b.inputs.shape[1] for b in single]
    padding = -sum(lengths) % ROUNDED
    return Batch(
        F.pad(torch.cat([b.inputs for b in single], 1), (0, padding)),
        F.pad(torch.cat([b.labels for b in single], 1), (0, padding), value=UNSUPERVISED),
        sum((b.families for b in single), ()),
        sum((b.supervised for b in single), ()),
        sum(lengths),
        Packed.of([*lengths, padding] if padding else lengths),
    )


def sample_pieces(seed: int, each: int) -> Iterator[str]:
    """Pieces of text, without marks, of problems of all families: what a vocabulary is learnt from."""
    rng = random.Random(seed)
    for family in FAMILIES.values():
        for i in range(each):
            conversation = family.draw(rng, held_out=False).conversation(EFFORTS[i % len(EFFORTS)])
            pieces = [
                *settings_pieces(conversation),
                *(p for m in conversation.messages for p in message_pieces(m)),
            ]
            yield from (piece[-LONGEST_PIECE:] for piece in pieces if not isinstance(piece, Mark))
    for word in (*NAMES, *THINGS, *FIELDS, *CITIES, *COLORS, *DAYS):
        yield from [f"{word} {word}"] * each  # a token of its own, after a space or without
