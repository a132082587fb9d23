"""The builder stores the target's output and thinks; killed or out of disk it ends in the same bytes."""

import dataclasses
import os
import random
import resource
import shutil
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from outpace.checkpoint.base import LoadError
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.teacher.build import TeacherRecipe, build, predict_nbytes
from outpace.teacher.prompts import ChatPrompts, TextPrompts
from outpace.teacher.store import StoreError, TeacherCache, read_meta, write_meta
from outpace.text.corpus import Document

LAYERS = (0, 2, 3)
OFFSETS = (0, 4096, 131072)
# 13 texts x 3 offsets in shards of 4 texts (the last holds one), batches of 3: nothing divides anything
RECIPE = TeacherRecipe(
    samples=13,
    prompt_tokens=(5, 11),
    response_tokens=(9, 23),
    position_offsets=OFFSETS,
    target_layer_ids=LAYERS,
    shard_samples=14,
    batch=3,
    seed=11,
)
HELD_OUT_LETTER, FIRST_ID = "~", 5


def tokenizer():
    """One id a character; ids below FIRST_ID are special."""
    letters = string.ascii_letters + "\n ." + HELD_OUT_LETTER
    vocab = {f"<{i}>": i for i in range(FIRST_ID)} | {c: i + FIRST_ID for i, c in enumerate(letters)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return made


def documents():
    """Lines of 10 to 40 letters. Held-out ones consist of HELD_OUT_LETTER alone."""
    draw = random.Random(3)
    items = []
    for i in range(40):
        document = Document(f"file{i}.py", "")
        letters = HELD_OUT_LETTER if document.held_out else string.ascii_letters
        lines = ["".join(draw.choices(letters, k=draw.randrange(10, 40))) for _ in range(9)]
        items.append(Document(document.name, "\n".join(lines)))
    return items


def predicted(recipe):
    return predict_nbytes(recipe, TextPrompts(documents(), tokenizer()), 96, 3)


def make(folder, recipe=RECIPE, model=None, **kwargs):
    return build(
        model or tiny.target("gpt_oss"),
        tokenizer(),
        TextPrompts(documents(), tokenizer()),
        folder,
        recipe,
        **kwargs,
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    make(folder)
    return folder


@pytest.fixture
def copy(unbroken, tmp_path):
    return Path(shutil.copytree(unbroken, tmp_path / "copy"))


def test_aux_is_what_the_target_gives_for_each_text_alone(unbroken):
    target, cache = tiny.target("gpt_oss"), TeacherCache.open(unbroken)
    assert len(cache) == 39
    for i in range(len(cache)):
        sample = cache.sample(i)
        assert sample.offset == OFFSETS[i % 3] and sample.tokens.dtype == torch.int64
        with torch.inference_mode():
            aux = target(sample.tokens[None], aux=LAYERS, offset=sample.offset).aux[:, 0]
        assert sample.aux.shape == (3, len(sample.tokens), 96) and sample.aux.dtype == torch.bfloat16
        torch.testing.assert_close(sample.aux.float(), aux, rtol=2.0**-8, atol=1e-4)  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_the_final_state_of_a_position_predicts_the_next_token(tmp_path, dtype):
    """What `target.logits` makes of row t: the greedy texts' token t + 1, and not their token t."""
    recipe = dataclasses.replace(RECIPE, dtype=dtype, final=True, greedy_share=1.0)
    target, cache = tiny.target("gpt_oss"), make(tmp_path, recipe)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= predicted(recipe)
    plainly = dataclasses.replace(recipe, final=False)
    assert predicted(recipe) > predicted(plainly) + cache.meta.tokens * 96
    next_token = same_token = rows = 0
    for i in range(len(cache)):
        sample = cache.sample(i)
        with torch.inference_mode():
            hidden = target(sample.tokens[None], offset=sample.offset).hidden[0]
            value = target.logits(sample.final.float()).argmax(-1)
        assert sample.final.shape == (len(sample.tokens), 96)
        assert (sample.final.float() - hidden).norm() < (0.04 if dtype == "fp8" else 0.004) * hidden.norm()
        answer = slice(sample.prompt_length - 1, len(sample.tokens) - 1)
        next_token += int((value[answer] == sample.tokens[1:][answer]).sum())
        same_token += int((value[answer] == sample.tokens[answer]).sum())
        rows += len(value[answer])
    assert next_token > 0.95 * rows and same_token < 0.3 * rows
    assert 0.0005 < max(s.relative_error for s in cache.meta.shards) < (0.04 if dtype == "fp8" else 0.003)


def test_a_build_older_than_a_setting_is_gone_on_with(copy, unbroken):
    """Its recipe does not name `final`; what is made from here on is what a build without it makes."""
    meta = read_meta(copy)
    (copy / meta.shards[3].file).unlink()
    values = {k: v for k, v in meta.recipe.items() if k != "final"}
    write_meta(copy, dataclasses.replace(meta, recipe=values, shards=meta.shards[:3]))
    make(copy)
    assert contents(copy) == contents(unbroken)
    write_meta(copy, dataclasses.replace(meta, recipe=values))
    with pytest.raises(StoreError, match=r"started with final False \(now True\)"):
        make(copy, dataclasses.replace(RECIPE, final=True))


def test_offsets_share_one_text_and_move_its_hidden_states_little(unbroken):
    cache = TeacherCache.open(unbroken)
    near, mid, far = (cache.sample(i) for i in range(3))
    assert near.tokens.tolist() == mid.tokens.tolist() == far.tokens.tolist()
    torch.testing.assert_close(near.aux, far.aux, rtol=0.02, atol=0.02)


def test_responses_are_the_targets_own(unbroken):
    """Greedy ones equal autoregressive decoding of that prompt alone; sampled ones do not repeat it."""
    target, cache, same = tiny.target("gpt_oss"), TeacherCache.open(unbroken), {0.0: [], 1.0: []}
    stop = frozenset(target.config.eos_token_ids)
    for i in range(0, len(cache), 3):
        sample = cache.sample(i)
        prompt, response = (
            x.tolist()
            for x in sample.tokens.split_with_sizes(
                [sample.prompt_length, len(sample.tokens) - sample.prompt_length]
            )
        )
        request = Request(max_new_tokens=len(response), stop=stop)
        same[sample.temperature].append(generate(target, [prompt], request).tokens[0] == response)
    assert len(same[0.0]) == 6 and all(same[0.0])
    assert len(same[1.0]) == 7 and not any(same[1.0])


def test_lengths_stops_and_sources_of_the_texts(unbroken):
    cache = TeacherCache.open(unbroken)
    asked = RECIPE.lengths().tolist()
    held_out = tokenizer().token_to_id(HELD_OUT_LETTER)
    prompts = set()
    for i in range(0, len(cache), 3):
        sample, (prompt, response) = cache.sample(i), asked[i // 3]
        assert sample.prompt_length == prompt and 5 <= prompt <= 11 and 9 <= response <= 23
        made = sample.tokens[prompt:].tolist()
        assert len(made) == response or (len(made) < response and made[-1] == 3)
        assert 3 not in made[:-1]
        assert held_out not in sample.tokens[:prompt].tolist()
        prompts.add(tuple(sample.tokens[:prompt].tolist()))
    assert len(prompts) == 13


def test_a_stop_token_ends_a_text_and_is_kept(tmp_path):
    """A head that favours the stop token: responses end early, some at once, all with the token."""
    target = tiny.build(tiny.config("gpt_oss"))
    tiny.randomise(tiny.named_tensors(target))
    with torch.no_grad():
        target.lm_head.weight[3] *= 3
    recipe = dataclasses.replace(RECIPE, position_offsets=(0,), response_tokens=(23, 23), greedy_share=0.0)
    cache = make(tmp_path, recipe, target.eval())
    made = [cache.sample(i).tokens[cache.sample(i).prompt_length :].tolist() for i in range(len(cache))]
    stopped = [m for m in made if len(m) < 23]
    assert len(stopped) > 3 and all(m and m[-1] == 3 and 3 not in m[:-1] for m in stopped)
    assert cache.meta.nbytes < predicted(recipe)


def test_the_prediction_is_a_close_upper_bound(unbroken):
    size = sum(path.stat().st_size for path in unbroken.iterdir())
    target = dataclasses.replace(RECIPE, response_tokens=(400, 400))  # overheads matter less
    assert size <= predicted(RECIPE)
    rows = int(target.lengths().sum()) * 3 * (4 + 3 * 2 * 96)
    assert rows < predicted(target) < 1.01 * rows
    fp8 = dataclasses.replace(target, dtype="fp8")
    assert predicted(fp8) < 0.53 * rows


def test_of_prompts_as_they_are_the_longest_are_expected():
    prompts = ChatPrompts([[1] * n for n in (3, 500, 7, 2)])
    assert prompts.most_tokens([9]) == 500 and prompts.most_tokens([9] * 6) == 512 + 507
    for samples in (1, 3, 4, 9):
        drawn = [len(prompts.draw(i, 9, RECIPE.seed)) for i in range(samples)]
        assert sum(drawn) <= prompts.most_tokens([9] * samples) <= samples * 500
    recipe = dataclasses.replace(RECIPE, samples=4, response_tokens=(400, 400))
    rows = (512 + 4 * 400) * 3 * (4 + 3 * 2 * 96)
    assert rows < predict_nbytes(recipe, prompts, 96, 3) < 1.02 * rows


def test_fp8_halves_the_cache_and_says_its_error(tmp_path, unbroken):
    recipe = dataclasses.replace(RECIPE, dtype="fp8")
    cache, full = make(tmp_path, recipe), TeacherCache.open(unbroken)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= predicted(recipe)
    assert cache.meta.nbytes < 0.6 * full.meta.nbytes
    for i in range(len(cache)):
        a, b = cache.sample(i), full.sample(i)
        assert a.tokens.tolist() == b.tokens.tolist()
        assert (a.aux - b.aux).norm() < 0.04 * b.aux.norm()
    for shard, exact in zip(cache.meta.shards, full.meta.shards, strict=True):
        assert 0.01 < shard.relative_error < 0.03 and 0.0005 < exact.relative_error < 0.003


def test_a_resumed_build_has_the_same_bytes_and_keeps_what_was_finished(tmp_path, unbroken):
    first = make(tmp_path, stop_after=2)
    assert not first.meta.complete and len(first) == 24 and first.verify() > 0
    (tmp_path / "shard-00002.safetensors.tmp").write_bytes(b"half a shard")
    (tmp_path / "shard-00002.safetensors").write_bytes(b"renamed, but not yet in meta.json")
    kept = (tmp_path / "shard-00001.safetensors").stat()
    assert make(tmp_path).meta.complete
    again = (tmp_path / "shard-00001.safetensors").stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert contents(tmp_path) == contents(unbroken)


def test_a_build_killed_by_sigkill_ends_in_the_same_bytes(tmp_path, unbroken):
    root, tests = Path(__file__).parents[2], Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": f"{root}{os.pathsep}{tests}",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    command = [sys.executable, __file__, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as child:
        while child.poll() is None and not (tmp_path / "shard-00001.safetensors").exists():
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL, "the build was over before it could be killed"
    assert 1 <= len(read_meta(tmp_path).shards) < 4
    make(tmp_path)
    assert contents(tmp_path) == contents(unbroken)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_building_again_makes_a_lost_shard_anew(copy, unbroken, damage):
    shard = copy / "shard-00001.safetensors"
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    make(copy)
    assert contents(copy) == contents(unbroken)


def test_a_disk_that_fills_up_loses_nothing(tmp_path, unbroken):
    sizes = [s.nbytes for s in read_meta(unbroken).shards]
    largest = sizes.index(max(sizes))
    assert largest > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[largest] - 1, hard))
    try:
        with pytest.raises(LoadError, match=r"could not be written.* Make room and run the same command"):
            make(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finished = [f"shard-{k:05d}.safetensors" for k in range(largest)]
    assert sorted(contents(tmp_path)) == ["meta.json", *finished]
    make(tmp_path)
    assert contents(tmp_path) == contents(unbroken)


def test_a_disk_too_small_is_refused_before_the_start(tmp_path):
    recipe = dataclasses.replace(RECIPE, samples=10**6, response_tokens=(10**5, 10**5))
    with pytest.raises(StoreError, match=r"needs up to [\d,]{15,} bytes more and .* has [\d,]+ free"):
        make(tmp_path, recipe)
    assert list(contents(tmp_path)) == ["meta.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 8}, r"started with seed 11 \(now 8\)"),
        ({"batch": 4, "response_tokens": (9, 24)}, r"batch 3 \(now 4\), response_tokens \[9, 23\] \(now"),
        ({"dtype": "fp8"}, "started with dtype bfloat16, this build has fp8"),
        ({"target_layer_ids": (0, 1, 3)}, r"target_layer_ids \(0, 2, 3\), this build has \(0, 1, 3\)"),
    ],
)
def test_resuming_with_other_settings_is_refused(copy, changes, message):
    before = contents(copy)
    with pytest.raises(StoreError, match=message):
        make(copy, dataclasses.replace(RECIPE, **changes))
    assert contents(copy) == before


def test_resuming_with_another_target_tokenizer_or_corpus_is_refused(copy):
    with pytest.raises(StoreError, match="target_fingerprint"):
        make(copy, model=tiny.target("gpt_oss", seed=1))
    other = tokenizer()
    other.add_tokens(["word"])
    target = tiny.target("gpt_oss")
    with pytest.raises(StoreError, match="tokenizer_sha256"):
        build(target, other, TextPrompts(documents(), other), copy, RECIPE)
    with pytest.raises(StoreError, match="corpus_sha256"):
        build(target, tokenizer(), TextPrompts(documents()[:-1], tokenizer()), copy, RECIPE)
    assert read_meta(copy).target_fingerprint == fingerprint(target)


def test_a_folder_of_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="holds other files"):
        make(tmp_path)
    assert list(contents(tmp_path)) == ["thesis.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples 0"),
        ({"prompt_tokens": (9, 5)}, "prompt_tokens 9, 5"),
        ({"response_tokens": (0, 5)}, r"response_tokens \(0, 5\): it must be at least 1"),
        ({"greedy_share": 1.5}, "greedy_share 1.5"),
        ({"position_offsets": (0, 0)}, "none twice"),
        ({"position_offsets": ()}, "at least one"),
        ({"dtype": "float16"}, "bfloat16 or fp8"),
        ({"target_layer_ids": (2, 0)}, "ascending layers of 0..3"),
        ({"target_layer_ids": (0, 4)}, "ascending layers of 0..3"),
        ({"prompt_tokens": (500, 900)}, "fewer than .* tokens"),
        ({"response_tokens": (5, 10**6)}, "positions end at 135168"),
    ],
)
def test_settings_no_build_can_honour(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, dataclasses.replace(RECIPE, **changes))


