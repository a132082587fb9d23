"""Trees from a block's marginals: the block's own greedy chain and best-first are its two ends."""

import pytest
import tiny
import torch

from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.sampler import Greedy, GumbelCoupled
from outpace.drafts.tree import DDTree, best_first
from outpace.drafts.vocab import DraftVocabulary
from outpace.models.load import named_tensors
from outpace.ops.rope import RopeConfig
from outpace.ops.sampling import Sampling

BLOCK, V = 5, 11


class Block:
    """A block draft with fixed logits; remembers how it was used."""

    block_size, target_layer_ids, vocab = BLOCK, (1, 3), DraftVocabulary(None, V)

    def __init__(self, batch=2, seed=0):
        self.message = torch.randn(batch, BLOCK - 1, V, generator=torch.Generator().manual_seed(seed)) * 2
        self.calls = []

    def begin(self, batch, length, offset=0, slack=0):
        self.calls.append(("begin", batch, length, offset))
        return self

    def block(self, last, width):
        self.calls.append(("block", width))
        return self.message[:, : width - 1], None

    def tree(self, last, width, nodes, branch):
        return None  # there is no native call

    def observe(self, tokens, aux, counts):
        self.calls.append(("observe", tokens, aux, counts))

    def select(self, batch_indices):
        self.message = self.message[batch_indices]


def session(draft, nodes, branch=16):
    return DDTree(draft, nodes, branch).begin(2, 40, 7)


@pytest.mark.parametrize(("nodes", "width", "depth"), [(12, 12, 4), (12, 3, 2), (3, 3, 2), (40, 25, 4)])
def test_a_tree_is_best_first_over_the_block(nodes, width, depth):
    draft, last = Block(), torch.tensor([4, 9])
    proposal = session(draft, nodes).propose(last, width, Greedy())
    assert draft.calls == [("begin", 2, 40, 7), ("block", depth + 1)]  # no deeper than there are positions
    wanted = best_first(last, draft.message[:, :depth].log_softmax(-1), width)
    for name in ("tokens", "parents", "survival"):
        assert torch.equal(getattr(proposal, name), getattr(wanted, name))
    assert proposal.counts == [width, width] and max(proposal.deepest) <= depth


def test_without_branches_it_is_the_block():
    draft, last = Block(), torch.tensor([4, 9])
    proposal = session(draft, 40, branch=1).propose(last, 40, Greedy())
    assert proposal.tokens.tolist() == torch.cat((last[:, None], draft.message.argmax(-1)), 1).tolist()
    assert proposal.parents.tolist() == [[0, 0, 1, 2, 3]] * 2 and proposal.counts == [BLOCK, BLOCK]


def test_it_stands_where_its_draft_is():
    draft = Block()
    tree = DDTree(draft, 12)
    assert (tree.block_size, tree.target_layer_ids) == (12, (1, 3))
    started = tree.begin(2, 40)
    started.observe("tokens", "aux", [1, 2])
    assert draft.calls[-1] == ("observe", "tokens", "aux", [1, 2])
    started.select([1])
    proposal = started.propose(torch.tensor([9]), 6, Greedy())
    assert torch.equal(
        proposal.tokens, best_first(torch.tensor([9]), draft.message.log_softmax(-1), 6).tokens
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((1, 4), "at least 2"), ((0, 4), "at least 2"), ((1025, 4), "at most 1024"), ((8, 0), "branch 0")],
)
def test_sizes_that_make_no_tree(sizes, message):
    with pytest.raises(ValueError, match=message):
        DDTree(Block(), *sizes)


# ---- drafts where the draft tokens know the one before
# -----------------------------------------------------------

PARTS = {
    "blind": {},
    "selector": {"selector_rank": 9, "selector_top_k": 6},
    "Markov": {"markov_rank": 9},
    "gated Markov, few words": {"markov_rank": 9, "markov_gated": True, "draft_vocab_size": 31},
    "selector, few words": {"selector_rank": 9, "selector_top_k": 6, "draft_vocab_size": 31},
}


