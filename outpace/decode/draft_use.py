"""Which of a server's requests bring their draft along."""

from dataclasses import dataclass

REVIEWED = 64  # steps after which it is looked at how many had draft tokens
RARE = 1 / 16  # fewer than this share of them
LEAST_WITHOUT, MOST_WITHOUT = 64, 1024  # requests that then join without their draft, twice as many each time


@dataclass
class DraftUse:
    """Of the steps of one load. A draft that is hardly used there still costs: what it would read of the
    target is kept, and prompts that begin alike are read again where it has not seen them."""

    steps: int = 0  # since the last review
    drafted: int = 0  # of them, those with draft tokens
    without: int = 0  # requests that still join without their draft
    next: int = LEAST_WITHOUT  # of the next review that finds next to none

    def add(self, steps: int, drafted: bool) -> None:
        self.steps += steps
        self.drafted += steps if drafted else 0

    def joins(self) -> bool:
        """Whether the next request brings its draft."""
        if not self.without and self.steps >= REVIEWED:
            if self.drafted < RARE * self.steps:
                self.without, self.next = self.next, min(2 * self.next, MOST_WITHOUT)
            else:
                self.next = LEAST_WITHOUT
            self.steps = self.drafted = 0
        if not self.without:
            return True
        self.without -= 1
        return False
