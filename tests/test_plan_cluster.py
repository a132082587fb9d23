"""Plans for several devices: by hand, against parts that are really loaded, and what more devices can do."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from typer.testing import CliRunner

from outpace.cli.app import app
from outpace.cli.main import main
from outpace.models.load import build, load_target, named_tensors, parse_config
from outpace.models.published import PUBLISHED
from outpace.models.save import save_target
from outpace.ops.ranks import Group
from outpace.plan.choices import LOGITS, Choices
from outpace.plan.devices import DEVICES
from outpace.plan.estimate import plan
from outpace.plan.sizes import busiest, divided, sizes_of
from outpace.plan.speed import step_seconds
from outpace.train.losses import DEVICE_LOGITS

HEAD = 201088 * 2880 * 2  # bytes of gpt-oss's head, and of its embedding
DEVICES_SHOWN = "h100", "h200", "v5e", "v5p", "v6e"
EXPERT = 3 * 2880 * 2880 * 4.25 / 8 + 3 * 2880 * 2


def published(name):
    return sizes_of(name, PUBLISHED[name])


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_of_gpt_oss_by_hand(name, layers, experts, ranks):
    part = divided(published(name), ranks)
    divided_attention = (
        2880 * (4096 + 2 * 512) + 4096 * 2880 + (4096 + 2 * 512) + 64
    )  # matrices, biases, sinks
    attention = layers * (divided_attention / ranks + 2880) * 2  # the bias of o is whole
    router, norms = layers * (2880 * experts + experts) * 2, (2 * layers + 1) * 2880 * 2
    held = 2 * HEAD + attention + layers * experts / ranks * EXPERT + router + norms
    assert part.nbytes == pytest.approx(held, rel=1e-12)
    assert part.kv_growing() == 2 * layers / 2 * 2 * 512 / ranks
    assert part.kv_bytes(1000) == (1000 + 128) * layers / 2 * 2 * 512 * 2 / ranks
    chosen = busiest(4, experts, ranks)
    assert part.weights_read() == pytest.approx(HEAD + attention + layers * chosen * EXPERT + router + norms)


@pytest.mark.parametrize(
    ("family", "changes", "ranks"),
    [
        ("gpt_oss", {"num_local_experts": 6}, 2),
        ("llama", {}, 2),
        ("qwen3", {"intermediate_size": 60}, 3),
        ("qwen3_moe", {"num_experts": 6}, 2),
    ],
)
def test_a_rank_is_what_is_loaded(tmp_path, family, changes, ranks):
    hf = tiny.HF[family] | changes
    target = build(parse_config(hf))
    tiny.randomise(named_tensors(target))
    save_target(target, tmp_path)
    first = load_target(tmp_path, group=Group(ranks, 0))
    part = divided(sizes_of(family, hf), ranks)
    assert part.parameters == sum(t.numel() for _, t in named_tensors(first))
    growing = [memory.nbytes / 101 for memory in first.make_cache(1, 100).layers if not memory.window]
    assert part.kv_growing(4) == sum(growing)


def test_the_busiest_rank():
    assert busiest(4, 32, 1) == 4 and busiest(2.5, 32, 1) == 2.5 and busiest(32, 32, 4) == 8
    # of 4 experts in two halves of 16: at most 2 in each in 14,400 of 35,960 sets, 4 in one in 3,640
    assert busiest(4, 32, 2) == pytest.approx(2 + (1 - 14400 / 35960) + 3640 / 35960)
    sets = list(itertools.combinations(range(6), 4))
    most = [max(sum(expert // 2 == rank for expert in chosen) for rank in range(3)) for chosen in sets]
    assert busiest(4, 6, 3) == pytest.approx(sum(most) / len(sets))


def test_a_step_of_two_ranks_by_hand():
    choices = Choices(context=1, batch=3, expert_overlap=1.0)
    device, part = DEVICES["h100"], divided(published("gpt-oss-120b"), 2)
    reading = (part.weights_read(3) + 3 * part.kv_read(1)) / (0.3 * 3.35e12)
    sums = 2 * 36 * (20e-6 + 3 * 2880 * 2 / 450e9)
    assert step_seconds(part, device, choices, (0.3, 0.15)) == pytest.approx(reading + sums + 36 * 6e-6)
    full = Choices(context=1, batch=4096)  # products take longer
    products = 2 * part.active * 4096 / (0.15 * 989e12)
    sums = 2 * 36 * (20e-6 + 4096 * 2880 * 2 / 450e9)
    assert step_seconds(part, device, full, (0.3, 0.15)) == pytest.approx(products + sums + 36 * 6e-6)


def test_a_teacher_cache_by_hand():
    """16 texts of 4,096 tokens in each of 8 processes: decoded, then run once more."""
    sizes, device = published("gpt-oss-20b"), DEVICES["h100"]
    job = plan(sizes, device, 8, Choices(tokens=1e9))["jobs"]["teacher cache"]
    reading = sizes.weights_read(16, 0.82) + 16 * sizes.kv_read(4096)
    step = reading / (0.75 * 3.35e12) + 24 * 6e-6
    again = (2 * sizes.active + 2 * 64 * 64 * 4096 * 12) / (0.45 * 989e12)
    hours = 1e9 * (step / 16 + again) / 8 / 3600
    assert job["hours"][0] == pytest.approx(hours) and job["tokens_per_s"][1] == pytest.approx(
        1e9 / hours / 3600
    )
    assert job["device_hours"][0] == pytest.approx(8 * hours)
    assert job["cost"][0] == pytest.approx(8 * hours * 1.9)
    assert job["memory"]["kv"] == 16 * sizes.kv_bytes(4096)
    assert job["memory_per_rank"] == sum(job["memory"].values()) and job["targets"] == 8


def test_the_training_of_a_draft_by_hand():
    """Two positions a token, six operations a parameter; the target is whole in every process."""
    choices = Choices(tokens=1e9, draft_parameters=8e8, tensor_parallel_size=2)
    job = plan(published("gpt-oss-120b"), DEVICES["h200"], 8, choices)["jobs"]["draft training"]
    assert job["tokens_per_s"][0] == pytest.approx(8 * 0.15 * 989e12 / (6 * 8e8 * 2))
    assert job["hours"][1] == pytest.approx(1e9 / job["tokens_per_s"][0] / 3600)
    memory = job["memory"]
    assert round(memory["weights"] / 1e9, 1) == 65.2 and memory["optimizer"] == 12.8e9
    assert memory["activations"] == 2 * 8192 * 2880 * 5 * 32
    assert memory["cached states"] == 2 * 4096 * 2880 * 6 and memory["logits"] == 12 * LOGITS
    assert job["fits"] and job["ranks_of_a_target"] == 1
    assert LOGITS == DEVICE_LOGITS


def test_the_training_of_a_sharded_draft():
    """Its optimizer is divided; a process gathers two layers and the gradients of one."""
    sizes, device = published("gpt-oss-20b"), DEVICES["h100"]
    choices = Choices(draft_parameters=4e9, draft_layers=4, tokens=1e9)
    whole, parts = (
        plan(sizes, device, 8, replace(choices, shard=shard))["jobs"]["draft training"]
        for shard in (False, True)
    )
    assert parts["memory"]["optimizer"] == 16 * 4e9 / 8 + 3 * 4 * 1e9
    assert whole["memory_per_rank"] - parts["memory_per_rank"] == 64e9 - 20e9
    assert not whole["fits"] and parts["fits"] and parts["hours"] == whole["hours"]


def test_decoding_with_a_draft_is_tau_tokens_a_round():
    sizes, device = published("gpt-oss-20b"), DEVICES["v6e"]
    choices = Choices(context=1024, batch=2, draft_parameters=8e8, tau=3.0, tokens=1e6)
    job = plan(sizes, device, 4, choices)["jobs"]["decoding"]
    verify = step_seconds(sizes, device, choices, (0.3, 0.15), 8)
    seconds = verify + 1.6e9 / (0.3 * 1.638e12) + 6e-6
    assert job["tokens_per_s"][0] == pytest.approx(4 * 3.0 * 2 / seconds)
    assert job["memory"]["draft"] == 1.6e9


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b", "qwen3-8b"])
@pytest.mark.parametrize("device", ["h100", "h200", "v5e", "v5p", "v6e"])
def test_what_more_devices_do(name, device):
    """With the same ranks a target, more devices take no more memory per rank and fewer hours; with more
    ranks a target, no more memory per rank."""
    sizes, memory = published(name), {}
    for ranks in (1, 2, 4, 8):
        choices = Choices(tokens=1e9, draft_parameters=8e8, tensor_parallel_size=ranks)
        plans = [plan(sizes, DEVICES[device], ranks * n, choices)["jobs"] for n in (1, 2, 8)]
        for job in plans[0]:
            few, more, many = (values[job] for values in plans)
            assert few["memory_per_rank"] == more["memory_per_rank"] == many["memory_per_rank"]
            assert few["hours"] > more["hours"] > many["hours"]
            assert few["device_hours"] == pytest.approx(many["device_hours"])
            assert few["memory_per_rank"] <= memory.get(job, 1e15)
            memory[job] = few["memory_per_rank"]


def planned(*arguments):
    assert callable(main)
    return json.loads(CliRunner().invoke(app, ["plan", *arguments, "--json"]).stdout)


@pytest.mark.parametrize(
    ("given", "job", "fix"),
    [
        (["120b", "--hardware", "8xrtx-4090"], "decoding", "--tensor-parallel-size 4"),
        (["120b", "--hardware", "v5e"], "decoding", "--hardware 8xv5e --tensor-parallel-size 8"),
        (["20b", "--hardware", "8xv5e", "--tokens", "1e9"], "teacher cache", "--tensor-parallel-size 2"),
        (["120b", "--hardware", "8xh100", "--draft", "8e8"], "draft training", "--hardware 8xh200"),
        (["20b", "--hardware", "8xh100", "--draft", "4e9"], "draft training", "--set shard=true"),
        (["20b", "--hardware", "8xv5e", "--draft", "8e8"], "draft training", "--hardware 8xv5p"),
    ],
)
def test_what_does_not_fit_and_what_would(given, job, fix):
    value = planned(*given)["jobs"][job]
    message, _, first = value["fix"].partition("; take ")
    assert value["memory_per_rank"] > value["usable_per_rank"] and not value["fits"]
    assert message.startswith(f"{job} does not fit: ") and "GB usable" in message
    assert first.split(", or ")[0] == fix
    repaired = planned(*given, *fix.split())["jobs"][job]
    assert repaired["fits"] and "fix" not in repaired


def test_nothing_is_large_enough():
    job = planned("120b", "--hardware", "8xb200", "--batch", "2000", "--rank", "512")["jobs"]["decoding"]
    assert job["fix"].endswith("; take a shorter --context or a smaller --batch")  # latent KV: one rank


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            ["20b", "--hardware", "8xh100", "--tensor-parallel-size", "3"],
            "8 devices are no multiple of it; take 3",
        ),
        (
            ["20b", "--hardware", "6xh100", "--tensor-parallel-size", "3"],
            "8 is not a multiple of it; it can be 2",
        ),
        (
            ["20b", "--hardware", "2xh100", "--tensor-parallel-size", "2", "--rank", "64"],
            "has latent KV, which",
        ),
    ],
)
def test_what_cannot_be_divided(given, named):
    assert named in str(CliRunner().invoke(app, ["plan", *given]).exception)


def test_prices_are_given_or_assumed():
    given = "20b", "--hardware", "8xv5e", "--tokens", "1e9"
    unknown = planned(*given)
    assert "cost" not in unknown["jobs"]["decoding"]
    assert "not known: a price of v5e; give --price" in unknown["assumptions"]
    known = planned(*given, "--price", "1.5")
    job = known["jobs"]["decoding"]
    assert job["cost"] == pytest.approx([hours * 1.5 for hours in job["device_hours"]])
    assert "given price: $1.5 per device-hour" in known["assumptions"]
    assumed = planned("20b", "--hardware", "8xh100", "--tokens", "1e9")["assumptions"]
    assert "assumed market price: $1.9 to $4 per device-hour" in assumed


def test_every_assumption_says_what_it_rests_on():
    bases = (
        "published peaks: ",
        "assumed",
        "measured ",
        "not counted: ",
        "not known: ",
        "not there on a TPU: ",
    )
    choices = Choices(tokens=1.0, draft_parameters=1.0, tensor_parallel_size=2)
    for device in ("h100", "v5p", "rtx-4090"):
        lines = plan(published("gpt-oss-20b"), DEVICES[device], 2, choices)["assumptions"]
        assert len(lines) > 7 and all(line.startswith(bases) for line in lines)


def test_the_table_of_the_docs():
    """docs/plan.md: eight devices, a draft of 0.8 billion parameters, 10^9 tokens."""
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()
    for model, device, ranks in itertools.product(("20b", "120b"), DEVICES_SHOWN, (1, 2, 8)):
        if f"| {model} | 8 x {device} | {ranks} |" in page:
            options = "--tensor-parallel-size", str(ranks), "--draft", "8e8", "--tokens", "1e9"
            cells = [model, f"8 x {device}", str(ranks)]
            for job in planned(model, "--hardware", f"8x{device}", *options)["jobs"].values():
                memory = f"{job['memory_per_rank'] / 1e9:.0f} GB"
                hours = "{:.1f} to {:.1f} h".format(*job["hours"])
                cells.append(f"{memory}, {hours}" if job["fits"] else f"{memory}: does not fit")
            assert f"| {' | '.join(cells)} |" in page
    assert page.count(" | 8 x ") == 9
