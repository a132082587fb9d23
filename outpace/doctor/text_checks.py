"""Checks of the tokenizer, its special tokens, and the prompts that it makes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outpace.checkpoint.tokenizer import generation_stops
from outpace.doctor.check import Check, check_of, skipped
from outpace.models.config import ModelConfig
from outpace.text.harmony import HarmonyTokens, Mark, has_harmony_tokens, prompt_ids, render
from outpace.text.messages import Conversation, Message, System
from outpace.text.template import ChatTemplate
from outpace.text.tokenizer import encode, surroundings

DIFFICULT_TEXTS = {
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
MARK = re.compile(r"<\|[^<>|\s]+\|>")  # how Harmony, Llama 3 and Qwen write their special tokens
ANSWER = "A short answer."
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
    (Qwen composes accents) is no error."""
    lost, outer = {}, []
    for kind, text in DIFFICULT_TEXTS.items():
        wanted = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        content = tokenizer.decode(ids, skip_special_tokens=False)
        if content.strip(" ") != wanted.strip(" "):
            lost[kind] = [wanted, content]
        elif content != wanted:
            outer.append(kind)
    count, errors, warnings = len(DIFFICULT_TEXTS), [], []
    if lost:
        wanted, content = next(iter(lost.values()))
        errors = [
            f"{len(lost)} of {count} texts come back changed ({', '.join(lost)}): {wanted!r} as {content!r}"
        ]
    elif outer:
        warnings = [f"outer spaces are lost or added in {len(outer)} of {count} texts; all else comes back"]
    text = f"{count} texts come back unchanged"
    evidence = {"texts": count, "lost": lost, "outer_spaces": outer}
    return check_of("tokenizer round trip", text, errors=errors, warnings=warnings, evidence=evidence)


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> Check:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    highest, rows = max(ids, default=-1), config.vocab_size
    spare = f" ({rows - highest - 1:,} of them padding)" if rows - highest - 1 else ""
    text = f"{len(ids):,} tokens, {rows:,} rows{spare}"
    errors, warnings = [], []
    if highest >= rows:
        errors = [f"ids go to {highest:,}, the embedding has {rows:,} rows: not this model's tokenizer"]
    elif highest < rows * 0.9:
        warnings = [f"ids end at {highest:,}, the embedding has {rows:,} rows: another model's tokenizer?"]
    evidence = {"tokens": len(ids), "highest_id": highest, "rows": rows}
    return check_of("vocabulary size", text, errors=errors, warnings=warnings, evidence=evidence)


def check_special(tokenizer: Tokenizer, config: ModelConfig, folder: Path) -> Check:
    """Stop, begin and padding ids are tokens, special ones, and the ones that the tokenizer's files name."""
    errors, warnings = [], []
    added = tokenizer.get_added_tokens_decoder()
    stops = stop_ids(config, folder)
    ids = {"eos": sorted(stops), "bos": _some(config.bos_token_id), "pad": _some(config.pad_token_id)}
    for kind, numbers in ids.items():
        for id in numbers:
            if tokenizer.id_to_token(id) is None:
                errors.append(f"{kind} id {id} is no token of this tokenizer")
            elif kind == "eos" and not (id in added and added[id].special):
                errors.append(f"eos id {id} is {tokenizer.id_to_token(id)!r}, an ordinary token")
    if not stops:
        warnings.append("no stop token: generation ends at its limit only")
    eos = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    if eos is not None and stops and tokenizer.token_to_id(eos) not in stops:
        warnings.append(f"tokenizer_config.json's eos_token {eos!r} is none of the stop ids {sorted(stops)}")
    if config.vocab_size == PUBLISHED_VOCABULARY and config.sinks:
        moved = [t for t, id in PUBLISHED.items() if tokenizer.token_to_id(t) != id]
        errors += [f"{t} is {tokenizer.token_to_id(t)}, in gpt-oss it is {PUBLISHED[t]}" for t in moved]
        missing = [t for t in ("<|return|>", "<|call|>") if PUBLISHED[t] not in stops]
        warnings += [f"{t} is not a stop id: generation does not end after it" for t in missing]
    text = ", ".join(f"{kind} {' '.join(map(str, numbers))}" for kind, numbers in ids.items() if numbers)
    evidence = {**ids, "harmony": has_harmony_tokens(tokenizer)}
    return check_of("special tokens", text, errors=errors, warnings=warnings, evidence=evidence)


def stop_ids(config: ModelConfig, folder: Path) -> set[int]:
    """config.json's and generation_config.json's. Raises ValueError where the latter is damaged."""
    return {*config.eos_token_ids, *generation_stops(folder)}


