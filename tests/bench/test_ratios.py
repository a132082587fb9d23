"""Ratios of runs: which length others name best, and how far a ratio is known."""

import math
import statistics

import pytest

from outpace.bench import comparison, metrics
from outpace.bench.run import Timed
from outpace.decode.trace import Trace


def runs(*seconds):
    """Of one group, repeat after repeat."""
    return {
        (r, 0): Timed(tokens=[[7] * 9], first_s=0.5, decode_s=s, trace=Trace()) for r, s in enumerate(seconds)
    }


def test_the_best_length_is_the_one_that_other_repeats_tell():
    lengths = {"plain": runs(4.0, 4.0, 4.0), "steady": runs(2.0, 2.0, 2.0), "lucky": runs(1.0, 3.0, 3.0)}
    assert comparison.fastest(lengths, lengths["plain"]) == "steady"
    assert comparison.best_of_other_repeats(lengths, "plain") == lengths["steady"]
    early = {"plain": runs(4.0, 4.0, 4.0), "first": runs(1.0, 1.0, 3.4), "then": runs(2.0, 2.0, 2.0)}
    note = comparison.best_of_other_repeats(early, "plain")
    assert [note[r, 0].decode_s for r in range(3)] == [2.0, 2.0, 3.4]
    alone = {label: {(0, 0): r[0, 0]} for label, r in lengths.items()}
    assert comparison.best_of_other_repeats(alone, "plain") == alone["lucky"]


def test_the_error_of_a_ratio_is_how_far_its_turns_differ():
    ours, theirs = runs(1.0, 1.0, 4.0), runs(2.0, 2.0, 2.0)
    assert metrics.speed_ratio(ours, theirs) == 2
    assert metrics.ratio_error(ours, theirs) == pytest.approx(statistics.stdev([2, 2, 0.5]) / math.sqrt(3))
    assert metrics.ratio_error(runs(1.0), runs(2.0)) == 0
