"""A sorted text: where the last tokens of another text occur in it, and what tends to follow them there."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels import cpu, cpu_suffix

SORTED = 64  # tokens of a suffix that decide its place
CONTEXTS = (16, 8, 4, 2)  # how many of the last tokens are looked for, the most telling first
DEEPEST = SORTED - CONTEXTS[0]  # guesses in a line
DOUBT = 4.0  # a context seen n times is believed as n / (n + DOUBT); the shorter ones share the rest
ENOUGH = 0.1  # a rest that is not shared any more
SAMPLES = 16  # occurrences of a context that are looked at, evenly spread over what follows
BRANCH = 8  # followers of a node that may become nodes


class Grown(NamedTuple):
    """By column, without the root: the token; its parent's column, 0 being the root; how likely it is reached
    as far as the counts say, falling, no child before its parent."""

    tokens: list[int]
    parents: list[int]
    reach: list[float]


def sort_suffixes(text: Tensor) -> Tensor:
    """text [n] int32, -1 between its parts -> [n] int32, the places of its suffixes in the order of their
    first SORTED tokens (prefix doubling: Manber and Myers, 1993)."""
    n, known = len(text), 1
    rank = torch.unique(text, return_inverse=True)[1]
    order = rank.argsort(stable=True)
    while known < SORTED:
        later = torch.cat((rank[known:], rank.new_full((min(known, n),), -1)))
        key, order = (rank * (n + 1) + later + 1).sort(stable=True)
        rank = torch.empty_like(rank)
        rank[order] = torch.cat((rank.new_zeros(min(n, 1)), (key[1:] != key[:-1]).cumsum(0)))
        known *= 2
    return order.int()


class Interval(NamedTuple):
    """Suffixes lo .. hi - 1 in their order: all that begin with the same `known` tokens."""

    lo: int
    hi: int
    known: int


@dataclass(frozen=True, eq=False)
class Suffixes:
    """text and order [n] int32: as `sort_suffixes` takes and gives them."""

    text: Tensor
    order: Tensor

    @staticmethod
    def of(text: Tensor) -> "Suffixes":
        return Suffixes(text, sort_suffixes(text))

    def grow(self, tail: Sequence[int], nodes: int) -> Grown:
        """The likeliest `nodes` columns after `tail`, best first; fewer where less is known."""
        if not cpu.available():
            return self.reference.grow(tail, nodes)
        found = cpu_suffix.grow(
            self.text,
            self.order,
            tail,
            nodes,
            contexts=CONTEXTS,
            samples=SAMPLES,
            branch=BRANCH,
            deepest=DEEPEST,
            doubt=DOUBT,
            enough=ENOUGH,
        )
        return Grown(*found)

    @cached_property
    def reference(self) -> "Reference":
        return Reference(self.text.tolist(), self.order.tolist())


@dataclass(frozen=True)
class Reference:
    """The same in Python, where there is no kernel; the kernel agrees with it to the bit."""

    text: list[int]
    order: list[int]

    def token(self, at: int, known: int) -> int:
        place = self.order[at] + known
        return self.text[place] if place < len(self.text) else -1

    def narrowed(self, found: Interval, token: int) -> Interval:
        places = range(found.hi)
        how = {"lo": found.lo, "hi": found.hi, "key": lambda at: self.token(at, found.known)}
        lo, hi = bisect_left(places, token, **how), bisect_right(places, token, **how)  # type: ignore[call-overload]
        return Interval(lo, hi, found.known + 1)

    def contexts(self, tail: Sequence[int]) -> list[Interval]:
        """Where the last CONTEXTS tokens of `tail` occur, the longest that does first; of two with the same
        occurrences the longer one."""
        found: list[Interval] = []
        for length in CONTEXTS:
            if length > len(tail):
                continue
            here = Interval(0, len(self.order), 0)
            for token in tail[-length:]:
                here = self.narrowed(here, token)
            widest = found[-1].hi - found[-1].lo if found else 0
            if here.hi - here.lo > widest:
                found.append(here)
        return found

    def followers(self, contexts: list[Interval]) -> list[tuple[int, float]]:
        """The likeliest BRANCH tokens after these contexts, falling, the first seen of equals first:

        p(token) = sum over contexts of their share of what the longer ones left, times its part in them.
        """
        chance: dict[int, float] = {}
        left = 1.0
        for lo, hi, known in contexts:
            total = hi - lo
            share = left * total / (total + DOUBT)
            looked = min(total, SAMPLES)
            for i in range(looked):
                token = self.token(lo + (2 * i + 1) * total // (2 * looked), known)
                if token >= 0:
                    chance[token] = chance.get(token, 0.0) + share / looked
            left -= share
            if left < ENOUGH:
                break
        return sorted(chance.items(), key=lambda pair: -pair[1])[:BRANCH]

    def grow(self, tail: Sequence[int], nodes: int) -> Grown:
        tree = Grown([], [], [])
        # falling reach, order of offering; parent's column, depth, token, the parent's contexts
        heap: list[tuple[float, int, int, int, int, list[Interval]]] = []
        serial = 0

        def offer(column: int, depth: int, reach: float, contexts: list[Interval]) -> None:
            nonlocal serial
            for token, chance in self.followers(contexts) if depth < DEEPEST else ():
                heappush(heap, (-(reach * chance), serial, column, depth + 1, token, contexts))
                serial += 1

        offer(0, 0, 1.0, self.contexts(tail))
        while heap and len(tree.tokens) < nodes:
            cost, _, parent, depth, token, contexts = heappop(heap)
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.reach.append(-cost)
            narrower = [self.narrowed(c, token) for c in contexts]
            offer(len(tree.tokens), depth, -cost, [c for c in narrower if c.lo < c.hi])
        return tree
