"""The suite tasks: held-out problems through a scripted model, right and wrong; resumed; and a real model."""

import json

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from examples.tiny_target.make import ALONE
from examples.tiny_target.model import TargetShape, init_weights
from examples.tiny_target.problem_rows import sample_pieces
from outpace.bench import tasks
from outpace.bench.tasks import PAGE, TasksSettings, run_tasks, solve, task_table
from outpace.decode.request import Generation
from outpace.decode.trace import Trace
from outpace.models.load import build
from outpace.tasks.families import FAMILIES
from outpace.tasks.prompts import draw
from outpace.text.harmony import HarmonyTokens
from outpace.text.sft_rows import rows
from outpace.text.tokenizer import train_bpe

QUIET = Console(quiet=True)
SMALL = {"problems": 3, "longer": 2, "batch": 2, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def tokens():
    return HarmonyTokens(train_bpe(sample_pieces(1, 30), 400, alone=ALONE))


class Knowing:
    """Says what problems teach, from wherever a prompt ends; `spoil` turns an answer into another one."""

    def __init__(self, tokens, problems, effort="medium", spoil=lambda text: text):
        self.tokens, self.asked = tokens, 0
        self.known = []
        for problem in problems:
            text = tokens.tokenizer.decode(
                rows(problem.conversation(effort), tokens)[-1].ids, skip_special_tokens=False
            )
            self.known.append((problem.question, spoil(text)))

    def generate(self, prompts, request):
        self.asked += len(prompts)
        return Generation([self.answer(prompt, request) for prompt in prompts], Trace())

    def answer(self, prompt, request):
        before = self.tokens.tokenizer.decode(prompt, skip_special_tokens=False)
        whole = next(text for question, text in self.known if f"{question}<|end|>" in before)
        calls = before.count("<|call|>")
        begin = whole.index("<|start|>assistant") + len("<|start|>assistant")
        if calls:
            begin = whole.index("<|start|>assistant", whole.index("<|call|>")) + len("<|start|>assistant")
        ids = self.tokens.tokenizer.encode(whole[begin:], add_special_tokens=False).ids
        end = next(i for i, token in enumerate(ids) if token in request.stop)
        return ids[: min(end + 1, request.max_new_tokens)]


@pytest.mark.parametrize("effort", ["low", "high"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_of_training_is_right(tokens, family, effort):
    settings = TasksSettings(problems=4, longer=1, effort=effort)
    problems = draw(family, settings.problems, settings.seed)
    known = Knowing(tokens, problems, effort)
    solutions = solve(known.generate, tokens, problems, settings)
    assert all(s.right and s.finished and s.answer == s.wanted for s in solutions)
    assert known.asked == (8 if family == "functions" else 4)  # a call, and then the answer
    assert all(problem.held_out for problem in problems)


@pytest.mark.parametrize(
    ("spoil", "finished"),
    [
        (lambda text: text.replace("<|return|>", "0<|return|>"), True),
        (lambda text: text.replace("<|channel|>final", "<|channel|>analysis"), True),
        (lambda text: text.replace("<|return|>", "0" * 2000), False),
    ],
)
def test_another_answer_is_wrong(tokens, spoil, finished):
    settings = TasksSettings(problems=4, max_new_tokens=200)
    problems = draw("addition", settings.problems, settings.seed)
    known = Knowing(tokens, problems, spoil=lambda text: spoil(text) + "<|return|>")
    solutions = solve(known.generate, tokens, problems, settings)
    assert not any(s.right for s in solutions)
    assert [s.finished for s in solutions] == [finished] * 4


@pytest.mark.parametrize(
    ("old", "new"), [('{"', '{"x": 1, "'), ("to=functions.", "to=functions.x_"), ('{"', '["')]
)
def test_a_problem_with_a_wrong_call_is_wrong(tokens, old, new):
    settings = TasksSettings(problems=6)
    problems = draw("functions", settings.problems, settings.seed)

    def spoil(text):
        begin = text.index("<|start|>assistant")
        return text[:begin] + text[begin:].replace(old, new, 1)

    known = Knowing(tokens, problems, spoil=spoil)
    assert not any(s.right for s in solve(known.generate, tokens, problems, settings))


def test_an_answer_without_the_call_is_wrong_though_it_is_the_right_one(tokens):
    settings = TasksSettings(problems=6)
    problems = draw("functions", settings.problems, settings.seed)

    def guessed(text):
        begin, end = text.index("<|start|>assistant to="), text.index("<|start|>assistant<|channel|>final")
        return text[:begin] + text[end:]

    known = Knowing(tokens, problems, spoil=guessed)
    solutions = solve(known.generate, tokens, problems, settings)
    assert all(s.answer == s.wanted and not s.right for s in solutions)


def small_target(tokens):
    shape = TargetShape(
        vocab_size=400,
        hidden_size=96,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        expert_size=64,
        num_experts=5,
        sliding_window=7,
        original_max_position=512,
    )
    model = build(shape.config(tokens.end_of_text))
    init_weights(model, 1)
    return model


def test_a_model_that_learnt_nothing_solves_nothing_and_a_stopped_run_goes_on(tokens, monkeypatch, tmp_path):
    settings = TasksSettings(**SMALL, families=("addition", "functions", "talk"))
    target = small_target(tokens)
    whole = run_tasks(target, tokens.tokenizer, settings, tmp_path / "whole", QUIET)
    assert whole["accuracy"] == 0 and [row["family"] for row in whole["families"]] == list(settings.families)
    assert all(row["of"] == 3 and row["longer_of"] == 2 for row in whole["families"])
    real, calls = tasks.solve, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(tasks, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(target, tokens.tokenizer, settings, tmp_path / "parts", QUIET)
    parts = run_tasks(target, tokens.tokenizer, settings, tmp_path / "parts", QUIET)
    assert parts["families"] == whole["families"] and len(calls) == 4 + 9 - 3
    PAGE.write(parts, tmp_path / "parts")
    page = (tmp_path / "parts" / "report.md").read_text()
    assert "| addition | 0 of 3 | 0.0% | 0 of 2 |" in page and "**addition**" in page
    assert json.loads((tmp_path / "parts" / "report.json").read_text())["wrong"]["talk"]


def test_the_table_of_a_report_without_longer_problems():
    row = {
        "family": "talk",
        "right": 3,
        "of": 4,
        "accuracy": 0.75,
        "longer_of": 0,
        "tokens": 9.6,
        "cut_off": 0,
    }
    table = task_table({"families": [row | {"longer_right": 0}]})
    assert table[-2] == "| talk | 3 of 4 | 75.0% | - | 10 | 0 |"


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="no family 'adition'"):
        TasksSettings(families=("adition",))
    with pytest.raises(ValueError, match="problems 0"):
        TasksSettings(problems=0)


def test_a_target_without_harmony_says_so(tmp_path):
    plain = Tokenizer(models.BPE())
    with pytest.raises(ValueError, match="does not use Harmony"):
        run_tasks(None, plain, TasksSettings(), tmp_path, QUIET)
