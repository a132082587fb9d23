"""Output by a JSON schema: what may come next, by brute force; every draft and rule against whole texts."""

import json
import random

import pytest
import tiny
import torch
from scripted import Scripted
from test_lossless import half
from test_trees import ScriptedTree

from examples.tiny_target.make import ALONE
from examples.tiny_target.problem_rows import sample_pieces
from outpace.decode.generate import generate
from outpace.decode.grammar import Grammar, Place, Vocabulary, Where, at_once, schema_text
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.drafts.lookup import NGram
from outpace.kv.partial import PartialConfig
from outpace.models.load import build, named_tensors
from outpace.ops.sampling import Sampling, generator
from outpace.text.harmony import HarmonyTokens
from outpace.text.harmony_parser import HarmonyChat
from outpace.text.messages import Developer, Tool
from outpace.text.template import ChatTemplate, TemplateChat
from outpace.text.tokenizer import train_bpe

V = 400
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "old": {"type": "boolean"},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["name", "old", "size"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"enum": [7, 12, 120]}, "minItems": 2, "maxItems": 3}
PROMPTS = [[31, 97, 205, 64], [88, 12], [301, 302, 303, 304, 305, 306]]
SMALL = PartialConfig(
    block_size=2, n_sink_blocks=1, n_retrieval_blocks=2, n_window_blocks=2, n_spec_tokens_buf=6
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(sample_pieces(1, 30), V, alone=ALONE)


@pytest.fixture(scope="module")
def end(tokenizer):
    return tokenizer.token_to_id("<|return|>")


@pytest.fixture(scope="module")
def vocabulary(tokenizer, end):
    return Vocabulary(tokenizer, V, frozenset({end}))


@pytest.fixture(scope="module")
def target():
    model = build(tiny.config("gpt_oss", vocab_size=V))
    tiny.randomise(named_tensors(model))
    return model.eval()


def grammar(vocabulary, schema, begins=at_once):
    return Grammar.of(vocabulary, schema, begins)


@pytest.mark.parametrize("schema", [PERSON, NUMBERS])
def test_what_may_come_next_is_what_a_fresh_matcher_says(vocabulary, tokenizer, end, schema):
    """Along random texts, to their end; each is JSON of the schema. Where the text is forced, the tokenizer's
    own tokens of it may come alone, while the matcher would take others."""
    rng, known = random.Random(3), grammar(vocabulary, schema)
    for _ in range(4):
        place, text = Place(known), []
        while place.where is Where.INSIDE:
            forced, mask = place.forced(), place.allowed()
            allowed = mask.nonzero()[:, 0].tolist()
            fresh = Place(known)
            assert all(fresh.go(t) for t in text) and torch.equal(fresh.allowed(), mask)
            assert not forced or allowed == forced[:1]
            for token in rng.sample(range(V), 15) + allowed[:5]:
                taken = fresh.go(token)
                assert taken == (token in allowed) or (taken and forced)
                if taken:
                    fresh.back()
            text.append(rng.choice(allowed))
            assert place.go(text[-1])
        assert text[-1] == end and place.allowed() is None
        value = json.loads(tokenizer.decode(text[:-1]))
        if schema is NUMBERS:
            assert 2 <= len(value) <= 3 and set(value) <= {7, 12, 120}
        else:
            assert list(value) == ["name", "old", "size"] and len(value["name"]) <= 6


def test_a_place_goes_back_to_where_it_was(vocabulary, tokenizer, end):
    place = Place(grammar(vocabulary, NUMBERS, lambda tokens: tokens[-1:] == [5]))
    text = [44, 5, *tokenizer.encode("[7, 120]", add_special_tokens=False).ids, end]
    masks = []
    for token in text:
        masks.append(place.allowed())
        assert place.go(token)
    assert place.where is Where.PAST
    for token, mask in zip(reversed(text), reversed(masks), strict=True):
        forked = place.fork()
        place.back()
        again = place.allowed()
        assert (mask is None and again is None) or torch.equal(mask, again)
        assert place.go(token)
        place.back()
        assert len(forked.tokens) == len(place.tokens) + 1  # it went its own way
    assert not place.tokens and place.where is Where.BEFORE


def test_a_token_that_is_refused_changes_nothing(vocabulary, tokenizer, end):
    place = Place(grammar(vocabulary, NUMBERS))
    assert not place.go(end) and not place.go(tokenizer.token_to_id("7")) and not place.tokens
    for token in tokenizer.encode("[7, ", add_special_tokens=False).ids:
        assert place.go(token) and not place.go(end)


def test_forced_tokens_are_what_must_come(vocabulary, tokenizer):
    place = Place(grammar(vocabulary, PERSON))
    forced = place.forced()
    assert tokenizer.decode(forced) == '{"name": "' and all(map(place.go, forced))
    before = Place(grammar(vocabulary, PERSON, lambda tokens: False))
    assert before.forced() == []


def by_whole_texts(target, grammars, end, new):
    """Each token by a forward over the whole text, its logits cut by a matcher that has read all of it."""
    texts = []
    for prompt, known in zip(PROMPTS, grammars, strict=True):
        text = list(prompt)
        while len(text) - len(prompt) < new and text[-1] != end:
            place = Place(known)
            assert all(place.go(t) for t in text[len(prompt) :])
            with torch.inference_mode():
                logits = target.logits(target(torch.tensor([text])).hidden[0, -1])
            allowed = place.allowed()
            text.append(
                int((logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).argmax())
            )
        texts.append(text[len(prompt) :])
    return texts


@pytest.fixture(scope="module")
def grammars(vocabulary):
    """One from the start, one after some tokens, one of any text."""
    return (
        grammar(vocabulary, PERSON),
        grammar(vocabulary, NUMBERS, lambda tokens: len(tokens) == 3),
        grammar(vocabulary, PERSON, lambda tokens: False),
    )


@pytest.fixture(scope="module")
def wanted(target, grammars, end):
    return by_whole_texts(target, grammars, end, 60)


@pytest.mark.parametrize("name", ["none", "ngram", "half", "half, tree", "half, partial"])
def test_every_draft_writes_what_whole_texts_say(target, grammars, wanted, end, tokenizer, name):
    assert list(json.loads(tokenizer.decode(wanted[0][:-1]))) == PERSON["required"]
    assert wanted[0][-1] == wanted[1][-1] == end and len(wanted[2]) > 40
    draft = {
        "none": None,
        "ngram": NGram(block_size=6),
        "half": Scripted(wanted, PROMPTS, half, ragged=True, patient=True),
        "half, tree": ScriptedTree(wanted, PROMPTS, half, 9, True, patient=True),
        "half, partial": Scripted(wanted, PROMPTS, half, ragged=True, patient=True),
    }[name]
    partial = Partial(config=SMALL) if name == "half, partial" else None
    request = Request(max_new_tokens=60, stop=frozenset({end}), grammars=grammars)
    got = generate(target, PROMPTS, request, draft, partial=partial)
    assert got.tokens == wanted
    if name.startswith("half"):
        assert 0 < got.trace.accept_rate < 1


@pytest.mark.parametrize("rule", ["match", "gumbel", "rejection"])
def test_at_a_temperature_the_form_stays(target, grammars, end, tokenizer, rule):
    """And so does the text: nothing that a lookup proposes was drawn."""
    sampling = Sampling(temperature=1.5, top_p=0.9, repetition_penalty=1.2)
    request = Request(
        max_new_tokens=60, stop=frozenset({end}), grammars=grammars, sampling=sampling, rule=rule
    )
    texts = []
    for draft in (None, NGram(block_size=5)):
        got = generate(target, PROMPTS, request, draft, rng=generator(4)).tokens
        texts.append(got)
        for row in got[0], got[1][3:]:
            assert row[-1] == end
            json.loads(tokenizer.decode(row[:-1]))
    assert texts[0] == texts[1]


def test_a_wrong_schema_is_named(vocabulary):
    for schema, message in (
        ({"type": "strng"}, "Invalid type: strng"),
        ({"$ref": "#/nope"}, "Pointer '/nope' does not exist"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no text has its form"),
    ):
        with pytest.raises(ValueError, match=f"the JSON schema cannot be followed: .*{message}"):
            grammar(vocabulary, schema)


def test_a_schema_that_would_keep_others_waiting_is_refused(vocabulary):
    with pytest.raises(ValueError, match=r"has 68,993 characters; the limit is 65,536"):
        grammar(vocabulary, {"enum": [f"value {i}" for i in range(5000)]})
    schema = {"type": "integer"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        grammar(vocabulary, schema)


def test_as_many_grammars_as_prompts(target, grammars):
    request = Request(max_new_tokens=3, grammars=grammars[:2])
    with pytest.raises(ValueError, match="2 grammars for 3 prompts"):
        generate(target, PROMPTS, request)


def test_without_llguidance_the_way_to_it_is_said(tokenizer, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs llguidance: pip install 'outpace\[structured\]'"):
        Vocabulary(tokenizer, V, frozenset({1}))


@pytest.mark.parametrize(
    ("written", "begins"),
    [
        ("<|channel|>final<|message|>", True),
        ("<|channel|>final <|constrain|>json<|message|>", True),
        ("<|channel|>analysis<|message|>12+7=19<|end|><|start|>assistant<|channel|>final<|message|>", True),
        ("<|channel|>analysis<|message|>", False),
        ("<|channel|>analysis<|message|>final<|message|>", False),
        ("<|channel|>commentary to=functions.final <|constrain|>json<|message|>", False),
        ("<|channel|>final", False),
        ("<|channel|>final<|message|>{", False),
        ("final<|message|>", False),
        ("", False),
    ],
)
def test_where_an_answer_in_harmony_begins(tokenizer, end, written, begins):
    chat = HarmonyChat(tokenizer)
    ids = tokenizer.encode(written, add_special_tokens=False).ids
    assert chat.answer_begins(ids) == begins
    assert chat.answer_ends == frozenset({end}) < HarmonyTokens(tokenizer).stop


def test_a_required_call_in_harmony(tokenizer, end):
    tools = (Tool(name='say"so', parameters=PERSON), Tool(name="now"))
    chat = HarmonyChat(tokenizer, developer=Developer(tools=tools))
    (ends,) = chat.call_ends
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size(), chat.call_ends)
    now = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    person = '{"name": "a", "old": true, "size": "small"}'
    said = f'<|channel|>commentary to=functions.say"so <|constrain|>json<|message|>{person}'
    thought = "<|channel|>analysis<|message|>é\n<< now<|end|><|start|>assistant"

    def follows(text, name=None, then=ends):
        place = Place(Grammar.read(vocabulary, chat.call_grammar(name, schema_text)))
        return all(map(place.go, [*tokenizer.encode(text, add_special_tokens=False).ids, then]))

    assert follows(now) and follows(said) and follows(thought + now) and follows(thought + said)
    before = " to=functions.now<|channel|>commentary{}<|message|>{{}}"  # as messages of a history are written
    for kind in (" <|constrain|>json", "<|constrain|>json", " json", ""):
        assert follows(thought + before.format(kind)) and follows(before.format(kind), "now")
        assert not follows(thought + before.format(kind), 'say"so')
    assert not follows(thought + before.format(" text"))
    assert follows(now, "now") and not follows(said, "now") and not follows(thought + now, 'say"so')
    assert not follows(now[:-2]) and not follows(said[:-1])  # a call ends where its arguments do
    assert not follows(thought) and not follows(now, then=end)
    assert not follows("<|channel|>final<|message|>7")
    assert not follows(now.replace("{}", '{"a": 1}')) and not follows(said.replace("true", "1"))
    with pytest.raises(ValueError, match="no function is called 'then'"):
        chat.call_grammar("then", schema_text)


def test_a_call_of_a_strict_function_that_nobody_demands(tokenizer, end):
    """Reasoning, text for the user and calls may come as ever; `person` alone is held to its schema."""
    tools = (Tool(name="person", parameters=PERSON), Tool(name="now", parameters=PERSON))
    chat = HarmonyChat(tokenizer, developer=Developer(tools=tools))
    ends = chat.call_ends | chat.answer_ends
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size(), ends)
    call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
    person = '{"name": "a", "old": true, "size": "small"}'
    thought = "<|channel|>analysis<|message|>é\n<< now<|end|><|start|>assistant"
    note = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"

    def follows(text, answer=None, then=end):
        place = Place(Grammar.read(vocabulary, chat.free_grammar({"person"}, answer, schema_text)))
        return all(map(place.go, [*tokenizer.encode(text, add_special_tokens=False).ids, then]))

    (called,) = chat.call_ends
    for before in ("", thought, note, thought + note + thought):
        assert follows(before + "<|channel|>final<|message|>7 {\n")
        assert follows(before + call.format("person", person), then=called)
        assert follows(before + call.format("now", '{"any": 1'), then=called)
        assert not follows(before + call.format("person", person.replace("true", "1")), then=called)
        assert not follows(before + call.format("person", person[:-1]), then=called)
        assert not follows(before + call.format("then", person), then=called)
        assert not follows(before)
    assert follows(thought + f"<|channel|>final<|message|>{person}", PERSON)
    assert not follows(thought + "<|channel|>final<|message|>7", PERSON)
    assert follows(call.format("person", person), PERSON, called)


def test_where_an_answer_by_a_template_begins():
    tokenizer = train_bpe(["some text"] * 3, 270)
    tokenizer.add_tokens(["<think>", "</think>"])
    before, after = (tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    reasons = plain + "{% if false %}</think>{% endif %}"
    cases = [
        (plain, [], True),
        (plain, [7], False),
        (reasons, [], False),
        (reasons, [before, 7, after], True),
        (reasons, [before, 7, after, 8], False),
        (plain + "<think>\n\n</think>\n\n", [], True),  # closed in the prompt
        (plain + "<think>\n{% if false %}</think>{% endif %}", [], False),  # opened there
        (plain + "<think>\n{% if false %}</think>{% endif %}", [7, after], True),
    ]
    for source, written, begins in cases:
        chat = TemplateChat(tokenizer, ChatTemplate(source=source), frozenset({2}))
        chat.add_user("Hi")
        chat.prompt()
        assert chat.answer_begins(written) == begins, (source, written)
        assert chat.answer_ends == {2}
