"""A generation request, its result, and the state of the rows while they are generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.decode.acceptance import RULES, AcceptanceRule, BlockVerification, Gumbel, Match, Rejection
from outpace.decode.grammar import Constrained, Grammar
from outpace.decode.trace import Trace
from outpace.models.decoder import Target
from outpace.ops.sampling import Sampling, check_scale

GREEDY = "greedy"
COST_RULES = (GREEDY, *RULES)

OnTokens = Callable[[int, list[int]], bool | None]  # row, its new tokens -> True ends the row
OnLogits = Callable[[int, Tensor], None]  # row, logits [n, V] of its next n tokens; a limit may cut the last


@dataclass(frozen=True, kw_only=True)
class Request:
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    limits: tuple[int, ...] = ()  # max_new_tokens per row, where they differ
    stop: frozenset[int] = frozenset()  # a row ends with the first of these tokens
    prefill_chunk: int = 512
    offset: int = 0  # first rotary position
    rule: str = "match"  # the acceptance rule, one of RULES; without a draft all are the same
    draft_temperature: float | None = None  # of sampled draft tokens; None: the target's
    streams: tuple[int, ...] = ()  # rules "match" and "gumbel": noise stream of each row; default: its number
    grammars: tuple[Grammar, ...] = ()  # of each row; none: any text

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
            raise ValueError("draft_temperature: the rule match samples no draft tokens; use another rule")

    @property
    def takes_argmax(self) -> bool:
        """Whether the next token is always the most likely one."""
        return self.sampling.is_argmax and not self.grammars

    @property
    def runs_ahead(self) -> bool:
        """Whether logits alone decide the next token, with noise at most."""
        return (self.sampling.is_argmax or self.sampling.is_softmax) and not self.grammars

    @property
    def effective_rule(self) -> str:
        """One of COST_RULES: the rule, or "greedy" at temperature 0, where all rules are the same."""
        return self.rule if self.sampling.temperature else GREEDY


@dataclass(frozen=True)
class Generation:
    """tokens: the new tokens of each row, stop token included. trace: measurements of every step."""

    tokens: list[list[int]]
    trace: Trace


class BatchRows:
    """The rows of a batch: the tokens emitted so far, and which rows are done."""

    def __init__(self, batch: int, request: Request, on_tokens: OnTokens | None) -> None:
        self.emitted: list[list[int]] = [[] for _ in range(batch)]
        self.done = [False] * batch
        self.request = request
        self.limits = request.limits or (request.max_new_tokens,) * batch
        self.on_tokens = on_tokens

    def running(self, rows: list[int]) -> list[int]:
        """Indices into `rows` (row numbers) of those that are not done, the last ones in the places of those
        that are, so that few rows of a cache move."""
        going = [i for i, b in enumerate(rows) if not self.done[b]]
        if len(going) == len(rows):
            return going
        last = [i for i in going if i >= len(going)]
        return [last.pop() if self.done[b] else i for i, b in enumerate(rows[: len(going)])]

    def emit_steps(self, row: int, tokens: list[int]) -> int:
        """`emit` the token of each of several steps, until the row is done -> of how many."""
        if self.on_tokens is None:
            before = len(self.emitted[row])
            self.emit(row, tokens)
            return len(self.emitted[row]) - before
        for step, token in enumerate(tokens):
            if self.done[row]:
                return step
            self.emit(row, [token])
        return len(tokens)

    def emit(self, row: int, tokens: list[int]) -> None:
        """Append the `tokens` of a step up to the row's limit or first stop token."""
        headroom = self.limits[row] - len(self.emitted[row])
        kept = tokens[:headroom]
        stops = [i for i, t in enumerate(kept) if t in self.request.stop]
        if stops:
            kept = kept[: stops[0] + 1]
        self.emitted[row] += kept
        self.done[row] = bool(stops) or len(self.emitted[row]) == self.limits[row]
        if kept and self.on_tokens is not None and self.on_tokens(row, kept) is True:
            self.done[row] = True


def check_prompts(target: Target, prompts: Sequence[Sequence[int]], request: Request) -> None:
    config = target.config
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    if len(request.limits) not in (0, len(prompts)):
        raise ValueError(f"{len(request.limits)} limits for {len(prompts)} prompts: give each row one")
    for name in ("streams", "grammars"):
        if len(getattr(request, name)) not in (0, len(prompts)):
            given = len(getattr(request, name))
            raise ValueError(f"{given} {name} for {len(prompts)} prompts: give each row one")
    named = [t for p in prompts for t in (max(p), min(p))] + [t for t, _ in request.sampling.logit_bias]
    outside = [t for t in named if not 0 <= t < config.vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {config.vocab_size}")
    longest = max(len(p) for p in prompts) + request.max_new_tokens
    if request.offset + longest > config.max_position_embeddings:
        raise ValueError(
            f"prompt and max_new_tokens reach position {request.offset + longest}; this model's "
            f"positions end at {config.max_position_embeddings}"
        )


def acceptance_rule(
    request: Request, prompts: Sequence[Sequence[int]], rng: torch.Generator | None
) -> AcceptanceRule:
    """The acceptance rule of one generation. At temperature 0 all rules are exact match."""
    rule = _unconstrained(request, prompts, rng)
    return Constrained(rule, request.grammars) if request.grammars else rule


def _unconstrained(
    request: Request, prompts: Sequence[Sequence[int]], rng: torch.Generator | None
) -> AcceptanceRule:
    sampling, own = request.sampling, request.draft_temperature
    match request.effective_rule:
        case "rejection":
            return Rejection(sampling, prompts, rng, draft_temperature=own)
        case "block":
            return BlockVerification(sampling, prompts, rng, draft_temperature=own)
        case "gumbel":
            return Gumbel(sampling, prompts, rng, request.streams, own)
        case rule:
            assert rule in (GREEDY, "match"), f"Request accepts only RULES: {rule}"
            return Match(sampling, prompts, rng, request.streams)
