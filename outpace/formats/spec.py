"""A draft as files hold it, whichever engine they were written for: one description per kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.checkpoint.open import Checkpoint, LoadError
from outpace.drafts.dflash import parts_of, shapes_of_parts
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.eagle3 import Eagle3Config
from outpace.models.config import FULL, WINDOW, ModelConfig
from outpace.models.load import Comparison, explain
from outpace.ops.quant import dense
from outpace.ops.rope import RopeConfig

TensorShape = tuple[int, ...]

# what a rope of each kind is made of; the other fields of a RopeConfig mean nothing there
ROPE_FIELDS = {
    "default": ("theta",),
    "linear": ("theta", "factor"),
    "llama3": ("theta", "factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "theta",
        "factor",
        "original_max_position",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
    ),
    "factors": ("theta", "factors"),
}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class FormatWarning:
    """What a format, or one of the engines that read it, cannot hold of a draft. `fatal`: all that read
    the format would take it wrongly, so it is not written."""

    check: str  # a row of `outpace preflight`
    engine: str
    message: str
    fatal: bool = False


@dataclass(frozen=True, kw_only=True)
class TargetFiles:
    """The target that a draft belongs to: some formats need its name, its embedding, head or tokenizer.

    `embedding` and `head` give [V, C]. `packed`: not in a precision that a copy of them could have, so that
    none can be told from the draft's own.
    """

    path: str
    config: ModelConfig
    embedding: Callable[[], Tensor]
    head: Callable[[], Tensor]  # the embedding where they are tied
    tokenizer: Callable[[], Tokenizer]
    vocabulary: Callable[[], dict[str, Any]]  # as GGUF's tokenizer.* metadata
    packed: bool = False


def stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor as it is stored; blocks of GGUF are unpacked to float32."""
    value = checkpoint.get(name)
    return value if isinstance(value, Tensor) else dense(value)


def canonical_rope(rope: RopeConfig) -> RopeConfig:
    """Fields that the kind does not use, at their defaults."""
    used = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.kind]}
    return RopeConfig(kind=rope.kind, **used)


def canonical(config: DFlashConfig) -> DFlashConfig:
    """One way to say each draft: layer types written out; no window and no causality of layers that it does
    not have."""
    windows = WINDOW in config.layer_types
    return replace(
        config,
        rope=canonical_rope(config.rope),
        layer_types=config.layer_types or (FULL,) * config.num_layers,
        sliding_window=config.sliding_window if windows else 0,
        causal=config.causal and windows,
        causal_full=config.causal_full and (not windows or FULL in config.layer_types),
    )


def without_parts(config: DFlashConfig, engine: str) -> list[FormatWarning]:
    """Of formats that hold a plain DFlash alone."""
    value = parts_of(config)
    if value == "none":
        return []
    return [
        FormatWarning(
            check="parts", engine=engine, message=f"holds a plain DFlash, without {value}", fatal=True
        )
    ]


@dataclass(frozen=True, kw_only=True)
class DFlashDraft:
    """A DFlash: its config, canonical, and its tensors by z-lab's names, each as stored."""

    config: DFlashConfig
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        assert self.config == canonical(self.config)


@dataclass(frozen=True, kw_only=True)
class Eagle3Draft:
    """An EAGLE-3: its config and its tensors by SGLang's names, each as stored.

    `d2t` int64 [draft_vocab] holds offsets (draft id i means target id i + d2t[i]), `t2d` bool
    [vocab] is true at those ids; both are absent where the vocabularies are the same. `embed_tokens.weight`
    is there where the draft has an embedding of its own, `lm_head.weight` unless the target's serves.
    """

    config: Eagle3Config
    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        c = self.config
        assert c.rope == canonical_rope(c.rope)
        if c.hidden_size != c.target_hidden_size and not (self.own_embedding and self.own_head):
            raise ValueError(
                f"an EAGLE-3 of width {c.hidden_size} for a target of {c.target_hidden_size} needs an "
                "embedding and a head of its own"
            )

    @property
    def own_embedding(self) -> bool:
        return EMBEDDING in self.tensors

    @property
    def own_head(self) -> bool:
        return HEAD in self.tensors


Description = DFlashDraft | Eagle3Draft
Read = tuple[Description, list[str]]  # and what a person should know about these files


