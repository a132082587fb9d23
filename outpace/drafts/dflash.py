"""DFlash (arXiv 2602.06036): fill a masked block in one pass, conditioned on the target's hidden states.

With the optional parts of `dflash_heads.py` it is a DFlash 2, or has DSpark's heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outpace.drafts.base import HostProposal, Proposal
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.dflash_decode import (
    BigramBias,
    DraftTokens,
    Head,
    confidence,
    guess,
    host_survival,
    survival,
)
from outpace.drafts.dflash_heads import ConfidenceHead, MarkovHead, Selector
from outpace.drafts.dflash_layer import Attend, DFlashLayer
from outpace.drafts.dflash_native import (
    NativeBlock,
    NativeCandidates,
    NativeChain,
    NativeContext,
    NativeTree,
    Parts,
    in_one_call,
)
from outpace.drafts.native import NativeDraft, address, native, program_key, program_of
from outpace.drafts.rows import CacheRows
from outpace.drafts.sampler import DraftSampler, coupling
from outpace.drafts.vocab import DraftVocabulary
from outpace.kv.base import KVCache
from outpace.kv.metadata import FEW, StepMetadata
from outpace.models.blocks import Linear, RMSNorm
from outpace.models.decoder import Decoder
from outpace.ops.attention import attend_view
from outpace.ops.quant import Quant
from outpace.ops.rope import inverse_frequencies, rope_tables

Chosen = TypeVar("Chosen", bound=NativeCandidates)
REST = 32  # verified tokens of a rest, at most: one native call takes them, or FEW of a prompt


class DFlash(NativeDraft):
    """Embedding and head are the target's, frozen: `bind` gives them; they are not parameters here."""

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        C, K = config.hidden_size, len(config.target_layer_ids)
        self.fc = Linear(K * C, C)
        self.hidden_norm = RMSNorm(C, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(C, config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(C)) if config.mask_token_id is None else None
        self.candidate_selector = Selector(config) if config.selector_rank else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.draft_vocab_size else None
        self.register_buffer("d2t", offsets)  # row i of the draft's head is the target's token i + d2t[i]
        self.inv = inverse_frequencies(config.rope, config.head_dim)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def context(self, aux: Tensor) -> Tensor:
        """aux [n,B,T,C] in the order of target_layer_ids -> c_s = RMSNorm(W_c [h^l1; ..; h^lm]) [B,T,C]."""
        return self.hidden_norm(self.fc(aux.permute(1, 2, 0, 3).flatten(2)))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.inv.to(positions.device), self.config.rope.concentration)

    def embed_block(self, anchors: Tensor, target: Decoder) -> Tensor:
        """anchors [...] -> [..., block_size, C]: the anchor's embedding, then MASKs."""
        size = (*anchors.shape, self.block_size - 1)
        mask_id = self.config.mask_token_id
        if self.mask_embedding is None:
            assert mask_id is not None
            masks = torch.full(size, mask_id, dtype=anchors.dtype, device=anchors.device)
            return target.embed(torch.cat((anchors[..., None], masks), dim=-1))
        anchor = target.embed(anchors)[..., None, :]
        masks = self.mask_embedding.to(anchor.dtype).expand(*size, -1)
        return torch.cat((anchor, masks), dim=-2)

    def denoise(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, recompute: bool = False) -> Tensor:
        """x [B,T,C], B embedded blocks of T rows -> hidden [B,T,C]; the state at a MASK predicts that very
        position.
        `attend` computes how a block's queries meet the context's and the block's own keys. `recompute`: in
        training, layers are run again in the backward."""
        for i, layer in enumerate(self.layers):
            inputs = (x, cos, sin, i, attend)
            x = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.norm(x)

    def guess(self, head: Head, hidden: Tensor, last: Tensor, sampler: DraftSampler) -> DraftTokens:
        """hidden [B,n,C] of the n places after `last` [B]. A confidence head gives their survival."""
        parts = self.candidate_selector, self.markov_head
        result = guess(head, *parts, hidden, last, sampler)
        if self.confidence_head is None:
            return result
        previous = torch.cat((last[:, None], result.tokens[:, :-1]), dim=1)
        sure = confidence(self.confidence_head, *parts, hidden, previous).sigmoid()
        # NaN stays where the logits were: a head over hidden states would hide it
        return replace(result, sure=torch.where(result.sure.isnan(), result.sure, sure))

    def reset_parts(self, rng: torch.Generator) -> None:
        """The optional parts as training begins with them: they change no draft token."""
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            for conv in (layer.attention_conv, layer.mlp_conv):
                if conv is not None:
                    conv.reset()
        for part in (self.candidate_selector, self.markov_head):
            if part is not None:
                part.reset(rng)
        if self.confidence_head is not None:
            self.confidence_head.reset()

    def bind(self, target: Decoder) -> "BoundDFlash":
        return BoundDFlash(self, target)


