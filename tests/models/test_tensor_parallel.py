"""A target over several processes: one process's tokens, and the same bits whatever is verified together."""

import json
from pathlib import Path

import pytest
import sharded
import tiny
import torch
from indexers import indexed_target
from latents import latent_target
from processes import torchrun

import outpace
from outpace.checkpoint.open import LoadError
from outpace.loading import open_target
from outpace.models.load import fingerprint, load_target, named_tensors
from outpace.models.save import save_target
from outpace.ops.ranks import Group, join
from outpace.teacher.store import TeacherCache

SCRIPT = Path(sharded.__file__)


def run(count, folder, *more):
    for name, changes in sharded.TARGETS[count].items():
        sharded.save(name, folder, **changes)
    done = torchrun(count, SCRIPT, folder, *more, *sharded.TARGETS[count])
    outputs = [folder / f"process-{rank}.json" for rank in range(count)]
    assert all(path.is_file() for path in outputs), done.stderr[-3000:]
    results = [json.loads(path.read_text()) for path in outputs]
    for name in sharded.TARGETS[count]:
        whole = load_target(folder / name)
        held = sum(tensor.nbytes for _, tensor in named_tensors(whole))
        for result in results:
            assert [result[name]["plain"], result[name]["sampled"]] == list(sharded.texts(whole))
            assert result[name]["fingerprint"] == fingerprint(whole)
            assert held / count < result[name]["bytes"] < held
    return done, results


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, *run(2, folder, "default")


def test_three_processes(tmp_path):
    """Of whom an all-reduce would add up a row in an order that depends on the rows next to it."""
    done, _ = run(3, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_processes_generate_what_one_does(two):
    _, done, results = two
    model = outpace.load("default")
    limit = outpace.SamplingParams(max_tokens=sharded.LENGTH)
    plain = outpace.generate(model, sharded.TEXT, draft=False, sampling=limit).tokens
    assert results[0]["default"] == results[1]["default"]
    assert results[0]["default"]["plain"] == plain
    assert results[0]["default"]["fingerprint"] == fingerprint(model.target)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["tokens"] for line in lines] == [plain]  # of one process
    assert lines[0]["timing"]["steps"] == "native calls between the sums over 2 processes"


def test_a_teacher_cache_by_two_processes_is_the_targets(two):
    folder, _, _ = two
    target, _ = open_target("default")
    cache = TeacherCache.open(folder / "cache", target_fingerprint=fingerprint(target))
    assert cache.verify() and len(cache) == sharded.CACHE["samples"]
    for i in range(len(cache)):
        sample = cache.sample(i)
        with torch.inference_mode():
            aux = target(sample.tokens[None], aux=cache.meta.target_layer_ids).aux[:, 0]
        torch.testing.assert_close(sample.aux.float(), aux, rtol=2.0**-7, atol=1e-3)


def test_a_killed_process_ends_all(two):
    _, done, _ = two
    assert done.returncode != 0 and "SIGKILL" in done.stderr


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("gpt_oss", 4, "num_key_value_heads 2 is not a multiple of it; run the target in one process"),
        ("gpt_oss", 2, "num_experts 5 is not a multiple of it; run the target in one process"),
        ("qwen3", 2, "num_key_value_heads 3 is not a multiple of it; run"),
        ("llama", 3, "num_key_value_heads 2 is not a multiple of it; it can be 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path, family, size, message):
    save_target(tiny.target(family), tmp_path)
    with pytest.raises(ValueError, match=f"tensor_parallel_size {size}: this target's {message}"):
        load_target(tmp_path, group=Group(size, 0))


@pytest.mark.parametrize(("made", "message"), [(latent_target, "latent KV"), (indexed_target, "an index")])
def test_retrofits_are_refused(tmp_path, made, message):
    save_target(made("gpt_oss")[1], tmp_path)
    with pytest.raises(ValueError, match=f"tensor_parallel_size 2: this target has {message}, which is not"):
        load_target(tmp_path, group=Group(2, 0))


def test_blocks_that_end_within_a_part_are_refused(tmp_path):
    sharded.save("llama.gguf", tmp_path, num_heads=2, head_dim=48, hidden_size=128, intermediate_size=64)
    wanted = r"o_proj.weight: rows of 96 values in blocks of 32 \(Q8_0\) cannot be divided by 2: take"
    with pytest.raises(LoadError, match=wanted):
        load_target(tmp_path / "llama.gguf", group=Group(2, 1))


@pytest.mark.parametrize("size", [0, 2, -3])
def test_another_number_of_processes_is_refused(size):
    with pytest.raises(ValueError, match=f"size {size}, and the number of processes is 1: run torchrun --np"):
        outpace.load("default", tensor_parallel_size=size)
    assert join(1) is None