def dflash_shapes(c: DFlashConfig) -> dict[str, TensorShape]:
    """z-lab's names and what each holds."""
    C, D, F = c.hidden_size, c.head_dim, c.intermediate_size
    q, kv = c.num_heads * D, c.num_kv_heads * D
    values: dict[str, TensorShape] = {"fc.weight": (C, len(c.target_layer_ids) * C)}
    values |= {"hidden_norm.weight": (C,), "norm.weight": (C,)}
    if c.mask_token_id is None:
        values["mask_embedding"] = (C,)
    for i in range(c.num_layers):
        at = f"layers.{i}."
        values |= {f"{at}{n}_layernorm.weight": (C,) for n in ("input", "post_attention")}
        values |= {f"{at}self_attn.{n}_norm.weight": (D,) for n in "qk"}
        for name, rows, columns in (("q", q, C), ("k", kv, C), ("v", kv, C), ("o", C, q)):
            values[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
            if c.attention_bias:
                values[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        values |= {f"{at}mlp.{n}_proj.weight": (F, C) for n in ("gate", "up")}
        values[f"{at}mlp.down_proj.weight"] = (C, F)
    return values | shapes_of_parts(c)


def eagle3_shapes(c: Eagle3Config, *, embedding: bool, head: bool, mapped: bool) -> dict[str, TensorShape]:
    """SGLang's names and what each holds; the last three say which of the optional tensors are there."""
    C, D, F = c.hidden_size, c.head_dim, c.intermediate_size
    q, kv = c.num_heads * D, c.num_kv_heads * D
    states = len(c.layer_ids)
    values: dict[str, TensorShape] = {"fc.weight": (C, states * c.target_hidden_size), "norm.weight": (C,)}
    values["midlayer.hidden_norm.weight"] = (C,)
    for i in range(c.num_layers):
        at, width = (f"layers.{i}.", C) if i else ("midlayer.", 2 * C)
        values |= {f"{at}{n}_layernorm.weight": (C,) for n in ("input", "post_attention")}
        for name, rows, columns in (("q", q, width), ("k", kv, width), ("v", kv, width), ("o", C, q)):
            values[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
        values |= {f"{at}mlp.{n}_proj.weight": (F, C) for n in ("gate", "up")}
        values[f"{at}mlp.down_proj.weight"] = (C, F)
    if c.parallel:
        values["mask_hidden"] = (1, states * c.target_hidden_size)
    if c.parallel and c.mask_token_id is None:
        values["mask_embedding"] = (C,)
    if c.norm_before_fc:
        values["input_norm.weight"] = (states * c.target_hidden_size,)
    if c.fc_norm:
        values |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(states)}
    if embedding:
        values[EMBEDDING] = (c.vocab_size, C)
    if head:
        values[HEAD] = (c.draft_vocab_size, C)
    if mapped:
        values |= {"d2t": (c.draft_vocab_size,), "t2d": (c.vocab_size,)}
    return values


def shared_copies(
    where: str,
    checkpoint: Checkpoint,
    held: dict[str, str],
    target: TargetFiles | None,
    copied: tuple[str, ...] = (),
) -> list[str]:
    """Take embedding and head out of `held` (our name -> the file's): a DFlash uses the target's, and some
    formats carry copies. Adds a note, where they are not `copied` by us; raises LoadError where they are
    known to be something else."""
    notes = []
    for name in (EMBEDDING, HEAD):
        if name not in held:
            continue
        copy = stored(checkpoint, held.pop(name))
        if target is None:
            if name not in copied:
                notes.append(f"{name} left out, the target's serves; name the target to have them compared")
            continue
        if not is_targets(name, copy, target):
            raise LoadError(
                f"{where} holds a {name} that is not the target's ({target.path}). vLLM would use it, SGLang "
                "the target's; a DFlash with its own is not supported"
            )
    return notes


def is_targets(name: str, copy: Tensor, target: TargetFiles) -> bool:
    """Whether an embedding or a head is the target's, in the precision of the copy."""
    theirs = target.embedding() if name == EMBEDDING else target.head()
    return torch.equal(copy, theirs.to(copy.dtype))


def target_layers(where: str, values: Mapping[str, Any], target: TargetFiles | None) -> int:
    """How many layers the target has: what we left in the files under "outpace", or the target's own.
    Raises LoadError without either."""
    layers = values.get("num_target_layers")
    if type(layers) is int and layers > 0:
        return layers
    if target is None:
        raise LoadError(f"{where} does not say how many layers its target has: name the target (--target)")
    return target.config.num_layers


def check_shapes(
    where: Path | str, wanted: Mapping[str, TensorShape], held: Mapping[str, TensorShape]
) -> None:
    """Raises LoadError, naming each side's tensors, where the two are not the same."""
    wrong = [(n, wanted[n], held[n]) for n in wanted if n in held and held[n] != wanted[n]]
    difference = Comparison(sorted(wanted.keys() - held.keys()), sorted(held.keys() - wanted.keys()), wrong)
    if difference.clean:
        return
    hint = ""
    if any(name == "fc.weight" for name, _, _ in wrong):
        columns = wanted["fc.weight"]
        hint = (
            f"\n  fc.in_features must be {columns[1] // columns[0]} (target_layer_ids) x {columns[0]}: "
            "the list of layers and fc belong together"
        )
    raise LoadError(f"{where} is not what its config describes:\n{explain(difference)}{hint}")


def vocabulary_map(where: Path | str, rows: int, vocab_size: int, tensors: dict[str, Tensor]) -> list[str]:
    """Check `d2t` and `t2d` of a head of `rows` rows against each other, make a missing `t2d`, and say so.
    Raises LoadError."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if rows != vocab_size:
            raise LoadError(
                f"{where}: a head of {rows} rows for a vocabulary of {vocab_size} needs d2t, which says "
                f"what "
                "target token each row is"
            )
        if t2d is not None:
            raise LoadError(f"{where} holds t2d without d2t")
        return []
    if d2t.dtype != torch.int64 or (t2d is not None and t2d.dtype != torch.bool):
        raise LoadError(
            f"{where}: d2t must be int64 and t2d bool, they are {d2t.dtype} and {getattr(t2d, 'dtype', None)}"
        )
    ids = d2t + torch.arange(len(d2t))
    if not _is_map(ids, vocab_size, t2d):
        if _is_map(d2t, vocab_size, t2d):
            raise LoadError(
                f"{where}: d2t holds target ids, and every engine adds the row's number to them: "
                "write offsets, d2t[i] = target id - i"
            )
        raise LoadError(
            f"{where}: i + d2t[i] does not give {len(ids)} different tokens in 0..{vocab_size - 1}"
            + ("" if t2d is None else f", or not those that t2d marks ({int(t2d.sum())})")
        )
    if t2d is None:
        tensors["t2d"] = marks(ids, vocab_size)
        return ["t2d is not in the files: made from d2t"]
    return []


def marks(ids: Tensor, vocab_size: int) -> Tensor:
    """t2d: bool [vocab], true at the target ids that the draft can say."""
    result = torch.zeros(vocab_size, dtype=torch.bool)
    result[ids] = True
    return result


def _is_map(ids: Tensor, vocab_size: int, t2d: Tensor | None) -> bool:
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if not inside or len(ids.unique()) != len(ids):
        return False
    return t2d is None or torch.equal(marks(ids, vocab_size), t2d)


def converted(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Floating-point tensors in `dtype`, or all as they are for None."""
    return {
        name: t.to(dtype) if dtype is not None and t.is_floating_point() else t for name, t in tensors.items()
    }


def main_dtype(tensors: Mapping[str, Tensor]) -> str:
    """What config.json calls the precision: that of `fc`, the largest tensor that every draft has."""
    return str(tensors["fc.weight"].dtype).removeprefix("torch.")


def rope_in_words(rope: RopeConfig) -> str:
    """Equal words for equal ropes."""
    message = f"theta {rope.theta:g}"
    match rope.kind:
        case "linear":
            message += f", linear /{rope.factor:g}"
        case "llama3":
            ends = f"{rope.low_freq_factor:g}..{rope.high_freq_factor:g}"
            message += f", llama3 x{rope.factor:g} of {rope.original_max_position}, {ends}"
        case "yarn":
            message += f", yarn x{rope.factor:g} of {rope.original_max_position}"
            message += f", betas {rope.beta_fast:g}/{rope.beta_slow:g}"
            message += ", rounded range" if rope.truncate else ", exact range"
            message += "" if rope.attention_factor is None else f", cos x{rope.attention_factor:g}"
        case "factors":
            message += f", by {len(rope.factors)} factors ({sum(rope.factors):g})"
    return message
