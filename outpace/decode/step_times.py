"""What a server's steps take by the clock, over the seconds of a cost table."""

from dataclasses import dataclass, field

TIMED_FADE = 0.98  # weight that a timed step leaves to earlier ones
AGED_FADE = 0.998  # and an autoregressive step to earlier ones with draft tokens
PRIOR_STEPS = 8  # timed steps that outweigh what was taken for granted
TIMED = 24  # autoregressive steps by the clock before drafting is judged by them ..
TIMED_ROUNDS = 64  # .. and steps with draft tokens after which some are timed again


@dataclass
class Timed:
    """Fading sum of what steps of one kind took, over the table's seconds; `steps`: how many were timed."""

    total: float = 0.0
    count: float = 0.0
    steps: int = 0

    def add(self, ratio: float, steps: int) -> None:
        """The first of its kind says nothing: it may build its program."""
        if self.steps:
            self.fade(TIMED_FADE**steps)
            self.total, self.count = self.total + steps * ratio, self.count + steps
        self.steps += steps

    def fade(self, keep: float) -> None:
        self.total, self.count = keep * self.total, keep * self.count

    def ratio(self, prior: float) -> float:
        missing = max(0.0, PRIOR_STEPS - self.count)
        return (self.total + missing * prior) / (self.count + missing)


@dataclass
class StepTimes:
    """Steps by the clock, autoregressive ones and those with draft tokens: a table is of another hour, and of
    fewer rows. While drafting rests, what is known of it becomes what is known of the steps between."""

    plain: Timed = field(default_factory=Timed)
    drafting: Timed = field(default_factory=Timed)
    since: int = 0  # steps with draft tokens after the last autoregressive one
    account: float | None = None  # see `Adaptive`; None: it has yet to begin

    @property
    def known(self) -> bool:
        """Whether autoregressive steps were timed often and lately enough to compare drafting with them."""
        return self.plain.steps >= TIMED and self.since < TIMED_ROUNDS

    @property
    def ratios(self) -> tuple[float, float]:
        plain = self.plain.ratio(1.0)
        return plain, self.drafting.ratio(plain)

    def rested(self, ratio: float, steps: int) -> None:
        self.plain.add(ratio, steps)
        self.drafting.fade(AGED_FADE**steps)
        self.since = 0

    def drafted(self, ratio: float) -> None:
        self.drafting.add(ratio, 1)
        self.since += 1
