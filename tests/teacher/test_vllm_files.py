"""Files as vLLM's extract_hidden_states writes them become a teacher cache, or one clear line."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_build import tokenizer
from test_cli import run

from outpace.models.load import load_target
from outpace.teacher.store import StoreError, TeacherCache
from outpace.teacher.vllm_files import ImportRecipe, import_files

LENGTHS = (31, 9, 17, 24, 12)
RECIPE = ImportRecipe(vllm_layer_ids=(1, 3), shard_samples=2)
WITH_FINAL = ImportRecipe(vllm_layer_ids=(1, 2, 3), final=True, shard_samples=2)
TOKENIZER = tokenizer()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, and the states of a few texts as transformers computes them: hidden_states[k], and before the
    final norm for the last of them."""
    folder = tmp_path_factory.mktemp("model")
    twin, states = tiny.save_twin("llama", folder), []
    last = twin.model.layers[-1].register_forward_hook(lambda module, args, out: states.append(out))
    files = tmp_path_factory.mktemp("states")
    for i, n in enumerate(LENGTHS):
        tokens = tiny.tokens(n, seed=n)
        with torch.no_grad():
            seen = [*twin(tokens[None], output_hidden_states=True).hidden_states[:-1], states.pop()]
        contents = {"hidden_states": torch.stack([s[0] for s in seen], 1).bfloat16(), "token_ids": tokens}
        save_file(contents, files / f"request-{i}.safetensors")
    last.remove()
    return load_target(folder), files


def of_layers(files, folder, ids, **changes):
    """The files with the layers `ids`, and with other tensors in the second."""
    folder.mkdir()
    for path in files.iterdir():
        contents = load_file(path)
        contents["hidden_states"] = contents["hidden_states"][:, list(ids)].contiguous()
        if path.stem == "request-1":
            contents |= {k: f(contents[k]) for k, f in changes.items()}
        save_file(contents, folder / path.name)
    return folder


def test_the_cache_is_that_of_our_own_engine(world, tmp_path):
    """Layer k of vLLM is the output of our layer k - 1; the last one, normed, is the final state."""
    target, files = world
    lengths = {f"request-{i}": i + 2 for i in range(5)}
    files = of_layers(files, tmp_path / "files", (1, 2, 3))
    cache = import_files(target, TOKENIZER, files, tmp_path / "cache", WITH_FINAL, lengths)
    assert cache.meta.target_layer_ids == (0, 1) and len(cache.meta.shards) == 3 and cache.verify()
    assert (len(cache), cache.meta.tokens) == (5, sum(LENGTHS))
    for i, n in enumerate(LENGTHS):
        sample = cache.sample(i)
        with torch.inference_mode():
            out = target(tiny.tokens(n, seed=n)[None], aux=(0, 1))
        assert torch.equal(sample.tokens, tiny.tokens(n, seed=n)) and sample.prompt_length == i + 2
        torch.testing.assert_close(sample.aux.float(), out.aux[:, 0], rtol=2**-7, atol=1e-3)
        assert (sample.final.float() - out.hidden[0]).norm() < 0.01 * out.hidden.norm()


def test_an_import_that_was_stopped_goes_on(world, tmp_path, monkeypatch):
    target, files = world
    files = of_layers(files, tmp_path / "files", (1, 3))
    whole = import_files(target, TOKENIZER, files, tmp_path / "whole", RECIPE)
    bad = files / "request-4.safetensors"
    contents = bad.read_bytes()
    bad.write_bytes(contents[:-9])
    with pytest.raises(StoreError, match=r"request-4.safetensors is no whole safetensors file"):
        import_files(target, TOKENIZER, files, tmp_path / "cache", RECIPE)
    assert not (tmp_path / "cache" / "shard-00002.safetensors").exists()
    with pytest.raises(StoreError, match="is unfinished: 4 of 5 samples"):
        TeacherCache.open(tmp_path / "cache")
    bad.write_bytes(contents)
    again = import_files(target, TOKENIZER, files, tmp_path / "cache", RECIPE)
    assert again.meta == whole.meta and again.sample(0).prompt_length == 1
    with pytest.raises(StoreError, match="was started with corpus_sha256"):
        (files / "request-3.safetensors").unlink()
        import_files(target, TOKENIZER, files, tmp_path / "cache", RECIPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_states": lambda x: x[:, :1].contiguous()},
            r"hidden_states \[9, 1, 42\] and token_ids \[9\]",
        ),
        (
            {"hidden_states": lambda x: x[:-1].clone()},
            r"\[8, 2, 42\] and token_ids \[9\] are not \[T, 2, 42\]",
        ),
        ({"hidden_states": lambda x: x[..., :40].contiguous()}, r"\[9, 2, 40\]"),
        ({"hidden_states": lambda x: x[:, 0].contiguous()}, r"\[9, 42\]"),
        ({"hidden_states": lambda x: x.to(torch.float8_e4m3fn)}, "hidden_states is torch.float8_e4m3fn"),
        (
            {"hidden_states": lambda x: x * torch.inf},
            "hidden_states holds NaN or Inf: run that request again",
        ),
        ({"token_ids": lambda x: x.float()}, "token_ids is torch.float32; it must be one of torch.int64"),
        ({"token_ids": lambda x: x[None].clone()}, r"token_ids \[1, 9\]"),
        (
            {"token_ids": lambda x: x + 90},
            r"token_ids reach from \d+ to \d+, this target's vocabulary from 0",
        ),
        ({"token_ids": lambda x: x - 50}, "token_ids reach from -"),
    ],
)
def test_a_file_that_is_no_request_of_this_target(changes, message, world, tmp_path):
    target, files = world
    files = of_layers(files, tmp_path / "files", (1, 3), **changes)
    with pytest.raises(StoreError, match=f"request-1.safetensors: .*{message}"):
        import_files(target, TOKENIZER, files, tmp_path / "cache", RECIPE)


