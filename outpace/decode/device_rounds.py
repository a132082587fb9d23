"""Rounds that a device runs by itself: the host starts one, and reads the one before while it runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, Gumbel
from outpace.decode.controller import Controller
from outpace.decode.request import BatchRows, Request
from outpace.decode.round import MODELS, Choice, Committed, Round, State
from outpace.decode.static_drafts import runs_whole, static_draft
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft, not_finite
from outpace.kv.base import KVCache
from outpace.models.cuda_graphs import GraphCache, GraphTarget
from outpace.models.decoder import Decoder
from outpace.models.static_step import StaticStep, bucket, memories_of

if TYPE_CHECKING:
    from outpace.models.xla import XLATarget

MOST_KEPT = 16  # lengths and ways to choose, captured or compiled; the oldest goes
Numbers = Callable[[], list[list[int]]]  # of a round, see `Committed`; waits until it has run


class DeviceRounds(ABC):
    """The rounds of a draft, or of none, over one size of cache. How sure a draft is does not shorten a
    round."""

    def __init__(self, target: Decoder, cache: KVCache, draft: Any) -> None:
        self.block = 1 if draft is None else draft.block_size
        self.session = None if draft is None else draft.begin(cache.batch, cache.length, cache.offset)
        self.draft = None if self.session is None else static_draft(self.session)
        aux = () if draft is None else draft.target_layer_ids
        self.step = StaticStep(target, cache, aux)
        self.state = State(target, cache.batch, self.block, len(aux))

    def begin(self, cache: KVCache, last: Tensor, left: list[int], rule: AcceptanceRule) -> None:
        """A generation: `cache` and `session` have its prompts, and `rule` has drawn `last` [B]."""
        self.choice = Choice(rule.sampling, rule.draft_sampling) if isinstance(rule, Gumbel) else None
        self.state.begin(last, cache.lengths, left, rule)
        if self.draft is not None:
            self.draft.begin(self.state, last)

    @abstractmethod
    def play(self, n: int) -> Numbers:
        """Starts a round of n positions."""

    @abstractmethod
    def end(self, row: int) -> None:
        """No round that is started from here on writes to this row."""

    def run(
        self,
        cache: KVCache,
        last: Tensor,
        rule: AcceptanceRule,
        rows: BatchRows,
        trace: Trace,
        controller: Controller,
    ) -> Iterator[None]:
        """After the prefill, which gave `last` [B]: yields after every round that was read. `controller`
        chooses how long one is before it hears of the one before."""
        batch, lengths = len(rows.done), list(cache.lengths)
        self.begin(
            cache,
            last,
            [
                0 if done else limit - len(text)
                for done, limit, text in zip(rows.done, rows.limits, rows.emitted, strict=True)
            ],
            rule,
        )
        waiting: tuple[int, Numbers] | None = None
        while not all(rows.done):
            with trace.timed("verify"):
                n = min(controller.width(lengths), self.block)
                before, waiting = waiting, (n, self.play(n))
                if before is None:
                    continue
                n, read = before
                numbers = read()
            with trace.timed("rest"):
                if numbers[0][-1]:
                    raise not_finite(f"step {trace.steps + 1}", MODELS[numbers[0][-1]])
                active = [b for b in range(batch) if not rows.done[b]]
                kept = [numbers[b][-2] for b in active]
                for b, count in zip(active, kept, strict=True):
                    lengths[b] += count
                    rows.emit(b, numbers[b][n : n + count])
                    if rows.done[b]:
                        self.end(b)
                trace.add(batch, active, [n - 1] * len(active), [count - 1 for count in kept])
                controller.learn_chain(n, kept)
            yield


class GraphRounds(DeviceRounds):
    """Captured once for each number of positions and way to choose, over the buffers of a cache, and replayed
    for every generation in them."""

    def __init__(self, target: GraphTarget, cache: GraphCache, draft: Any) -> None:
        super().__init__(target.decoder, cache.buffers.cache, draft)
        self.target = target
        self.captured: dict[tuple[int, Choice | None], tuple[Committed, Callable[[], None]]] = {}

    def play(self, n: int) -> Numbers:
        out, replay = self._round(n)
        replay()
        return on_its_way(out.numbers)

    def end(self, row: int) -> None:
        self.state.left[row].zero_()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _round(self, n: int) -> tuple[Committed, Callable[[], None]]:
        known = self.captured.get((n, self.choice))
        if known is None:
            before = {name: buffer.clone() for name, buffer in self.state.named_buffers()}
            run = Round(self.step, self.draft, self.state, n, self.target.width(n), self.choice)
            drop_oldest(self.captured)
            known = self.captured[n, self.choice] = self.target.capture(run)
            self.target.captured += 1
            for name, buffer in before.items():  # keys and values lie behind the text, and are written again
                self.state.get_buffer(name).copy_(buffer)
        return known


class CompiledRounds(DeviceRounds):
    """Compiled once for each number of positions and way to choose: a program takes what a round writes, and
    gives it back."""

    def __init__(self, target: "XLATarget", cache: KVCache, draft: Any) -> None:
        super().__init__(target.decoder, cache, draft)
        self.target, self.programs = target, dict[tuple[int, Choice | None], Callable[..., Any]]()
        self.written = dict[str, Tensor]()
        self.fixed = {f"step.{name}": x for name, x in target.fixed.items()}
        if self.draft is not None:
            own = (*self.draft.named_parameters(prefix="draft"), *self.draft.named_buffers(prefix="draft"))
            self.fixed |= target.moved({name: x for name, x in own if name not in self._memories()})

    def begin(self, cache: KVCache, last: Tensor, left: list[int], rule: AcceptanceRule) -> None:
        super().begin(cache, last, left, rule)
        own = dict(self.state.named_buffers(prefix="state")) | self._memories()
        targets = {f"step.{name}": memory for name, memory in memories_of(cache).items()}
        self.written = self.target.moved(own) | targets

    def play(self, n: int) -> Numbers:
        key = n, self.choice
        if key not in self.programs:
            run = Round(self.step, self.draft, self.state, n, bucket(n), self.choice)
            drop_oldest(self.programs)
            self.programs[key] = self.target.program(run)
        values, self.written = self.target.run(self.programs[key], self.fixed, self.written, {})
        return lambda: self.target.read(values)[0].tolist()

    def end(self, row: int) -> None:
        self.written["state.left"][row] = 0

    def _memories(self) -> dict[str, Tensor]:
        """The draft's keys and values, on the host."""
        known = {} if self.session is None else memories_of(self.session.cache)
        return {f"draft.{name}": memory for name, memory in known.items()}


