"""Streams and `outpace generate`: text, chat, timing, layers, largest logits."""

import json
from types import SimpleNamespace

import pytest
import tiny
import torch
from test_cli import run as outpace

from outpace.api import Model, SamplingParams, stream
from outpace.checkpoint.shipped import EMBEDDED
from outpace.cli.generate import answer_note
from outpace.drafts.lookup import NGram
from outpace.models.decoder import Output
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


def go(few, draft, family="gpt_oss", **sampling):
    model = Model(name=family, target=tiny.target(family), tokenizer=few)
    prompt = tiny.tokens(1, 11)[0].tolist()
    options = {"max_tokens": 20, "ignore_eos": True} | sampling
    pieces = stream(model, prompt, draft=draft or False, sampling=SamplingParams(**options))
    text = "".join(piece.text for piece in pieces)
    output = pieces.finish()
    assert text == output.text
    return model.target, prompt, output


# ---- largest logits --------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, NGram()])
@pytest.mark.parametrize("new", [1, 2, 20])
def test_largest_logits_are_those_of_one_long_forward(few, draft, new):
    target, prompt, output = go(few, draft, top_logits=4, max_tokens=new)
    whole = torch.tensor([prompt + output.tokens[:-1]])
    with torch.inference_mode():
        logits = target.logits(target(whole).hidden[0, len(prompt) - 1 :])
    values, ids = logits.topk(4)
    top = output.top_logits
    assert [[c.token for c in row] for row in top] == ids.tolist()
    assert [row[0].token for row in top] == output.tokens  # temperature 0
    torch.testing.assert_close(torch.tensor([[c.logit for c in row] for row in top]), values)
    assert top[0][1].text == few.decode([int(ids[0, 1])], skip_special_tokens=False)


def test_a_stop_token_inside_a_proposal_ends_the_logits_too(few):
    *_, free = go(few, NGram())
    *_, output = go(few, NGram(), stop_token_ids=free.tokens[7:8], top_logits=2)
    assert len(output.top_logits) == len(output.tokens) <= 8


def test_more_than_the_vocabulary_is_all_of_it(few):
    *_, output = go(few, None, top_logits=10_000, max_tokens=2)
    assert len(output.top_logits[0]) == tiny.VOCAB


@pytest.mark.parametrize("draft", [None, NGram()])
def test_without_top_logits_nothing_is_sorted(few, monkeypatch, draft):
    def never(*args, **kwargs):
        raise AssertionError("sorted")

    for name in ("topk", "sort", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, never)
        monkeypatch.setattr(torch, name, never)
    *_, output = go(few, draft, "llama", max_tokens=5)  # no router: its topk would be the model's own
    assert len(output.tokens) == 5 and output.top_logits == []
    with pytest.raises(AssertionError, match="sorted"):
        go(few, draft, "llama", max_tokens=5, top_logits=1)


# ---- timing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, NGram()])
def test_times_of_steps(few, draft):
    *_, output = go(few, draft)
    seconds = output.step_seconds
    assert len(seconds) == len(output.trace.accepted) and min(seconds) > 0
    times = output.timing()
    assert 0 < times["prefill"] <= times["first_token"]
    assert min(seconds) <= times["round_p50"] + 1e-6
    assert times["round_p50"] <= times["round_p95"] <= max(seconds) + 1e-6


def test_a_single_token_has_no_steps(few):
    *_, output = go(few, None, max_tokens=1)
    assert output.step_seconds == [] and output.timing()["round_p95"] == 0


# ---- text ------------------------------------------------------------------------------------------


class Scripted:
    """A target whose outputs are the given tokens."""

    def __init__(self, tokens, vocab_size, positions=1000):
        self.tokens, self.at = tokens, 0
        self.device, self.group = torch.device("cpu"), None
        self.config = SimpleNamespace(
            vocab_size=vocab_size, max_position_embeddings=positions, eos_token_ids=()
        )

    def make_cache(self, batch, length, **more):
        return SimpleNamespace(lengths=[0] * batch, rounds=None)

    def __call__(self, tokens, cache, *, logits=False, **more):
        hidden = torch.zeros(*tokens.shape, 1)
        return Output(hidden, None, logits=self.logits(hidden) if logits else None)

    def logits(self, hidden):
        logits = torch.zeros(*hidden.shape[:-1], self.config.vocab_size)
        logits[..., self.tokens[self.at]] = 1
        self.at += 1
        return logits


