"""With a reference: which mistakes turn one half of a layer into what the reference computes?

Single mistakes first, on the weights of both sides; then one on each side; then every two on either side.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from outpace.doctor.mistakes import Half, Mistake, Names, apply, mistakes_of, pairs
from outpace.doctor.reference import (
    Reading,
    attention_weights,
    layer_of,
    mlp_weights,
    read_attention,
    read_mlps,
    relative,
    right_reading,
)
from outpace.models.decoder import Decoder

# Two float32 forwards of one layer differ by some 1e-6 of what the layer adds; the least of the known
# mistakes that a text of some hundred tokens shows at all is above 1e-4.
EXACT = 1e-4
ROUNDING = 2e-6
Key = TypeVar("Key", bound=tuple[Any, ...])
ROWS = 8  # of the MLP, on which mistakes are tried: its rows are independent


@dataclass(frozen=True, kw_only=True)
class HalfLayer:
    """One half of one layer of a checkpoint. `run`: [n, C], what it adds under each reading."""

    half: Half
    reading: Reading  # the right one
    known: dict[str, Mistake]
    run: Callable[[Sequence[Reading]], list[Tensor]]

    @torch.inference_mode()
    def under(self, combinations: Sequence[Names]) -> dict[Names, Tensor]:
        outs = self.run([apply(names, self.known, self.reading) for names in combinations])
        return dict(zip(combinations, outs, strict=True))

    @property
    def singles(self) -> list[Names]:
        return [(name,) for name in self.known]


def half_layer(half: Half, model: Decoder, layer: int, x: Tensor, rows: Tensor) -> HalfLayer:
    """`x` [T, C] enters the half. The MLP runs on `rows` alone; attention on all, and gives these."""
    block, reading = layer_of(model, layer), right_reading(model, layer)
    known = mistakes_of(half, reading, model.config)
    if half == "attention":
        attention = attention_weights(block)

        def run(readings: Sequence[Reading]) -> list[Tensor]:
            return [read_attention(x, attention, r).out[rows] for r in readings]

    else:
        mlp, few = mlp_weights(block), x[rows]

        def run(readings: Sequence[Reading]) -> list[Tensor]:
            return [steps.out for steps in read_mlps([few] * len(readings), mlp, readings)]

    return HalfLayer(half=half, reading=reading, known=known, run=run)


def rows_to_try(half: Half, ours: Tensor, theirs: Tensor, comparable: Tensor) -> Tensor:
    """All rows for attention; for the MLP those in which two sides [T, C] differ most for their size, of
    those that `comparable` [T] allows."""
    if half == "attention":
        return torch.arange(len(ours))
    size = theirs.norm(dim=-1).clamp(min=1e-30)
    share = ((ours - theirs).norm(dim=-1) / size).nan_to_num(torch.inf).masked_fill(~comparable, -1.0)
    return share.topk(min(ROWS, int(comparable.sum()))).indices


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Mistakes that make the two sides of one half agree; all () where none do.

    `ours`: under each of these our weights give the reference's output (several: the text does not separate
    them). `theirs`: the other way round. `both`: one mistake in ours and one in the reference's, together.
    `before`: the relative error without them, `error`: with the best. `nearest`: the best where none explains
    it.
    """

    ours: tuple[Names, ...] = ()
    theirs: tuple[Names, ...] = ()
    both: tuple[tuple[Names, Names], ...] = ()
    before: float
    error: float
    nearest: str | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """Every mistake in any of them, once."""
        groups = (*self.ours, *self.theirs, *(a + b for a, b in self.both))
        return tuple(dict.fromkeys(name for names in groups for name in names))


