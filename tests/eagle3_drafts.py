"""Random EAGLE-3 drafts for the tiny targets, and their predictions worked out one by one."""

import math
from dataclasses import dataclass

import tiny
import torch

from outpace.bench.stages import eagle3_feature, eagle3_stages, norm
from outpace.drafts.eagle3 import Eagle3Config, init_eagle3
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.drafts.vocab import DraftVocabulary
from outpace.formats.load import describe_draft
from outpace.models.load import named_tensors
from outpace.ops.rope import RopeConfig

IDS = torch.arange(0, tiny.VOCAB, 3)[1:]  # what a draft with a vocabulary of its own can say
VARIANTS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "norms": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "one norm": {"norm_before_fc": True, "rope": RopeConfig(theta=15000.0, kind="yarn", factor=8.0,
                                                             original_max_position=32, truncate=False)},
    "two layers": {"num_layers": 2, "sliding_window": 6},
    "own embedding": {"own_embedding": True},
    "whole vocabulary": {"draft_vocab_size": tiny.VOCAB},
    "target's head": {"draft_vocab_size": tiny.VOCAB, "own_head": False},
    "narrow": {"hidden_size": 40, "own_embedding": True},
}  # fmt: skip


def random_eagle3(model, seed=0, *, own_embedding=False, own_head=True, **changes):
    c = model.config
    values = {
        "hidden_size": c.hidden_size, "target_hidden_size": c.hidden_size, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "intermediate_size": 28, "vocab_size": c.vocab_size, "draft_vocab_size": len(IDS),
        "rope": RopeConfig(theta=1000.0), "rms_norm_eps": 1e-5, "layer_ids": (0, 2),
    }  # fmt: skip
    config = Eagle3Config(**(values | changes))
    ids = IDS if config.draft_vocab_size == len(IDS) else None
    draft = init_eagle3(config, seed, ids=ids, own_embedding=own_embedding, own_head=own_head)
    tiny.randomise(named_tensors(draft), seed)
    return draft.eval()


def bound_eagle3(model, shape=None, seed=0, **changes):
    return BoundEagle3(random_eagle3(model, seed, **changes), model, shape or TreeShape())


@dataclass
class Oracle:
    """One row of text. Every answer is worked out over the whole of it, without a memory, in float64."""

    bound: BoundEagle3
    aux: torch.Tensor  # [n, S, C] of the verified tokens
    text: list  # those tokens
    last: int  # and the one after them
    offset: int = 0

    def __post_init__(self):
        draft = self.bound.draft
        described = describe_draft(draft)
        self.w, self.c = described.tensors, described.config
        self.features = eagle3_feature(self.w, self.c, list(self.aux))
        own = self.w.get("embed_tokens.weight")
        self.embedding = self.bound.target.embed_tokens.weight if own is None else own
        self.head = self.w.get("lm_head.weight", self.bound.target.head)
        d2t = self.w.get("d2t")
        self.ids = torch.arange(len(self.head)) if d2t is None else d2t + torch.arange(len(d2t))
        self.known = {}

    def stages(self, following, features):
        embeds = self.embedding.detach()[torch.tensor(following)].double()
        return eagle3_stages(self.w, self.c, features, embeds, self.offset, self.head.detach())

    def wide(self, logits):
        result = torch.full((self.c.vocab_size,), -math.inf, dtype=torch.float64)
        result[self.ids] = logits
        return result.log_softmax(-1)

    def after(self, path):
        """Log-probabilities [V] of what follows the draft tokens `path`."""
        if tuple(path) not in self.known:
            features, following = self.features, [*self.text[1:], self.last]
            for guess in [*path, None]:
                result = self.stages(following, features)
                fed = result["before the head"] if self.c.norm_output else result["hidden"]
                features, following = torch.cat((features, fed[-1:])), [*following, guess]
            self.known[tuple(path)] = self.wide(result["logits"][-1])
        return self.known[tuple(path)]

    def chain(self, depth):
        """The greedy draft tokens, and how likely each prefix is."""
        path, reach = [], [0.0]
        for _ in range(depth):
            row = self.after(path)
            path.append(int(row.argmax()))
            reach.append(reach[-1] + float(row.max()))
        return path, [math.exp(r) for r in reach]

    def tree(self, shape, width):
        """{path: probability} of the best width - 1 of all children that the dynamic tree looks at."""
        frontier, pool = [((), 0.0)], {}
        for _ in range(min(shape.depth, width - 1)):
            children = []
            for path, score in frontier:
                top = self.after(path).topk(min(shape.branch, self.c.draft_vocab_size))
                children += [
                    ((*path, int(i)), score + float(v)) for v, i in zip(top.values, top.indices, strict=True)
                ]
            pool |= dict(children)
            frontier = sorted(children, key=lambda item: -item[1])[: shape.branch]
        best = sorted(pool.items(), key=lambda item: -item[1])[: width - 1]
        return {path: math.exp(score) for path, score in best}

    def at_once(self, depth):
        """P-EAGLE: log-probabilities [depth, V], the masks behind the newest pair."""
        states = self.w["mask_hidden"].view(len(self.c.layer_ids), 1, -1)
        mask = eagle3_feature(self.w, self.c, list(states)).expand(depth - 1, -1)
        embeds = self.embedding.detach()[torch.tensor([*self.text[1:], self.last])].double()
        learnt = self.w.get("mask_embedding")
        token = self.embedding.detach()[self.c.mask_token_id] if learnt is None else learnt
        embeds = torch.cat((embeds, token.double().expand(depth - 1, -1)))
        features = torch.cat((self.features, mask))
        result = eagle3_stages(self.w, self.c, features, embeds, self.offset, self.head.detach())
        return torch.stack([self.wide(row) for row in result["logits"][-depth:]])


def paths(proposal, row):
    """{path of tokens: survival} of one row of a proposal."""
    tokens, parents = proposal.tokens[row].tolist(), proposal.parents[row].tolist()
    values, walked = {}, [()]
    for column in range(1, proposal.counts[row]):
        walked.append((*walked[parents[column]], tokens[column]))
        values[walked[-1]] = float(proposal.survival[row, column])
    return values


def over_all(draft, logits):
    """logits [..., draft_vocab] -> [..., V], -inf at the tokens that the draft cannot say."""
    return DraftVocabulary(draft.target_ids(), draft.config.vocab_size).wide(logits, -torch.inf)


__all__ = ["VARIANTS", "Oracle", "bound_eagle3", "norm", "over_all", "paths", "random_eagle3"]
