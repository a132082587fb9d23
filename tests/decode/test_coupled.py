"""Match and the coupled rule: one seed, one text, whatever the draft and the batch; the penalties, too."""

import functools

import pytest
import tiny
import torch
from scripted import Scripted
from test_lossless import PROMPTS, half, random_dflash
from test_trees import ScriptedTree

from outpace.decode.controller import Fixed
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree
from outpace.ops import sampling as noise
from outpace.ops.sampling import Sampling, shaped

NEW = 14
WAYS = {
    "as it is": Sampling(temperature=1.0),
    "cut": Sampling(temperature=0.8, top_k=30, top_p=0.9, min_p=0.02),
    "penalty": Sampling(temperature=1.1, top_p=0.95, repetition_penalty=1.3),
    "greedy, penalty": Sampling(repetition_penalty=1.5),
    "greedy, output": Sampling(presence_penalty=0.7, frequency_penalty=0.4),
    "all penalties": Sampling(
        temperature=0.9, repetition_penalty=1.2, presence_penalty=-0.6, frequency_penalty=0.5
    ),
    "greedy, bias": Sampling(logit_bias=((0, -100.0), (3, 2.5), (40, -1.5))),
    "bias": Sampling(temperature=1.2, top_k=20, repetition_penalty=1.3, logit_bias=((7, 3.0), (9, -3.0))),
}


def request(way, rule="gumbel", **asked):
    return Request(max_new_tokens=NEW, sampling=WAYS[way], rule=rule, **asked)


def seed(n=3):
    return torch.Generator().manual_seed(n)


@functools.cache
@torch.inference_mode()
def by_definition(family, way):
    """Each token by a forward over the whole text, the penalty by a loop over the text's tokens."""
    model, how, items = tiny.target(family), WAYS[way], []
    key = int(torch.randint(2**63 - 1, (), generator=seed()))
    for b, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for place in range(NEW):
            logits = model.logits(model(torch.tensor([text])).hidden[:, -1])[0].clone()
            for token, bias in how.logit_bias:
                logits[token] += bias
            for token in set(text):
                logits[token] *= how.repetition_penalty ** (1 if logits[token] < 0 else -1)
            for token in text[len(prompt) :]:
                logits[token] -= how.frequency_penalty
            for token in set(text[len(prompt) :]):
                logits[token] -= how.presence_penalty
            if how.temperature:
                logits = shaped(logits, how.for_draft())
                logits += noise.gumbel(noise.keys(key, torch.tensor(b), torch.tensor(place)), len(logits))
            text.append(int(logits.argmax()))
        items.append(text[len(prompt) :])
    return items


def drafts(name, model, known):
    prompts = PROMPTS[: len(known)]
    return {
        "ngram": lambda: NGram(block_size=6),
        "dflash": lambda: random_dflash(model),
        "tree of dflash": lambda: DDTree(random_dflash(model), nodes=9),
        "half": lambda: Scripted(known, prompts, half, ragged=True),
        "half, tree": lambda: ScriptedTree(known, prompts, half, 11, True),
    }[name]()


DRAFTS = ["ngram", "dflash", "tree of dflash", "half", "half, tree"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("family", "rule"), [("gpt_oss", "gumbel"), ("gpt_oss", "match"), ("qwen3", "gumbel")]
)
def test_every_draft_says_what_plain_decoding_says(family, rule, way):
    model, known = tiny.target(family), by_definition(family, way)
    asked = request(way, rule)
    assert generate(model, PROMPTS, asked, rng=seed()).tokens == known
    for name in DRAFTS:
        for batch in (3, 1):
            draft = drafts(name, model, known[:batch])
            got = generate(model, PROMPTS[:batch], asked, draft, rng=seed())
            assert got.tokens == known[:batch], (name, batch)
            if name.startswith("half"):
                assert 0.1 < got.trace.accept_rate < 0.9
    if WAYS[way].temperature:
        assert generate(model, PROMPTS, asked, rng=seed(4)).tokens != known


def test_the_length_of_rounds_changes_nothing():
    model, known = tiny.target("gpt_oss"), by_definition("gpt_oss", "penalty")
    for columns in (1, 2, 3):
        draft = drafts("dflash", model, known)
        got = generate(model, PROMPTS, request("penalty"), draft, rng=seed(), controller=Fixed(columns))
        assert got.tokens == known


def test_rows_that_leave_change_nothing_for_the_others():
    model, known = tiny.target("gpt_oss"), by_definition("gpt_oss", "penalty")
    limits = (3, NEW, 9)
    wanted = [row[:n] for row, n in zip(known, limits, strict=True)]
    asked = request("penalty", limits=limits)
    assert generate(model, PROMPTS, asked, rng=seed()).tokens == wanted
    for name in ("dflash", "tree of dflash"):
        got = generate(model, PROMPTS, asked, drafts(name, model, known), rng=seed())
        assert got.tokens == wanted
    stop = known[0][2]
    wanted = [row[: row.index(stop) + 1] if stop in row else row for row in known]
    asked = request("penalty", stop=frozenset({stop}))
    assert generate(model, PROMPTS, asked, rng=seed()).tokens == wanted
    got = generate(model, PROMPTS, asked, drafts("half", model, known), rng=seed())
    assert got.tokens == wanted


def test_a_stream_goes_with_its_prompt():
    """The same prompt with the same stream, alone, in another order, in other company: the same text."""
    model, known = tiny.target("gpt_oss"), by_definition("gpt_oss", "as it is")
    order = [2, 0, 1]
    asked = request("as it is", streams=tuple(order))
    shuffled = [PROMPTS[i] for i in order]
    assert generate(model, shuffled, asked, rng=seed()).tokens == [known[i] for i in order]
    for i in range(3):
        alone = request("as it is", streams=(i,))
        assert generate(model, [PROMPTS[i]], alone, rng=seed()).tokens == [known[i]]
        got = generate(model, [PROMPTS[i]], alone, drafts("dflash", model, known), rng=seed())
        assert got.tokens == [known[i]]
    twice = generate(model, [PROMPTS[0]] * 2, request("as it is"), rng=seed()).tokens
    assert twice[0] == known[0] != twice[1]
    with pytest.raises(ValueError, match="2 streams for 3 prompts"):
        generate(model, PROMPTS, request("as it is", streams=(0, 1)), rng=seed())


def test_a_draft_that_hears_the_noise_is_accepted_more():
    """A hot target and a random draft are both nearly uniform: they overlap, and share no most probable
    token."""
    model = tiny.target("qwen3")
    draft = random_dflash(model)
    alike = []
    for rule in ("match", "gumbel"):
        asked = Request(max_new_tokens=120, sampling=Sampling(temperature=40.0), rule=rule)
        got = generate(model, PROMPTS, asked, draft, rng=seed())
        alike.append(got.trace.accept_by_position()[0])
    assert alike[0] < 0.05 and alike[1] > 0.4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rule": "greedy"}, "rule 'greedy'"),
        ({"rule": "block", "draft_temperature": 0.0}, "draft_temperature 0.0"),
        ({"rule": "block", "draft_temperature": float("nan")}, "draft_temperature nan"),
        ({"draft_temperature": 0.5}, "the rule match samples no draft tokens"),
    ],
)
def test_requests_that_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Request(max_new_tokens=3, **wrong)