def drop_oldest(kept: dict[Any, Any]) -> None:
    """A user may try any number of temperatures."""
    if len(kept) == MOST_KEPT:
        del kept[next(iter(kept))]


@torch.inference_mode(False)  # buffers outlive the generation that asked first
@torch.no_grad()
def device_rounds(
    target: object, cache: KVCache, draft: Draft | None, request: Request
) -> DeviceRounds | None:
    """The rounds of `cache`, emptied; None where a round needs the host: lookups, trees, other rules than the
    argmax and `Gumbel`, penalties, targets without graphs or programs."""
    known, sampling = cache.rounds, request.sampling
    chosen = sampling.is_argmax or (
        request.effective_rule == "gumbel" and not (sampling.penalises or sampling.logit_bias)
    )
    if known is None or not chosen or request.grammars or not runs_whole(draft):
        return None
    if draft not in known:
        kind: Any = GraphRounds if isinstance(target, GraphTarget) else CompiledRounds
        known[draft] = kind(target, cache, draft)
    rounds: DeviceRounds = known[draft]
    if rounds.session is not None:
        rounds.session.rewind([0] * cache.batch)
    return rounds


def on_its_way(numbers: Tensor) -> Numbers:
    """Begins to copy them to the host -> what waits for it, and gives them."""
    if numbers.device.type != "cuda":
        return numbers.clone().tolist  # the next round overwrites them
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> list[list[int]]:
        event.synchronize()
        values: list[list[int]] = host.tolist()
        return values

    return read
