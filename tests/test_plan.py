"""Plans against numbers worked out by hand, and against what is really built."""

import copy
import json
from pathlib import Path

import pytest
import tiny
from indexers import indexed_target
from latents import latent_target
from typer.testing import CliRunner

from outpace.checkpoint.shipped import EMBEDDED
from outpace.cli.app import app
from outpace.cli.main import main
from outpace.decode.costs import Costs, Point, Touched, write_costs
from outpace.kv.topk import TopKConfig
from outpace.models.load import named_tensors
from outpace.models.published import PUBLISHED
from outpace.plan.choices import TYPICAL, Choices
from outpace.plan.devices import DEVICES, parse_hardware
from outpace.plan.estimate import plan
from outpace.plan.sizes import retrofitted, sizes_of, trainable


def published(name, dense="bf16"):
    return sizes_of(name, PUBLISHED[name], dense)


def test_what_the_published_gpt_oss_are():
    small, large = published("gpt-oss-20b"), published("gpt-oss-120b")
    assert round(small.parameters / 1e9, 2) == 20.91 and round(large.parameters / 1e9, 2) == 116.83
    assert round(small.active / 1e9, 1) == 3.6 and round(large.active / 1e9, 1) == 5.1
    assert round(small.nbytes / 1e9, 1) == 13.8 and round(large.nbytes / 1e9, 1) == 65.2  # of the files
    assert (len(small.full_layers), len(large.full_layers)) == (12, 18)
    assert (small.kv_growing(), large.kv_growing()) == (24576, 36864)
    assert round(small.kv_bytes(131072) / 1e9, 1) == 3.2 and round(large.kv_bytes(131072) / 1e9, 1) == 4.8
    # layers with a window hold 128 tokens of 2,048 bytes
    assert small.kv_bytes(10**6) - 24576 * 10**6 == 12 * 128 * 2048


def test_bytes_of_a_layer_by_hand():
    parts = published("gpt-oss-20b").parts
    matrices = 2880 * (4096 + 2 * 512) + 4096 * 2880
    biases = 4096 + 2 * 512 + 2880 + 64  # and a sink a head
    assert parts["attention"] == (24 * (matrices + biases), 24 * (matrices + biases) * 2)
    assert round(matrices * 2 / 1e6, 1) == 53.1
    expert = 3 * 2880 * 2880 * 4.25 / 8 + (2 * 2880 + 2880) * 2
    assert round(expert / 1e6, 2) == 13.24 and parts["experts"][1] == 24 * 32 * expert
    assert parts["head"][1] == 201088 * 2880 * 2


@pytest.mark.parametrize(
    ("name", "dense", "gigabytes", "speeds"),
    [
        ("gpt-oss-20b", "bf16", "3.71", {"h100": 904, "h200": 1295, "b200": 2158, "rtx-5090": 483}),
        (
            "gpt-oss-20b",
            "bf16",
            "3.71",
            {"rtx-4090": 272, "m3-ultra": 221, "m4-max-32c": 111, "ddr5-2ch": 24},
        ),
        ("gpt-oss-20b", "fp8", "2.49", {}),
        ("gpt-oss-20b", "q8", "2.57", {"h100": 1305, "rtx-5090": 698, "m3-ultra": 319, "epyc-12ch": 180}),
        ("gpt-oss-120b", "bf16", "5.00", {"h100": 670, "h200": 960, "dgx-spark": 55, "strix-halo": 51}),
        ("gpt-oss-120b", "q8", "3.55", {"h100": 940, "h200": 1347, "b200": 2245, "m4-max": 153}),
    ],
)
def test_the_table_of_step_bytes(name, dense, gigabytes, speeds):
    """GB that a token's step reads at a short context, and what a device's memory allows."""
    read = published(name, dense).weights_read()
    assert f"{read / 1e9:.2f}" == gigabytes
    for device, wanted in speeds.items():
        assert DEVICES[device].bandwidth / read == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gpt-oss-20b", {1: (4, 1, 1), 2: (7.5, 1.30, 1.18), 8: (21.0, 2.46, 1.87), 16: (28.2, 3.08, 2.25)}),
        ("gpt-oss-120b", {2: (7.9, 1.37, 1.22), 4: (15.3, 2.07, 1.64), 10: (34.8, 3.94, 2.76)}),
    ],
)
def test_what_verifying_costs(name, rows):
    """Experts of n tokens, and the bytes of verifying over those of a step: alone, and as neighbours."""
    sizes = published(name)
    for n, (experts, alone, kin) in rows.items():
        assert sizes.experts_touched(n) == pytest.approx(experts, abs=0.06)
        assert sizes.weights_read(n) / sizes.weights_read() == pytest.approx(alone, abs=0.015)
        assert sizes.weights_read(n, 0.6) / sizes.weights_read() == pytest.approx(kin, abs=0.03)


