"""The rules on the embedded model and its draft, as a user has them: in Python and on the command line."""

import functools
import json

import pytest
import torch
from questions import QUESTION

from outpace.cli.main import main
from outpace.decode.controller import Fixed
from outpace.decode.generate import generate
from outpace.decode.request import RULES, Request
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree
from outpace.loading import open_draft, open_target
from outpace.ops.sampling import Sampling, probabilities
from outpace.tasks.prompts import problem_prompts
from outpace.text.harmony import HarmonyTokens

NEW = 24


@functools.cache
def embedded():
    target, tokenizer = open_target("default")
    return target, open_draft("dflash", target, tokenizer), tokenizer


@functools.cache
def prompts():
    return problem_prompts(HarmonyTokens(embedded()[2]), 3, 3, 150)


@functools.cache
def plainly(request):
    return generate(embedded()[0], prompts(), request, rng=torch.Generator().manual_seed(5)).tokens


def drafted(request, draft):
    rng = torch.Generator().manual_seed(5)
    return generate(embedded()[0], prompts(), request, draft, rng=rng)


@pytest.mark.parametrize("rule", RULES)
def test_at_temperature_0_all_rules_are_one(rule):
    how = Sampling(repetition_penalty=1.3)
    got = drafted(Request(max_new_tokens=NEW, sampling=how, rule=rule), embedded()[1])
    assert got.tokens == plainly(Request(max_new_tokens=NEW, sampling=how)) and got.trace.tau > 1


@pytest.mark.parametrize("kind", ["dflash", "ngram", "tree"])
def test_one_seed_is_one_text(kind):
    draft = embedded()[1]
    chosen = {"dflash": draft, "ngram": NGram(), "tree": DDTree(draft, nodes=12)}[kind]
    for how in (Sampling(temperature=1.0), Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2)):
        request = Request(max_new_tokens=NEW, sampling=how, rule="gumbel")
        got = drafted(request, chosen)
        assert got.tokens == plainly(request)
        if kind != "ngram":
            assert got.trace.tau > 1.1


@functools.cache
@torch.inference_mode()
def exact(prompt, how):
    """The likely texts of three tokens after `prompt`, at most top_k^3 of them, and their chances."""
    target, texts, chance = embedded()[0], torch.empty(1, 0, dtype=torch.int64), torch.ones(1)
    for _ in range(3):
        rows = torch.cat((torch.tensor(prompt).expand(len(texts), -1), texts), dim=1)
        p, token = probabilities(target.logits(target(rows).hidden[:, -1]), how).topk(how.top_k)
        texts = torch.cat((texts.repeat_interleave(how.top_k, 0), token.view(-1, 1)), dim=1)
        chance = chance.repeat_interleave(how.top_k) * p.flatten()
    return texts, chance


@pytest.mark.parametrize("rule", RULES)
def test_texts_come_as_often_as_they_should(rule):
    """500 rows of one prompt; a round verifies two draft tokens of each. Hot, for the target is sure of its
    words: at temperature 1 one text would have all the chance."""
    target, draft, _ = embedded()
    how, rows = Sampling(temperature=10.0, top_k=4), 500
    prompt = [*prompts()[2], *plainly(Request(max_new_tokens=18))[2]]  # past the header
    request = Request(max_new_tokens=3, sampling=how, rule=rule)
    got = generate(
        target, [prompt] * rows, request, draft, rng=torch.Generator().manual_seed(8), controller=Fixed(3)
    )
    texts, chance = exact(tuple(prompt), how)
    place = {tuple(text): i for i, text in enumerate(texts.tolist())}
    counts = torch.bincount(torch.tensor([place[tuple(t)] for t in got.tokens]), minlength=len(texts))
    often = chance * rows > 6
    counts = torch.cat((counts[often], counts[~often].sum()[None])).double()
    expected = torch.cat((chance[often], chance[~often].sum()[None])).double() * rows
    k = len(counts) - 1
    x = float(((counts - expected) ** 2 / expected).sum())
    assert k > 10 and (x - k) / (2 * k) ** 0.5 < 4
    assert got.trace.accept_rate > 0.25


def outpace(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["outpace", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    given = capsys.readouterr()
    return ended.value.code, given.out, given.err


def test_generate_with_a_rule(monkeypatch, capsys):
    sampling = ("--temperature", 1, "--min-p", 0.02, "--seed", 3, "--repetition-penalty", 1.1)
    options = ("generate", "default", QUESTION, "--chat", "-n", 20, *sampling, "--json")
    names = set()
    for draft in ("none", "ngram", "dflash"):
        code, out, _ = outpace(monkeypatch, capsys, *options, "--draft", draft, "--acceptance", "gumbel")
        assert code == 0
        names.add(tuple(json.loads(out)["tokens"]))
    assert len(names) == 1
    for rule in ("rejection", "block"):
        more = ("--acceptance", rule, "--draft-temperature", 0.7, "--top-logits", 2)
        code, out, _ = outpace(monkeypatch, capsys, *options, *more)
        data = json.loads(out)
        assert code == 0 and len(data["tokens"]) == len(data["top_logits"]) > 1


def test_chat_with_a_rule(monkeypatch, capsys):
    sampling = ("--acceptance", "gumbel", "--temperature", 1, "--seed", 2)
    options = ("chat", "default", "-m", "hi", "-n", 12, *sampling, "--json")
    names = set()
    for draft in ("none", "dflash"):
        code, out, _ = outpace(monkeypatch, capsys, *options, "--top-k", 50, "--draft", draft)
        assert code == 0
        names.add(tuple(json.loads(out)["tokens"]))
    assert len(names) == 1


@pytest.mark.parametrize("command", [("generate", "default", "x"), ("chat", "-m", "x")])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--acceptance", "greedy"), "rule 'greedy': it must be one of match, rejection, block, gumbel"),
        (("--min-p", "1.5"), "min_p 1.5 is outside [0, 1]"),
        (("--repetition-penalty", "0"), "repetition_penalty 0.0 is not above 0"),
        (("--repetition-penalty", "nan"), "repetition_penalty nan is not a number"),
        (("--draft-temperature", "0.5"), "the rule match samples no draft tokens"),
        (
            ("--acceptance", "block", "--draft-temperature", "0"),
            "draft_temperature 0.0 is outside [1e-06, 1e+06]",
        ),
    ],
)
def test_bad_values_end_in_one_line(monkeypatch, capsys, command, options, message):
    code, _, err = outpace(monkeypatch, capsys, *command, *options)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err
