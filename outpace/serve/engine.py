"""Continuous batching: sequences join and leave between rounds, and each has the tokens it has alone.

A round is a chunk of prompts, then one pass of the target over what every sequence proposes. All sequences
share one cache; a sequence has a row of it, and what a finished one left there is reused by the next with a
prompt that begins alike.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from threading import Condition

import torch
from torch import Tensor

from outpace.decode.ahead import RunAhead, Verified
from outpace.decode.controller import Controller, Fixed
from outpace.decode.native_rounds import NativeRounds, Played
from outpace.decode.request import Request, check_prompts
from outpace.decode.reuse import reusable
from outpace.drafts.base import Draft, Proposal, check_finite, not_finite, roots
from outpace.drafts.deferred import States, accepted_states
from outpace.drafts.tree import row_of, together
from outpace.kv.base import KVCache
from outpace.kv.metadata import FEW
from outpace.models.decoder import Decoder, Output, Target
from outpace.models.native_step import step_bytes
from outpace.serve.sequence import Sequence
from outpace.serve.shared_draft import SharedDraft

LEAST_REUSE = 8  # tokens of a beginning that are worth a look
DEBT_TOKENS = 1024  # of a text, by which the controller bounds what drafting may lose before it pays


class QueueFull(Exception):
    """Too many requests wait."""


class RequestTimeout(Exception):
    """A request has taken longer than it may."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`max_num_seqs` sequences run at once, of `max_model_len` tokens each, prompt and output together;
    `max_waiting` more may wait. `prefill_rows`: prompts that share a chunk. `max_seconds`: of a request,
    from its arrival to its last token; None: any."""

    max_num_seqs: int = 8
    max_model_len: int = 4096
    max_waiting: int = 256
    prefill_rows: int = 4
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: it must be at least 1")


class Engine:
    """`add` from any thread; `step` from one. `drafts`: those that sequences may bring."""

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        drafts: Iterable[Draft] = (),
        controller: Controller | None = None,
    ) -> None:
        """Raises ValueError for a target that remembers something else than keys and values, and for lengths
        beyond its positions."""
        if config.max_model_len > target.config.max_position_embeddings:
            raise ValueError(
                f"max_model_len {config.max_model_len}: this model's positions end at "
                f"{target.config.max_position_embeddings}"
            )
        self.target, self.config = target, config
        drafts = list(drafts)
        self.block = max((draft.block_size for draft in drafts), default=1)
        self.aux = tuple(sorted({layer for draft in drafts for layer in draft.target_layer_ids}))
        length = config.max_model_len + self.block
        self.cache = target.make_cache(config.max_num_seqs, length, slack=length)
        self.cache.of([0], [0])  # refuses what cannot be shared
        self.shared = {
            id(draft): SharedDraft(draft, config.max_num_seqs, length)
            for draft in drafts
            if draft.target_layer_ids
        }
        self.controller = controller or Fixed(self.block)
        self.controller.begin(self.block, DEBT_TOKENS)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.arrival = Condition()
        # what each row holds, and when it was last used
        self.held: list[list[int]] = [[] for _ in range(config.max_num_seqs)]
        self.used = [0.0] * config.max_num_seqs
        self.rounds = 0
        # of this thread on a CPU, where others serve what it made: theirs is no time of a round
        self.clock = time.thread_time if target.device.type == "cpu" else time.perf_counter
        self.ahead, self.native = RunAhead(target), NativeRounds(target)

    @property
    def nbytes(self) -> int:
        """Of the KV caches, the target's and its drafts'."""
        return self.cache.nbytes + sum(draft.session.nbytes for draft in self.shared.values())

    @property
    def step_nbytes(self) -> int:
        """Of what a round holds besides: the buffers of a target's widest step, and what it returns."""
        verified = self.config.max_num_seqs * self.block
        rows = max(self.config.prefill_rows * FEW, verified)
        return step_bytes(self.target.config, rows, len(self.aux), verified)

    def check(self, sequence: Sequence) -> None:
        """Raises ValueError for a prompt that the target cannot take, or that is too long with its output."""
        check_prompts(self.target, [sequence.prompt], sequence.request)
        if sequence.length > self.config.max_model_len:
            raise ValueError(
                f"the prompt has {len(sequence.prompt)} tokens and up to {sequence.request.max_new_tokens} "
                f"may follow, but the server's max_model_len is {self.config.max_model_len}"
            )
        if sequence.draft is not None:
            assert sequence.draft.block_size <= self.block, "one of the engine's drafts"

    def add(self, sequence: Sequence) -> None:
        """Let it join. Raises ValueError as `check`, and QueueFull."""
        self.check(sequence)
        with self.arrival:
            if len(self.waiting) >= self.config.max_waiting:
                raise QueueFull(f"{len(self.waiting)} requests are waiting")
            self.waiting.append(sequence)
            self.arrival.notify()

    def warm_up(self, draft: Draft | None) -> None:
        """Sequences of any tokens that draft in every step, in proposals of each length: what is built at its
        first use is there then, and no request waits for it, nor does the controller take it for the time of
        a step."""
        if self.config.max_model_len < 2:
            return
        controller, shortest = self.controller, self.block if draft is None else 2
        for positions in range(self.block, shortest - 1, -1):
            self.controller = Fixed(positions)
            self.controller.begin(self.block)
            longest = FEW if positions == self.block else 2 * positions
            request = Request(max_new_tokens=min(longest, self.config.max_model_len - 1))
            self.add(Sequence(prompt=[0], request=request, on_tokens=lambda _: None, draft=draft))
            while self.wait(0):
                self.step()
        self.controller = controller

    def wait(self, seconds: float) -> bool:
        """Until there is something to do; -> whether there is."""
        with self.arrival:
            return self.arrival.wait_for(lambda: bool(self.running or self.waiting), seconds)

    @torch.inference_mode()
    def step(self) -> None:
        """One round. An error ends the sequences that took part in it, not the engine."""
        self._end_late()
        self._admit()
        for part, taking in (
            (self._prefill, [s for s in self.running if s.prefilling][: self.config.prefill_rows]),
            (self._decode, [s for s in self.running if not s.prefilling and not s.done]),
        ):
            try:
                if taking:
                    part(taking)
            except Exception as error:
                for sequence in taking:
                    self._leave(sequence, error)
        for sequence in [s for s in self.running if s.cancelled or s.done]:
            self._leave(sequence, sequence.failed)
        self.rounds += 1

    def end_all(self, error: Exception) -> None:
        """Every sequence, running or waiting; nothing is reused of what they left in their rows."""
        for sequence in list(self.running):
            self._leave(sequence, error)
        with self.arrival:
            waiting, self.waiting = self.waiting, deque()
        for sequence in waiting:
            sequence.on_end(error)

    def _end_late(self) -> None:
        """Those that have taken longer than they may, running or waiting, and those that wait for nobody."""
        limit = math.inf if self.config.max_seconds is None else self.config.max_seconds
        error, now = RequestTimeout(f"a request may take {limit:g} seconds here"), time.perf_counter()

        def late(sequence: Sequence) -> bool:
            return now - sequence.times["arrived"] > limit

        with self.arrival:
            gone = [s for s in self.waiting if s.cancelled or late(s)]
            for sequence in gone:
                self.waiting.remove(sequence)
        for sequence in gone:
            sequence.on_end(None if sequence.cancelled else error)
        for sequence in [s for s in self.running if late(s)]:
            self._leave(sequence, error)

    def _admit(self) -> None:
        """Those that have waited longest, while there are rows."""
        while len(self.running) < self.config.max_num_seqs:
            with self.arrival:
                if not self.waiting:
                    return
                sequence = self.waiting.popleft()
            shared = self.shared.get(id(sequence.draft))
            if shared is not None and not self._joins(sequence):
                sequence.draft = shared = None
            row, source, reused = self._row_for(sequence.prompt, shared)
            if row != source:
                self.cache.copy(source, row, reused)
            for draft in self.shared.values():
                draft.begin(source, row, reused, draft is shared)
            self.running.append(sequence)
            try:
                sequence.enter(row, reused, shared)
            except Exception as error:  # of its draft
                self._leave(sequence, error)

    def _joins(self, sequence: Sequence) -> bool:
        """Whether it brings its draft: a grammar has choices that only a draft makes use of."""
        if sequence.constrained:
            return True
        return self.controller.joins(min(len(self.running) + 1 + len(self.waiting), self.config.max_num_seqs))

    def _row_for(self, prompt: list[int], draft: SharedDraft | None) -> tuple[int, int, int]:
        """-> a free row, and the row that holds so many tokens of the prompt's beginning; one at least is
        left, for its logits. Of them, `draft` remembers what it reads."""
        busy = {s.row: s.in_cache for s in self.running}
        most, source = 0, -1
        for row, held in enumerate(self.held):
            known = None if draft is None else draft.known(row)
            alike = reusable(busy.get(row, held), prompt, known)
            if alike > most:
                most, source = alike, row
        free = [row for row in range(len(self.held)) if row not in busy]
        if most < LEAST_REUSE:
            row = min(free, key=lambda row: (bool(self.held[row]), self.used[row]))
            return row, row, 0
        if source in free and most >= len(self.held[source]) - 1:
            return source, source, most  # it goes on where that one ended
        row = min(free, key=lambda row: (bool(self.held[row]), row == source, self.used[row]))
        return row, source, most

    def _leave(self, sequence: Sequence, error: Exception | None = None) -> None:
        self.running.remove(sequence)
        if sequence.shared is not None and not error:
            sequence.shared.leave(sequence.row)
        self.held[sequence.row] = [] if error else sequence.in_cache
        self.used[sequence.row] = sequence.times["ended"] = time.perf_counter()
        sequence.on_end(error)

    def _prefill(self, some: Rows[Sequence]) -> None:
        """The next chunk of their prompts. Chunks are short: the bits are those of any other chunking, and
        others wait no longer than for one."""
        parts = [s.prompt[s.cached : s.cached + FEW] for s in some]
        counts = [len(part) for part in parts]
        width = max(counts)
        padded = [[*part, *[0] * (width - len(part))] for part in parts]
        tokens = torch.tensor(padded, device=self.target.device)
        cache = self.cache.of([s.row for s in some], [s.cached for s in some])
        out = self.target(tokens, cache, counts=counts, aux=self._aux(some))
        ended = []
        for b, (sequence, count) in enumerate(zip(some, counts, strict=True)):
            if sequence.shared is not None:
                assert out.aux is not None
                taken = partial(self._chunk_states, sequence, tokens, out.aux, b, count)
                sequence.shared.add(sequence.row, count, taken, out.aux)
            sequence.cached += count
            if not sequence.prefilling:
                ended.append((sequence, out.hidden[b, count - 1]))
        if not ended:
            return
        logits = self.target.logits(torch.stack([hidden for _, hidden in ended]))
        check_finite("the prompt", logits)
        for b, (sequence, _) in enumerate(ended):
            sequence.score(logits[b : b + 1])
            sequence.draw(logits[b : b + 1])

    def _decode(self, some: Rows[Sequence]) -> None:
        """One step of each: propose, verify together, commit; or some without draft tokens. See
        `decode.generate.steps`."""
        began, steps = self.clock(), self._native_steps
        drafting = any(s.draft is not None for s in some)
        cache = self.cache.of([s.row for s in some], [s.cached for s in some])
        n = self.controller.width(cache.lengths, len(self.running)) if drafting else 1
        drafted, played = None, self._play(some[0], n, cache) if n > 1 else None
        if played is not None:
            drafted, seconds = played.offered or (None, 0.0)
            if played.rounds:
                if drafted is None or some[0].done:
                    return
                began, n = self.clock() - seconds, self.controller.width(cache.lengths)
        lengths = list(cache.lengths)
        if n > 1:
            offered = drafted or self._propose(some, n)
            proposal = self.controller.cut(offered)
        else:
            proposal = offered = roots(torch.tensor([s.last for s in some], device=self.target.device))
        many = None
        if proposal.width == 1:
            many = self._run_ahead(some, proposal.tokens[:, 0], cache, drafting)
        if many is not None:
            check_finite(f"round {self.rounds}", None, offered, many.finite)
            proposal, aux = many.proposal, many.aux
            paths = [s.take_steps(tokens) for s, tokens in zip(some, many.result.tokens, strict=True)]
        else:
            what = {"counts": proposal.counts, "tree": proposal.tree, "aux": self._aux(some)}
            out = self.target(proposal.tokens, cache, **what, logits=True)
            assert out.logits is not None
            check_finite(f"round {self.rounds}", out.logits, offered, out.finite)
            paths, aux = self._verify(some, proposal, out), out.aux
            cache.commit(paths)
        for b, (sequence, path) in enumerate(zip(some, paths, strict=True)):
            sequence.cached = lengths[b] + len(path)
            if sequence.shared is not None:
                assert aux is not None
                taken = partial(self._step_states, sequence, proposal, aux, b, path)
                if (
                    proposal.width > 1 and many is None
                ):  # its memory has places for rejected draft tokens, too
                    taken = partial(States, *taken())
                sequence.shared.add(sequence.row, len(path), taken, aux)
        if drafting:
            building = self._native_steps > steps
            self.controller.learn(proposal, paths, None if building else self.clock() - began)

    def _play(self, sequence: Sequence, n: int, cache: KVCache) -> Played | None:
        """Rounds of a sequence that is alone, in one native call, where one can be."""
        shared, width = sequence.shared, sequence.most(n)
        if len(self.running) > 1 or shared is None or width == 1 or self._aux([sequence]) != shared.layers:
            return None
        if not sequence.request.runs_ahead or sequence.on_logits is not None:
            return None
        text = sequence.rule, sequence.last, sequence.left, sequence.request.stop
        began = self.clock()
        with shared.observed([sequence.row]) as session:
            played = self.native.play(cache, session, *text, width, self.controller.chain_cut)
        if played is None:
            return None
        if not played.finite:
            raise not_finite(f"round {self.rounds}", "target")
        drafted = 0.0 if played.offered is None else played.offered[1]
        timed = drafted + sum(sum(made.seconds) for made in played.rounds)
        share = (self.clock() - began) / timed if timed else 1.0
        for i, made in enumerate(played.rounds):
            if not sequence.done:
                path = [list(range(len(made.tokens)))]
                self.controller.was_cut(made.offered, made.verified, again=i > 0)
                sequence.count(made.verified - 1, len(made.tokens) - 1)
                sequence.emit(made.tokens)
                self.controller.learn(made.offered, path, share * sum(made.seconds))
        sequence.cached = cache.lengths[0]
        if played.states is not None:
            states, aux = played.states, played.states.aux
            assert aux is not None
            shared.add(sequence.row, states.counts[0], lambda: states, aux)
        return played

    def _run_ahead(
        self, some: Rows[Sequence], last: Tensor, cache: KVCache, drafting: bool
    ) -> Verified | None:
        """Steps without draft tokens in one call, where logits alone say what comes, and no prompt waits for
        their end."""
        if not all(s.request.runs_ahead and s.on_logits is None for s in some):
            return None
        if len(some) < len(self.running):
            return None
        most = self.ahead.most(min(s.left for s in some))
        if not most:
            return None
        stop = frozenset[int]().union(*(s.request.stop for s in some))
        most = self.controller.rest(most) if drafting else most
        return self.ahead.make(last, cache, most, stop, self._aux(some), [s.rule for s in some])

    def _propose(self, some: Rows[Sequence], n: int) -> Proposal:
        """Of all, in at most `n` positions each: in one forward those that share a draft and a width."""
        offered, sharing = list[Proposal | None](), defaultdict[tuple[SharedDraft, int], list[int]](list)
        for b, sequence in enumerate(some):
            width, own = sequence.most(n), sequence.forced(n)
            if own is None and sequence.shared is not None and width > 1:
                sharing[sequence.shared, width].append(b)
            else:
                own = own or sequence.propose(width)
            offered.append(own)
        for (draft, width), members in sharing.items():
            of = [some[b] for b in members]
            last = torch.tensor([s.last for s in of], device=self.target.device)
            samplers = [s.rule.sampler for s in of]
            proposal = draft.propose([s.row for s in of], last, width, samplers)
            if len(members) == len(some):
                return proposal
            for i, b in enumerate(members):
                offered[b] = row_of(proposal, i)
        return together([own for own in offered if own is not None])

    def _verify(self, some: Rows[Sequence], proposal: Proposal, out: Output) -> list[list[int]]:
        """-> the accepted path of each; their new tokens go out."""
        assert out.logits is not None
        best = None if out.best is None else out.best.tolist()  # of all at once
        paths: list[list[int]] = []
        for b, sequence in enumerate(some):
            n = proposal.counts[b]
            if n == 1 and best is not None and sequence.request.takes_argmax:
                paths.append(sequence.take(best[b][0], out.logits[b]))
                continue
            own = None if out.best is None else out.best[b : b + 1, :n]
            paths.append(sequence.verify(row_of(proposal, b), out.logits[b : b + 1, :n], own))
        return paths

    @property
    def _native_steps(self) -> int:
        """How many the target has: a round that makes one takes longer than others of its kind."""
        return len(self.target.native_steps) if isinstance(self.target, Decoder) else 0

    def _aux(self, some: Rows[Sequence]) -> tuple[int, ...]:
        return self.aux if any(s.shared is not None for s in some) else ()

    def _chunk_states(self, sequence: Sequence, tokens: Tensor, aux: Tensor, b: int, count: int) -> States:
        """Of the first `count` tokens in row b of a chunk of prompts."""
        return States(tokens[b : b + 1, :count], self._aux_of(sequence, aux, b, count), [count])

    def _step_states(
        self, sequence: Sequence, proposal: Proposal, aux: Tensor, b: int, path: list[int]
    ) -> States:
        """Of the accepted path in row b of a step."""
        own = self._aux_of(sequence, aux, b, proposal.counts[b])
        return accepted_states(row_of(proposal, b), own, [path])

    def _aux_of(self, sequence: Sequence, aux: Tensor, b: int, count: int) -> Tensor:
        """aux [n, B, T, C] of all drafts' layers -> [m, 1, count, C] of the layers that its own reads."""
        layers = () if sequence.draft is None else sequence.draft.target_layer_ids
        assert layers
        own = aux[:, b : b + 1, :count]
        return own if layers == self.aux else own[[self.aux.index(layer) for layer in layers]]
