"""Rounds of a chain in one native call: programs of a draft and of a target's steps, in turns."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.kernels.bindings import _address, _c, _threads
from outpace.kernels.program import Program


class VerifyPass(NamedTuple):
    """A step of one row of n tokens: tokens [1, n], start and counts [1], best [1, n], logits [1, n, V] and
    aux [layers, 1, n, C]; `odd` as of `Program.argmax`. `owner`: what else the program reads."""

    program: Program
    tokens: Tensor
    start: Tensor
    counts: Tensor
    best: Tensor
    odd: ctypes.c_int64
    logits: Tensor
    aux: Tensor
    owner: object


class Context(NamedTuple):
    """How a draft remembers up to n tokens of one row: states [1, n, layers, C], start and counts [1]."""

    program: Program
    states: Tensor
    start: Tensor
    counts: Tensor


class Chain(NamedTuple):
    """A draft's tokens after `last` [1], of which `anchor` [1] is a copy, behind `start` [1] remembered ones:
    chosen [1, N - 1] and how likely each is, sure [1, N - 1]; keys [1, N - 1] of the noise it adds."""

    program: Program
    last: Tensor
    anchor: Tensor
    start: Tensor
    chosen: Tensor
    sure: Tensor
    keys: Tensor


class ChainCut(NamedTuple):
    """Of a chain the n positions with the largest sum of worth[i] - rate * seconds[n], i < n, the smallest of
    equals: worth is the survival stated for position i times trust[i], at most that of i - 1. `settle`: more
    seconds of n > 1 in the first round."""

    rate: float
    seconds: list[float]
    settle: float
    trust: list[float]


class Row(NamedTuple):
    """Where the text is: its last token, tokens that the target and the draft remember, and how many it may
    still get, which end at one of `stops`. keys [n, 1]: of the noise of coming tokens at `temperature`, which
    the draft adds, too, where it is `coupled`."""

    last: int
    start: int
    remembered: int
    left: int
    stops: Tensor
    keys: Tensor | None = None
    temperature: float = 1.0
    coupled: bool = False


class Made(NamedTuple):
    """Of each round: the chain and its survival, root included, how many of its positions were verified, the
    tokens that were kept, and seconds of draft and verify pass. `offered`: whether the last chain was only
    drafted. `observed`: how many of the tokens the draft remembers, all of them where the row goes on."""

    chains: list[list[int]]
    survival: list[list[float]]
    verified: list[int]
    kept: list[list[int]]
    seconds: list[tuple[float, float]]
    offered: bool
    observed: int


class Rounds:
    """Of chains of N positions, `most` in a call at most; `softness` [N - 1] or none: the temperatures that
    divide the log-odds of `sure`."""

    def __init__(self, chain: Chain, contexts: Sequence[Context], softness: Sequence[float], most: int):
        N = self.N = len(contexts)
        self.most, self.chain, self.contexts = most, chain, contexts
        self.passes: dict[int, VerifyPass] = {}
        empty = _c.DraftContext(0, 0, 0, 0)
        packed = [
            _c.DraftContext(c.program.address(), c.states.data_ptr(), c.start.data_ptr(), c.counts.data_ptr())
            for c in contexts
        ]
        self._contexts = ctypes.create_string_buffer(b"".join((empty, *packed)))
        self._softness = (ctypes.c_double * len(softness))(*softness)
        self._passes = ctypes.create_string_buffer(b"")
        self.tokens, self.text = torch.empty(most, N, dtype=torch.int64), (ctypes.c_int64 * (most * N))()
        self.survival = torch.empty(most, N)
        self.verified, self.kept, self.nanoseconds = (
            (ctypes.c_int64 * most)(),
            (ctypes.c_int64 * most)(),
            (ctypes.c_int64 * (2 * most))(),
        )
        self.made, self.offered, self.observed = (ctypes.c_int64() for _ in range(3))

    def use(self, passes: Mapping[int, VerifyPass]) -> None:
        """By their numbers of positions, from 2 to N: a chain that is cut to another is only drafted."""
        self.passes = dict(passes)
        items = [_c.VerifyPass(*[0] * 8)] * (self.N + 1)
        for n, own in passes.items():
            tensors = own.tokens, own.start, own.counts, own.best
            pointers = *(t.data_ptr() for t in tensors), ctypes.addressof(own.odd)
            items[n] = _c.VerifyPass(
                own.program.address(), *pointers, own.logits.data_ptr(), own.aux.data_ptr()
            )
        self._passes = ctypes.create_string_buffer(b"".join(items))

    def run(self, row: Row, most: int, longest: float, cut: ChainCut | None) -> Made:
        """Up to `most` rounds, in about `longest` seconds, but one at least. A call ends early with the row,
        with odd logits, and with a chain of which no token is worth verifying, or with a pass that is not in
        use."""
        address = ctypes.addressof
        chain, some, stops = self.chain, next(iter(self.passes.values())), row.stops
        assert most <= self.most and (row.keys is None or len(row.keys) >= most * self.N)
        noise = chain.keys.data_ptr() if row.coupled else 0
        tensors = chain.last, chain.anchor, chain.start, chain.chosen, chain.sure
        of_chain = ctypes.create_string_buffer(
            _c.Chain(chain.program.address(), *(t.data_ptr() for t in tensors), noise)
        )
        rate, settle, seconds, trust = 0.0, 0.0, None, None
        if cut is not None:
            rate, settle = cut.rate, cut.settle
            seconds, trust = ((ctypes.c_double * len(x))(*x) for x in (cut.seconds, cut.trust))
        inputs = address(of_chain), address(self._passes), address(self._contexts)
        rules = stops.data_ptr(), _address(row.keys), address(self._softness) if len(self._softness) else 0
        of_cut = (address(seconds), address(trust)) if seconds is not None and trust is not None else (0, 0)
        written = address(self.verified), address(self.kept), address(self.text), address(self.nanoseconds)
        ends = self.survival.data_ptr(), address(self.made), address(self.offered), address(self.observed)
        layers, _, _, C = some.aux.shape
        sizes = self.N, most, row.left, len(stops), layers, C, some.logits.shape[-1]
        places = row.last, row.start, row.remembered, int(longest * 1e9)
        numbers = row.temperature, rate, settle
        outputs = self.tokens.data_ptr(), *written, *ends
        _c.play_rounds(_c.Rounds(*inputs, *rules, *of_cut, *outputs, *sizes, *places, _threads(), *numbers))
        return self._read()

    def _read(self) -> Made:
        made, offered = self.made.value, bool(self.offered.value)
        kept, begin = [], 0
        for n in self.kept[:made]:
            kept.append(self.text[begin : begin + n])
            begin += n
        drafted = made + offered
        spent = [x / 1e9 for x in self.nanoseconds[: 2 * drafted]]
        seconds = list(zip(spent[::2], spent[1::2], strict=True))
        chains, survival = self.tokens[:drafted].tolist(), self.survival[:drafted].tolist()
        return Made(chains, survival, self.verified[:made], kept, seconds, offered, self.observed.value)
