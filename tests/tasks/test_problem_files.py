"""Problems as files of conversations, and the prompts that are made of such files."""

import json
import random

import pytest
import tiny
from test_cli import run
from tokenizers import Tokenizer

from examples.tiny_target.problem_rows import sample_pieces
from outpace.loading import chat_prompts
from outpace.models.load import build
from outpace.models.save import save_target
from outpace.tasks.families import FAMILIES
from outpace.teacher.prompts import ChatPrompts
from outpace.text.harmony import HarmonyTokens
from outpace.text.messages import parse_conversation
from outpace.text.tokenizer import train_bpe


@pytest.fixture(scope="module")
def tokens():
    return HarmonyTokens(train_bpe(sample_pieces(1, 30), 400))


@pytest.mark.parametrize("effort", ["low", "medium"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_line_reads_back_as_the_conversation(name, effort):
    rng = random.Random(name)
    for _ in range(5):
        problem = FAMILIES[name].draw(rng, held_out=False)
        line = json.loads(json.dumps(problem.as_json(effort)))
        assert parse_conversation(line) == problem.conversation(effort)


def test_the_command_writes_problems_and_prompts_are_made_of_them(monkeypatch, capsys, tmp_path, tokens):
    file = tmp_path / "problems.jsonl"
    families = [word for name in ("addition", "functions", "talk") for word in ("--family", name)]
    options = ("--count", 9, *families, "--held-out")
    code, out, _ = run(monkeypatch, capsys, "problems", file, *options)
    assert code == 0 and "9 problems of 3 families" in " ".join(out.split())
    first = file.read_bytes()
    run(monkeypatch, capsys, "problems", file, *options)
    assert file.read_bytes() == first
    prompts, stop = chat_prompts(file, "unused", tokens.tokenizer, frozenset())
    lines = [json.loads(line) for line in first.decode().splitlines()]
    assert stop == tokens.stop
    texts = [tokens.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    for line in lines:
        call, *result = texts[: 2 if "tools" in line else 1]
        del texts[: 1 + len(result)]
        for text in (call, *result):
            assert text.endswith("<|start|>assistant") and line["messages"][0]["content"] in text
            answered = line["messages"][-1]["content"]
            assert f"final<|message|>{answered}" not in text
        assert "<|call|>" not in call and all("<|call|>" in text for text in result)
    assert not texts


def test_prompts_of_a_target_with_a_chat_template(tmp_path, tokens):
    model = build(tiny.config("qwen3", vocab_size=400))
    save_target(model, tmp_path / "target", eos_token_id=None)
    (tmp_path / "target" / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[bot]{% endif %}"
    )
    file = tmp_path / "chats.jsonl"
    asked, answered = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    chats = [[asked, answered], [{"role": "system", "content": "S"}, asked, asked, answered, asked]]
    file.write_text("\n".join([json.dumps(chats[0]), json.dumps({"messages": chats[1]})]))
    without = Tokenizer.from_str(tokens.tokenizer.to_str().replace("<|channel|>", "<|other|>"))
    prompts, stop = chat_prompts(file, str(tmp_path / "target"), without, frozenset({3}))
    texts = ["[user]Hi[bot]", "[system]S[user]Hi[user]Hi[bot]"]
    assert [without.decode(ids) for ids in prompts] == [
        *texts,
        "[system]S[user]Hi[user]Hi[assistant]Ho[user]Hi[bot]",
    ] and stop == {3}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: messages: none is a user's"),
        ('{"message": []}', "line 2: a conversation is a JSON object with a list of `messages`"),
    ],
)
def test_a_file_that_cannot_be_prompts(tmp_path, tokens, line, message):
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\n' + line)
    with pytest.raises(ValueError, match=message):
        chat_prompts(file, "unused", tokens.tokenizer, frozenset())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--family", "adition"), "--family adition: known are addition"),
        (("--reasoning", "most"), "--reasoning most: one of low, medium, high"),
    ],
)
def test_odd_options(monkeypatch, capsys, tmp_path, options, message):
    code, _, error = run(monkeypatch, capsys, "problems", tmp_path / "x.jsonl", *options)
    assert code == 2 and message in " ".join(error.split()) and not list(tmp_path.iterdir())


def test_a_file_that_is_not_there_or_empty(tmp_path, tokens):
    file = tmp_path / "chats.jsonl"
    for message in (r"chats\.jsonl is not there: name a JSONL file", r"chats\.jsonl holds no conversation"):
        with pytest.raises(ValueError, match=message):
            chat_prompts(file, "unused", tokens.tokenizer, frozenset())
        file.write_text("\n")


def test_a_folder_is_no_file(monkeypatch, capsys, tmp_path, tokens):
    with pytest.raises(ValueError, match="is a folder: name a JSONL file"):
        chat_prompts(tmp_path, "unused", tokens.tokenizer, frozenset())
    code, _, error = run(monkeypatch, capsys, "problems", tmp_path, "--count", 2)
    assert code == 2 and "is a folder: name the file to write" in " ".join(error.split())


def test_prompts_come_in_another_order_every_time_around():
    prompts = ChatPrompts([[i] for i in range(10)])
    order = [prompts.draw(text, 5, seed=1)[0] for text in range(30)]
    rounds = [order[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(one) == list(range(10)) for one in rounds) and rounds[0] != rounds[1] != rounds[2]
    assert prompts.longest == 1 and prompts.digest != ChatPrompts([[i] for i in range(9)]).digest
    with pytest.raises(ValueError, match="no prompts"):
        ChatPrompts([])