@pytest.mark.parametrize("ids", [(0, 2), (2, 3)])
def test_layers_numbered_otherwise_are_noticed(ids, world, tmp_path):
    """The sampled text's states are another layer's: here those that SGLang's numbers name."""
    target, files = world
    files = of_layers(files, tmp_path / "files", ids)
    with pytest.raises(StoreError, match=r"request-\d.safetensors: alone it has other states in layer"):
        import_files(target, TOKENIZER, files, tmp_path / "cache", RECIPE)


def test_a_run_that_mixed_up_its_rows_is_noticed(world, tmp_path):
    target, files = world
    roll = {"hidden_states": lambda x: x.roll(1, 0)}
    files = of_layers(files, tmp_path / "files", (1, 3), **roll)
    one = ImportRecipe(vllm_layer_ids=(1, 3), shard_samples=1)
    with pytest.raises(StoreError, match=r"request-1.safetensors: alone it has other states in layer [02]"):
        import_files(target, TOKENIZER, files, tmp_path / "cache", one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give the run's eagle_aux_hidden_state_layer_ids"),
        ({"vllm_layer_ids": (0, 2)}, "0, the embeddings, is no layer's output"),
        ({"vllm_layer_ids": (2, 2)}, "ascending and each once"),
        ({"vllm_layer_ids": (2,), "dtype": "int8"}, "dtype 'int8'"),
        ({"vllm_layer_ids": (2,), "tolerance": 2.0}, "tolerance 2.0"),
    ],
)
def test_settings_that_no_import_can_use(settings, message):
    with pytest.raises(ValueError, match=message):
        ImportRecipe(**settings)


def test_layers_and_prompts_that_the_target_or_the_files_lack(world, tmp_path):
    target, files = world
    given = target, TOKENIZER, files, tmp_path / "cache"
    for ids, final, message in (((4,), False, "end at 3"), ((1, 2), True, "final states need that one")):
        with pytest.raises(ValueError, match=message):
            import_files(*given, ImportRecipe(vllm_layer_ids=ids, final=final))
    with pytest.raises(StoreError, match="no whole number above 0 for request-0"):
        import_files(*given, ImportRecipe(vllm_layer_ids=(1, 2, 3)), {"request-1": 3})
    with pytest.raises(StoreError, match=r"holds no .*safetensors: name the run's shared_storage_path"):
        import_files(target, TOKENIZER, tmp_path, tmp_path / "cache", RECIPE)


def test_the_command(monkeypatch, capsys, tmp_path):
    """States of the embedded target, from our own engine, and a draft that reads them."""
    from outpace.loading import open_target

    target, _ = open_target("default")
    (tmp_path / "files").mkdir()
    for i in range(3):
        tokens = torch.randint(
            5, target.config.vocab_size, (40 + i,), generator=torch.Generator().manual_seed(i)
        )
        with torch.inference_mode():
            states = target(tokens[None], aux=(1, 2, 4)).aux[:, 0].transpose(0, 1).bfloat16().contiguous()
        save_file(
            {"hidden_states": states, "token_ids": tokens.int()}, tmp_path / "files" / f"{i}.safetensors"
        )
    (tmp_path / "lengths.json").write_text(json.dumps({str(i): 8 for i in range(3)}))
    out = tmp_path / "cache"
    words = ["teacher", "import", tmp_path / "files", "--out", out, "--layer-ids", "2,3,5"]
    code, text, err = run(monkeypatch, capsys, *words, "--prompt-lengths", tmp_path / "lengths.json")
    assert (code, err) == (0, "") and "3 samples, 123 tokens" in text
    sizes = ["num_heads=2", "head_dim=8", "intermediate_size=16", "anchors=3", "steps=1", "eval_prompts=0"]
    options = [word for pair in sizes for word in ("--set", pair)]
    code, _, err = run(
        monkeypatch, capsys, "train", "dflash", "--cache", out, "--out", tmp_path / "run", *options
    )
    assert code == 0, err
    code, _, err = run(monkeypatch, capsys, *words[:-1], "2,3,x")
    assert code == 2 and "--layer-ids: 'x' is not a whole number" in err
