"""The shipped models' output, token for token, as it was before the package was reorganised."""

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
from outpace.text.tokenizer import encode_prompt

GOLDEN = json.loads((Path(__file__).parent / "golden" / "shipped_tokens.json").read_text())
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\nclass Path:\n",
    "# A queue that several threads share.\n",
    "    def __init__(self, name, *args, **kwargs):\n        ",
)
LONG = "\n".join(
    f'def function_{i}(x, y={i}):\n    """Return x plus {i} times y."""\n    return x + {i} * y\n'
    for i in range(40)
)
GREEDY = Sampling()
WARM = Sampling(temperature=0.8, top_p=0.9, top_k=40)
BATCH = range(len(PROMPTS))
# name -> prompts, sampling, acceptance rule, seed; the draft is the name's first part
SHORT = {f"autoregressive/prompt{i}": ([i], GREEDY, "match", 0) for i in BATCH} | {
    f"{draft}/batch": (BATCH, GREEDY, "match", 0)
    for draft in ("autoregressive", "dflash", "dflash-tree", "suffix", "ngram")
}
SHORT |= {
    "autoregressive/sampled": ([0], WARM, "match", 7),
    "dflash/match": ([0], WARM, "match", 7),
    "dflash/rejection": ([1], WARM, "rejection", 7),
    "dflash/block": ([2], WARM, "block", 7),
    "dflash-tree/rejection": ([1], WARM, "rejection", 7),
    "suffix/gumbel": ([3], WARM, "gumbel", 7),
    "autoregressive/gumbel": ([3], WARM, "gumbel", 7),
    "autoregressive/min_p": ([0], Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.2), "match", 11),
    "dflash/penalty": ([0], Sampling(repetition_penalty=1.3), "match", 0),
}
LONG_CASES = {
    "autoregressive/long": None,
    "suffix/long": None,
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
        "suffix": open_draft("suffix", target, tokenizer, num_draft_tokens=16),
        "ngram": open_draft("ngram", target, tokenizer),
    }
    # tokens that are drawn depend on a draft's: these texts are of drafts that rounded no activations
    chain, tree = (open_draft("dflash", target, tokenizer, num_draft_tokens=n) for n in (0, 16))
    for draft in (chain.draft, tree.draft.draft):
        draft.use_activation_dtype(torch.float32)
    return target, tokenizer, drafts, drafts | {"dflash": chain, "dflash-tree": tree}


def decode(target, draft, prompts, request, seed, partial=None):
    rng = generator(seed, target.device)
    if draft is None:
        return generate(target, prompts, request, rng=rng).tokens
    return generate(target, prompts, request, draft, rng=rng, partial=partial).tokens


def test_every_golden_text_has_a_case():
    assert set(GOLDEN) == set(SHORT) | set(LONG_CASES)


@pytest.mark.parametrize("name", SHORT)
def test_short_prompts_decode_as_before(shipped, name):
    target, tokenizer, *drafts = shipped
    rows, sampling, rule, seed = SHORT[name]
    prompts = [encode_prompt(tokenizer, PROMPTS[i]) for i in rows]
    request = Request(max_new_tokens=96, sampling=sampling, rule=rule)
    draft = drafts[sampling.temperature > 0][name.split("/")[0]]
    assert decode(target, draft, prompts, request, seed) == GOLDEN[name]


@pytest.mark.parametrize("name", LONG_CASES)
def test_a_long_prompt_decodes_as_before(shipped, name):
    """2,280 tokens: past the window, and past the KV budget of 512."""
    target, tokenizer, drafts, _ = shipped
    mode = LONG_CASES[name]
    partial = Partial(config=PartialConfig.within(512), mode=mode) if mode else None
    prompts = [encode_prompt(tokenizer, LONG)]
    request = Request(max_new_tokens=160)
    assert decode(target, drafts[name.split("/")[0]], prompts, request, 0, partial) == GOLDEN[name]
