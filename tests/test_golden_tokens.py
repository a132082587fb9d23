"""The shipped model's answers, token for token, with every draft: a change of any kernel would show here."""

import json
from pathlib import Path

import pytest
import torch

from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.kv.partial import PartialConfig
from outpace.loading import open_draft, open_target
from outpace.ops.sampling import Sampling, generator
from outpace.tasks.prompts import draw
from outpace.text.harmony import HarmonyTokens, prompt_ids

GOLDEN = json.loads((Path(__file__).parent / "golden" / "shipped_tokens.json").read_text())
FAMILIES = "json", "addition", "code edits", "lists"
LONG = 2000  # tokens of the needles' prompt, at least: past the window, and past the KV budget of 512
GREEDY = Sampling()
WARM = Sampling(temperature=0.8, top_p=0.9, top_k=40)
BATCH = range(len(FAMILIES))
# name -> prompts, sampling, acceptance rule, seed; the draft is the name's first part
SHORT = {f"autoregressive/prompt{i}": ([i], GREEDY, "match", 0) for i in BATCH} | {
    f"{draft}/batch": (BATCH, GREEDY, "match", 0)
    for draft in ("autoregressive", "dflash", "dflash-tree", "eagle3", "ngram")
}
SHORT |= {
    "autoregressive/sampled": ([0], WARM, "match", 7),
    "dflash/match": ([0], WARM, "match", 7),
    "dflash/rejection": ([1], WARM, "rejection", 7),
    "dflash/block": ([2], WARM, "block", 7),
    "dflash-tree/rejection": ([1], WARM, "rejection", 7),
    "eagle3/gumbel": ([3], WARM, "gumbel", 7),
    "autoregressive/gumbel": ([3], WARM, "gumbel", 7),
    "autoregressive/min_p": ([0], Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.2), "match", 11),
    "dflash/penalty": ([0], Sampling(repetition_penalty=1.3), "match", 0),
}
LONG_CASES = {
    "autoregressive/long": None,
    "eagle3/long": None,
    "dflash/kv-budget-lossless": "lossless",
    "dflash/kv-budget-lossy": "lossy",
}


@pytest.fixture(scope="module")
def shipped():
    target, tokenizer = open_target("default")
    drafts = {
        "autoregressive": None,
        "dflash": open_draft("dflash", target, tokenizer),
        "dflash-tree": open_draft("dflash", target, tokenizer, num_draft_tokens=16),
        "eagle3": open_draft("eagle3", target, tokenizer),
        "ngram": open_draft("ngram", target, tokenizer),
    }
    # tokens that are drawn depend on a draft's: these texts are of drafts that rounded no activations
    chain, tree = (open_draft("dflash", target, tokenizer, num_draft_tokens=n) for n in (0, 16))
    for draft in (chain.draft, tree.draft.draft):
        draft.use_activation_dtype(torch.float32)
    return target, HarmonyTokens(tokenizer), drafts, drafts | {"dflash": chain, "dflash-tree": tree}


def decode(target, draft, prompts, request, seed, partial=None):
    rng = generator(seed, target.device)
    if draft is None:
        return generate(target, prompts, request, rng=rng).tokens
    return generate(target, prompts, request, draft, rng=rng, partial=partial).tokens


def short(shipped, name):
    target, tokens, *drafts = shipped
    rows, sampling, rule, seed = SHORT[name]
    prompts = [prompt_ids(draw(FAMILIES[i], 1, 3)[0].prompt(), tokens) for i in rows]
    request = Request(max_new_tokens=96, sampling=sampling, rule=rule, stop=tokens.stop)
    draft = drafts[sampling.temperature > 0][name.split("/")[0]]
    return decode(target, draft, prompts, request, seed)


def long(shipped, name):
    target, tokens, drafts, _ = shipped
    mode = LONG_CASES[name]
    partial = Partial(config=PartialConfig.within(512), mode=mode) if mode else None
    problems = (prompt_ids(problem.prompt(), tokens) for problem in draw("needles", 20, 3))
    prompts = [next(ids for ids in problems if LONG < len(ids))]
    request = Request(max_new_tokens=160, stop=tokens.stop)
    return decode(target, drafts[name.split("/")[0]], prompts, request, 0, partial)


def test_every_golden_text_has_a_case():
    assert set(GOLDEN) == set(SHORT) | set(LONG_CASES)


@pytest.mark.parametrize("name", SHORT)
def test_short_prompts_are_answered_as_before(shipped, name):
    assert short(shipped, name) == GOLDEN[name]


@pytest.mark.parametrize("name", LONG_CASES)
def test_a_long_prompt_is_answered_as_before(shipped, name):
    assert long(shipped, name) == GOLDEN[name]
