"""`outpace generate`: chat, timing, layers and largest logits; what is off costs nothing."""

import json

import pytest
import tiny
import torch
from test_cli import run as outpace

from outpace.checkpoint.open import EMBEDDED
from outpace.cli.text_stream import Largest, answer_reader, no_answer, reader, run, timing_table, top_lines
from outpace.decode.request import Request
from outpace.drafts.lookup import NGram
from outpace.ops.sampling import Sampling
from outpace.text.gguf_tokenizer import tokenizer_from_gguf
from outpace.text.harmony_parser import HarmonyChat
from outpace.text.tokenizer import SPECIAL, encode, read_tokenizer, train_bpe

LAYERS = json.loads((EMBEDDED / "target" / "config.json").read_text())["num_hidden_layers"]
TEXT = "def f(x):\n    return x  # gr\u00f6\u00dfer \U0001f642\n" * 9


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(EMBEDDED / "target")


@pytest.fixture(scope="module")
def few():
    """As many ids as the tiny models have."""
    return train_bpe([TEXT], len(SPECIAL) + 256)


def go(few, draft, largest=None, new=20, **how):
    request = Request(max_new_tokens=new, sampling=Sampling(**how))
    prompt = tiny.tokens(1, 11)[0].tolist()
    written = []
    target = tiny.target("gpt_oss")
    done = run(target, draft, prompt, reader(few, prompt), request, 7, written.append, largest)
    assert "".join(written) == done.text
    return target, prompt, done


# ---- largest logits --------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, NGram()])
@pytest.mark.parametrize("new", [1, 2, 20])
def test_largest_logits_are_those_of_one_long_forward(few, draft, new):
    target, prompt, done = go(few, draft, Largest(4, few), new)
    whole = torch.tensor([prompt + done.tokens[:-1]])
    with torch.inference_mode():
        logits = target.logits(target(whole).hidden[0, len(prompt) - 1 :])
    values, ids = logits.topk(4)
    assert [[c.token for c in item] for item in done.top] == ids.tolist()
    assert [item[0].token for item in done.top] == done.tokens  # temperature 0
    torch.testing.assert_close(torch.tensor([[c.logit for c in item] for item in done.top]), values)
    assert done.top[0][1].text == few.decode([int(ids[0, 1])], skip_special_tokens=False)
    assert len(top_lines(done).splitlines()) == len(done.tokens)


def test_a_stop_token_amid_a_proposal_ends_the_logits_too(few):
    *_, free = go(few, NGram(), Largest(1, few))
    request = Request(max_new_tokens=20, stop=frozenset(free.tokens[7:8]))
    prompt = tiny.tokens(1, 11)[0].tolist()
    done = run(tiny.target("gpt_oss"), NGram(), prompt, lambda t: "", request, 7, print, Largest(2, few))
    assert len(done.top) == len(done.tokens) <= 8


def test_more_than_the_vocabulary_is_all_of_it(few):
    _, _, done = go(few, None, Largest(10_000, few), 2)
    assert len(done.top[0]) == tiny.VOCAB


def test_without_them_nothing_is_sorted(few, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("sorted")

    for name in ("topk", "sort", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, never)
        monkeypatch.setattr(torch, name, never)
    model = tiny.target("llama")  # it has no router; its topk would be the model's own
    prompt = tiny.tokens(1, 11)[0].tolist()
    for draft in (None, NGram()):
        done = run(model, draft, prompt, lambda t: "", Request(max_new_tokens=5), 0, print)
        assert len(done.tokens) == 5 and done.top == []
        with pytest.raises(AssertionError, match="sorted"):
            run(model, draft, prompt, lambda t: "", Request(max_new_tokens=5), 0, print, Largest(1, few))


# ---- timing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, NGram()])
def test_times_of_rounds(few, draft):
    _, _, done = go(few, draft)
    assert len(done.round_seconds) == len(done.trace.accepted) and min(done.round_seconds) > 0
    times = done.timing()
    assert 0 < times["prefill"] <= times["first_token"]
    assert min(done.round_seconds) <= times["round_p50"] + 1e-6
    assert times["round_p50"] <= times["round_p95"] <= max(done.round_seconds) + 1e-6
    assert done.round_time(0.0) == min(done.round_seconds) and done.round_time(1.0) == max(done.round_seconds)
    assert timing_table(0.5, done, done).row_count == 6


def test_a_single_token_has_no_rounds(few):
    _, _, done = go(few, None, new=1)
    assert done.round_seconds == [] and done.timing()["round_p95"] == 0


# ---- what people read ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [TEXT, "\U0001f642\U0001f642 \u65e5\u672c", " a"])
def test_pieces_are_whole_characters(tokenizer, text):
    ids = encode(tokenizer, text)
    for at in range(len(ids)):
        prompt = tokenizer.decode(ids[:at])
        if "\ufffd" in prompt:  # a prompt is a whole text
            continue
        read = reader(tokenizer, ids[:at])
        pieces = [read(token) for token in ids[at:]]
        assert prompt + "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces)


def test_sentencepiece_keeps_the_space_after_a_prompt():
    tokens = ["<unk>", "<s>", "\u2581", "H", "i", "y", "o", "\u2581y", "\u2581yo"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3] + [1] * 7,
        "tokenizer.ggml.scores": [0.0, 0.0, *range(0, -7, -1)],
    }
    made = tokenizer_from_gguf(metadata)
    prompt = encode(made, "Hi")
    assert reader(made, prompt)(8) == " yo" and reader(made, [])(8) == "yo"