def read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file, or no object in it: these files are hints."""
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


def check_beginning(tokenizer: Tokenizer, config: ModelConfig) -> Check:
    """What the tokenizer puts in front of a text: the config's begin token, once, or nothing."""
    before, after = surroundings(tokenizer)
    tokens = [tokenizer.id_to_token(id) for id in before]
    errors, warnings = [], []
    if len(set(before)) < len(before):
        errors = [f"begin tokens twice: {tokens}"]
    elif before and config.bos_token_id is not None and before != [config.bos_token_id]:
        warnings = [f"the tokenizer begins a text with {tokens}, config.json with id {config.bos_token_id}"]
    text = f"the tokenizer puts {tokens[0] if before else 'nothing'} in front"
    evidence = {"before": before, "behind": after}
    return check_of("beginning of a text", text, errors=errors, warnings=warnings, evidence=evidence)


def check_harmony(tokenizer: Tokenizer, config: ModelConfig) -> Check:
    """gpt-oss: special tokens are one id each, nothing is between the system message and the user's,
    and the answer's channel is left to the model."""
    name = "Harmony"
    if not config.sinks:
        return skipped(name, "not a gpt-oss")
    if not has_harmony_tokens(tokenizer):
        missing = ", ".join(str(m) for m in Mark if tokenizer.token_to_id(m) is None)
        text = f"a gpt-oss with a tokenizer that has no Harmony: it lacks {missing}"
        return check_of(name, "", warnings=[text])
    conversation = Conversation(system=System(), messages=(Message(role="user", content="Hello"),))
    ids, text = prompt_ids(conversation, tokenizer), render(conversation)
    errors = [*_split_marks(tokenizer, map(str, Mark)), *_harmony_faults(tokenizer, ids)]
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        errors.append("the prompt's ids do not decode to the prompt")
    message = "special tokens are single ids, no developer block is added, the answer's channel is not opened"
    return check_of(name, message, errors=errors, evidence={"prompt": text})


def check_template(
    tokenizer: Tokenizer, config: ModelConfig, template: ChatTemplate | None, stops: set[int]
) -> Check:
    """The checkpoint's own chat template, on a greeting and on an answer to it."""
    name = "chat template"
    if template is None:
        return skipped(name, "the checkpoint has none")
    greeting, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}
    try:
        prompt = template.render([greeting])
        bare = template.render([greeting], add_generation_prompt=False)
        answered = template.render([greeting, answer], add_generation_prompt=False)
    except ValueError as error:
        return check_of(name, "", errors=[str(error)])
    errors = list(_split_marks(tokenizer, MARK.findall(prompt + answered)))
    warnings = []
    if config.sinks and has_harmony_tokens(tokenizer):
        errors += _harmony_faults(tokenizer, encode(tokenizer, prompt))
    elif prompt == bare:
        warnings.append("add_generation_prompt adds nothing: no answer is prompted")
    ends = MARK.findall(answered.rpartition(ANSWER)[2])
    if ends and tokenizer.token_to_id(ends[0]) not in stops and ends[0] != Mark.END:
        warnings.append(
            f"an answer ends with {ends[0]}, which is no stop token: generation does not end there"
        )
    before, _ = surroundings(tokenizer)
    twice = bool(before) and encode(tokenizer, prompt)[: len(before)] == before
    text = f"a prompt of {len(encode(tokenizer, prompt))} tokens, ends with {prompt[-24:]!r}"
    if twice:
        text += "; it writes the begin token itself: do not let the tokenizer add another"
    evidence = {"prompt": prompt, "begins_by_itself": twice}
    return check_of(name, text, errors=errors, warnings=warnings, evidence=evidence)


def _split_marks(tokenizer: Tokenizer, marks: Iterator[str] | list[str]) -> Iterator[str]:
    for mark in dict.fromkeys(marks):
        pieces = len(encode(tokenizer, mark))
        if pieces != 1:
            yield f"{mark} is {pieces} tokens, not a special one"


def _harmony_faults(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    """A prompt of a greeting has a system message, the user's, and the beginning of the answer."""
    marks = HarmonyTokens(tokenizer).ids
    headers = [_header(tokenizer, ids[i + 1 :]) for i, id in enumerate(ids) if id == marks[Mark.START]]
    if any(header.startswith("developer") for header in headers):
        yield "a developer block although there are no instructions: the model was not trained on it"
    elif len(headers) != 3:
        yield f"{len(headers)} messages, not three: system, user and the answer's beginning"
    last = ids[-1 - ids[::-1].index(marks[Mark.START]) :] if headers else []
    if marks[Mark.CHANNEL] in last:
        yield "the answer's channel is already open"
    elif marks[Mark.MESSAGE] in last:
        yield "the answer is already started"


def _header(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What is before the next special token."""
    special = tokenizer.get_added_tokens_decoder()
    end = next((i for i, id in enumerate(ids) if id in special), len(ids))
    return tokenizer.decode(ids[:end])
