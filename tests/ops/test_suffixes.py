"""The sorted text and what is grown from it, against searching the text from end to end."""

from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels import bindings
from outpace.ops.suffixes import (
    BRANCH,
    CONTEXTS,
    DEEPEST,
    DOUBT,
    ENOUGH,
    OWN_DOUBT,
    RECENT,
    SAMPLES,
    SORTED,
    Suffixes,
)

# few letters, so that contexts repeat; -1 ends an answer
texts = st.lists(st.sampled_from([-1, 0, 1, 2, 3]), min_size=1, max_size=120)
tails = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def of(text):
    return Suffixes.of(torch.tensor(text, dtype=torch.int32))


def grow(answers, message, nodes):
    return answers.grow(torch.tensor(message, dtype=torch.int32), nodes)


@given(texts)
def test_suffixes_stand_in_the_order_of_their_first_tokens(text):
    order = of(text).order.tolist()
    wanted = sorted(range(len(text)), key=lambda i: text[i : i + SORTED])
    assert [text[i : i + SORTED] for i in order] == [text[i : i + SORTED] for i in wanted]
    assert sorted(order) == list(range(len(text)))


def test_of_a_long_run_the_first_tokens_alone_count():
    """More equal suffixes than are told apart: still an order, still every place once."""
    answers = of([5] * 200 + [-1])
    assert sorted(answers.order.tolist()) == list(range(201))
    grown = grow(answers, [5] * 30, 60)
    assert grown.tokens == [5] * DEEPEST and grown.parents == list(range(DEEPEST))


def followers(text, known):
    """By searching: how often each token, or an end, follows `known`."""
    result = defaultdict(int)
    for i in range(len(text) - len(known) + 1):
        if text[i : i + len(known)] == known:
            end = i + len(known)
            result[text[end] if end < len(text) else -1] += 1
    return result


def by_searching(text, message, nodes):
    """The same tree from nothing but counts: paths, and how likely each is reached."""
    contexts, widest, widest_own = [], 0, 0  # tokens, or the places behind them in `said`
    for length in CONTEXTS:
        if length > len(message):
            continue
        own = [p for p in range(length, len(message)) if message[p - length : p] == message[-length:]]
        if len(own) > widest_own:
            contexts.append(own[-RECENT:])
            widest_own = len(own)
        if sum(followers(text, message[-length:]).values()) > widest:
            contexts.append(tuple(message[-length:]))
            widest = sum(followers(text, message[-length:]).values())
    reach, offered, taken = {(): 1.0}, [()], []
    while offered and len(taken) <= nodes:
        path = max(offered, key=lambda p: reach[p])
        offered.remove(path)
        taken.append(path)
        chance, left = defaultdict(float), 1.0
        for context in contexts:
            if isinstance(context, tuple):
                counts, doubt = followers(text, [*context, *path]), DOUBT
            else:
                here = [p + len(path) for p in context if message[p : p + len(path)] == list(path)]
                counts, doubt = Counter(message[p] if p < len(message) else -1 for p in here), OWN_DOUBT
            total = sum(counts.values())
            if total:
                share = left * total / (total + doubt)
                for token, count in counts.items():
                    chance[token] += share * count / total
                left -= share
                if left < ENOUGH:
                    break
        chance.pop(-1, None)
        for token in sorted(chance, key=lambda t: -chance[t])[:BRANCH]:
            reach[*path, token] = reach[path] * chance[token]
            offered.append((*path, token))
    return [reach[p] for p in taken[1:]], reach


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 6]), min_size=1, max_size=SAMPLES), tails)
def test_a_tree_is_what_searching_finds(text, tail):
    """Texts so short that every occurrence is looked at. Equals may are in another order."""
    grown = of(text).lookup(tail).grow(9)
    wanted, reach = by_searching(text, tail, 9)
    assert grown.reach == pytest.approx(wanted)
    paths = [()]
    for token, parent in zip(grown.tokens, grown.parents, strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths)
    assert [reach[p] for p in paths[1:]] == pytest.approx(grown.reach)


@settings(deadline=None)
@given(texts, tails, st.integers(1, 40))
def test_the_kernel_agrees_to_the_bit(text, tail, nodes):
    assert bindings.available()
    answers = of(text)
    assert grow(answers, tail, nodes) == answers.lookup(tail).grow(nodes)


@settings(deadline=None)
@given(texts, tails, st.integers(1, 12), st.integers(0, 20))
def test_the_first_columns_are_the_best_tree_of_so_many(text, tail, nodes, more):
    few, many = grow(of(text), tail, nodes), grow(of(text), tail, nodes + more)
    assert tuple(part[: len(few.tokens)] for part in many) == few
    assert many.reach == sorted(many.reach, reverse=True) and min(many.tokens, default=0) >= 0
    assert all(parent <= column for column, parent in enumerate(many.parents))


def test_where_there_are_no_kernels_it_is_the_same(force_kernels):
    answers = of([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, -1, 3, 1, 4, 1, 5, 8, -1])
    wanted = grow(answers, [3, 1, 4, 1, 5], 6)
    force_kernels(False)
    assert grow(answers, [3, 1, 4, 1, 5], 6) == wanted
    assert {wanted.tokens[0], wanted.tokens[1]} == {9, 8}


def test_a_longer_context_outweighs_a_shorter_one():
    """Behind 1 2 3 4 comes 9, behind any other 3 4 comes 5."""
    answers = of([1, 2, 3, 4, 9, -1] * 3 + [0, 7, 3, 4, 5, -1] * 9)
    assert grow(answers, [1, 2, 3, 4], 2).tokens == [9, 5]
    assert grow(answers, [0, 7, 3, 4], 2).tokens == [5, 9]
    assert grow(answers, [6, 6, 3, 4], 2).tokens == [5, 9]  # nothing but the short one is known


def test_the_text_itself_is_looked_up_first():
    """Behind 1 2 the answers have 3, this text 4; a longer context in the answers outweighs both."""
    answers = of([1, 2, 3, -1] * 6 + [7, 8, 1, 2, 9, -1] * 20)
    assert grow(answers, [1, 2, 4, 0, 0, 1, 2], 1).tokens == [4]
    assert grow(answers, [0, 0, 1, 2], 2).tokens == [9, 3]
    assert grow(answers, [1, 2, 4, 0, 7, 8, 1, 2], 2).tokens == [9, 4]


def test_of_many_places_in_the_text_the_latest_count():
    early, late = [1, 2, 3] * 20, [1, 2, 4] * RECENT
    assert grow(of([-1]), [*early, *late, 1, 2], 1).tokens == [4]
    assert grow(of([-1]), [0, *late, *early, 1, 2], 1).tokens == [3]


def test_nothing_known_is_nothing_proposed():
    assert grow(of([1, 2, 3, -1]), [7, 8], 4) == ([], [], [])
    assert grow(of([-1]), [1], 4) == ([], [], [])
