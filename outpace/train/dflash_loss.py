"""What a DFlash's packed blocks are worth: the block loss, the selector's and the confidence head's."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_decode import Head, confidence
from outpace.drafts.dflash_heads import Selector
from outpace.drafts.sampler import Greedy
from outpace.models.decoder import Decoder
from outpace.train.anchors import Packed
from outpace.train.dflash_recipe import DFlashRecipe
from outpace.train.losses import LossRows, block_losses, block_weights, default_gamma

ROWS = 1024  # where the candidates are looked at together


@dataclass(frozen=True)
class ValidationLoss:
    """loss: a scalar with its gradient to come; hits [A, n] bool: where the draft states the label, its
    predecessor given; more: for the log."""

    loss: Tensor
    hits: Tensor
    more: dict[str, float]


@dataclass(frozen=True)
class Objective:
    """A draft's loss against one target. head [N, C]: the rows of the target's head that the draft can say,
    in the training's dtype; row_of [V] int64: which row a token has, -1 for none; None: its own id."""

    draft: DFlash
    recipe: DFlashRecipe
    head: Tensor
    row_of: Tensor | None

    @staticmethod
    def of(draft: DFlash, target: Decoder, recipe: DFlashRecipe) -> "Objective":
        ids = Head.of(target, draft.d2t).ids
        head, dtype = target.dense_head.detach(), recipe.dtype(target.device)
        if ids is None:
            return Objective(draft, recipe, head.to(dtype), None)
        row_of = torch.full((target.config.vocab_size,), -1, device=ids.device)
        row_of[ids] = torch.arange(len(ids), device=ids.device)
        return Objective(draft, recipe, head[ids].to(dtype), row_of)

    def __call__(self, hidden: Tensor, packed: Packed) -> ValidationLoss:
        """hidden [A, B, C], of which slot i >= 1 predicts its own position.

        Every part learns with the true predecessor. A token that the draft cannot say teaches nothing but
        that it is not accepted.
        """
        draft, recipe = self.draft, self.recipe
        states, tokens = hidden[:, 1:].flatten(0, 1), packed.labels.flatten()
        previous = predecessors(packed).flatten()
        labels = tokens if self.row_of is None else self.row_of[tokens]
        given, head = states, self.head
        if draft.markov_head is not None:  # U + e W_2^T, as one product
            w2 = draft.markov_head.markov_w2.weight
            assert isinstance(w2, Tensor)
            given = torch.cat((states, draft.markov_head.embed(previous, states)), dim=-1)
            head = torch.cat((head, w2.to(head.dtype)), dim=-1)
        final = None if packed.final is None else packed.final.flatten(0, 1).to(self.head.dtype)
        theirs = None if final is None else self.head
        selector = draft.candidate_selector  # never next to a Markov head: its candidates are of these logits
        top = 0 if selector is None else selector.top_k
        rows = block_losses(recipe.loss, given, head, labels, final, theirs, top=top)
        known, shape = (labels >= 0) & packed.valid.flatten(), packed.valid.shape
        gamma = recipe.gamma or default_gamma(packed.layout.block)
        unknown = replace(rows, nll=rows.nll.masked_fill(labels < 0, torch.inf))
        validation = unknown if recipe.weights == "dpace" else rows
        how = {"alpha": recipe.alpha, "gamma": gamma}
        weights = block_weights(recipe.weights, validation, packed.valid, **how).flatten()
        loss, hits, more = _mean(rows.loss, weights * known), rows.hits & known, {}
        if selector is not None and rows.top is not None:
            nll, chosen, has = self.selected(selector, states, rows.top, labels, previous)
            more = {"recall": (has & known).sum().item() / max(1, int(known.sum()))}
            more["base_accept_len"] = _leading(hits.view(shape))
            hits = chosen & known
            loss = loss + recipe.selector_weight * _mean(nll, weights * (known & has))
        if draft.confidence_head is not None:
            bce = self.confident(states, previous, hits, rows)
            loss = loss + recipe.confidence_weight * _mean(bce, weights * packed.valid.flatten())
            more["confidence_loss"] = _mean(bce.detach(), packed.valid.flatten().float()).item()
        return ValidationLoss(loss, hits.view(shape), more)

    def selected(
        self, selector: Selector, states: Tensor, top: Tensor, labels: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Per row, of its candidates `top` [n, k]: -log of the label's share among them (0 where it is none),
        whether it has the largest score, and whether it is among them. Gradients reach the states too: the
        candidates' own logits are part of their scores."""
        items = []
        for i in range(0, len(states), ROWS):
            part = slice(i, i + ROWS)
            rows = top[part]
            given = (selector, states[part], rows, previous[part])
            scores = checkpoint(self._scores, *given, use_reentrant=False)
            is_label = rows == labels[part, None]
            place, has = is_label.long().argmax(-1), is_label.any(-1)
            nll = F.cross_entropy(scores, place, reduction="none") * has
            items.append((nll, has & (scores.detach().argmax(-1) == place), has))
        nll, chosen, has = (torch.cat(x) for x in zip(*items, strict=True))
        return nll, chosen, has

    def _scores(self, selector: Selector, states: Tensor, rows: Tensor, previous: Tensor) -> Tensor:
        values = torch.einsum("nkc,nc->nk", self.head[rows], states)
        ids = rows if self.draft.d2t is None else rows + self.draft.d2t[rows]
        return selector.scores(previous, ids, values, selector.hidden_projection(states))

    def confident(self, states: Tensor, previous: Tensor, hits: Tensor, rows: LossRows) -> Tensor:
        """Binary cross-entropy per row. The states learn nothing from it: what is stated about a draft token
        shall not change the draft token."""
        draft = self.draft
        assert draft.confidence_head is not None
        parts = draft.candidate_selector, draft.markov_head
        logit = confidence(draft.confidence_head, *parts, states.detach(), previous)
        wanted = hits.float()
        if self.recipe.confident == "overlap":
            assert rows.accept is not None
            wanted = rows.accept.clamp(0, 1)
        return F.binary_cross_entropy_with_logits(logit, wanted, reduction="none")


def predecessors(packed: Packed) -> Tensor:
    """[A, n]: the true token before each label."""
    return torch.cat((packed.anchors[:, None], packed.labels[:, :-1]), dim=1)


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    return (weights * x).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)


def _leading(hits: Tensor) -> float:
    return hits.long().cumprod(1).sum(1).float().mean().item()


@torch.no_grad()
def served_guesses(draft: DFlash, head: Head, hidden: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """hidden [A, B, C] -> hits and sure [A, n]: what serving would predict after the true predecessors,
    through the code that serves."""
    states, previous = hidden[:, 1:].flatten(0, 1)[:, None], predecessors(packed).flatten()
    items = []
    for i in range(0, len(states), ROWS):
        part = slice(i, i + ROWS)
        items.append(draft.guess(head, states[part], previous[part], Greedy()))
    hits = torch.cat([g.tokens[:, 0] for g in items]).view(packed.labels.shape) == packed.labels
    return hits & packed.valid, torch.cat([g.sure[:, 0] for g in items]).view(hits.shape)