def pieces_of(tokenizer, prompt, tokens, chat=None):
    """-> the texts of a stream of these tokens, and the output."""
    target = Scripted(tokens, tokenizer.get_vocab_size())
    model = Model(name="scripted", target=target, tokenizer=tokenizer)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=len(tokens))
    pieces = stream(model, prompt, draft=False, sampling=sampling, chat=chat)
    return [piece.text for piece in pieces], pieces.finish()


@pytest.mark.parametrize("text", [TEXT, "\U0001f642\U0001f642 \u65e5\u672c", " a"])
def test_pieces_are_whole_characters(tokenizer, text):
    ids = encode(tokenizer, text)
    for at in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:at])
        if "\ufffd" in prompt:  # a prompt is a whole text
            continue
        pieces, _ = pieces_of(tokenizer, ids[:at], ids[at:])
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
    assert pieces_of(made, encode(made, "Hi"), [8])[0] == [" yo"]


ANSWER = (
    "<|channel|>analysis<|message|>Hm, two.<|end|><|start|>assistant<|channel|>final<|message|>"
    "2 + 2 = 4 \U0001f642<|return|>"
)


def test_the_text_of_an_answer_is_its_final_channel(tokenizer):
    harmony = HarmonyChat(tokenizer)
    harmony.add_user("What is 2 + 2?")
    pieces, output = pieces_of(tokenizer, harmony.prompt(), encode(tokenizer, ANSWER), harmony)
    assert "".join(pieces) == output.text == "2 + 2 = 4 \U0001f642" and output.finish_reason == "stop"
    assert [part.kind for part in output.parts] == ["analysis", "final"] and answer_note(output) is None
    cut = encode(tokenizer, ANSWER.partition("<|end|>")[0])
    pieces, output = pieces_of(tokenizer, harmony.prompt(), cut, harmony)
    assert output.text == "" and output.finish_reason == "length"
    assert answer_note(output).startswith(
        f"no answer (analysis), cut off after {len(cut)} tokens: allow more"
    )


def test_an_output_finished_early_is_aborted(tokenizer):
    harmony = HarmonyChat(tokenizer)
    harmony.add_user("What is 2 + 2?")
    target = Scripted(encode(tokenizer, ANSWER), tokenizer.get_vocab_size())
    model = Model(name="scripted", target=target, tokenizer=tokenizer)  # type: ignore[arg-type]
    pieces = stream(model, harmony.prompt(), draft=False, chat=harmony)
    next(pieces), next(pieces)
    output = pieces.finish()
    assert len(output.tokens) == 2 and output.finish_reason == "abort" and list(pieces) == []
    assert answer_note(output) == "stopped"


# ---- the command -----------------------------------------------------------------------------------


def test_chat_prints_no_tags(monkeypatch, capsys):
    code, out, err = outpace(monkeypatch, capsys, "generate", "default", "What is 2 + 2?", "--chat", "-n", 12)
    assert code == 0 and "<|" not in out
    assert "no answer (analysis), cut off after 12 tokens" in " ".join(err.split())
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
    assert "steps: one native call each" in out and value["steps"] == "one native call each"
    code, out, _ = outpace(monkeypatch, capsys, *options, "--kv-budget", "200")
    why = "attention by its modules where there is partial KV while its queries are recorded"
    assert code == 0 and why in " ".join(out.split())


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
        (("--layers", 3, "--draft", "dflash"), "was made for the target with fingerprint"),
        (("--top-logits", 0), "top_logits 0: it must be at least 1"),
    ],
)
def test_refusals(monkeypatch, capsys, arguments, message):
    code, _, err = outpace(monkeypatch, capsys, "generate", "default", "x", *arguments)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err
