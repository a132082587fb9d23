"""Measurements of a generation: tokens proposed and accepted, and seconds, per step."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple


class Prediction(NamedTuple):
    """Tokens of all rows and seconds of a step, or of some without draft tokens made in one call, as
    the controller predicted and as measured."""

    tokens: float
    seconds: float
    tokens_measured: int
    seconds_taken: float


class Stopwatch:
    """`with trace.timed(part)`: adds the time inside. A class, since a generator costs a microsecond more."""

    def __init__(self, seconds: dict[str, float], part: str) -> None:
        self.seconds, self.part = seconds, part

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.part] += time.perf_counter() - self.began


def _seconds() -> dict[str, float]:
    return {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "rest": 0.0}


@dataclass
class Trace:
    """Steps after the prefill. A step of autoregressive decoding proposes nothing and commits one token.

    Per step and row of the batch: `proposed`, the draft tokens of the longest path; `accepted`, the accepted
    draft tokens, -1 once the row is done; `nodes`, the verified positions, root included; `provisional`, the
    draft tokens that had been accepted on partial KV (no steps without partial KV). `step_seconds`: from the
    end of the step before, or of the prefill. `predicted`: per step with a prediction. `reused`: tokens of
    the prompt that lay in the cache."""

    proposed: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    nodes: list[list[int]] = field(default_factory=list)
    provisional: list[list[int]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    partial_forwards: int = 0
    seconds: dict[str, float] = field(default_factory=_seconds)
    predicted: list[Prediction] = field(default_factory=list)
    reused: int = 0
    step_began: float = field(default_factory=time.perf_counter)

    def timed(self, part: str) -> Stopwatch:
        return Stopwatch(self.seconds, part)

    def spent(self, part: str, seconds: float, *, within: str) -> None:
        """Move `seconds` of the part `within` to `part`."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.seconds[within] -= seconds

    def add(
        self,
        batch: int,
        rows: list[int],
        proposed: list[int],
        accepted: list[int],
        nodes: list[int] | None = None,
        provisional: list[int] | None = None,
        seconds: float | None = None,
    ) -> None:
        """One step of the rows `rows`, out of `batch`. `nodes`: default, a chain. `seconds`: what it took,
        where it was one of several that ended together; None: since the one before."""

        def per_row(values: list[int], absent: int) -> list[int]:
            if len(rows) == batch:
                return values
            by_row = dict(zip(rows, values, strict=True))
            return [by_row.get(b, absent) for b in range(batch)]

        self.proposed.append(per_row(proposed, 0))
        self.accepted.append(per_row(accepted, -1))
        self.nodes.append(per_row(nodes or [n + 1 for n in proposed], 0))
        now = time.perf_counter()
        self.step_seconds.append(now - self.step_began if seconds is None else seconds)
        self.step_began = now
        if provisional is not None:
            self.provisional.append(per_row(provisional, 0))

    def add_plain(self, batch: int, rows: list[int], tokens: list[int]) -> None:
        """Steps without draft tokens, as many of each row as it has `tokens` of them."""
        now, begin = time.perf_counter(), 0
        self.step_seconds += [(now - self.step_began) / max(tokens)] * max(tokens)
        self.step_began = now
        for end in sorted(set(tokens)):  # alike up to there: steps share their lists, which nobody changes
            going = {b for b, n in zip(rows, tokens, strict=True) if n >= end}
            self.proposed += [[0] * batch] * (end - begin)
            self.accepted += [[0 if b in going else -1 for b in range(batch)]] * (end - begin)
            self.nodes += [[int(b in going) for b in range(batch)]] * (end - begin)
            begin = end

    def _pairs(self, steps: list[list[int]]) -> list[tuple[int, int]]:
        """(value, accepted draft tokens) of every step and running row."""
        return [
            (value, accepted)
            for values, taken in zip(steps, self.accepted, strict=True)
            for value, accepted in zip(values, taken, strict=True)
            if accepted >= 0
        ]

    @property
    def confirmed(self) -> tuple[int, int]:
        """Draft tokens accepted on partial KV that the full forward confirmed, and their total number."""
        if not self.provisional:
            return 0, 0
        pairs = self._pairs(self.provisional)
        return sum(min(a, m) for m, a in pairs), sum(m for m, _ in pairs)

    def partial_as_json(self) -> dict[str, dict[str, int]]:
        """Empty without partial KV."""
        if not self.provisional:
            return {}
        confirmed, passed = self.confirmed
        return {"partial": {"forwards": self.partial_forwards, "passed": passed, "confirmed": confirmed}}

    @property
    def decode_seconds(self) -> float:
        return sum(seconds for part, seconds in self.seconds.items() if part != "prefill")

    @property
    def predicted_tokens_per_s(self) -> float:
        seconds = sum(f.seconds for f in self.predicted)
        return sum(f.tokens for f in self.predicted) / seconds if seconds else 0.0

    @property
    def prediction_error(self) -> float:
        """The predicted tokens/s over the measured ones of the same steps, less 1."""
        taken = sum(f.seconds_taken for f in self.predicted)
        measured = sum(f.tokens_measured for f in self.predicted) / taken if taken else 0.0
        return self.predicted_tokens_per_s / measured - 1 if measured else 0.0

    @property
    def steps(self) -> int:
        """Those that are complete."""
        return len(self.accepted)

    @property
    def rounds(self) -> int:
        """Target forwards, counted per row that was still running."""
        return len(self.accept_lens)

    @property
    def accept_lens(self) -> list[int]:
        return [a for row in self.accepted for a in row if a >= 0]

    @property
    def tau(self) -> float:
        """Tokens committed per target forward, bonus included: total tokens / total steps."""
        lens = self.accept_lens
        return (sum(lens) + len(lens)) / len(lens) if lens else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted draft tokens over offered ones."""
        offered = sum(p for p, _ in self._pairs(self.proposed))
        return sum(self.accept_lens) / offered if offered else 0.0

    def accept_by_position(self) -> list[float]:
        """Share of steps that offered draft token k (k = 1, 2, ..) in which it was accepted."""
        pairs = self._pairs(self.proposed)
        longest = max((p for p, _ in pairs), default=0)
        offered = [[a for p, a in pairs if p >= k] for k in range(1, longest + 1)]
        return [sum(a >= k for a in lens) / len(lens) for k, lens in enumerate(offered, start=1)]