SAID = (
    "<|channel|>analysis<|message|>Hm, two.<|end|><|start|>assistant<|channel|>final<|message|>"
    "2 + 2 = 4 \U0001f642<|return|>"
)


def test_of_an_answer_only_the_final_channel_is_read(tokenizer):
    harmony_chat = HarmonyChat(tokenizer)
    harmony_chat.say("What is 2 + 2?")
    harmony_chat.prompt()
    read = answer_reader(harmony_chat)
    assert "".join(read(token) for token in encode(tokenizer, SAID)) == "2 + 2 = 4 \U0001f642"
    assert no_answer(harmony_chat.end(), 30) is None
    harmony_chat.prompt()
    read = answer_reader(harmony_chat)
    cut = SAID.partition("<|end|>")[0]
    assert "".join(read(token) for token in encode(tokenizer, cut)) == ""
    assert no_answer(harmony_chat.end(), 12).startswith(
        "no answer in 12 tokens (analysis): allow more with -n"
    )


# ---- the command -----------------------------------------------------------------------------------


def test_chat_prints_no_tags(monkeypatch, capsys):
    code, out, err = outpace(monkeypatch, capsys, "generate", "default", "What is 2 + 2?", "--chat", "-n", 12)
    assert code == 0 and "<|" not in out
    assert "no answer in" in err  # the embedded model was never trained to chat
    code, out, _ = outpace(
        monkeypatch, capsys, "generate", "default", "What is 2 + 2?", "--chat", "-n", 12, "--json"
    )
    data = json.loads(out)
    assert data["prompt_tokens"] > 100 and len(data["tokens"]) <= 12
    assert data["text"] == "" and data["note"] and all(p["kind"] != "final" for p in data["parts"])


def test_chat_by_the_checkpoints_template(monkeypatch, capsys, tmp_path, tokenizer):
    for path in (EMBEDDED / "target").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "tokenizer.json").unlink()
    other = tokenizer.to_str().replace("<|start|>", "<|turn|>")  # no Harmony now
    (tmp_path / "tokenizer.json").write_text(other)
    options = ("generate", tmp_path, "x = 1", "--chat", "-n", 8, "--ignore-eos", "--json")
    code, _, err = outpace(monkeypatch, capsys, *options)
    assert code == 2 and "neither Harmony's tokens nor a chat template" in " ".join(err.split())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}\ny = ")
    code, out, _ = outpace(monkeypatch, capsys, *options)
    data = json.loads(out)
    assert code == 0 and data["prompt_tokens"] == len(encode(tokenizer, "x = 1\ny = "))
    _, out, _ = outpace(monkeypatch, capsys, "generate", tmp_path, "x = 1\ny = ", *options[4:])
    assert json.loads(out)["text"].startswith(data["text"].rstrip("\n")) and data["text"]


def test_timing_runs_twice(monkeypatch, capsys):
    options = ("generate", "default", "import os\n", "-n", 12, "--ignore-eos", "--timing")
    code, out, _ = outpace(monkeypatch, capsys, *options, "--json")
    value = json.loads(out)["timing"]
    assert code == 0 and value["load"] > 0
    for kind in ("first", "warm"):
        assert {"prefill", "first_token", "round_mean", "round_p50", "round_p95", "tokens_per_s"} == value[
            kind
        ].keys()
        assert value[kind]["tokens_per_s"] > 0
    code, out, _ = outpace(monkeypatch, capsys, *options)
    assert code == 0 and "warm run" in out and "time to first token" in out


def test_layers_and_largest_logits(monkeypatch, capsys):
    options = ("generate", "default", "import os\n", "-n", 4, "--layers", 2, "--top-logits", 3)
    code, out, _ = outpace(monkeypatch, capsys, *options, "--json")
    data = json.loads(out)
    assert code == 0 and [len(item) for item in data["top_logits"]] == [3] * len(data["tokens"])
    assert [item[0]["token"] for item in data["top_logits"]] == data["tokens"]
    code, out, _ = outpace(
        monkeypatch, capsys, "generate", "default", "import os\n", "-n", 4, "--draft", "none", "--json"
    )
    assert code == 0 and json.loads(out)["tokens"] != data["tokens"] and "top_logits" not in json.loads(out)
    code, out, _ = outpace(monkeypatch, capsys, *options)
    assert code == 0 and "   3 " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", LAYERS + 1), f"layers {LAYERS + 1}: give 1 to {LAYERS}"),
        (("--layers", 3, "--draft", "dflash"), f"num_target_layers {LAYERS}; this one has 3"),
        (("--top-logits", 0), "top_logits 0: ask for at least 1"),
    ],
)
def test_refusals(monkeypatch, capsys, arguments, message):
    code, _, err = outpace(monkeypatch, capsys, "generate", "default", "x", *arguments)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err
