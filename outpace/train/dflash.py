"""Train a DFlash draft from a teacher cache (arXiv 2602.06036, section 4.3; D-PACE, arXiv 2605.18810)."""

import hashlib
import json
import subprocess
import time
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from outpace.decode import speculative
from outpace.decode.request import Request
from outpace.drafts.dflash import DFlash, DFlashConfig
from outpace.drafts.load import save_dflash
from outpace.models.config import FULL, WINDOW
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.ops.blocks import block_attend
from outpace.ops.sampling import seeded
from outpace.train.anchors import Packed, Sample, pack
from outpace.train.losses import chunked_nll_and_hits, decay_weights, default_gamma, dpace_weights
from outpace.train.muon import Muon
from outpace.train.trainer import fit, warmup_cosine
from outpace.weights.save import write_json

WEIGHTS = ("dpace", "decay")


class Meta(Protocol):
    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...

    @property
    def hidden_size(self) -> int: ...


class Teacher(Protocol):
    """What training reads of a teacher cache."""

    @property
    def meta(self) -> Meta: ...

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True, kw_only=True)
class DFlashRecipe:
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
    rows: int = 4  # of a step
    row_tokens: int | None = None  # rows are cut to this many tokens
    steps: int = 2000
    lr: float = 6e-4  # AdamW's
    muon_lr: float = 0.0  # 0: AdamW alone; else the matrices learn by Muon at this rate
    warmup_share: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    weights: str = "dpace"  # or "decay"
    alpha: float = 0.5  # D-PACE's smoothing
    gamma: float | None = None  # of the decay; None: the paper's for this block size
    bfloat16: bool = True
    recompute: bool = False  # layers are run again in the backward: less memory, a third more work
    seed: int = 1
    save_every: int = 100
    eval_every: int = 500
    held_out_share: float = 0.02  # of the cache, never trained on: what is learnt by heart shows there
    eval_prompts: int = 8
    eval_new_tokens: int = 128
    mask_token: str | None = "<|MASK|>"  # None: a learned mask_embedding

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights {self.weights!r}: known are {', '.join(WEIGHTS)}")
        for name in ("anchors", "rows", "steps", "save_every", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: it must be at least 1")
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window {self.sliding_window}: a count of tokens, or 0 for none")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share {self.held_out_share} is outside 0..1: some must be trained on")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is outside 0..1")

    def config(self, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...]) -> DFlashConfig:
        """`held`: the layers whose states the cache holds. Raises ValueError where the mask token is not
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
        """A trained draft's config with this recipe's block and window: no weight depends on them."""
        kind = WINDOW if self.sliding_window else FULL
        return replace(
            config,
            block_size=self.block_size,
            layer_types=(kind,) * config.num_layers,
            sliding_window=self.sliding_window,
            causal=False,
        )


def init_dflash(config: DFlashConfig, seed: int) -> DFlash:
    """Normal with std 1/sqrt(fan-in); what writes into the residual stream starts at zero."""
    draft, rng = DFlash(config), seeded(seed)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
                p.zero_()
            elif not name.endswith("norm.weight"):
                p.copy_(torch.randn(p.shape, generator=rng) * p.shape[-1] ** -0.5)
    return draft


def optimizers(draft: DFlash, recipe: DFlashRecipe) -> dict[str, tuple[torch.optim.Optimizer, float]]:
    """AdamW for everything, or for all but the matrices, which are Muon's then; each with its peak rate."""
    matrices = [p for p in draft.parameters() if p.dim() == 2 and recipe.muon_lr]
    known = {id(p) for p in matrices}
    rest = [p for p in draft.parameters() if id(p) not in known]
    how = {"betas": (0.9, 0.95), "weight_decay": recipe.weight_decay, "fused": True}
    found: dict[str, tuple[torch.optim.Optimizer, float]] = {}
    found["adam"] = torch.optim.AdamW(rest, lr=recipe.lr, **how), recipe.lr  # type: ignore[arg-type]
    if matrices:
        found["muon"] = Muon(matrices, recipe.muon_lr, weight_decay=recipe.weight_decay), recipe.muon_lr
    return found


def block_states(
    draft: DFlash, target: Decoder, packed: Packed, dtype: torch.dtype, recompute: bool = False
) -> Tensor:
    """All blocks in one forward: -> hidden [A, B, C]; the state at slot i >= 1 predicts that very position.

    Keys and values of the context are formed once a layer and shared by every block.
    """
    config, (A, B) = draft.config, packed.positions.shape
    scale = config.head_dim**-0.5
    features = draft.context(packed.aux.to(dtype)[:, None])
    context_rope = draft.rope(packed.context_positions[None])
    x = draft.embed_block(packed.anchors, target).to(dtype).view(1, A * B, -1)
    cos, sin = draft.rope(packed.positions.view(1, -1))

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = draft.layers[i].context_kv(features, *context_rope)  # type: ignore[operator]
        k, v, context_k, context_v = (t[0].transpose(0, 1) for t in (k, v, *shared))
        window = config.window(i)
        return block_attend(q[0], k, v, context_k, context_v, packed.layout, window, scale)[None]

    return draft.denoise(x, cos, sin, attend, recompute).view(A, B, -1)