def test_a_retrofit_of_the_120b():
    """Rank 512 and an index of 16 heads of 256 in 18 layers: about 250 million parameters."""
    made = retrofitted(published("gpt-oss-120b"), 512, 256, 16, TopKConfig(top_k=2048, min_context=2048))
    latent = (2880 * 512 + 512) + 2 * (512 * 512 + 512)
    index = (16 * 256 + 256 + 16) * (2880 + 1)
    assert trainable(made.config) == 18 * (latent + index) == 262522656
    assert made.kv_growing() == 18 * (512 + 256) * 2
    assert made.kv_read(131072) == 2 * (18 * (256 * 131072 + 512 * 2048) + 18 * 1024 * 128)
    # without latents, as the original's step at 131,072 tokens: 64 numbers of an index in 8 bits
    sparse = retrofitted(published("gpt-oss-20b"), 0, 64, 16, TopKConfig(top_k=2048, min_context=2048))
    growing = sparse.kv_read(131072) - 12 * 128 * 2048
    assert growing == 12 * (2 * 64 * 131072 + 2048 * 2048)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trainable_is_what_is_built(family):
    windows = family == "gpt_oss"
    sizes = sizes_of(
        family, copy.deepcopy(tiny.HF[family]) | ({} if windows else {"use_sliding_window": False})
    )
    sparse = indexed_target(family, rank=7, window=windows)[1]
    made = retrofitted(sizes, 7, 8, 3, None)
    learnt = sum(
        t.numel()
        for name, t in named_tensors(sparse)
        if (".latent." in name or ".indexer." in name) and "frequencies" not in name
    )
    assert trainable(made.config) == learnt
    assert sizes.parameters == sum(t.numel() for _, t in named_tensors(latent_target(family, 7, windows)[0]))
    cache = sparse.make_cache(1, 100)
    growing = [memory.nbytes / 101 for memory in cache.layers if not memory.window]
    assert made.kv_growing(4) == sum(growing)


def test_what_training_takes():
    sizes, device = published("gpt-oss-20b"), DEVICES["h100"]
    choices = Choices(rank=512, tokens=1e9, row_tokens=4096)
    value = plan(sizes, device, 8, choices)["jobs"]["retrofit training"]
    learnt = 12 * ((2880 * 512 + 512) + 2 * (512 * 512 + 512))
    token = 3 * (2 * sizes.active + 2 * 64 * 64 * 4096 * 12) + 6 * learnt
    assert value["memory"]["optimizer"] == 16 * learnt
    assert value["device_hours"][0] == pytest.approx(1e9 * token / (989e12 * 0.45) / 3600)
    assert value["hours"][0] == pytest.approx(value["device_hours"][0] / 8)
    assert value["cost"] == pytest.approx([value["device_hours"][0] * 1.9, value["device_hours"][1] * 4.0])
    cached = plan(sizes, device, 1, Choices(tokens=1000, draft_parameters=8e8))
    assert cached["teacher_cache_bytes"] == 1000 * (4 + 6 * 2880 * 2)


def test_speed_with_a_draft():
    """tau / (V + d), both over a step's bytes: 0.8 billion parameters in bfloat16 and the head are 0.74."""
    sizes = published("gpt-oss-20b")
    head = 201088 * 2880
    choices = Choices(context=1, draft_parameters=8e8 + head, tau=3.0, columns=8)
    value = plan(sizes, DEVICES["h100"], 1, choices)["decode"]["before"]
    assert value["draft_over_step"] == pytest.approx(0.74, abs=0.01)
    assert value["verify_over_step"] == pytest.approx(1 + 0.82 * (2.46 - 1), abs=0.01)
    rate, overhead = TYPICAL[0] * DEVICES["h100"].bandwidth, choices.layer_overhead
    step = value["bytes_per_step"] / rate
    drafted = (value["verify_over_step"] + value["draft_over_step"]) * step + 25 * overhead
    assert value["speedup"] == pytest.approx(3.0 * (step + 24 * overhead) / drafted)
    bare = Choices(context=1, draft_parameters=8e8 + head, tau=3.0, columns=8, layer_overhead=0.0)
    value = plan(sizes, DEVICES["h100"], 1, bare)["decode"]["before"]
    assert value["speedup"] == pytest.approx(3.0 / (value["verify_over_step"] + value["draft_over_step"]))


def test_the_estimate_lies_in_the_range_and_counts_the_calls():
    sizes = published("gpt-oss-20b")
    for overhead in (0.0, 1e-4, 1e-3):
        value = plan(sizes, DEVICES["h100"], 1, Choices(layer_overhead=overhead))["decode"]["before"]
        low, high = value["expected_tokens_per_s"]
        assert low < value["estimated_tokens_per_s"] < high < value["bound_tokens_per_s"]
        seconds = value["bytes_per_step"] / (TYPICAL[0] * DEVICES["h100"].bandwidth) + 24 * overhead
        assert value["estimated_tokens_per_s"] == pytest.approx(1 / seconds)