@dataclass
class Explainer:
    """Explains layer after layer: what explained an earlier layer is tried first, and no pairs after a layer
    that none explained."""

    earlier: dict[Half, Explanation] = field(default_factory=dict)
    no_pairs: set[Half] = field(default_factory=set)

    def explain(
        self, mine: HalfLayer, its: HalfLayer | None, ours: Tensor, theirs: Tensor, limit: float
    ) -> Explanation:
        """`ours`, `theirs` [n, C]: outputs of the two sides. `its`: the reference's weights, where it has
        others than ours."""
        search = Search(mine, its, ours, theirs, limit)
        if mine.half in self.earlier:
            again = search.again(self.earlier[mine.half])
            if again.named:
                return again
        result = search.singles()
        if not result.named and mine.half not in self.no_pairs:
            result = search.pairs(result)
            if not result.named:
                self.no_pairs.add(mine.half)
        if result.named:
            self.earlier[mine.half] = result
        return result


class Search:
    """One half of one layer of both sides."""

    def __init__(
        self, mine: HalfLayer, its: HalfLayer | None, ours: Tensor, theirs: Tensor, limit: float
    ) -> None:
        self.mine, self.its, self.ours, self.theirs, self.limit = mine, its, ours, theirs, limit
        self.before = relative(ours, theirs)

    def again(self, earlier: Explanation) -> Explanation:
        """The mistakes of another layer."""
        if earlier.both:
            return self._both([a for a, _ in earlier.both], [b for _, b in earlier.both])
        return self._either(earlier.ours, earlier.theirs)

    def singles(self) -> Explanation:
        return self._either(self.mine.singles, [] if self.its is None else self.its.singles)

    def pairs(self, nearest: Explanation) -> Explanation:
        """Two mistakes in ours, one in each, or two in the reference; else the nearest of all."""
        results = [nearest, self._either(pairs(self.mine.known), ())]
        if self.its is not None and not results[-1].named:
            results.append(self._both(self.mine.singles, self.its.singles))
            if not results[-1].named:
                results.append(self._either((), pairs(self.its.known)))
        return results[-1] if results[-1].named else min(results, key=lambda r: r.error)

    def _either(self, of_ours: Sequence[Names], of_theirs: Sequence[Names]) -> Explanation:
        mine = self._matches({n: relative(x, self.theirs) for n, x in self.mine.under(of_ours).items()})
        outs = self.its.under(of_theirs) if self.its is not None else {}
        its = self._matches({n: relative(x, self.ours) for n, x in outs.items()})
        error, nearest = min((mine[1:], its[1:]), key=lambda e: e[0])
        return self._explanation(error, nearest, ours=mine[0], theirs=its[0])

    def _both(self, of_ours: Sequence[Names], of_theirs: Sequence[Names]) -> Explanation:
        """A mistake that both sides erase alike is none: the two change different fields."""
        assert self.its is not None
        mine, its = self.mine.under(of_ours), self.its.under(of_theirs)
        errors = {
            (a, b): relative(x, y)
            for a, x in mine.items()
            for b, y in its.items()
            if not self._fields(self.mine, a) & self._fields(self.its, b)
        }
        both, error, nearest = self._matches(errors)
        return self._explanation(error, tuple(n for names in nearest for n in names), both=both)

    def _fields(self, side: HalfLayer, names: Names) -> set[str]:
        return {name for n in names if n in side.known for name in side.known[n].change}

    def _explanation(self, error: float, nearest: Names, **matches: Any) -> Explanation:
        near = not any(matches.values()) and error < self.before / 2
        label = " + ".join(nearest) if near else None
        values = {name: tuple(value) for name, value in matches.items()}
        return Explanation(before=self.before, error=error, nearest=label, **values)

    def _matches(self, errors: Mapping[Key, float]) -> tuple[list[Key], float, Key | Names]:
        """Those that come within the limit and clearly nearer than no mistake does, all that are as near as
        the best; the error of the best of all, and which it is."""
        ranked = sorted((n for n in errors if errors[n] == errors[n]), key=lambda n: errors[n])
        if not ranked:
            return [], math.inf, ()
        least = errors[ranked[0]]
        if least > min(self.limit, self.before / 3):
            return [], least, ranked[0]
        alike = 10 * least + ROUNDING if self.limit <= EXACT else 1.5 * least
        return [n for n in ranked if errors[n] <= alike], least, ranked[0]