def block_loss(hidden: Tensor, head: Tensor, packed: Packed, recipe: DFlashRecipe) -> tuple[Tensor, Tensor]:
    """hidden [A,B,C], head [V,C] -> loss, a weighted mean over the valid MASKs, and hits [A, B-1]: where
    the draft's first choice is the label."""
    labels, valid = packed.labels, packed.valid
    states = hidden[:, 1:].flatten(0, 1)
    nll, hits = (x.view(labels.shape) for x in chunked_nll_and_hits(states, head, labels.flatten()))
    if recipe.weights == "dpace":
        weights = dpace_weights(nll, valid, recipe.alpha)
    else:
        weights = decay_weights(valid, recipe.gamma or default_gamma(recipe.block_size))
    return (weights * nll).sum() / weights.sum(), hits & valid


def rows_of_step(step: int, recipe: DFlashRecipe, size: int) -> list[int]:
    """The step's rows of an endless walk over a cache of `size`, shuffled anew every epoch."""
    found = []
    for n in range(step * recipe.rows, (step + 1) * recipe.rows):
        epoch, i = divmod(n, size)
        found.append(int(torch.randperm(size, generator=seeded(recipe.seed, 0, epoch))[i]))
    return found


def accuracy(hits: Tensor, valid: Tensor) -> dict[str, Any]:
    """hits and valid [A, n]: the share right at each position, and the mean over blocks of the count of
    leading right ones: the accept_len that these blocks would have had, labels being the target's."""
    right = hits.sum(0) / valid.sum(0).clamp(min=1)
    leading = hits.long().cumprod(1).sum(1).float().mean()
    return {"accept_len": leading.item(), "accuracy": [round(x, 4) for x in right.tolist()]}


def measure_tau(draft: DFlash, target: Decoder, prompts: list[list[int]], new_tokens: int) -> float:
    """Real decoding at temperature 0: tokens per forward of the target, bonus included."""
    stop = frozenset(target.config.eos_token_ids)
    request = Request(max_new_tokens=new_tokens, stop=stop)
    return speculative.generate(target, draft.bind(target), prompts, request).trace.tau


@torch.no_grad()
def unseen(
    draft: DFlash, target: Decoder, samples: list[Sample], recipe: DFlashRecipe, features: list[int] | None
) -> dict[str, Any]:
    """`accuracy` on samples kept from training. Far below the training's, more steps will not help: it
    takes more answers."""
    found, valid = [], []
    for i in range(0, len(samples), recipe.rows):
        rng = seeded(recipe.seed, 2, i)
        rows = samples[i : i + recipe.rows]
        packed = pack(rows, recipe.block_size, recipe.anchors, recipe.row_tokens, rng, features)
        dtype = torch.bfloat16 if recipe.bfloat16 else torch.float32
        hidden = block_states(draft, target, packed, dtype)
        found.append(block_loss(hidden, target.dense_head.to(dtype), packed, recipe)[1])
        valid.append(packed.valid)
    return {f"unseen_{k}": v for k, v in accuracy(torch.cat(found), torch.cat(valid)).items()}


