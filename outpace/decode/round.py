"""One round of a chain at temperature 0, of tensors alone: draft, verify, accept, commit."""

from copy import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafts.dflash import DFlashSession
from outpace.drafts.dflash_decode import Head
from outpace.drafts.sampler import Greedy
from outpace.kv.metadata import StepMetadata
from outpace.models.decoder import Decoder
from outpace.models.static_step import StaticStep, memories_of
from outpace.ops.quant import dense

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

    def __init__(self, target: Decoder, batch: int, width: int, layers: int) -> None:
        super().__init__()
        for name in ("last", "starts", "kept", "left"):
            self.register_buffer(name, torch.zeros(batch, dtype=torch.int64, device=target.device))
        size = layers, batch, width, target.config.hidden_size
        self.register_buffer("aux", torch.zeros(size, dtype=target.dtype, device=target.device))

    def begin(self, last: Tensor, starts: list[int], left: list[int]) -> None:
        """A generation: `starts` tokens of each row are remembered, its prompt."""
        self.last.copy_(last)
        self.starts.copy_(torch.tensor(starts))
        self.left.copy_(torch.tensor(left))
        self.kept.zero_()


class StaticDraft(nn.Module):
    """A DFlash over what its session remembers, as `StaticStep` is a target over its cache."""

    head: Tensor | None  # the rows of the target's head that the draft has words for, where these are not all
    ids: Tensor | None

    def __init__(self, session: DFlashSession) -> None:
        super().__init__()
        self.draft, self.session = session.draft, copy(session)
        self.session.cache = copy(session.cache)
        self.session.cache.layers = [copy(memory) for memory in session.cache.layers]
        for name, memory in memories_of(session.cache).items():
            self.register_buffer(name, memory, persistent=False)
        weight = None if session.head.ids is None else session.head.weight
        head = weight if weight is None or isinstance(weight, Tensor) else dense(weight)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("ids", session.head.ids, persistent=False)

    def opened(self) -> DFlashSession:
        """The session over the buffers and weights that this module has now."""
        session = self.session
        for i, memory in enumerate(session.cache.layers):
            memory.k, memory.v = getattr(self, f"k{i}"), getattr(self, f"v{i}")
        session.weights = [layer.context_weights() for layer in session.layers]
        weight = session.target.head if self.head is None else self.head
        session.head = Head(weight, self.ids, session.head.vocab_size)
        return session


class Committed(NamedTuple):
    """numbers [B, 2N + 2] int64, of each row: the N verified tokens, the target's token after each, how many
    of the latter continue the text, and the index in `MODELS` of one that is damaged."""

    numbers: Tensor


class Round(nn.Module):
    """One round of N positions over the buffers of a target's step, a draft and `state`: no number is read on
    the host. N = 1 is autoregressive decoding. `width`: positions that the target's step is padded to."""

    def __init__(self, step: StaticStep, draft: StaticDraft | None, state: State, n: int, width: int) -> None:
        super().__init__()
        self.step, self.draft, self.state, self.n, self.width = step, draft, state, n, width

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
        state, last = self.state, self.state.last
        nothing = torch.zeros((), device=last.device)
        if self.draft is None:
            return last[:, None], nothing
        session = self.draft.opened()
        observed = state.starts - state.kept, state.kept
        session.remember(state.aux, self._step(state.aux.shape[2], *observed))
        if self.n == 1:
            return last[:, None], nothing
        x = session.embedded(last, self.n)
        step = self._step(x.shape[1], state.starts, torch.full_like(last, x.shape[1]), both_ways=True)
        hidden = session.denoise(x, step)[:, 1 : self.n]
        guessed = session.draft.guess(session.head, hidden, last, Greedy())
        return torch.cat((last[:, None], guessed.tokens), 1), guessed.sure.sum()

    def _step(self, T: int, start: Tensor, counts: Tensor, both_ways: bool = False) -> StepMetadata:
        return StepMetadata((), (), T, start.device, both_ways, on_device=(start, counts))
