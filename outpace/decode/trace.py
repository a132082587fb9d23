"""What each step proposed, accepted and cost; what every measurement reads."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prediction:
    """What a step was to bring, generated before the target ran, and what it brought: tokens of all rows."""

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


@dataclass
class Trace:
    """Rounds after the prefill. A step of autoregressive decoding proposes nothing and commits one token."""

    proposed: list[list[int]] = field(
        default_factory=list
    )  # per step and row: draft tokens offered in a line
    accepted: list[list[int]] = field(
        default_factory=list
    )  # per step and row: draft tokens taken; -1: row done
    nodes: list[list[int]] = field(
        default_factory=list
    )  # per step and row: positions verified, root included
    # per step and row: draft tokens that had passed on partial KV; no steps at all where it was not asked
    # for
    provisional: list[list[int]] = field(default_factory=list)
    partial_forwards: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "rest": 0.0}
    )
    predicted: list[Prediction] = field(default_factory=list)  # per step that a controller predicted

    def timed(self, part: str) -> "Stopwatch":
        return Stopwatch(self.seconds, part)

    def spent(self, part: str, seconds: float, *, within: str) -> None:
        """Of the time that runs as `within`, so much was another part's."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self.seconds[within] -= seconds

    def add(
        self,
        batch: int,
        alive: list[int],
        proposed: list[int],
        accepted: list[int],
        nodes: list[int] | None = None,
        provisional: list[int] | None = None,
    ) -> None:
        """One step of the rows `alive`, out of `batch`. Without `nodes` the draft tokens stood in a line."""
        verified, offered, taken = [0] * batch, [0] * batch, [-1] * batch
        nodes = nodes or [p + 1 for p in proposed]
        for b, n, p, a in zip(alive, nodes, proposed, accepted, strict=True):
            verified[b], offered[b], taken[b] = n, p, a
        if provisional is not None:
            before = dict(zip(alive, provisional, strict=True))
            self.provisional.append([before.get(b, 0) for b in range(batch)])
        self.nodes.append(verified)
        self.proposed.append(offered)
        self.accepted.append(taken)

    @property
    def confirmed(self) -> tuple[int, int]:
        """Of the draft tokens that had passed on partial KV, how many the full pass confirmed; and how many
        they were."""
        if not self.provisional:
            return 0, 0
        pairs = [
            (min(a, m), m)
            for taken, before in zip(self.accepted, self.provisional, strict=True)
            for a, m in zip(taken, before, strict=True)
            if a >= 0
        ]
        return sum(a for a, _ in pairs), sum(m for _, m in pairs)

    def partial_as_json(self) -> dict[str, dict[str, int]]:
        """Nothing where there was no partial KV."""
        if not self.provisional:
            return {}
        output, passed = self.confirmed
        return {"partial": {"forwards": self.partial_forwards, "passed": passed, "confirmed": output}}

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
        offered = sum(
            p
            for ps, as_ in zip(self.proposed, self.accepted, strict=True)
            for p, a in zip(ps, as_, strict=True)
            if a >= 0
        )
        return sum(self.accept_lens) / offered if offered else 0.0

    def accept_by_position(self) -> list[float]:
        """Share of steps that offered draft token k (k = 1, 2, ..) in which it was accepted."""
        pairs = [
            (p, a)
            for ps, as_ in zip(self.proposed, self.accepted, strict=True)
            for p, a in zip(ps, as_, strict=True)
            if a >= 0
        ]
        widest = max((p for p, _ in pairs), default=0)
        shares = []
        for k in range(1, widest + 1):
            offered = [a for p, a in pairs if p >= k]
            shares.append(sum(a >= k for a in offered) / len(offered))
        return shares
