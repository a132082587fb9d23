"""From a trained target to a checkpoint folder: MXFP4 experts, tokenizer, and the provenance next to it."""

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.tiny_target.problem_training import ProblemRecipe, exact_share
from examples.tiny_target.training import TargetRecipe, bits_per_byte
from outpace.checkpoint.save import write_atomically, write_json
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint, load_target
from outpace.models.save import save_target
from outpace.text.corpus import Document, corpus_hash
from outpace.text.harmony import HarmonyTokens, Mark
from outpace.text.tokenizer import END_OF_TEXT, encode
from outpace.train.losses import chunked_nll

SAMPLE_PROMPTS = 16
SAMPLE_PROMPT_TOKENS = 256
SAMPLE_TOKENS = 256
JUDGED_TOKENS = 8192  # at once, on the CPU


def repeated_ngrams(tokens: Sequence[int], n: int) -> float:
    """Share of the n-grams of `tokens` that occur there more than once: 0 is no repetition, 1 a loop."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    if not grams:
        return 0.0
    counts = Counter(grams)
    return sum(c for c in counts.values() if c > 1) / len(grams)


def _save(
    model: Decoder, tokenizer: Tokenizer, run: Path, folder: Path, stops: Sequence[str] = (END_OF_TEXT,)
) -> tuple[Decoder, list[dict[str, Any]]]:
    """To `folder`, experts packed; -> the model as saved, and the log of its training. `stops`: the tokens
    that end an answer."""
    ends = [tokenizer.token_to_id(stop) for stop in stops]
    experts = model.config.num_experts > 0
    save_target(model, folder, pack=experts, dtype=torch.bfloat16, eos_token_id=ends)
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": stops[0], "pad_token": END_OF_TEXT},
    )
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return load_target(folder), log


def _training(recipe: Any, log: list[dict[str, Any]], saved: Decoder) -> dict[str, Any]:
    return {
        "recipe": asdict(recipe),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steps": len(log),
        "training_hours": round(sum(r["seconds"] for r in log) / 3600, 2),
        "loss_curve": [[r["step"], round(r["loss"], 4)] for r in log[:: max(1, len(log) // 100)]],
        "fingerprint": fingerprint(saved),
    }


def publish_solver(
    model: Decoder,
    tokenizer: Tokenizer,
    recipe: ProblemRecipe,
    run: Path,
    folder: Path,
    started_from: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Save to `folder` in HF format and judge what was saved; -> the provenance. `started_from`: that of the
    weights that training began with."""
    stops = (Mark.RETURN, END_OF_TEXT, Mark.CALL)  # in the order of gpt-oss
    saved, log = _save(model, tokenizer, run, folder, stops)
    provenance = {
        **_training(recipe, log, saved),
        "corpus": "generated problems of outpace/tasks; a tenth of them, by hash, is held out",
        "tokens": sum(r["tokens"] for r in log),
        "tokens_supervised": sum(r["supervised"] for r in log),
        "problems": recipe.judged_problems,
        "exact": exact_share(saved, HarmonyTokens(tokenizer), recipe.judged_problems, JUDGED_TOKENS),
        "exact_curve": [[r["step"], round(r["exact"], 4)] for r in log if "exact" in r],
        "started_from": started_from,
    }
    write_json(folder / "provenance.json", provenance)
    return provenance


def publish_target(
    model: Decoder,
    tokenizer: Tokenizer,
    recipe: TargetRecipe,
    train: list[Document],
    held_out: list[Document],
    run: Path,
    folder: Path,
    started_from: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Save to `folder` in HF format and judge what was saved, not what was trained; -> the provenance.
    `started_from`: the provenance of the weights that training began with."""
    saved, log = _save(model, tokenizer, run, folder)
    provenance = {
        **_training(recipe, log, saved),
        "corpus": "the standard library's *.py, split by file name",
        "corpus_sha256": corpus_hash(train + held_out),
        "train_files": len(train),
        "held_out_files": len(held_out),
        "tokens": len(log) * recipe.step_tokens,
        **judge_target(saved, tokenizer, held_out, recipe.own_ngram),
        "started_from": started_from,
    }
    write_json(folder / "provenance.json", provenance)
    return provenance


def judge_target(target: Decoder, tokenizer: Tokenizer, held_out: list[Document], n: int) -> dict[str, Any]:
    """Held-out bits per byte; of greedy continuations the share of repeated n-grams and the mean probability
    of a token; three samples."""
    prompts = []
    for document in held_out:
        ids = encode(tokenizer, document.text)
        if len(ids) > 2 * SAMPLE_PROMPT_TOKENS:
            start = len(ids) // 3
            prompts.append(ids[start : start + SAMPLE_PROMPT_TOKENS])
    prompts = prompts[:: max(1, len(prompts) // SAMPLE_PROMPTS)][:SAMPLE_PROMPTS]
    value = generate(target, prompts, Request(max_new_tokens=SAMPLE_TOKENS)).tokens
    samples = [
        {"prompt_end": tokenizer.decode(p[-40:]), "continuation": tokenizer.decode(s)}
        for p, s in list(zip(prompts, value, strict=True))[:3]
    ]
    return {
        "held_out_bits_per_byte": round(bits_per_byte(target, tokenizer, held_out), 4),
        "repeated_ngram": n,
        "repeated_share": round(sum(repeated_ngrams(s, n) for s in value) / len(value), 4),
        "repeated_share_of_real_text": round(_real_repeats(tokenizer, held_out, n), 4),
        "repeated_prompts": len(value),
        "greedy_probability": round(sureness(target, prompts, value), 4),
        "greedy_samples": samples,
    }


@torch.inference_mode()
def sureness(target: Decoder, prompts: list[list[int]], items: list[list[int]]) -> float:
    """Mean probability of the target's own greedy tokens: what it is not sure of, no draft can predict."""
    likely = []
    for prompt, tokens in zip(prompts, items, strict=True):
        hidden = target(torch.tensor([prompt + tokens[:-1]])).hidden[0, len(prompt) - 1 :]
        likely.append(torch.exp(-chunked_nll(hidden, target.dense_head, torch.tensor(tokens))))
    return torch.cat(likely).mean().item()


def _real_repeats(tokenizer: Tokenizer, held_out: list[Document], n: int) -> float:
    """The same measure over windows of the held-out files themselves: Python repeats itself too."""
    shares = []
    for document in held_out:
        ids = encode(tokenizer, document.text)
        start = len(ids) // 3 + SAMPLE_PROMPT_TOKENS
        if len(ids) >= start + SAMPLE_TOKENS:
            shares.append(repeated_ngrams(ids[start : start + SAMPLE_TOKENS], n))
    return sum(shares) / max(1, len(shares))
