"""150 fuzz cases of all kinds (`make fuzz` runs 10,000); the harness sees each kind of failure."""

import json
import os
import random
import signal
import sys

import fuzz_mutate as mutate
import fuzz_run
import pytest
from fuzz_kinds import KINDS, lay_out
from fuzz_run import ACCEPTED, CLEAN, CRASH, GOOD, HANG, OUT_OF_MEMORY, TRACEBACK

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory need Linux")
SEED, CASES = 7, 150


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return fuzz_run.samples(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", [k for k in KINDS if k.commands], ids=lambda k: k.name)
def test_sound_samples_are_accepted(made, tmp_path, kind):
    """Otherwise every case of the kind would be refused for a reason that the mutation did not give."""
    lay_out(made, tmp_path)
    for argv in kind.commands:
        result, output, _ = fuzz_run.run_command(argv, tmp_path)
        assert result == ACCEPTED or (argv[0] == "preflight" and result == CLEAN), output


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_hostile_input_ends_in_one_clear_line(made, kind):
    for number in range(-(-CASES // len(KINDS))):
        outcome = fuzz_run.run_case(kind, number, SEED, made)
        assert outcome.result in GOOD, f"{outcome.output}\n{fuzz_run.repeat(outcome, SEED)}"


def planted(monkeypatch, command):
    """The class that the harness gives a program that does `command`."""
    monkeypatch.setattr(fuzz_run, "outpace_main", command)
    monkeypatch.setattr(fuzz_run, "PROCESSOR_SECONDS", 1)
    monkeypatch.setattr(fuzz_run, "WALL_SECONDS", 3.0)
    return lambda folder: fuzz_run.run_command([], folder)[0]


def loop():
    while True:
        pass


def error():
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("command", "result"),
    [
        (lambda: None, ACCEPTED),
        (lambda: sys.exit(2), CLEAN),
        (error, TRACEBACK),
        (lambda: print("\x1b[31mred"), TRACEBACK),
        (lambda: sys.exit(77), CRASH),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), CRASH),
        (loop, HANG),
        (lambda: bytearray(2 * fuzz_run.MEMORY), OUT_OF_MEMORY),
    ],
)
def test_each_kind_of_failure_is_seen(monkeypatch, tmp_path, command, result):
    assert planted(monkeypatch, command)(tmp_path) == result


def test_a_case_is_the_same_bytes_each_time():
    data = json.dumps({"a": [1, 2, {"b": "text"}], "c": 1.5}).encode()
    for mutator in (mutate.json_mutated, mutate.damaged):
        one, two = (mutator(random.Random("1/x/3"), data) for _ in range(2))
        assert one == two
    values = {mutate.json_mutated(random.Random(i), data) for i in range(50)}
    assert len(values) > 30
