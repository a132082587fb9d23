"""Tokenizer checks: round trip of text, size of the vocabulary, special tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outpace.checkpoint.stops import generation_stops
from outpace.doctor.check import Check, Verdict
from outpace.models.config import ModelConfig
from outpace.text.harmony import speaks_harmony

NASTY = {
    "plain": "Hello, world! It's 3.14159 and 1,000,000.",
    "spaces": "  two  before,   three between, trailing   ",
    "lines": "a\n\n\nb\r\nc\rd\n\te\n",
    "code": "def f(x):\n    return {k: v**2 for k, v in x.items()}  # done\n",
    "accents": "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d \u00dc\u00df",
    "combining": "e\u0301 o\u0308 is not \u00e9 \u00f6",
    "scripts": "日本語 한국어 العربية עברית हिन्दी",
    "emoji": "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽",
    "rare": "\U0001d518\U0001d52b\U0001d526 \U00013000 \u200b\ufeff\u2028|",
    "control": "nul \x00 bell \x07 escape \x1b delete \x7f",
    "long": "a" * 200 + " " * 40 + "1" * 50,
    "no token": "<|start |><|im_start><s ></s >",
}
# OpenAI's vocabulary of 201,088 ids.
PUBLISHED_VOCABULARY = 201088
PUBLISHED = {
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
}


def check_round_trip(tokenizer: Tokenizer) -> Check:
    """text -> ids -> text, for texts that break tokenizers. What the tokenizer's own normaliser changes
    (Qwen composes accents) is no fault."""
    name = "tokenizer round trip"
    lost, outer = {}, []
    for kind, text in NASTY.items():
        wanted = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        content = tokenizer.decode(ids, skip_special_tokens=False)
        if content.strip(" ") != wanted.strip(" "):
            lost[kind] = [wanted, content]
        elif content != wanted:
            outer.append(kind)
    evidence = {"texts": len(NASTY), "lost": lost, "outer_spaces": outer}
    if lost:
        kind, (wanted, content) = next(iter(lost.items()))
        which = ", ".join(lost)
        description = (
            f"{len(lost)} of {len(NASTY)} texts come back changed ({which}): {wanted!r} as {content!r}"
        )
        return Check(name=name, verdict="fail", message=description, evidence=evidence)
    if outer:
        description = (
            f"outer spaces are lost or added in {len(outer)} of {len(NASTY)} texts; all else comes back"
        )
        return Check(name=name, verdict="warn", message=description, evidence=evidence)
    return Check(
        name=name, verdict="pass", message=f"{len(NASTY)} texts come back unchanged", evidence=evidence
    )


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> Check:
    name = "vocabulary size"
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    highest, rows = max(ids, default=-1), config.vocab_size
    evidence = {"tokens": len(ids), "highest_id": highest, "rows": rows}
    if highest >= rows:
        text = f"ids go to {highest:,}, the embedding has {rows:,} rows: not this model's tokenizer"
        return Check(name=name, verdict="fail", message=text, evidence=evidence)
    if highest < rows * 0.9:
        text = f"ids end at {highest:,}, the embedding has {rows:,} rows: another model's tokenizer?"
        return Check(name=name, verdict="warn", message=text, evidence=evidence)
    spare = rows - highest - 1
    text = f"{len(ids):,} tokens, {rows:,} rows" + (f" ({spare:,} of them padding)" if spare else "")
    return Check(name=name, verdict="pass", message=text, evidence=evidence)


def check_special(tokenizer: Tokenizer, config: ModelConfig, folder: Path) -> Check:
    """Stop, begin and padding ids are tokens, special ones, and the ones that the tokenizer's files name."""
    name = "special tokens"
    faults, remarks = [], []
    added = tokenizer.get_added_tokens_decoder()
    stops = stop_ids(config, folder)
    ids = {"eos": sorted(stops), "bos": _some(config.bos_token_id), "pad": _some(config.pad_token_id)}
    for kind, result in ids.items():
        for id in result:
            if tokenizer.id_to_token(id) is None:
                faults.append(f"{kind} id {id} is no token of this tokenizer")
            elif kind == "eos" and not (id in added and added[id].special):
                faults.append(f"eos id {id} is {tokenizer.id_to_token(id)!r}, an ordinary token")
    if not stops:
        remarks.append("no stop token: generation ends at its limit only")
    named = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    if named is not None and stops and tokenizer.token_to_id(named) not in stops:
        remarks.append(f"tokenizer_config.json's eos_token {named!r} is none of the stop ids {sorted(stops)}")
    if config.vocab_size == PUBLISHED_VOCABULARY and config.sinks:
        moved = [t for t, id in PUBLISHED.items() if tokenizer.token_to_id(t) != id]
        faults += [f"{t} is {tokenizer.token_to_id(t)}, in gpt-oss it is {PUBLISHED[t]}" for t in moved]
        late = [t for t in ("<|return|>", "<|call|>") if PUBLISHED[t] not in stops]
        remarks += [f"{t} is not a stop id: the model would talk on after it" for t in late]
    evidence = {**ids, "harmony": speaks_harmony(tokenizer)}
    if faults or remarks:
        verdict: Verdict = "fail" if faults else "warn"
        return Check(name=name, verdict=verdict, message="; ".join(faults + remarks), evidence=evidence)
    shown = ", ".join(f"{kind} {' '.join(map(str, result))}" for kind, result in ids.items() if result)
    return Check(name=name, verdict="pass", message=shown, evidence=evidence)


def stop_ids(config: ModelConfig, folder: Path) -> set[int]:
    """config.json's and generation_config.json's. Raises ValueError where the latter is damaged."""
    return {*config.eos_token_ids, *generation_stops(folder)}


def read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file, or it holds no object: these files are hints."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a token as its text, or as an object around it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _some(id: int | None) -> list[int]:
    return [] if id is None else [id]
