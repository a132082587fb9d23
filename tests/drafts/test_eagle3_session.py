"""An EAGLE-3 session proposes the tokens of a forward over the whole text."""

import pytest
import tiny
import torch
from eagle3_drafts import VARIANTS, Oracle, bound_eagle3, paths

from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.drafts.sampler import Greedy, GumbelCoupled, Sampled
from outpace.ops.sampling import Sampling

B, LONG = 3, 30
PROMPTS = (7, 2, 11)  # tokens of each row before the first proposal
TAKEN = ((3, 1, 2), (1, 4, 1), (2, 1, 4))  # per round and row: tokens that are then verified


@pytest.fixture(autouse=True)
def serving():
    with torch.inference_mode():
        yield


def rounds(bound, offset=0, chunk=5, shapes=None):
    """Ragged prompts in chunks, ragged accepts; after the second round row 1 leaves. Yields (session, the
    oracles of the rows, their last tokens) before every proposal."""
    text = tiny.tokens(B, LONG, seed=4)
    aux = bound.target(text, aux=bound.target_layer_ids, offset=offset).aux
    session = bound.begin(B, LONG, offset)
    begins, rows = [0] * B, list(range(B))

    def observe(counts):
        width = max(counts)
        spans = [range(begin, begin + width) for begin in begins]
        index = torch.tensor([[min(i, LONG - 1) for i in span] for span in spans])
        at = torch.tensor(rows)[:, None]
        session.observe(text[at, index], aux[:, at, index], counts)
        for i, count in enumerate(counts):
            begins[i] += count

    while any(b < p for b, p in zip(begins, PROMPTS, strict=True)):
        observe([min(max(p - b, 0), chunk) for b, p in zip(begins, PROMPTS, strict=True)])
    for number, taken in enumerate(TAKEN):
        if number == 2:
            rows = [2, 0]
            session.select(rows)
            begins = [begins[b] for b in rows]
        oracles = [
            Oracle(bound, aux[:, b, :n], text[b, :n].tolist(), int(text[b, n]), offset)
            for b, n in zip(rows, begins, strict=True)
        ]
        yield session, oracles, torch.stack([text[b, n] for b, n in zip(rows, begins, strict=True)])
        observe([taken[b] for b in rows])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chain_is_what_the_whole_text_says(variant):
    bound = bound_eagle3(tiny.target("gpt_oss"), TreeShape(depth=4), **VARIANTS[variant])
    for session, oracles, last in rounds(bound):
        result = session.propose(last, bound.block_size, Greedy())
        assert result.counts == [5] * len(oracles) and result.parents is None and result.q is None
        for row, oracle in enumerate(oracles):
            wanted, reach = oracle.chain(4)
            assert result.tokens[row].tolist() == [oracle.last, *wanted]
            torch.testing.assert_close(result.survival[row], torch.tensor(reach), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("variant", ["plain", "window", "norms", "two layers"])
@pytest.mark.parametrize("nodes", [6, 14])
def test_a_tree_is_the_best_of_what_the_whole_text_says(variant, nodes):
    shape = TreeShape(depth=4, branch=3, nodes=nodes)
    bound = bound_eagle3(tiny.target("gpt_oss"), shape, **VARIANTS[variant])
    deepest = set()
    for session, oracles, last in rounds(bound):
        result = session.propose(last, bound.block_size, Greedy())
        for row, oracle in enumerate(oracles):
            wanted, got = oracle.tree(shape, nodes), paths(result, row)
            assert got.keys() == wanted.keys() and len(got) == nodes - 1
            for path in wanted:
                assert got[path] == pytest.approx(wanted[path], rel=1e-3)
        deepest |= set(result.deepest)
    assert max(deepest) > (2 if nodes > 6 else 1)  # several levels of the forest are run


@pytest.mark.parametrize("changes", [{}, {"mask_token_id": 2}, {"sliding_window": 4, "fc_norm": True}])
def test_guesses_at_once_are_what_the_whole_text_says(changes):
    bound = bound_eagle3(tiny.target("gpt_oss"), TreeShape(depth=4), parallel=True, **changes)
    for session, oracles, last in rounds(bound):
        result = session.propose(last, bound.block_size, Greedy())
        for row, oracle in enumerate(oracles):
            wanted = oracle.at_once(4)
            assert result.tokens[row].tolist() == [oracle.last, *wanted.argmax(-1).tolist()]
            reach = wanted.amax(-1).cumsum(0).exp().float()
            torch.testing.assert_close(result.survival[row, 1:], reach, atol=1e-5, rtol=1e-3)


def test_guesses_at_once_can_make_a_tree():
    shape = TreeShape(depth=4, branch=3, nodes=8)
    bound = bound_eagle3(tiny.target("gpt_oss"), shape, parallel=True)
    for session, oracles, last in rounds(bound):
        result = session.propose(last, bound.block_size, Greedy())
        for row, oracle in enumerate(oracles):
            rows, pool = oracle.at_once(4), {(): 0.0}
            for depth in range(4):
                top = rows[depth].topk(3)
                pool |= {
                    (*path, int(i)): score + float(v)
                    for path, score in list(pool.items())
                    if len(path) == depth
                    for v, i in zip(top.values, top.indices, strict=True)
                }
            best = sorted(pool, key=lambda path: -pool[path])[1 : shape.nodes]
            assert paths(result, row).keys() == set(best)


@pytest.mark.parametrize("parallel", [False, True])
def test_what_is_drawn_comes_with_its_distribution(parallel):
    """q [B,N,V] is the draft's own, at the temperature it was drawn at: 0 where it has no word."""
    bound = bound_eagle3(tiny.target("gpt_oss"), TreeShape(depth=4), parallel=parallel)
    sampling, rng = Sampling(temperature=1.7), torch.Generator().manual_seed(2)
    for session, oracles, last in rounds(bound):
        result = session.propose(last, bound.block_size, Sampled(sampling, rng))
        assert result.q.shape == (len(oracles), 5, tiny.VOCAB)
        for row, oracle in enumerate(oracles):
            path = result.tokens[row, 1:].tolist()
            value = oracle.at_once(4) if parallel else torch.stack([oracle.after(path[:i]) for i in range(4)])
            wanted = (value / 1.7).softmax(-1).float()
            torch.testing.assert_close(result.q[row, 1:], wanted, atol=1e-5, rtol=1e-3)
            assert result.q[row, 1:].gather(1, result.tokens[row, 1:, None]).min() > 0


@pytest.mark.parametrize("parallel", [False, True])
def test_a_coupled_draft_token_is_chosen_by_the_noise_of_its_place(parallel):
    bound = bound_eagle3(tiny.target("gpt_oss"), TreeShape(depth=4), parallel=parallel)
    sampling = Sampling(temperature=0.8)
    for session, oracles, last in rounds(bound):
        streams = torch.arange(len(oracles))
        places = 5 * streams + 3
        result = session.propose(last, bound.block_size, GumbelCoupled(sampling, 7, streams, places))
        for row, oracle in enumerate(oracles):
            path = result.tokens[row, 1:].tolist()
            value = oracle.at_once(4) if parallel else torch.stack([oracle.after(path[:i]) for i in range(4)])
            alone = GumbelCoupled(sampling, 7, streams[row : row + 1], places[row : row + 1])
            assert alone.tokens(value.float()[None], 1)[0].tolist() == [path]
            assert path != value.argmax(-1).tolist()


def test_far_out_positions_change_nothing():
    near, far = (
        [
            session.propose(last, 5, Greedy()).tokens.tolist()
            for session, _, last in rounds(bound_eagle3(tiny.target("gpt_oss"), TreeShape(depth=4)), offset)
        ]
        for offset in (0, 65536)
    )
    assert near == far


@pytest.mark.parametrize(
    "kind",
    [
        {"shape": TreeShape(depth=4)},
        {"shape": TreeShape(depth=4, branch=3, nodes=9)},
        {"shape": TreeShape(depth=4), "parallel": True},
    ],
)
def test_narrower_proposals_and_skipped_ones(kind):
    """A proposal of fewer positions, or none for some rounds, and the next one is the same as ever."""
    bound = bound_eagle3(tiny.target("gpt_oss"), **kind)
    whole = [s.propose(last, bound.block_size, Greedy()) for s, _, last in rounds(bound)]
    for skipped in ({0}, {0, 1}, {1}):
        for number, (session, oracles, last) in enumerate(rounds(bound)):
            if number in skipped:
                continue
            narrow = session.propose(last, 3, Greedy()) if number == 1 else None
            if narrow is not None:
                assert narrow.tokens.shape == (len(oracles), 3) and max(narrow.deepest) <= 2
                continue
            result = session.propose(last, bound.block_size, Greedy())
            assert torch.equal(result.tokens, whole[number].tokens)


@pytest.mark.parametrize("changes", [{"sliding_window": 5}, {"num_layers": 2, "norm_output": True}])
def test_long_prompts_wait_no_longer_than_they_must(changes):
    """Pieces longer than what may wait are run as they come; the text is the same in one piece."""
    bound = bound_eagle3(tiny.target("gpt_oss"), TreeShape(depth=3), **changes)
    text = tiny.tokens(2, 200, seed=8)
    aux = bound.target(text, aux=bound.target_layer_ids).aux
    items = []
    for pieces in ([200], [90, 3, 100, 7], [1] * 200):
        session = bound.begin(2, 210)
        begin = 0
        for size in pieces:
            session.observe(text[:, begin : begin + size], aux[:, :, begin : begin + size], [size] * 2)
            begin += size
            assert sum(s.tokens.shape[1] for s in session.pending) <= 64
        items.append(session.propose(torch.tensor([9, 10]), 4, Greedy()).tokens.tolist())
    assert items[0] == items[1] == items[2]
    oracle = Oracle(bound, aux[:, 1], text[1].tolist(), 10)
    assert items[0][1] == [10, *oracle.chain(3)[0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "at least 1"),
        ({"branch": 3}, "topk 3 grows a tree"),
        ({"branch": 8, "nodes": 99999}, "a tree of 99999 nodes: at most 1024"),
        ({"depth": 4, "nodes": 9}, "one of 4 draft tokens has 5 nodes, not 9"),
        ({"depth": 1024}, "depth 1024: a round verifies at most 1024 nodes"),
        ({"depth": 5, "branch": 1000, "nodes": 9}, "5000 draft tokens, and 4096 are the most"),
    ],
)
def test_shapes_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TreeShape(**changes)


