"""Whole rounds as captured steps: draft, verify, accept, commit; the host reads each while the next runs."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.decode.controller import Controller
from outpace.decode.request import BatchRows, Request
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft, Proposal, not_finite
from outpace.drafts.dflash import BoundDFlash, DFlashSession
from outpace.drafts.sampler import Greedy
from outpace.kv.base import KVCache
from outpace.kv.metadata import StepMetadata
from outpace.models.cuda_graphs import GraphCache, GraphTarget
from outpace.models.static_step import StaticStep

MODELS = "", "target", "draft"  # of Committed.damaged


class State(nn.Module):
    """What a round finds and leaves, of each of B rows.

    last: the last token of its text, which is not remembered yet. starts: tokens that are. kept: how many of
    the last round's; the draft observes them with `aux` [n,B,N,C], the target's hidden states at them. left:
    tokens to be written; 0 when the row is done. The host knows of stop tokens, a round later.
    """

    last: Tensor
    starts: Tensor
    kept: Tensor
    left: Tensor
    aux: Tensor

    def __init__(self, target: GraphTarget, batch: int, width: int, layers: int) -> None:
        super().__init__()
        config, device = target.config, target.device
        for name in ("last", "starts", "kept", "left"):
            self.register_buffer(name, torch.zeros(batch, dtype=torch.int64, device=device))
        aux = torch.zeros(layers, batch, width, config.hidden_size, dtype=target.decoder.dtype, device=device)
        self.register_buffer("aux", aux)

    def begin(self, last: Tensor, starts: list[int], left: list[int]) -> None:
        """A generation whose prompts are remembered, `starts` tokens of each row."""
        self.last.copy_(last)
        self.starts.copy_(torch.tensor(starts))
        self.left.copy_(torch.tensor(left))
        self.kept.zero_()


class Committed(NamedTuple):
    """numbers [B, 2N + 2] int64, of each row: the N verified tokens, the target's token after each, how many
    of the latter continue the text, and the index in `MODELS` of one that is damaged."""

    numbers: Tensor


class Round(nn.Module):
    """One round of N positions at temperature 0, over the buffers of a cache, a draft session and `state`: no
    number is read on the host. N = 1 is autoregressive decoding."""

    def __init__(
        self, target: GraphTarget, cache: KVCache, session: DFlashSession | None, state: State, n: int
    ) -> None:
        super().__init__()
        aux = () if session is None else session.draft.target_layer_ids
        self.step = StaticStep(target.decoder, cache, aux)
        self.session, self.state, self.n, self.width = session, state, n, target.width(n)

    def forward(self) -> Committed:
        state, n = self.state, self.n
        tokens, sure = self._draft()
        running = state.left > 0
        padded = F.pad(tokens, (0, self.width - n))
        out = self.step(padded, state.starts, torch.where(running, n, 0))
        best, scores = out.best[:, :n], out.logits[:, :n]
        accepted = (tokens[:, 1:] == best[:, :-1]).long().cumprod(1).sum(1)
        kept = torch.where(running, accepted + 1, 0)
        state.last.copy_(torch.where(running, best.gather(1, accepted[:, None])[:, 0], state.last))
        state.starts.add_(kept)
        state.kept.copy_(kept)
        state.left.copy_((state.left - kept).clamp(min=0))
        if out.aux is not None:
            state.aux[:, :, :n] = out.aux[:, :, :n]
        # as `check_finite`: a NaN or an infinity anywhere
        damaged = torch.where(scores.amax().isfinite(), torch.where(sure.isfinite(), 0, 2), 1)
        return Committed(torch.cat((tokens, best, kept[:, None], damaged.expand(len(kept), 1)), 1))

    def _draft(self) -> tuple[Tensor, Tensor]:
        """-> the round's tokens [B, N], and the sum of how sure the draft is of its own."""
        state, session = self.state, self.session
        nothing = torch.zeros((), device=state.last.device)
        if session is None:
            return state.last[:, None], nothing
        T, device = state.aux.shape[2], state.last.device
        before = state.starts - state.kept
        session.remember(state.aux, StepMetadata((), (), T, device, on_device=(before, state.kept)))
        if self.n == 1:
            return state.last[:, None], nothing
        x = session.embedded(state.last, self.n)
        every = torch.full_like(state.starts, x.shape[1])
        step = StepMetadata((), (), x.shape[1], device, True, on_device=(state.starts, every))
        hidden = session.denoise(x, step)[:, 1 : self.n]
        guessed = session.draft.guess(session.head, hidden, state.last, Greedy())
        return torch.cat((state.last[:, None], guessed.tokens), 1), guessed.sure.sum()


