"""A draft independent of file formats: a config and named tensors, one description per kind."""

from collections.abc import Callable, Collection, Mapping
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
Shapes = dict[str, TensorShape]

DFLASH, EAGLE3 = "DFlash", "EAGLE-3"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# what a rope of each kind is made of; the other fields of a RopeConfig mean nothing there
ROPE_FIELDS = {
    "default": "theta",
    "linear": "theta factor",
    "llama3": "theta factor original_max_position low_freq_factor high_freq_factor",
    "yarn": "theta factor original_max_position beta_fast beta_slow truncate attention_factor",
    "factors": "theta factors",
}


@dataclass(frozen=True, kw_only=True)
class FormatWarning:
    """A property of a draft that a format, or an engine that loads it, cannot express. `fatal`: every engine
    that loads the format would misread it, so it is not written. `lossy`: one of them would, and it is
    written on request."""

    check: str  # a row of `outpace preflight`
    engine: str
    message: str
    fatal: bool = False
    lossy: bool = False


def warn(
    engine: str, *rows: tuple[Any, str, str], fatal: bool = False, lossy: bool = False
) -> list[FormatWarning]:
    """A warning for each row (applies, check, message) that applies."""
    return [
        FormatWarning(check=check, engine=engine, message=message, fatal=fatal, lossy=lossy)
        for applies, check, message in rows
        if applies
    ]


@dataclass(frozen=True, kw_only=True)
class TargetFiles:
    """The target of a draft: some formats need its name, its embedding, head or tokenizer.

    `embedding` and `head` return [V, C]. `packed`: in blocks, so that copies of them in a draft's files
    cannot be recognised.
    """

    path: str
    config: ModelConfig
    embedding: Callable[[], Tensor]
    head: Callable[[], Tensor]  # the embedding where they are tied
    tokenizer: Callable[[], Tokenizer]
    vocabulary: Callable[[], dict[str, Any]]  # as GGUF's tokenizer.* metadata
    packed: bool = False
    # those that a draft of it may carry, see models.load.fingerprint; a call hashes every weight
    fingerprints: Callable[[], list[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class DFlashDraft:
    """A DFlash: its config, which becomes canonical, and its tensors by z-lab's names, each as stored."""

    config: DFlashConfig
    tensors: Mapping[str, Tensor]
    target_fingerprint: str = ""  # of the target it was made for; "" where that is not known

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", canonical(self.config))


@dataclass(frozen=True, kw_only=True)
class Eagle3Draft:
    """An EAGLE-3: its config, which becomes canonical, and its tensors by SGLang's names, each as stored.

    `d2t` int64 [draft_vocab] holds offsets (draft id i means target id i + d2t[i]), `t2d` bool
    [vocab] is true at those ids; both are absent where the vocabularies are the same. `embed_tokens.weight`
    is there where the draft has an embedding of its own, `lm_head.weight` unless it uses the target's.
    """

    config: Eagle3Config
    tensors: Mapping[str, Tensor]
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        c = self.config
        object.__setattr__(self, "config", replace(c, rope=canonical_rope(c.rope)))
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
Read = tuple[Description, list[str]]  # and notes on the files


def describe(
    config: DFlashConfig | Eagle3Config, tensors: Mapping[str, Tensor], fingerprint: str = ""
) -> Description:
    """The description of a draft of either kind."""
    if isinstance(config, DFlashConfig):
        return DFlashDraft(config=config, tensors=tensors, target_fingerprint=fingerprint)
    return Eagle3Draft(config=config, tensors=tensors, target_fingerprint=fingerprint)


def canonical_rope(rope: RopeConfig) -> RopeConfig:
    """Fields that the kind does not use, at their defaults."""
    used = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.kind].split()}
    return RopeConfig(kind=rope.kind, **used)


def canonical(config: DFlashConfig) -> DFlashConfig:
    """One config per draft: layer types written out; no window and no causality of layers that it does
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


def parts_warning(config: DFlashConfig, engine: str) -> list[FormatWarning]:
    """Of formats that hold a plain DFlash alone."""
    parts = parts_of(config)
    return warn(engine, (parts != "none", "parts", f"holds a plain DFlash, without {parts}"), fatal=True)


# ---- tensors -----------------------------------------------------------------------------------------


def _layer_shapes(c: Any, at: str, *, width: int, qk_norm: bool = False, bias: bool = False) -> Shapes:
    """One decoder layer; q, k and v read `width` values."""
    C, D, F = c.hidden_size, c.head_dim, c.intermediate_size
    q, kv = c.num_heads * D, c.num_kv_heads * D
    values: Shapes = {f"{at}{name}_layernorm.weight": (C,) for name in ("input", "post_attention")}
    if qk_norm:
        values |= {f"{at}self_attn.{name}_norm.weight": (D,) for name in "qk"}
    for name, rows, columns in (("q", q, width), ("k", kv, width), ("v", kv, width), ("o", C, q)):
        values[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
        if bias:
            values[f"{at}self_attn.{name}_proj.bias"] = (rows,)
    values |= {f"{at}mlp.{name}_proj.weight": (F, C) for name in ("gate", "up")}
    return values | {f"{at}mlp.down_proj.weight": (C, F)}


def dflash_shapes(c: DFlashConfig) -> Shapes:
    """z-lab's names and the shape of each tensor."""
    C = c.hidden_size
    values: Shapes = {"fc.weight": (C, len(c.target_layer_ids) * C)}
    values |= {"hidden_norm.weight": (C,), "norm.weight": (C,)}
    if c.mask_token_id is None:
        values["mask_embedding"] = (C,)
    for i in range(c.num_layers):
        values |= _layer_shapes(c, f"layers.{i}.", width=C, qk_norm=True, bias=c.attention_bias)
    return values | shapes_of_parts(c)


