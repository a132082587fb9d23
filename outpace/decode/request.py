"""What is asked of a decoding loop, what it gives back, and the prefill both loops share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.decode.acceptance import RULES, AcceptanceRule, BlockVerification, Gumbel, Match, Rejection
from outpace.decode.trace import Trace
from outpace.drafts.base import DraftSession
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder
from outpace.ops.sampling import Sampling, check_scale

GREEDY = "greedy"
COST_RULES = (GREEDY, *RULES)

OnTokens = Callable[[int, list[int]], bool | None]  # row, its new tokens -> True ends the row
OnLogits = Callable[[int, Tensor], None]  # row, logits [n, V] of its next n tokens; the last may not be kept


@dataclass(frozen=True, kw_only=True)
class Request:
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    limits: tuple[int, ...] = ()  # of each row, where some end before max_new_tokens
    stop: frozenset[int] = frozenset()  # a row ends with the first of these it emits
    prefill_chunk: int = 512
    offset: int = 0  # rotary positions begin here
    rule: str = "match"  # the acceptance rule: one of RULES; autoregressive decoding heeds "gumbel" alone
    draft_temperature: float | None = None  # of draft tokens that are drawn; None: the target's
    streams: tuple[int, ...] = ()  # rule "gumbel": which noise each row hears; else the row's number

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: it must be at least 1")
        if self.limits and not 1 <= min(self.limits) <= max(self.limits) <= self.max_new_tokens:
            raise ValueError(f"limits {list(self.limits)}: each must lie in 1..{self.max_new_tokens}")
        if self.rule not in RULES:
            raise ValueError(f"rule {self.rule!r}: it must be one of {', '.join(RULES)}")
        if self.draft_temperature is not None:
            check_scale("draft_temperature", self.draft_temperature)
        if self.draft_temperature is not None and self.rule == "match":
            raise ValueError(
                "draft_temperature: with the rule match no draft token is drawn; name another rule"
            )

    @property
    def effective_rule(self) -> str:
        """One of COST_RULES: the rule, or "greedy" at temperature 0, where all rules are one."""
        return self.rule if self.sampling.temperature else GREEDY


@dataclass(frozen=True)
class Generation:
    """tokens: per row what was emitted, the stop token included. trace: how."""

    tokens: list[list[int]]
    trace: Trace


class BatchRows:
    """The rows being generated: what each has emitted, and which are done."""

    def __init__(self, batch: int, request: Request, on_tokens: OnTokens | None) -> None:
        self.emitted: list[list[int]] = [[] for _ in range(batch)]
        self.done = [False] * batch
        self.request = request
        self.limits = request.limits or (request.max_new_tokens,) * batch
        self.on_tokens = on_tokens

    def still(self, alive: list[int]) -> list[int]:
        """Places in `alive` (row numbers) of the rows that are not done."""
        return [i for i, b in enumerate(alive) if not self.done[b]]

    def emit(self, row: int, tokens: list[int]) -> int:
        """Append what of `tokens` still belongs to the row; -> how many did."""
        headroom = self.limits[row] - len(self.emitted[row])
        kept = tokens[:headroom]
        stops = [i for i, t in enumerate(kept) if t in self.request.stop]
        if stops:
            kept = kept[: stops[0] + 1]
        self.emitted[row] += kept
        self.done[row] = bool(stops) or len(self.emitted[row]) == self.limits[row]
        if kept and self.on_tokens is not None and self.on_tokens(row, kept) is True:
            self.done[row] = True
        return len(kept)


def check_prompts(target: Decoder, prompts: Sequence[Sequence[int]], request: Request) -> None:
    config = target.config
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    if len(request.limits) not in (0, len(prompts)):
        raise ValueError(f"{len(request.limits)} limits for {len(prompts)} prompts: give each row one")
    if len(request.streams) not in (0, len(prompts)):
        raise ValueError(f"{len(request.streams)} streams for {len(prompts)} prompts: give each row one")
    outside = [t for p in prompts for t in (max(p), min(p)) if not 0 <= t < config.vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {config.vocab_size}")
    longest = max(len(p) for p in prompts) + request.max_new_tokens
    if request.offset + longest > config.max_position_embeddings:
        raise ValueError(
            f"prompt and max_new_tokens reach position {request.offset + longest}; this model's "
            f"positions end at {config.max_position_embeddings}"
        )


def prefill(
    target: Decoder,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    request: Request,
    rule: AcceptanceRule,
    session: DraftSession | None = None,
    aux: Sequence[int] = (),
    on_logits: OnLogits | None = None,
) -> Tensor:
    """Run the prompts through the target in chunks; -> the first token of every row [B].

    Logits are formed for one position a row. `session` observes each chunk as it passes. Raises ValueError
    for logits that are not finite.
    """
    lengths = [len(p) for p in prompts]
    last_hidden = [torch.empty(0)] * len(prompts)
    for begin in range(0, max(lengths), request.prefill_chunk):
        counts = [min(max(n - begin, 0), request.prefill_chunk) for n in lengths]
        width = max(counts)
        part = [[*p[begin : begin + c], *[0] * (width - c)] for p, c in zip(prompts, counts, strict=True)]
        tokens = torch.tensor(part, device=target.device)
        out = target(tokens, cache, counts=counts, aux=aux)
        if session is not None:
            session.observe(tokens, out.aux, counts)
        for b, (n, c) in enumerate(zip(lengths, counts, strict=True)):
            if c and begin + c == n:
                last_hidden[b] = out.hidden[b, c - 1]
    logits = target.logits(torch.stack(last_hidden))
    if not bool(logits.amax().isfinite()):  # NaN and Inf both show in the largest
        raise ValueError(
            "the target's logits after the prompt are not finite: its weights are damaged, or overflow in "
            "this precision; `outpace inspect MODEL --scan` names the tensors"
        )
    if on_logits is not None:
        for b in range(len(prompts)):
            on_logits(b, logits[b : b + 1])
    return rule.draw(logits)


def acceptance_rule(
    request: Request, prompts: Sequence[Sequence[int]], rng: torch.Generator | None
) -> AcceptanceRule:
    """The acceptance rule of one generation. At temperature 0 all rules are exact match."""
    how, own = request.sampling, request.draft_temperature
    if how.temperature == 0:
        return Match(how, prompts, rng)
    match request.rule:
        case "match":
            return Match(how, prompts, rng)
        case "rejection":
            return Rejection(how, prompts, rng, own)
        case "block":
            return BlockVerification(how, prompts, rng, own)
        case "gumbel":
            return Gumbel(how, prompts, rng, request.streams, own)
    raise AssertionError(f"Request lets no rule pass that is not in RULES: {request.rule}")