def train_dflash(
    recipe: DFlashRecipe,
    target: Decoder,
    tokenizer: Tokenizer,
    cache: Teacher,
    held_out: list[list[int]],
    folder: Path,
    *,
    init: DFlash | None = None,
    started_from: dict[str, Any] | None = None,
    stop_after: int | None = None,
) -> DFlash:
    """Train, resuming from folder/checkpoint.pt where there is one; -> the draft, float32.

    `target` is frozen from here on. `held_out`: prompts that the cache does not hold, for real acceptance
    every `eval_every` steps. `init`: a draft to start from; its own sizes then stand, not the recipe's, and
    only the block and the window are the recipe's. `started_from`: that draft's provenance. When the last
    step is done, folder/draft holds the draft in z-lab's format and provenance.json. Raises ValueError
    where cache, target and recipe do not fit.
    """
    held = tuple(cache.meta.target_layer_ids)
    draft = _begin(recipe, target, tokenizer, held, init)
    config = draft.config
    features = _features(config, target, held, cache.meta.hidden_size)
    draft.bind(target)
    target.requires_grad_(False)
    dtype = torch.bfloat16 if recipe.bfloat16 else torch.float32
    head = target.dense_head.to(dtype)
    learners = optimizers(draft, recipe)
    warmup = max(1, round(recipe.steps * recipe.warmup_share))
    trained = len(cache) - int(len(cache) * recipe.held_out_share)
    kept = [cache.sample(i) for i in range(trained, len(cache))]

    def update(step: int) -> dict[str, Any]:
        began = time.perf_counter()
        rows = [cache.sample(i) for i in rows_of_step(step, recipe, trained)]
        rng = seeded(recipe.seed, 1, step)
        packed = pack(rows, config.block_size, recipe.anchors, recipe.row_tokens, rng, features)
        factor = warmup_cosine(step, recipe.steps, warmup)
        for optimizer, lr in learners.values():
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
        hidden = block_states(draft, target, packed, dtype, recipe.recompute)
        loss, hits = block_loss(hidden, head, packed, recipe)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(draft.parameters(), recipe.clip)
        for optimizer, _ in learners.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        metrics = {"loss": loss.item(), **accuracy(hits, packed.valid), "lr": recipe.lr * factor}
        metrics["tokens_per_s"] = round(packed.row_tokens / (time.perf_counter() - began), 1)
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps:
            metrics |= _judge(draft, target, kept, held_out, recipe, features)
        return metrics

    parts = {"draft": draft, **{name: optimizer for name, (optimizer, _) in learners.items()}}
    every = recipe.save_every
    fit(folder, recipe.steps, update, parts, save_every=every, title="dflash", stop_after=stop_after)
    if json.loads(_lines(folder)[-1])["step"] + 1 == recipe.steps:
        said = provenance(recipe, config, target, cache, folder) | {"started_from": started_from}
        save_dflash(draft, folder / "draft")
        write_json(folder / "draft" / "provenance.json", said)
    return draft.requires_grad_(False)


def _begin(
    recipe: DFlashRecipe, target: Decoder, tokenizer: Tokenizer, held: tuple[int, ...], init: DFlash | None
) -> DFlash:
    if init is None:
        return init_dflash(recipe.config(target, tokenizer, held), recipe.seed)
    draft = DFlash(recipe.served(init.config))
    draft.load_state_dict(init.state_dict())
    return draft


def _judge(
    draft: DFlash,
    target: Decoder,
    kept: list[Sample],
    held_out: list[list[int]],
    recipe: DFlashRecipe,
    features: list[int] | None,
) -> dict[str, Any]:
    """What the log says every `eval_every` steps, of whichever there is to judge on."""
    metrics = unseen(draft, target, kept, recipe, features) if kept else {}
    if held_out:
        prompts = held_out[: recipe.eval_prompts]
        metrics["tau"] = measure_tau(draft, target, prompts, recipe.eval_new_tokens)
    return metrics


def _features(
    config: DFlashConfig, target: Decoder, held: tuple[int, ...], hidden_size: int
) -> list[int] | None:
    """Indices of the draft's layers among those the cache holds; None where they are all, in order."""
    if hidden_size != target.config.hidden_size:
        raise ValueError(
            f"the cache holds states of width {hidden_size}, this target's are {target.config.hidden_size} "
            "wide: build a cache of this target"
        )
    missing = [i for i in config.target_layer_ids if i not in held]
    if missing:
        raise ValueError(
            f"the cache holds the layers {list(held)}, the draft also reads {missing}: build a cache with "
            f"target_layer_ids {list(config.target_layer_ids)}"
        )
    return None if config.target_layer_ids == held else [held.index(i) for i in config.target_layer_ids]


def provenance(
    recipe: DFlashRecipe, config: DFlashConfig, target: Decoder, cache: Teacher, folder: Path
) -> dict[str, Any]:
    """What provenance.json says: enough to make this draft again, and to know whose it is."""
    lines = [json.loads(line) for line in _lines(folder)]
    meta = asdict(cache.meta) if is_dataclass(cache.meta) else vars(cache.meta)
    return {
        "recipe": asdict(recipe),
        "config": asdict(config),
        "target_fingerprint": fingerprint(target),
        "cache_sha256": hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest(),
        "cache_samples": len(cache),
        "seed": recipe.seed,
        "steps": recipe.steps,
        "git": _git_describe(),
        "torch": torch.__version__,
        "losses": [line["loss"] for line in lines[-20:]],
        "tau": [[line["step"], line["tau"]] for line in lines if "tau" in line],
        "unseen": [[line["step"], line["unseen_accuracy"]] for line in lines if "unseen_accuracy" in line],
    }


def _lines(folder: Path) -> list[str]:
    return (folder / "log.jsonl").read_text().splitlines()


def _git_describe() -> str | None:
    """Of the checkout this file lies in; None for an installed package."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