def test_a_draft_of_another_target_is_refused():
    draft = bound_eagle3(tiny.target("gpt_oss")).draft
    with pytest.raises(ValueError, match="hidden_size 96; this one has 42"):
        BoundEagle3(draft, tiny.target("llama"))
    deep = bound_eagle3(tiny.target("gpt_oss"), layer_ids=(0, 3)).draft
    narrow = bound_eagle3(tiny.target("llama"), layer_ids=(0, 2)).draft
    BoundEagle3(narrow, tiny.target("llama"))
    object.__setattr__(deep.config, "target_hidden_size", 42)
    with pytest.raises(ValueError, match=r"layers \[0, 3\]; this one has layers 0\.\.2"):
        BoundEagle3(deep, tiny.target("llama"))


@pytest.mark.parametrize("proposed", [False, True], ids=["pending", "in the cache"])
def test_after_a_rewind_it_proposes_as_a_fresh_session(proposed):
    """What was observed beyond the rewind leaves no trace: neither pending states nor cached pairs."""
    bound = bound_eagle3(tiny.target("gpt_oss"), TreeShape(depth=3), sliding_window=5)
    text, other = tiny.tokens(2, 40, seed=8), tiny.tokens(2, 40, seed=9)
    other[:, :13] = text[:, :13]  # the twelfth pair is of token 13, too
    aux, other_aux = (bound.target(x, aux=bound.target_layer_ids).aux for x in (text, other))

    def proposal(session, last):
        """With the distribution of the draft: greedy tokens of a random draft hardly depend on its past."""
        rng = torch.Generator().manual_seed(3)
        result = session.propose(last, 4, Sampled(Sampling(temperature=1.0), rng))
        return result.q[:, 1:]

    session, fresh = bound.begin(2, 60, slack=16), bound.begin(2, 60)
    session.observe(text[:, :12], aux[:, :, :12], [12] * 2)
    proposal(session, other[:, 12])
    session.observe(other[:, 12:17], other_aux[:, :, 12:17], [5] * 2)
    if proposed:
        proposal(session, other[:, 17])
    session.rewind([12] * 2)
    session.observe(text[:, 12:20], aux[:, :, 12:20], [8] * 2)
    fresh.observe(text[:, :20], aux[:, :, :20], [20] * 2)
    assert torch.equal(proposal(session, text[:, 20]), proposal(fresh, text[:, 20]))
    assert session.cache.lengths == fresh.cache.lengths == [20, 20]