def opened(parts, nodes=30, branch=6):
    """A random DFlash over a tiny target that has seen a text, as itself and as a tree."""
    model = tiny.target("llama")
    c = model.config
    config = DFlashConfig(
        hidden_size=c.hidden_size, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
        intermediate_size=28, vocab_size=c.vocab_size, rope=RopeConfig(theta=1000.0), rms_norm_eps=1e-5,
        block_size=BLOCK, target_layer_ids=(0, 2), num_target_layers=c.num_layers, mask_token_id=2, **parts,
    )  # fmt: skip
    draft = DFlash(config)
    tiny.randomise(named_tensors(draft))
    if draft.d2t is not None:
        draft.d2t.copy_(torch.arange(31) * 2 + 3)  # the words 3, 6, ..
    bound = draft.eval().bind(model)
    sessions, text = [x.begin(2, 40) for x in (bound, DDTree(bound, nodes, branch))], tiny.tokens(2, 12)
    aux = model(text, model.make_cache(2, 20), aux=bound.target_layer_ids).aux
    for session in sessions:
        session.observe(text, aux, [12, 7])
    return sessions


@torch.inference_mode()
@pytest.mark.parametrize("parts", PARTS)
def test_the_tree_holds_the_chain_that_its_draft_would_propose(parts):
    parts = PARTS[parts]  # a Markov head looks at every word
    chain, tree = opened(parts, branch=parts.get("selector_top_k") or parts.get("draft_vocab_size") or 97)
    last = torch.tensor([9, 41])
    line, proposal = (s.propose(last, w, Greedy()) for s, w in ((chain, 5), (tree, 30)))
    assert proposal.counts == [30, 30]
    if "draft_vocab_size" in parts:
        assert set(proposal.tokens[:, 1:].flatten().tolist()) <= set(range(3, 96, 3))
    for b in range(2):
        column = 0
        for d in range(1, 5):  # down the most probable child of each
            children = [c for c in range(1, 30) if proposal.parents[b, c] == column]
            if not children:
                break
            column = min(children)
            assert proposal.tokens[b, column] == line.tokens[b, d]
            assert abs(proposal.survival[b, column] - line.survival[b, d]) < 1e-4
        assert d > 1


@torch.inference_mode()
def test_followers_differ_by_what_they_follow():
    """Without pairs, all nodes of a depth rank the same followers."""
    for parts, differ in ((PARTS["blind"], False), (PARTS["selector"], True)):
        proposal = opened(parts, nodes=60)[1].propose(torch.tensor([9, 41]), 60, Greedy())
        best = {}  # the most probable follower of each token of depth 1
        for column in range(59, 0, -1):
            parent = int(proposal.parents[0, column])
            if proposal.tree.depth[0, column] == 2:
                best[parent] = int(proposal.tokens[0, column])
        assert len(best) > 2 and (len(set(best.values())) > 1) == differ


@torch.inference_mode()
def test_coupled_noise_falls_on_a_tree_as_on_the_text():
    """Every node of a depth has the noise of that place: the tree's chain is that of the coupled draft
    tokens."""
    sampler = GumbelCoupled(Sampling(temperature=0.8), 7, torch.tensor([3, 5]), torch.tensor([20, 11]))
    last = torch.tensor([9, 41])
    for parts in (PARTS["blind"], PARTS["selector"] | {"selector_top_k": 97}):
        chain, tree = opened(parts, branch=97)
        line, proposal = (s.propose(last, w, sampler) for s, w in ((chain, 5), (tree, 30)))
        assert line.tokens.tolist() != chain.propose(last, 5, Greedy()).tokens.tolist()
        for b in range(2):
            assert proposal.tokens[b, 1] == line.tokens[b, 1]
            second = [c for c in range(2, 30) if proposal.parents[b, c] == 1]
            assert not second or proposal.tokens[b, min(second)] == line.tokens[b, 2]
    level = torch.randn(2, 1, 97).expand(-1, 4, -1)
    same, apart = sampler.scores(level, 3, level=True), sampler.scores(level, 3)
    assert all(torch.equal(same[:, i], same[:, 0]) for i in range(4))
    assert torch.equal(same[:, 0], apart[:, 0]) and not torch.equal(same[:, 1], apart[:, 1])
