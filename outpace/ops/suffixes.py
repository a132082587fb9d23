"""Where the last tokens of a text occur, in itself and in a sorted one, and what tends to follow them."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels import draft_bindings
from outpace.kernels.bindings import use_kernel

SORTED = 64  # tokens of a suffix that decide its place
CONTEXTS = (16, 8, 4, 2)  # how many of the last tokens are samples for, the most telling first
DEEPEST = SORTED - CONTEXTS[0]  # draft tokens in a line
DOUBT = 4.0  # a context seen n times is believed as n / (n + DOUBT); the shorter ones share the rest
OWN_DOUBT = 1.0  # the same, of a context seen earlier in this very text
ENOUGH = 0.1  # a rest that is not shared any more
SAMPLES = 16  # occurrences of a context that are samples at, evenly spread over what follows
RECENT = 8  # occurrences in this very text, the latest
BRANCH = 8  # followers of a node that may become nodes


class Grown(NamedTuple):
    """By position, without the root: the token; its parent's position, 0 being the root; how likely it is
    reached as far as the counts say, falling, no child before its parent."""

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


class Places(NamedTuple):
    """Of the text that is continued, the places right behind some tokens, the latest first."""

    at: tuple[int, ...]


Context = Interval | Places


@dataclass(frozen=True, eq=False)
class Suffixes:
    """text and order [n] int32: as `sort_suffixes` takes and gives them."""

    text: Tensor
    order: Tensor

    @staticmethod
    def of(text: Tensor) -> "Suffixes":
        return Suffixes(text, sort_suffixes(text))

    def grow(self, history: Tensor, nodes: int) -> Grown:
        """history [m] int32, a text so far -> the most probable `nodes` positions after it, best first; fewer
        where less is known."""
        if not use_kernel(self.text):
            return self.lookup(history.tolist()).grow(nodes)
        result = draft_bindings.grow(
            self.text,
            self.order,
            history,
            nodes,
            contexts=CONTEXTS,
            samples=SAMPLES,
            recent=RECENT,
            branch=BRANCH,
            deepest=DEEPEST,
            doubt=DOUBT,
            own_doubt=OWN_DOUBT,
            enough=ENOUGH,
        )
        return Grown(*result)

    def lookup(self, history: list[int]) -> "Lookup":
        return Lookup(*self._lists, history)

    @cached_property
    def _lists(self) -> tuple[list[int], list[int]]:
        return self.text.tolist(), self.order.tolist()


@dataclass(frozen=True)
class Lookup:
    """The same in Python, where there is no kernel; the kernel agrees with it to the bit. `history`: the text
    to continue, text and order are what it is samples up in."""

    text: list[int]
    order: list[int]
    history: list[int]

    def token(self, at: int, known: int) -> int:
        place = self.order[at] + known
        return self.text[place] if place < len(self.text) else -1

    def narrowed(self, result: Interval, token: int) -> Interval:
        places = range(result.hi)
        bounds = {"lo": result.lo, "hi": result.hi, "key": lambda at: self.token(at, result.known)}
        lo, hi = bisect_left(places, token, **bounds), bisect_right(places, token, **bounds)  # type: ignore[call-overload]
        return Interval(lo, hi, result.known + 1)

    def all_narrowed(self, contexts: list[Context], token: int) -> list[Context]:
        """These contexts with `token` behind them, as far as it occurs there."""
        items: list[Context] = []
        for context in contexts:
            if isinstance(context, Places):
                at = tuple(p + 1 for p in context.at if p < len(self.history) and self.history[p] == token)
                items += [Places(at)] if at else []
            else:
                here = self.narrowed(context, token)
                items += [here] if here.lo < here.hi else []
        return items

    def contexts(self) -> list[Context]:
        """Where the last CONTEXTS tokens occur, the longest that does first, and of one length the text's own
        before the others; of two with the same occurrences the longer one."""
        items: list[Context] = []
        widest = widest_own = 0
        for length in CONTEXTS:
            if length > len(self.history):
                continue
            tail = self.history[-length:]
            own = [
                p
                for p in range(len(self.history) - 1, length - 1, -1)
                if self.history[p - length : p] == tail
            ]
            if len(own) > widest_own:
                items.append(Places(tuple(own[:RECENT])))
                widest_own = len(own)
            here = Interval(0, len(self.order), 0)
            for token in tail:
                here = self.narrowed(here, token)
            if here.hi - here.lo > widest:
                items.append(here)
                widest = here.hi - here.lo
        return items

    def sampled(self, context: Context) -> tuple[list[int], int, float]:
        """Up to SAMPLES tokens that follow, -1 for an end; of how many occurrences; how these are doubted."""
        if isinstance(context, Places):
            tokens = [self.history[p] if p < len(self.history) else -1 for p in context.at]
            return tokens, len(tokens), OWN_DOUBT
        total = context.hi - context.lo
        samples = min(total, SAMPLES)
        places = (context.lo + (2 * i + 1) * total // (2 * samples) for i in range(samples))
        return [self.token(at, context.known) for at in places], total, DOUBT

    def followers(self, contexts: list[Context]) -> list[tuple[int, float]]:
        """The most probable BRANCH tokens after these contexts, falling, the first seen of equals first:

        p(token) = sum over contexts of their share of what the longer ones left, times its part in them.
        """
        chance: dict[int, float] = {}
        left = 1.0
        for context in contexts:
            tokens, total, doubt = self.sampled(context)
            share = left * total / (total + doubt)
            for token in tokens:
                if token >= 0:
                    chance[token] = chance.get(token, 0.0) + share / len(tokens)
            left -= share
            if left < ENOUGH:
                break
        return sorted(chance.items(), key=lambda pair: -pair[1])[:BRANCH]

    def grow(self, nodes: int) -> Grown:
        tree = Grown([], [], [])
        # falling reach, order of offering; parent's position, depth, token, the parent's contexts
        heap: list[tuple[float, int, int, int, int, list[Context]]] = []
        serial = 0

        def offer(column: int, depth: int, reach: float, contexts: list[Context]) -> None:
            nonlocal serial
            for token, chance in self.followers(contexts) if depth < DEEPEST else ():
                heappush(heap, (-(reach * chance), serial, column, depth + 1, token, contexts))
                serial += 1

        offer(0, 0, 1.0, self.contexts())
        while heap and len(tree.tokens) < nodes:
            cost, _, parent, depth, token, contexts = heappop(heap)
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.reach.append(-cost)
            offer(len(tree.tokens), depth, -cost, self.all_narrowed(contexts, token))
        return tree