def eagle3_shapes(c: Eagle3Config, *, embedding: bool, head: bool, mapped: bool) -> Shapes:
    """SGLang's names and the shape of each tensor; the flags are for the optional ones."""
    C, states = c.hidden_size, len(c.layer_ids)
    joined = states * c.target_hidden_size
    values: Shapes = {"fc.weight": (C, joined), "norm.weight": (C,), "midlayer.hidden_norm.weight": (C,)}
    for i in range(c.num_layers):
        values |= _layer_shapes(c, f"layers.{i}." if i else "midlayer.", width=C if i else 2 * C)
    if c.parallel:
        values["mask_hidden"] = (1, joined)
    if c.parallel and c.mask_token_id is None:
        values["mask_embedding"] = (C,)
    if c.norm_before_fc:
        values["input_norm.weight"] = (joined,)
    if c.fc_norm:
        values |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(states)}
    if embedding:
        values[EMBEDDING] = (c.vocab_size, C)
    if head:
        values[HEAD] = (c.draft_vocab_size, C)
    if mapped:
        values |= {"d2t": (c.draft_vocab_size,), "t2d": (c.vocab_size,)}
    return values


def wanted_shapes(config: DFlashConfig | Eagle3Config, names: Collection[str]) -> Shapes:
    """The tensors that a file with these `names` must have: t2d may be missing, it follows from d2t."""
    if isinstance(config, DFlashConfig):
        return dflash_shapes(config)
    head = HEAD in names or config.draft_vocab_size != config.vocab_size
    wanted = eagle3_shapes(config, embedding=EMBEDDING in names, head=head, mapped="d2t" in names)
    if "t2d" not in names:
        wanted.pop("t2d", None)
    return wanted


def stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor as it is stored; blocks of GGUF are unpacked to float32."""
    value = checkpoint.get(name)
    return value if isinstance(value, Tensor) else dense(value)


def leave_out_copies(
    where: str,
    held: dict[str, str],
    get: Callable[[str], Tensor],
    target: TargetFiles | None,
    *,
    kind: str,
    copied: Collection[str] = (),
) -> list[str]:
    """Remove the target's embedding and head from `held` (our name -> the file's), and return notes.

    A DFlash has neither; an EAGLE-3 keeps its own. `copied`: known to be copies. Raises LoadError for copies
    of another target's, and for a DFlash with its own.
    """
    notes = []
    for name in (EMBEDDING, HEAD):
        if name not in held or (name == HEAD and "d2t" in held):
            continue
        same = None
        if target is not None and not target.packed:
            same = is_targets(name, get(held[name]), target)
        if same is False and name in copied:
            raise LoadError(
                f"{where}: {name} is not a copy of the target's, which is {target and target.path}"
            )
        if same is False and kind == DFLASH:
            raise LoadError(
                f"{where} holds a {name} that is not the target's ({target and target.path}). vLLM would use "
                "it, SGLang the target's; a DFlash with its own is not supported"
            )
        if same or kind == DFLASH or name in copied:
            del held[name]
            compared = "" if same else "; name the target to have the two compared"
            notes += [] if name in copied else [f"{name} left out: it is the target's{compared}"]
        elif name == EMBEDDING and same is None:
            notes.append(f"{name} is taken as the draft's own; name the target to have the two compared")
    return notes


def is_targets(name: str, copy: Tensor, target: TargetFiles) -> bool:
    """Whether an embedding or a head is the target's, in the precision of the copy."""
    original = target.embedding() if name == EMBEDDING else target.head()
    return torch.equal(copy, original.to(copy.dtype))


def check_shapes(
    where: Path | str, wanted: Mapping[str, TensorShape], held: Mapping[str, TensorShape]
) -> None:
    """Raises LoadError, naming the tensors of either side, where the two are not the same."""
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
    """Check `d2t` and `t2d` of a head of `rows` rows against each other, and make a missing `t2d`, with a
    note. Raises LoadError."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if rows != vocab_size:
            raise LoadError(
                f"{where}: a head of {rows} rows for a vocabulary of {vocab_size} needs d2t, the target "
                "token of each row"
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
    """t2d: bool [vocab], true at the target ids that the draft can propose."""
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