class DeviceRounds:
    """The rounds of a draft, or of none, over one size of cache: captured once for each number of positions,
    and replayed for every generation in such a cache. How sure a draft is does not shorten a round."""

    def __init__(self, target: GraphTarget, cache: GraphCache, draft: BoundDFlash | None) -> None:
        memory = cache.buffers.cache
        self.target, self.memory = target, memory
        self.block = 1 if draft is None else draft.block_size
        self.session = (
            None if draft is None else draft.begin(memory.batch, memory.length, memory.offset, slack=0)
        )
        layers = 0 if draft is None else len(draft.target_layer_ids)
        self.state = State(target, memory.batch, self.block, layers)
        self.captured: dict[int, tuple[Committed, Callable[[], None]]] = {}

    @classmethod
    @torch.inference_mode(False)  # buffers outlive the generation that asked first
    @torch.no_grad()
    def over(
        cls, target: object, cache: KVCache, draft: Draft | None, request: Request
    ) -> "DeviceRounds | None":
        """Those of `cache`, emptied; None where a round needs the host: other drafts than a DFlash, other
        rules than the argmax, caches without graphs."""
        fits = request.sampling.is_argmax and not request.grammars
        if not isinstance(target, GraphTarget) or not isinstance(cache, GraphCache):
            return None
        if not fits or not cache.whole or not (draft is None or isinstance(draft, BoundDFlash)):
            return None
        known = cache.buffers.rounds
        if draft not in known:
            known[draft] = cls(target, cache, draft)
        rounds: DeviceRounds = known[draft]
        if rounds.session is not None:
            rounds.session.rewind([0] * rounds.session.cache.batch)
        return rounds

    def run(
        self, last: Tensor, starts: list[int], rows: BatchRows, trace: Trace, controller: Controller
    ) -> Iterator[None]:
        """After the prefill, which gave `last` [B]: yields after every round that was read. `controller`
        chooses how long the next one is, knowing all rounds but the one that runs."""
        batch, lengths = len(rows.done), list(starts)
        left = [
            0 if done else limit - len(text)
            for done, limit, text in zip(rows.done, rows.limits, rows.emitted, strict=True)
        ]
        self.state.begin(last, starts, left)
        waiting: tuple[int, Callable[[], list[list[int]]]] | None = None
        while not all(rows.done):
            with trace.timed("verify"):
                n = min(controller.width(lengths), self.block)
                out, replay = self._round(n)
                replay()
                before, waiting = waiting, (n, on_its_way(out.numbers))
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
                        self.state.left[b].zero_()
                trace.add(batch, active, [n - 1] * len(active), [count - 1 for count in kept])
                proposal = Proposal(torch.tensor([numbers[b][:n] for b in active]), [n] * len(active))
                controller.learn(proposal, [list(range(count)) for count in kept])
            yield

    @torch.inference_mode(False)
    @torch.no_grad()
    def _round(self, n: int) -> tuple[Committed, Callable[[], None]]:
        if n not in self.captured:
            before = {name: buffer.clone() for name, buffer in self.state.named_buffers()}
            run = Round(self.target, self.memory, self.session, self.state, n)
            self.captured[n] = self.target.capture(run)
            self.target.captured += 1
            for name, buffer in before.items():  # keys and values lie behind the text, and are written again
                self.state.get_buffer(name).copy_(buffer)
        return self.captured[n]


def on_its_way(numbers: Tensor) -> Callable[[], list[list[int]]]:
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
