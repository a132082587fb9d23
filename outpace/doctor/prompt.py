"""What a chat prompt begins and ends with: Harmony as we render it, and the checkpoint's chat template."""

import re
from collections.abc import Iterator

from tokenizers import Tokenizer

from outpace.doctor.check import Check, Verdict
from outpace.models.config import ModelConfig
from outpace.text.harmony import HarmonyTokens, Mark, prompt_ids, render, speaks_harmony
from outpace.text.messages import Conversation, Message, System
from outpace.text.template import ChatTemplate
from outpace.text.tokenizer import encode, surroundings

MARK = re.compile(r"<\|[^<>|\s]+\|>")  # how Harmony, Llama 3 and Qwen write their special tokens
ANSWER = "A short answer."


def check_beginning(tokenizer: Tokenizer, config: ModelConfig) -> Check:
    """What the tokenizer puts in front of a text: the config's begin token, once, or nothing."""
    name, (before, behind) = "beginning of a text", surroundings(tokenizer)
    tokens = [tokenizer.id_to_token(id) for id in before]
    evidence = {"before": before, "behind": behind}
    if len(set(before)) < len(before):
        return Check(name=name, verdict="fail", message=f"begin tokens twice: {tokens}", evidence=evidence)
    if before and config.bos_token_id is not None and before != [config.bos_token_id]:
        text = f"the tokenizer begins a text with {tokens}, config.json with id {config.bos_token_id}"
        return Check(name=name, verdict="warn", message=text, evidence=evidence)
    text = f"the tokenizer puts {tokens[0]} in front" if before else "the tokenizer puts nothing in front"
    return Check(name=name, verdict="pass", message=text, evidence=evidence)


def check_harmony(tokenizer: Tokenizer, config: ModelConfig) -> Check:
    """gpt-oss: special tokens are one id each, nothing is between the system message and the user's,
    and the answer's channel is left to the model."""
    name = "Harmony"
    if not config.sinks:
        return Check(name=name, verdict="skipped", message="not a gpt-oss")
    if not speaks_harmony(tokenizer):
        missing = [str(m) for m in Mark if tokenizer.token_to_id(m) is None]
        description = (
            f"a gpt-oss where the tokenizer lacks {', '.join(missing)}: it cannot be spoken to in Harmony"
        )
        return Check(name=name, verdict="warn", message=description)
    conversation = Conversation(system=System(), messages=(Message(role="user", content="Hello"),))
    ids, text = prompt_ids(conversation, tokenizer), render(conversation)
    faults = [*_split_marks(tokenizer, map(str, Mark)), *_harmony_faults(tokenizer, ids)]
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        faults.append("the prompt's ids do not decode to the prompt")
    description = "special tokens are single ids, no developer block is added, the answer's channel is shut"
    verdict: Verdict = "fail" if faults else "pass"
    return Check(
        name=name, verdict=verdict, message="; ".join(faults) or description, evidence={"prompt": text}
    )


def check_template(
    tokenizer: Tokenizer, config: ModelConfig, template: ChatTemplate | None, stops: set[int]
) -> Check:
    """The checkpoint's own chat template, on a greeting and on an answer to it."""
    name = "chat template"
    if template is None:
        return Check(name=name, verdict="skipped", message="the checkpoint has none")
    greeting = {"role": "user", "content": "Hello"}
    try:
        prompt = template.render([greeting])
        bare = template.render([greeting], add_generation_prompt=False)
        answered = template.render(
            [greeting, {"role": "assistant", "content": ANSWER}], add_generation_prompt=False
        )
    except ValueError as error:
        return Check(name=name, verdict="fail", message=str(error))
    faults = list(_split_marks(tokenizer, MARK.findall(prompt + answered)))
    remarks = []
    if config.sinks and speaks_harmony(tokenizer):
        faults += _harmony_faults(tokenizer, encode(tokenizer, prompt))
    elif prompt == bare:
        remarks.append("add_generation_prompt adds nothing: the model is not told to answer")
    ends = MARK.findall(answered.rpartition(ANSWER)[2])
    if ends and tokenizer.token_to_id(ends[0]) not in stops and ends[0] != Mark.END:
        remarks.append(f"an answer ends with {ends[0]}, which is no stop token: the model would talk on")
    before, _ = surroundings(tokenizer)
    twice = bool(before) and encode(tokenizer, prompt)[: len(before)] == before
    evidence = {"prompt": prompt, "begins_by_itself": twice}
    if faults or remarks:
        verdict: Verdict = "fail" if faults else "warn"
        return Check(name=name, verdict=verdict, message="; ".join(faults + remarks), evidence=evidence)
    text = f"a prompt of {len(encode(tokenizer, prompt))} tokens, ends with {prompt[-24:]!r}"
    if twice:
        text += "; it writes the begin token itself: do not let the tokenizer add another"
    return Check(name=name, verdict="pass", message=text, evidence=evidence)


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
