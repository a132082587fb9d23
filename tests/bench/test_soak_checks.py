"""What the suite soak concludes: of a client's answers, of memory, of what is left."""

import random

import pytest

from outpace.bench import soak, soak_clients
from outpace.bench.soak import SoakSettings
from outpace.bench.soak_clients import TEXT, Visit, _wrong, random_visit

SETTINGS = SoakSettings(rows=3, slow=3, clients=8)


def _parts():
    idle = {"num_requests_running": 0.0, "kv_cache_usage_perc": 0.0}
    return {
        "load": {"failed": 0, "left": dict(idle), "rows_at_once": 3, "growth": 0.01},
        "slow": {"left": dict(idle), "whole": 3, "slowed": 1.1},
        "killed": {"running": 3.0},
        "restarted": {"same": True, "seconds": 1.0,
                      "queue": {"answered": 8, "other": 0, "refused": {"1": 5}}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("way", "value", "check"),
    [
        (("load", "failed"), 1, "no error"),
        (("load", "growth"), 0.06, "memory flat"),
        (("load", "rows_at_once"), 2, "no row or KV lost"),
        (("load", "left", "kv_cache_usage_perc"), 0.1, "no row or KV lost"),
        (("slow", "left", "num_requests_running"), 1.0, "streams that nobody reads"),
        (("slow", "whole"), 2, "streams that nobody reads"),
        (("slow", "slowed"), 2.5, "slow readers"),
        (("restarted", "queue", "refused"), {}, "a full queue"),
        (("restarted", "queue", "refused"), {"None": 5}, "a full queue"),
        (("restarted", "queue", "other"), 1, "a full queue"),
        (("restarted", "same"), False, "nothing to repair"),
    ],
)
def test_a_check_fails_by_what_it_is_for(way, value, check):
    parts = _parts()
    assert all(row["passed"] for row in soak._checks(parts, SETTINGS))
    inside = parts
    for step in way[:-1]:
        inside = inside[step]
    inside[way[-1]] = value
    failed = [row["check"] for row in soak._checks(parts, SETTINGS) if not row["passed"]]
    assert len(failed) == 1 and failed[0].startswith(check)


def test_memory_is_judged_after_the_warm_up():
    memory = [100, 150, 200, *[204] * 15, 208, 204]
    assert len(memory) == soak.BATCHES
    assert soak._growth(memory, SoakSettings(requests=2000, warm_up=300)) == 0.04
    assert soak._growth(memory, SoakSettings(requests=2000, warm_up=301)) == pytest.approx(
        208 / 204 - 1, abs=1e-4
    )
    assert soak._growth(memory, SoakSettings(requests=2000, warm_up=2000)) is None


@pytest.mark.parametrize(
    ("body", "status", "text", "wrong"),
    [
        ({}, 200, b'{"usage": {"x": 1}}', None),
        ({}, 200, b"{}", "no usage"),
        ({}, 500, b"{}", "500 instead of 200"),
        ({"stream": True}, 200, b'data: {}\n\ndata: [DONE]\n\n', None),
        ({"stream": True}, 200, b'event: response.completed\ndata: {}\n\n', None),
        ({"stream": True}, 200, b'data: {}\n\n', "broke off"),
        ({"stream": True}, 200, b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n', "broke off"),
    ],
)  # fmt: skip
def test_what_a_client_finds_wrong(body, status, text, wrong):
    problem = _wrong(Visit(TEXT, body), status, text)
    assert problem == wrong if wrong is None else wrong in problem


def test_all_kinds_come_and_are_the_seeds():
    def some():
        rng = random.Random(3)
        return [random_visit(rng, ["a text of words"], 9) for _ in range(400)]

    visits = some()
    assert visits == some()
    assert {v.path for v in visits} == {soak_clients.CHAT, TEXT, soak_clients.ITEMS}
    assert {v.status for v in visits if v.manner == "wrong"} == {400, 404}
    assert all(v.status == 200 for v in visits if v.manner != "wrong")