def test_a_target_of_nan_is_refused(tmp_path):
    target = tiny.build(tiny.config("gpt_oss"))
    tiny.randomise(tiny.named_tensors(target))
    with torch.no_grad():
        target.layers[2].input_layernorm.weight[5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        make(tmp_path, dataclasses.replace(RECIPE, greedy_share=1.0), target.eval())


def test_a_tokenizer_of_another_model_and_no_documents(tmp_path):
    larger = tokenizer()
    larger.add_tokens([f"word{i}" for i in range(60)])
    with pytest.raises(ValueError, match="another model's"):
        build(tiny.target("gpt_oss"), larger, TextPrompts(documents(), larger), tmp_path, RECIPE)
    with pytest.raises(ValueError, match="for training"):
        TextPrompts([d for d in documents() if d.held_out], tokenizer())


@pytest.mark.parametrize(("share", "greedy"), [(0.0, 0), (0.3, 30), (0.5, 50), (1.0, 100)])
def test_temperatures_are_spread_evenly(share, greedy):
    recipe = TeacherRecipe(samples=100, greedy_share=share)
    drawn = [recipe.temperature(i) for i in range(100)]
    assert drawn.count(0.0) == greedy
    for i in range(0, 100, 20):
        assert drawn[i : i + 20].count(0.0) == round(20 * share)


if __name__ == "__main__":  # what the SIGKILL test runs and kills
    make(Path(sys.argv[1]))


def test_chats_are_prompts_as_they_are_and_answers_end_at_their_stop_tokens(tmp_path):
    model = tiny.target("gpt_oss")
    chats = [tiny.tokens(n, seed=n).tolist() for n in (5, 9, 14)]
    recipe = dataclasses.replace(RECIPE, samples=8, position_offsets=(0,), response_tokens=(12, 12))
    free = build(model, tokenizer(), ChatPrompts(chats), tmp_path / "free", recipe)
    answers = [free.text(i) for i in range(8)]
    assert {tuple(tokens[:n].tolist()) for tokens, n in answers} == {tuple(chat) for chat in chats}
    stop = int(answers[0][0][answers[0][1] + 3])
    source = ChatPrompts(chats, frozenset({stop}))
    stopped = build(model, tokenizer(), source, tmp_path / "stopped", recipe)
    ends = [stopped.text(i)[0][stopped.text(i)[1] :].tolist() for i in range(8)]
    assert len(ends[0]) <= 4 and all(stop not in answer[:-1] for answer in ends)
    assert free.meta.template == "chat" and free.meta.corpus_sha256 == stopped.meta.corpus_sha256
    with pytest.raises(StoreError, match="corpus_sha256"):
        build(model, tokenizer(), ChatPrompts(chats[:2]), tmp_path / "free", recipe)
    with pytest.raises(ValueError, match="prompts of 140000 tokens"):
        build(model, tokenizer(), ChatPrompts([[7] * 140000]), tmp_path / "long", recipe)


@pytest.mark.parametrize("k", [0, 2])
def test_a_batch_that_mixes_up_its_rows_is_refused(k, tmp_path, monkeypatch):
    """A text alone has other states than its neighbour's; the shard with the fault is not written."""
    forward, calls = Decoder.forward, []

    def mixed(self, tokens, *rest, aux=(), **more):
        out = forward(self, tokens, *rest, aux=aux, **more)
        capture = aux and len(tokens) > 1
        calls.extend([1] * bool(capture))
        return (
            dataclasses.replace(out, aux=out.aux.roll(1, dims=1)) if capture and len(calls) > 3 * k else out
        )

    monkeypatch.setattr(Decoder, "forward", mixed)
    with pytest.raises(
        StoreError, match=r"text \d+ at position \d+, in a batch of 4: alone it has other states in layer"
    ):
        make(tmp_path / "cache")
    assert len(read_meta(tmp_path / "cache").shards) == k