def test_hardware_by_name():
    assert parse_hardware("8xH200") == (8, "h200") and parse_hardware("this") == (1, "this")
    for wrong in ("0xh200", "h9000", "8", "x", "8 x h200", "-1xh200"):
        with pytest.raises(ValueError, match="known are h100"):
            parse_hardware(wrong)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"context": 0}, "context 0"),
        ({"rank": -1}, "rank -1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0: it must be 1 to 1e18"),
        ({"positions_per_token": 0.0}, "positions_per_token 0.0: it must be 0.01 to"),
        ({"tokens": float("nan")}, "tokens nan"),
        ({"tokens": float("inf")}, "tokens inf"),
        ({"context": 10**30}, "context 1000000000000000000000000000000"),
        ({"expert_overlap": 1.5}, "expert_overlap 1.5"),
        ({"tau": 3.0}, "tau without a draft"),
    ],
)
def test_choices_that_cannot_be(message, named):
    with pytest.raises(ValueError, match=named):
        Choices(**message)


def test_the_command(tmp_path):
    assert callable(main)  # the module adds every command
    run = CliRunner().invoke
    done = run(app, ["plan", "120b", "--hardware", "8xh200", "--rank", "512", "--index-dim", "256", "--json"])
    data = json.loads(done.stdout)
    assert data["trainable_parameters"] == 262522656 and data["jobs"]["decoding"]["fits"] is True
    assert data["model"]["full_attention_layers"] == 18 and data["assumptions"]
    (tmp_path / "config.json").write_text(json.dumps(tiny.GPT_OSS))
    data = json.loads(run(app, ["plan", str(tmp_path), "--hardware", "rtx-4090", "--json"]).stdout)
    assert data["model"]["layers"] == 4
    text = run(app, ["plan", "120b", "--hardware", "rtx-4090", "--tokens", "1e9", "--draft", "1e9"]).stdout
    assert "does not fit" in text and "hours" in text and "not known: tau" in text
    measured = json.loads(run(app, ["plan", "qwen3-8b", "--hardware", "this", "--json"]).stdout)["hardware"]
    assert measured["bandwidth"] > 1e8 and measured["flops"] > 1e8 and measured["memory"] > 1e8
    for wrong, named in (
        (["plan", "gpt-9"], "no such model"),
        (["plan", "20b", "--price", "four"], "one number or two"),
        (["plan", "20b", "--price", "4-2"], "the lower one first"),
        (["plan", "20b", "--weights", "int3"], "int3"),
        (["plan", "20b", "--rank", "-4"], "rank -4"),
    ):
        assert named in str(run(app, wrong).exception)


def measured_plan(*arguments):
    assert callable(main)
    return json.loads(CliRunner().invoke(app, ["plan", *arguments, "--hardware", "this", "--json"]).stdout)


@pytest.fixture
def quick_machine(monkeypatch, tmp_path):
    monkeypatch.setattr("outpace.config.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("outpace.bench.machine.read_bandwidth", lambda: 2e10)
    monkeypatch.setattr("outpace.bench.machine.multiply_rate", lambda: 1e11)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return tmp_path


def test_the_embedded_model_on_this_machine(quick_machine, monkeypatch):
    # so fast that a step is all overhead: for a model in the cache, reading could explain all of it
    monkeypatch.setattr("outpace.bench.machine.multiply_rate", lambda: 1e18)
    monkeypatch.setattr("outpace.bench.machine.read_bandwidth", lambda: 1e15)
    data = measured_plan("default", "--context", "64")
    assert data["model"]["name"] == "default" and data["model"]["layers"] == 6
    overhead = data["choices"]["layer_overhead"]
    assert 1e-6 < overhead < 1e-1 and overhead != Choices().layer_overhead and data["warnings"] == []
    assert measured_plan("default", "--set", "layer_overhead=0.5")["choices"]["layer_overhead"] == 0.5
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    (warning,) = measured_plan("default")["warnings"]
    assert "busy while it was measured (load 99.0 on" in warning


def test_the_overlap_of_experts_is_the_measured_one():
    root = Path(__file__).parents[1]
    report = json.loads((root / "reports" / "answers" / "report.json").read_text())
    touched = report["costs"]["DFlash 2, greedy"]["touched"]
    assert (touched["experts"], touched["per_token"], touched["widths"]) == (8, 2, [*range(1, 13)])
    assert round(touched["rho"], 2) == Choices().expert_overlap
    assert f"`expert_overlap`: {Choices().expert_overlap}, what" in (root / "docs" / "plan.md").read_text()


def test_a_cost_table_gives_overhead_and_overlap(quick_machine):
    """One second per step of the target, and a measured rho."""
    config = sizes_of("default", json.loads((EMBEDDED / "target" / "config.json").read_text())).config
    touched = Touched(experts=config.num_experts, per_token=2, widths=(1,), measured=(2.0,), rho=0.71)
    costs = Costs(
        fingerprint="f" * 64,
        widths=(1,),
        points=(Point(batch=1, context=64, verify=(1.0,), draft=(0.0,), rest=0.0, plain=1.0),),
        acceptance=0.5,
        touched=touched,
        described={"target": f"{config.architecture}, {config.num_layers} layers"},
    )
    write_costs(costs, quick_machine)
    data = measured_plan("default", "--context", "64")
    assert data["choices"]["expert_overlap"] == 0.71
    assert data["decode"]["before"]["estimated_tokens_per_s"] == pytest.approx(1.0, rel=1e-3)