@dataclass(frozen=True)
class BoundDFlash:
    """A DFlash with its target, ready to draft. Raises ValueError where the two do not fit."""

    draft: DFlash
    target: Decoder

    def __post_init__(self) -> None:
        ours, theirs = self.draft.config, self.target.config
        for what, a, b in (
            ("hidden_size", ours.hidden_size, theirs.hidden_size),
            ("num_target_layers", ours.num_target_layers, theirs.num_layers),
            ("vocab_size", ours.vocab_size, theirs.vocab_size),
        ):
            if a != b:
                raise ValueError(f"this draft was made for a target with {what} {a}; this one has {b}")

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.draft.target_layer_ids

    @property
    def block_size(self) -> int:
        return self.draft.block_size

    @cached_property
    def head(self) -> Head:
        """Formed once: a reduced vocabulary takes its rows out of the target's head, packed where the draft
        is."""
        packed = isinstance(self.draft.fc.weight, Quant)
        return Head.of(self.target, self.draft.d2t, packed, self.draft.rounded)

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "DFlashSession":
        return DFlashSession(self.draft, self.target, batch, length, offset, self.head, slack)


class DFlashSession(CacheRows):
    """The context-only KV cache: rows of verified tokens alone. A block's own rows are written behind
    them while it is drafted and are never committed, so the next append overwrites them."""

    def __init__(
        self,
        draft: DFlash,
        target: Decoder,
        batch: int,
        length: int,
        offset: int,
        head: Head | None = None,
        slack: int = 0,
    ) -> None:
        config = draft.config
        self.draft, self.target = draft, target
        self.head = head or Head.of(target, draft.d2t, rounded=draft.rounded)
        self.vocab = DraftVocabulary(self.head.ids, self.head.vocab_size)
        self.layers = [layer for layer in draft.layers if isinstance(layer, DFlashLayer)]
        self.weights = [layer.context_weights() for layer in self.layers]
        self.in_one_piece = draft.in_one_piece
        self.chains: dict[tuple[int, int], tuple[NativeChain, list[NativeContext]]] = {}
        self.cache = KVCache(
            batch,
            length + draft.block_size,
            draft.block_size + slack,
            tuple(config.window(i) for i in range(config.num_layers)),
            config.num_kv_heads,
            config.head_dim,
            offset=offset,
            dtype=target.dtype,
            device=target.device,
        )

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        assert aux is not None, "DFlash reads the target's hidden states"
        width, block = max(counts), self.draft.block_size
        if not width:
            return
        # a few sizes of programs: a step's, exactly, and those of a rest or a prompt
        most = next((n for n in (FEW, REST, block, width) if self._native(n)), 0)
        for begin in range(0, width, most or width):
            part = [min(max(count - begin, 0), most or width) for count in counts]
            n = max(part)
            step, states = self.cache.begin(n, part), aux[:, :, begin : begin + n]
            if most:
                T = n if n <= block else REST if n <= REST else FEW
                self._native_context(T).append(states, step, self.cache)
            else:
                self.remember(states, step)
            self.cache.advance(step)

    def remember(self, aux: Tensor, step: StepMetadata) -> None:
        """aux [n,B,T,C] of the verified tokens that `step` appends."""
        for memory, (k, v) in zip(self.cache.layers, self.context_kv(aux, step), strict=True):
            memory.append(k, v, step)

    def context_kv(self, aux: Tensor, step: StepMetadata) -> list[tuple[Tensor, Tensor]]:
        """aux [n,B,T,C] of verified tokens -> k and v [B,K,T,D] of every layer."""
        draft = self.draft
        features, (cos, sin) = draft.context(aux), draft.rope(step.storage + self.cache.offset)
        layers = zip(self.layers, self.weights, strict=True)
        return [layer.context_kv(features, cos, sin, weights) for layer, weights in layers]

    def _native(self, T: int) -> bool:
        return self.in_one_piece and native(self.draft.config.head_dim, self.cache, T)

    def _native_context(self, T: int) -> NativeContext:
        draft, cache = self.draft, self.cache
        parts = draft.config, self.layers, draft.fc, draft.hidden_norm, draft.inv
        return program_of(draft.native_programs, NativeContext, parts, cache.offset, cache.batch, T)

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        proposal = self._in_one_call(last, width, sampler)
        if proposal is not None:
            return proposal
        hidden = self.block_hidden(last, width)[:, 1:width]
        result = self.draft.guess(self.head, hidden, last, sampler)
        q = None if result.q is None else torch.nn.functional.pad(result.q, (0, 0, 1, 0))
        return Proposal(
            torch.cat((last[:, None], result.tokens), dim=1),
            [width] * len(last),
            q=q,
            survival=survival(result.sure, self.draft.config.temperatures),
        )

    def _in_one_call(self, last: Tensor, width: int, sampler: DraftSampler) -> HostProposal | None:
        """On the host: tensors of a dozen numbers would take as long as the draft's layers. None where no
        program chooses so."""
        selector = self.draft.candidate_selector
        choice = coupling(sampler, len(last), width - 1) if self.in_one_piece else None
        if choice is None or (choice[1] is not None and selector is None):
            return None
        program = self._native_program(NativeChain, width, selector.top_k if selector else 1)
        if program is None:
            return None
        step, roots = self.cache.begin(program.block.T, both_ways=True), last.tolist()
        tokens, sure = program.run(roots, *choice, step, self.cache)
        rows = [[root, *row] for root, row in zip(roots, tokens, strict=True)]
        stated = [host_survival(row, self.draft.config.temperatures) for row in sure]
        return HostProposal(rows, [width] * len(rows), None, stated, last.device)

    def native_chain(self, width: int) -> tuple[NativeChain, list[NativeContext]] | None:
        """What drafts `width` - 1 tokens after one row, and what remembers up to 1, 2 .. `width` of it; None
        where they are not drafted so, one after the other. Who runs them uses `point_to` first."""
        size = width, self.cache.batch
        if size not in self.chains:
            selector = self.draft.candidate_selector
            program = self._native_program(NativeChain, width, selector.top_k) if selector else None
            if program is None or not self._native(width):
                return None
            self.chains[size] = program, [self._native_context(n) for n in range(1, width + 1)]
        return self.chains[size]

    def point_to(self, chain: NativeChain, contexts: Sequence[NativeContext]) -> None:
        step = self.cache.begin(chain.block.T, both_ways=True)
        chain.block.point_to(step, self.cache)
        for context in contexts:
            context.point_to(step, self.cache)

    def tree(self, last: Tensor, width: int, nodes: int, branch: int) -> HostProposal | None:
        program = self._native_program(NativeTree, width, branch, nodes)
        if program is None:
            return None
        step = self.cache.begin(program.block.T, both_ways=True)
        return program.run(last.tolist(), step, self.cache)

    def block(self, last: Tensor, width: int) -> tuple[Tensor, BigramBias | None]:
        """last [B] -> logits [B, width - 1, N] of `vocab`, 1 .. width - 1 tokens after it (width <=
        block_size), each blind to the others; and what one adds to the next's."""
        hidden = self.block_hidden(last, width)[:, 1:width]
        parts = self.draft.candidate_selector, self.draft.markov_head
        return self.head.logits(hidden), None if parts == (None, None) else BigramBias(
            self.head, *parts, hidden
        )

    def rewind(self, lengths: list[int]) -> None:
        self.cache.rewind(lengths)

    def select(self, batch_indices: list[int]) -> None:
        self.cache.select(batch_indices)

    def block_hidden(self, last: Tensor, width: int | None = None) -> Tensor:
        """last [B] -> [B, block_size, C]; where no slot depends on a later one, the first `width` alone."""
        x = self.embedded(last, width)
        step = self.cache.begin(x.shape[1], both_ways=True)
        if self._native(x.shape[1]):
            return self._native_block(x.shape[1]).denoise(x, step, self.cache)
        return self.denoise(x, step)

    def embedded(self, last: Tensor, width: int | None = None) -> Tensor:
        """The embedded rows that `block_hidden` takes."""
        x = self.draft.embed_block(last, self.target)
        return x if width is None or not self.draft.config.one_way else x[:, :width]

    def denoise(self, x: Tensor, step: StepMetadata) -> Tensor:
        """Embedded blocks [B,T,C] behind what is remembered -> hidden [B,T,C], by the modules."""
        config = self.draft.config
        positions, scale = step.storage + self.cache.offset, config.head_dim**-0.5
        one_way = replace(step, both_ways=False) if config.causal or config.causal_full else step

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            sees = one_way if config.hides(layer) else step
            view = self.cache.layers[layer].append(k, v, sees)
            return attend_view(q, view, config.window(layer), None, scale)

        return self.draft.denoise(x, *self.draft.rope(positions), attention)

    def _native_block(self, T: int) -> NativeBlock:
        draft, cache = self.draft, self.cache
        parts = draft.config, self.layers, draft.norm, draft.inv
        return program_of(draft.native_programs, NativeBlock, parts, cache.offset, cache.batch, T)

    def _native_program(self, kind: Callable[..., Chosen], width: int, k: int, *size: int) -> Chosen | None:
        """The program that is kept, at first sight: to ask again whether there may be one takes as long as a
        layer of a small draft."""
        draft = self.draft
        if not self.in_one_piece:
            return None
        T = width if draft.config.one_way else draft.block_size
        weights = self.target.embed_tokens.weight, self.head.weight
        foreign = (*map(address, weights), self.cache.offset, self.cache.batch, T)
        kept: Any = draft.native_programs.get(program_key(kind, width, k, *size, foreign=foreign))
        if kept is not None:
            return kept
        parts = self._parts(T, k)
        if parts is None:
            return None
        return program_of(draft.native_programs, kind, (parts,), width, k, *size, foreign=foreign)

    def _parts(self, T: int, k: int) -> Parts | None:
        """None where draft tokens are chosen in another way than by the most probable ones or a selector."""
        draft, head, selector = self.draft, self.head, self.draft.candidate_selector
        if draft.markov_head is not None or draft.confidence_head is not None or not self._native(T):
            return None
        if not in_one_call(head, selector, k):
            return None
        masked = draft.config.mask_token_id if draft.mask_embedding is None else draft.mask_embedding[None]
        assert masked is not None
        return Parts(self._native_block(T), self.target.embed_tokens.weight, masked, head, selector)


