"""Prompt lookup against a brute-force search of the text."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.drafts.lookup import NGram
from outpace.drafts.sampler import Greedy


def search(text, longest, shortest, guesses):
    """What followed the last earlier occurrence of the longest n-gram that ends the text. The last token
    has not been observed yet: it counts as the end of the n-gram, not as a follower."""
    for n in range(longest, shortest - 1, -1):
        tail = text[-n:]
        for start in range(len(text) - n - 2, -1, -1):
            if len(tail) == n and text[start : start + n] == tail:
                return text[start + n : start + n + guesses]
    return []


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=3),
    st.integers(2, 6),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 7),
)
def test_against_search(rows, block, longest, shortest, chunk):
    shortest = min(shortest, longest)
    session = NGram(block_size=block, longest=longest, shortest=shortest).begin(len(rows), 99)
    texts = [row[:-1] for row in rows]
    for begin in range(0, max(map(len, texts)), chunk):
        parts = [t[begin : begin + chunk] for t in texts]
        counts = [len(p) for p in parts]
        width = max(counts)
        session.observe(torch.tensor([p + [9] * (width - len(p)) for p in parts]), None, counts)
    proposal = session.propose(torch.tensor([row[-1] for row in rows]), block, Greedy())
    for row, ids, count in zip(rows, proposal.tokens.tolist(), proposal.counts, strict=True):
        assert ids[:count] == [row[-1], *search(row, longest, shortest, block - 1)]


def test_no_repetition_no_guess():
    session = NGram().begin(1, 99)
    session.observe(torch.tensor([[1, 2, 3, 4]]), None, [4])
    proposal = session.propose(torch.tensor([5]), 8, Greedy())
    assert proposal.counts == [1] and proposal.tokens.tolist() == [[5]]


letters = st.lists(st.integers(0, 2), max_size=20)


@given(letters, letters.filter(bool), letters)
def test_after_a_rewind_it_proposes_as_a_fresh_session(kept, forgotten, after):
    """Of an n-gram that occurs before and after the rewind, the later places alone are forgotten."""
    draft, sessions = NGram(shortest=1), []
    for pieces in ((kept, forgotten, None, after), (kept, after)):
        session = draft.begin(1, 99)
        for piece in pieces:
            if piece is None:
                session.rewind([len(kept)])
            elif piece:
                session.observe(torch.tensor([piece]), None, [len(piece)])
        sessions.append(session)
    for last in range(3):
        again, fresh = (s.propose(torch.tensor([last]), 8, Greedy()).tokens.tolist() for s in sessions)
        assert again == fresh
