"""The gates: five proofs that target, cache, draft and verifier agree, before any number is believed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.bench.check_decoding import oracle_labels, position_offsets
from outpace.bench.check_forwards import CheckResult, cached_targets, later_slots, one_token
from outpace.bench.timing import Prompts
from outpace.drafts.base import Draft
from outpace.drafts.dflash import DFlash
from outpace.models.decoder import Decoder
from outpace.teacher.store import TeacherCache

OFFSETS = (0, 4096, 65536, 131072)


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    samples: int = 8  # of the teacher cache, drawn at random
    positions: int = 48  # one-token decode against slot 0
    new_tokens: int = 128  # decoded per prompt where a gate decodes
    block_size: int = 8  # where there is no draft to take it from
    offsets: tuple[int, ...] = OFFSETS
    offset_limit: float = 0.03  # largest relative change of tau


def run_checks(
    target: Decoder,
    draft: DFlash | Draft | None,
    cache: TeacherCache | None,
    prompts: Prompts,
    settings: CheckSettings | None = None,
    *,
    on_gate: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """All five, in order; `on_gate` hears of each as it ends. `prompts`: held-out text, a few of them.

    Raises ValueError for prompts the model cannot take.
    """
    s = settings or CheckSettings()
    block = draft.block_size if draft is not None else s.block_size
    bound = draft.bind(target) if isinstance(draft, DFlash) else draft
    steps: tuple[Callable[[], CheckResult], ...] = (
        lambda: cached_targets(target, cache, block, s.samples),
        lambda: later_slots(target, prompts, block),
        lambda: one_token(target, prompts, block, s.positions),
        lambda: oracle_labels(target, prompts, block, s.new_tokens),
        lambda: position_offsets(target, bound, prompts, s.offsets, s.new_tokens, s.offset_limit),
    )
    gates = []
    for step in steps:
        gates.append(step())
        if on_gate is not None:
            on_gate(gates[-1])
    return gates


def failed(gates: Sequence[CheckResult]) -> list[CheckResult]:
    return [g for g in gates if g.passed is False]
