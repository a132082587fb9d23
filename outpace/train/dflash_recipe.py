"""A DFlash draft of any size and how to train it: the recipe, the initial weights, the draft vocabulary."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer

from outpace.drafts.dflash import DFlash, DFlashConfig
from outpace.models.config import FULL, WINDOW
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded
from outpace.train.drafts import TrainingRecipe
from outpace.train.losses import WEIGHTS, needs_target

GROUP = 16  # channels that share a coefficient of a convolution
CANDIDATES = 16  # of the selector
CONFIDENT = ("match", "overlap")
# parts that a draft may begin without: at their start they change nothing
PARTS = ("_conv.", "candidate_selector.", "markov_head.", "confidence_head.", "d2t")
# matrices that Muon leaves alone: tables of rows, and what begins at 0 and should leave it slowly
BY_ADAM = ("_codebook", "hidden_projection.weight", "kernel_projection.weight", "markov_w1", "w2.weight")


@dataclass(frozen=True, kw_only=True)
class DFlashRecipe(TrainingRecipe):
    """A DFlash draft of any size and how to train it. Fields of recipes/dflash-*.toml."""

    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    block_size: int = 8
    sliding_window: int = 0  # of every layer; 0: they see all of the context
    target_layer_ids: tuple[int, ...] = ()  # of those the cache holds; () is all of them
    anchors: int = 128  # of a row
    rounds: bool = False  # they are where decoding's rounds would begin (train/rounds.py), not anywhere
    loss: str = "ce"  # of train/losses.py: ce, kl, tv, nla, lk, or a sum such as 0.1*ce+0.9*tv
    weights: str = "dpace"  # of the positions of a block: dpace, dpace-soft, decay, auf, flat
    alpha: float = 0.5  # D-PACE's smoothing
    gamma: float | None = None  # of the decay; None: the paper's for this block size
    recompute: bool = False  # layers are run again in the backward: less memory, a third more work
    mask_token: str | None = "<|MASK|>"  # None: a learned mask_embedding
    causal: bool = False  # no slot of a block sees what follows it (JetSpec)
    conv: int = 0  # taps of the convolutions around every sublayer (DFlash 2: 2); 0: none
    selector: int = 0  # rank of the selector over the 16 most probable candidates (DFlash 2: 256); 0: none
    selector_weight: float = 1.0  # of its loss
    markov: int = 0  # rank of the Markov head (DSpark: 256); 0: none
    markov_gated: bool = False
    confidence: bool = False  # a head that states how sure a draft token is (DSpark)
    confidence_weight: float = 1.0  # of its loss
    confident: str = (
        "match"  # learns where draft tokens are right; "overlap": 1 - TV, which needs final states
    )
    draft_vocab: int = 0  # the draft can say the so-many commonest tokens of the cache; 0: all

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_target(self.loss)  # raises for one that is not known
        for name, known in (("weights", WEIGHTS), ("confident", CONFIDENT)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: known are {', '.join(known)}")
        for name in ("conv", "selector", "markov", "draft_vocab", "selector_weight", "confidence_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is below 0")
        if self.anchors < 1:
            raise ValueError(f"anchors {self.anchors}: it must be at least 1")
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window {self.sliding_window}: a count of tokens, or 0 for none")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is outside 0..1")

    @property
    def final(self) -> bool:
        """Whether training needs the target's final states."""
        overlap = self.confidence and self.confident == "overlap"
        return needs_target(self.loss) or self.weights == "dpace-soft" or overlap

    def config(self, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...]) -> DFlashConfig:
        """`held`: the layers where the states the cache holds. Raises ValueError where the mask token is not
        in the vocabulary."""
        theirs = target.config
        mask = None if self.mask_token is None else tokenizer.token_to_id(self.mask_token)
        if mask is None and self.mask_token is not None:
            raise ValueError(
                f"the tokenizer knows no mask_token {self.mask_token!r}: name a token that text never "
                "uses, or none for a learned embedding"
            )
        config = DFlashConfig(
            hidden_size=theirs.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=theirs.vocab_size,
            rope=theirs.rope,
            rms_norm_eps=theirs.rms_norm_eps,
            block_size=self.block_size,
            target_layer_ids=self.target_layer_ids or tuple(held),
            num_target_layers=theirs.num_layers,
            mask_token_id=mask,
            max_position_embeddings=theirs.max_position_embeddings,
        )
        return self.served(config)

    def served(self, config: DFlashConfig) -> DFlashConfig:
        """A trained draft's config with this recipe's block, window and causality, on which no weight
        depends, and with the parts that this recipe adds; those it has already stay as they are."""
        kind = WINDOW if self.sliding_window else FULL
        added: dict[str, Any] = {}
        if self.conv and not config.conv_kernel_size:
            added |= {"conv_kernel_size": self.conv, "conv_group_size": math.gcd(config.hidden_size, GROUP)}
        if self.selector and not config.selector_rank:
            rows = config.draft_vocab_size or self.draft_vocab or config.vocab_size
            added |= {"selector_rank": self.selector, "selector_top_k": min(CANDIDATES, rows)}
        if self.markov and not config.markov_rank:
            added |= {"markov_rank": self.markov, "markov_gated": self.markov_gated}
        if self.draft_vocab and not config.draft_vocab_size:
            added["draft_vocab_size"] = min(self.draft_vocab, config.vocab_size)
        return replace(
            config,
            block_size=self.block_size,
            layer_types=(kind,) * config.num_layers,
            sliding_window=self.sliding_window,
            causal=self.causal and kind == WINDOW,
            causal_full=self.causal and kind == FULL,
            confidence=self.confidence or config.confidence,
            temperatures=(),
            **added,
        )


def init_dflash(config: DFlashConfig, seed: int) -> DFlash:
    """Normal with std 1/sqrt(fan-in); what writes into the residual stream starts at zero, and the optional
    parts where they change nothing."""
    draft, rng = DFlash(config), seeded(seed)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
                p.zero_()
            elif not name.endswith("norm.weight") and not is_part(name):
                p.copy_(torch.randn(p.shape, generator=rng) * p.shape[-1] ** -0.5)
    draft.reset_parts(seeded(seed, 3))
    return draft


def continued(config: DFlashConfig, init: DFlash, seed: int) -> DFlash:
    """`init` with the parts that `config` adds: until they learn, it proposes what it did."""
    draft = DFlash(config)
    draft.reset_parts(seeded(seed, 3))
    missing, left = draft.load_state_dict(init.state_dict(), strict=False)
    assert not left and all(map(is_part, missing)), (missing, left)
    return draft


def is_part(name: str) -> bool:
    return any(part in name for part in PARTS)
