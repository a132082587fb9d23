"""Which known mistake turns one side's layer into the other's? Single ones first, then every two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outpace.doctor.mistakes import Mistake, pairs
from outpace.doctor.reading import Reading
from outpace.doctor.weights import relative

# Two float32 forwards of the same layer differ by some 1e-6 of what the layer adds; the least of the known
# mistakes that a text of some hundred tokens shows at all is above 1e-4.
EXACT = 1e-4
ROUNDING = 2e-6


Run = Callable[[Sequence[Reading]], list[Tensor]]  # what a layer states under each reading


@dataclass(frozen=True, kw_only=True)
class Tried:
    """`error`: ||what it gives - what is wanted|| / ||what is wanted||."""

    mistake: Mistake
    error: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """`matches`: those that give what is wanted, best first; more than one cannot be told apart by this text.
    `nearest`: where none does, the one that comes closest."""

    before: float
    matches: tuple[Tried, ...]
    nearest: Tried | None


def search(
    mistakes: Sequence[Mistake],
    reading: Reading,
    run: Run,
    wanted: Tensor,
    limit: float,
    *,
    in_pairs: bool = True,
) -> Search:
    """`wanted` is what the layer should say; errors up to `limit` count as the same."""
    before = relative(run([reading])[0], wanted)

    def attempt(some: Sequence[Mistake]) -> list[Tried]:
        outs = run([m.apply(reading) for m in some])
        tried = [Tried(mistake=m, error=relative(out, wanted)) for m, out in zip(some, outs, strict=True)]
        return sorted((t for t in tried if t.error == t.error), key=lambda t: t.error)

    singles = attempt(mistakes)
    result = _reproducing(singles, before, limit)
    nearest = singles[:1]
    if not result and in_pairs:
        doubles = attempt(pairs(list(mistakes)))
        result = _reproducing(doubles, before, limit)
        nearest = sorted(nearest + doubles[:1], key=lambda t: t.error)[:1]
    better = nearest and nearest[0].error < before / 2
    return Search(before=before, matches=result, nearest=nearest[0] if better and not result else None)


def _reproducing(tried: list[Tried], before: float, limit: float) -> tuple[Tried, ...]:
    """What comes within the limit and clearly nearer than no mistake does: all as near as the best."""
    if not tried or tried[0].error > min(limit, before / 3):
        return ()
    alike = 10 * tried[0].error + ROUNDING if limit <= EXACT else 1.5 * tried[0].error
    return tuple(t for t in tried if t.error <= alike)