Shape = tuple[int, ...]


def parts_of(config: DFlashConfig) -> str:
    """The optional parts in words, "none" for a plain DFlash."""
    result = second_parts(
        config.conv_kernel_size, config.conv_group_size, config.selector_rank, config.selector_top_k
    )
    if config.markov_rank:
        result.append(f"{'gated ' if config.markov_gated else ''}Markov head {config.markov_rank}")
    if config.confidence:
        result.append("confidence head")
    if config.draft_vocab_size:
        result.append(f"{config.draft_vocab_size:,} tokens")
    return ", ".join(result) or "none"


def second_parts(taps: Any, group: Any, rank: Any, top_k: Any) -> list[str]:
    """DFlash 2's, in words."""
    items = [f"convolutions {taps} x {group}"] if taps else []
    return items + ([f"selector {rank} of {top_k}"] if rank else [])


def shapes_of_parts(c: DFlashConfig) -> dict[str, Shape]:
    """The names of z-lab's DFlash 2 and of DeepSpec's DSpark."""
    C, V, taps = c.hidden_size, c.vocab_size, c.conv_kernel_size
    values: dict[str, Shape] = {}
    for i in range(c.num_layers if taps else 0):
        for conv in ("attention_conv", "mlp_conv"):
            values[f"layers.{i}.{conv}.base_kernel"] = (2, taps, C)
            values[f"layers.{i}.{conv}.kernel_projection.weight"] = (2 * taps * (C // c.conv_group_size), C)
    if c.selector_rank:
        at = "candidate_selector."
        values |= {f"{at}{side}_codebook": (V, c.selector_rank) for side in ("predecessor", "successor")}
        values[f"{at}hidden_projection.weight"] = (c.selector_rank, C)
    if c.markov_rank:
        values["markov_head.markov_w1.weight"] = (V, c.markov_rank)
        values["markov_head.markov_w2.weight"] = (c.rows, c.markov_rank)
    if c.markov_gated:
        values["markov_head.gate.weight"] = (c.markov_rank, C + c.markov_rank)
    if c.confidence:
        values |= {"confidence_head.proj.weight": (1, C + c.previous_rank), "confidence_head.proj.bias": (1,)}
    if c.draft_vocab_size:
        values |= {"d2t": (c.draft_vocab_size,), "t2d": (V,)}
    return values
