"""DFlash and EAGLE-3 in GGUF: architectures "dflash" and "eagle3" of llama.cpp.

A record of our own ("outpace.draft") holds the config and what llama.cpp has no keys for.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.gguf import (
    ROPE_FACTORS,
    gguf_name,
    halves,
    paired_heads,
    pairs,
    rope_factors,
    stored_tensor,
)
from outpace.checkpoint.gguf_header import Header, read_header
from outpace.checkpoint.gguf_writer import Item, write_items
from outpace.config import typed
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.eagle3 import Eagle3Config
from outpace.drafts.quantize import packs
from outpace.formats.base import Format, draft_rows
from outpace.formats.engines import View, field_view
from outpace.formats.fields import (
    NEEDED,
    ConfigFile,
    Field,
    Fields,
    Place,
    TokenId,
    fingerprint_in,
    write_fields,
)
from outpace.formats.spec import (
    DFLASH,
    EAGLE3,
    EMBEDDING,
    HEAD,
    Description,
    DFlashDraft,
    Eagle3Draft,
    FormatWarning,
    Read,
    TargetFiles,
    canonical_rope,
    check_shapes,
    describe,
    leave_out_copies,
    parts_warning,
    vocabulary_map,
    wanted_shapes,
    warn,
)
from outpace.models.config import FULL, WINDOW
from outpace.ops.quant import dense
from outpace.ops.rope import RopeConfig

# of our own: the whole config and the precision of what had to be widened. llama.cpp does not read it
RECORD = "outpace.draft"
FINGERPRINT = "outpace.target_fingerprint"
MASK = "tokenizer.ggml.mask_token_id"
KINDS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
    torch.int64: GGMLQuantizationType.I64,
}


def common(architecture: str) -> Fields:
    """llama.cpp's keys of both kinds."""
    rows: tuple[tuple[str, str, type, Any], ...] = (
        ("vocab_size", "vocab_size", int, NEEDED),
        ("hidden_size", "embedding_length", int, NEEDED),
        ("num_layers", "block_count", int, NEEDED),
        ("intermediate_size", "feed_forward_length", int, NEEDED),
        ("num_heads", "attention.head_count", int, NEEDED),
        ("num_kv_heads", "attention.head_count_kv", int, lambda values: values["num_heads"]),
        ("head_dim", "attention.key_length", int, lambda v: v["hidden_size"] // v["num_heads"]),
        ("head_dim", "attention.value_length", int, lambda values: values["head_dim"]),
        ("head_dim", "rope.dimension_count", int, lambda values: values["head_dim"]),
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon", float, NEEDED),
        ("max_position_embeddings", "context_length", int, NEEDED),
    )
    return tuple(
        Field(name=name, places=(Place(f"{architecture}.{key}"),), kind=kind, default=default, most=2**31)
        for name, key, kind, default in rows
    )


DFLASH_FIELDS = (
    *common("dflash"),
    Field(name="block_size", places=(Place("dflash.block_size"),), default=16, row="block size"),
    Field(name="target_layer_ids", places=(Place("dflash.target_layers"),), kind=list, row="layer ids"),
    Field(name="mask_token_id", places=(Place(MASK),), row="mask token"),
)
EAGLE3_FIELDS = (
    *common("eagle3"),
    Field(name="layer_ids", places=(Place("eagle3.target_layers"),), kind=list, row="layer ids"),
    Field(name="target_hidden_size", places=(Place("eagle3.target_hidden_size"),)),
    *(
        Field(name=name, places=(Place(f"eagle3.{name}"),), kind=bool, default=False)
        for name in ("norm_before_residual", "norm_before_fc")
    ),
)
UNSUPPORTED = {  # keys of DFlash's successors -> the value that changes nothing
    "attention.scale": 0.0,
    "attention.value_scale": 0.0,
    "conv_kernel_size": 0,
    "embedding_scale": 0.0,
    "final_logit_softcapping": 0.0,
    "hyper_connection_count": 0,
    "logit_scale": 0.0,
    "sample_from_anchor": False,
    "selector_rank": 0,
}


@dataclass(frozen=True, kw_only=True)
class GGUFFormat(Format):
    """One architecture of llama.cpp. `parse(file, header)` reads a file without our record; `keys(config)` is
    what llama.cpp reads; `encoder_norm`: our name of its enc.output_norm."""

    architecture: str
    config_class: type[DFlashConfig] | type[Eagle3Config]
    parse: Callable[[ConfigFile, Header], Any]
    keys: Callable[[Any], dict[str, Any]]
    encoder_norm: str

    def open(self, path: Path, target: TargetFiles | None = None) -> tuple[Header, ConfigFile]:
        header = read_header(path)
        architecture = header.metadata.get("general.architecture")
        if architecture != self.architecture:
            raise LoadError(
                f"{path}: general.architecture is {str(architecture)[:60]!r}, not {self.architecture!r}"
            )
        return header, ConfigFile(where=str(path), values=header.metadata, target=target)

    def name(self, ours: str) -> str:
        """llama.cpp's name; the draft's own where it has none."""
        if ours == self.encoder_norm:
            return "enc.output_norm.weight"
        whole = ours if ours == HEAD else "model." + ours.replace("midlayer.", "layers.0.")
        theirs = gguf_name(whole, self.architecture)
        return ours if theirs == whole else theirs

    def read(self, path: Path, target: TargetFiles | None = None, token_id: TokenId | None = None) -> Read:
        """Raises LoadError. Others' files of a DFlash do not hold the depth of the target: name it."""
        header, file = self.open(path, target)
        for key, neutral in UNSUPPORTED.items():
            if file.values.get(f"dflash.{key}", neutral) != neutral:
                raise file.error(f"dflash.{key} is not supported")
        record = read_record(file)
        config = self._recorded(file, record[0]) if record else self.parse(file, header)
        widened, notes = record[1] if record else {}, file.notes
        ours = {self.name(name): name for name in (EMBEDDING, HEAD)}
        there = {ours.get(name, name) for name in header.tensors}
        wanted = wanted_shapes(config, there)
        ours |= {self.name(name): name for name in wanted}
        held = {ours.get(name, name): name for name in header.tensors if name != ROPE_FACTORS}
        if self.kind == DFLASH:
            notes += leave_out_copies(
                str(path), held, lambda name: tensor_of(header, name), target, kind=self.kind
            )
        check_shapes(path, wanted, {name: header.tensors[theirs].shape for name, theirs in held.items()})
        tensors = {n: tensor_of(header, held[n]) for n in wanted}
        # exact, since it was widened from there
        tensors = {n: t.to(widened.get(held[n], t.dtype)) for n, t in tensors.items()}
        if isinstance(config, Eagle3Config):
            tensors = eagle3_rows(tensors, config, halves)
            if "d2t" in tensors:  # target ids
                tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
        vocabulary_map(path, draft_rows(config), config.vocab_size, tensors)
        return describe(config, tensors, fingerprint_in(file, FINGERPRINT)), notes

    def _recorded(self, file: ConfigFile, fields: dict[str, Any]) -> Any:
        """The config of our record, which must agree with the keys that llama.cpp reads."""
        try:
            config: Any = typed(self.config_class, fields, RECORD)
            config = replace(config, rope=canonical_rope(config.rope))  # a kind that is known
            wanted = self.keys(config)
            if config.rope.kind == "factors" and len(config.rope.factors) != config.head_dim // 2:
                raise TypeError("one rope factor per frequency")
        except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError) as error:
            raise file.error(f"its record is damaged ({repr(error)[:300]})") from error
        values = asdict(config)
        for name, value in (values | values["rope"]).items():
            if not _in_range(value):
                raise file.error(f"the metadata {RECORD} is damaged ({name} is {str(value)[:60]!r})")
        for key, value in wanted.items():
            given = file.values.get(key)
            same = given == value
            if isinstance(value, float) and isinstance(given, float):
                same = np.float32(given) == np.float32(value)
            if not same:
                raise file.error(
                    f"{key} is {str(given)[:60]}, and {RECORD} was made for {str(value)[:60]}: the file was "
                    "changed after it was written; export it again"
                )
        return config

    def write(
        self, draft: Description, path: Path, target: TargetFiles | None = None, packed: bool = False
    ) -> None:
        """The file holds the target's vocabulary; embedding and head are the target's when llama.cpp runs it.
        Raises ValueError without a target, and for a dtype that GGUF does not have."""
        if target is None:
            raise ValueError("a GGUF draft carries its target's vocabulary: give --target")
        config: Any = draft.config
        tensors = {name: tensor for name, tensor in draft.tensors.items() if name != "t2d"}
        if isinstance(config, Eagle3Config):
            tensors = eagle3_rows(tensors, config, pairs)
            if "d2t" in tensors:
                tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors = {self.name(name): tensor for name, tensor in tensors.items()}
        if by_factors(config.rope):
            tensors[ROPE_FACTORS] = rope_factors(config.rope, config.head_dim)
        keys = self.keys(config)
        metadata = keys | target.vocabulary() | keys  # keys first, in order and in precedence
        if draft.target_fingerprint:
            metadata[FINGERPRINT] = draft.target_fingerprint
        write_file(path, self.architecture, metadata, tensors, config, packed)


# ---- DFlash ------------------------------------------------------------------------------------------


def parse_dflash(file: ConfigFile, header: Header) -> DFlashConfig:
    fields = file.read(DFLASH_FIELDS)
    window = file.get("dflash.attention.sliding_window") or 0
    slides = file.get("dflash.attention.sliding_window_pattern") if window else None
    slides = [False] * fields["num_layers"] if slides is None else slides
    if not isinstance(slides, list) or len(slides) != fields["num_layers"]:
        raise file.error(f"dflash.attention.sliding_window_pattern is not of {fields['num_layers']} layers")
    causal = file.checked("dflash.attention.causal", file.values.get("dflash.attention.causal", False), bool)
    return DFlashConfig(
        **file.depth(fields | {"num_target_layers": 0}),
        rope=read_rope(file, header, "dflash", fields["head_dim"]),
        layer_types=tuple(WINDOW if slide else FULL for slide in slides),
        sliding_window=file.checked("dflash.attention.sliding_window", window, int),
        causal=causal and any(slides),
        causal_full=causal and not all(slides),
    )


def dflash_keys(config: DFlashConfig) -> dict[str, Any]:
    values = write_fields(DFLASH_FIELDS, config) | rope_keys(config.rope, "dflash")
    values["dflash.attention.causal"] = config.one_way
    if WINDOW in config.layer_types:
        values["dflash.attention.sliding_window"] = config.sliding_window
        values["dflash.attention.sliding_window_pattern"] = [t == WINDOW for t in config.layer_types]
    return values


def dflash_warnings(draft: DFlashDraft) -> list[FormatWarning]:
    c = draft.config
    result = warn(
        "llama.cpp",
        (c.attention_bias, "attention bias", "has no attention biases"),
        (c.mask_token_id is None, "mask token", "knows no learned mask_embedding"),
        (c.causal and not c.one_way, "block sees", "is causal in all layers or in none"),
        fatal=True,
    )
    return result + parts_warning(c, "llama.cpp")


# ---- EAGLE-3 -----------------------------------------------------------------------------------------


def eagle3_rows(
    tensors: Mapping[str, Tensor], config: Eagle3Config, order: Callable[[int, int], Tensor]
) -> dict[str, Tensor]:
    """q and k in `order`: llama.cpp turns pairs (2i, 2i + 1) here, all other engines i with i + D/2."""
    heads = {name: paired_heads(name, config.num_heads, config.num_kv_heads) for name in tensors}
    return {n: t[order(len(t), heads[n])] if heads[n] else t for n, t in tensors.items()}


def parse_eagle3(file: ConfigFile, header: Header) -> Eagle3Config:
    fields = file.read(EAGLE3_FIELDS)
    if fields["num_layers"] != 1:
        raise file.error("only EAGLE-3 of one layer is supported")
    rows = header.tensors.get("d2t") or header.tensors.get("output.weight")
    return Eagle3Config(
        **fields,
        draft_vocab_size=rows.shape[0] if rows else fields["vocab_size"],
        rope=read_rope(file, header, "eagle3", fields["head_dim"]),
    )


def eagle3_keys(config: Eagle3Config) -> dict[str, Any]:
    return write_fields(EAGLE3_FIELDS, config) | rope_keys(config.rope, "eagle3")


def eagle3_warnings(draft: Eagle3Draft) -> list[FormatWarning]:
    c = draft.config
    return warn(
        "llama.cpp",
        (len(c.layer_ids) != 3, "layer ids", f"joins three states, not {len(c.layer_ids)}"),
        (c.fc_norm, "norms", "has no norm per state (fc_norm)"),
        (c.norm_output, "norms", "feeds back the state before the norm"),
        (c.sliding_window, "window", "has no window here"),
        (c.num_layers > 1, "layers", "has one layer"),
        (c.parallel, "one pass", "draft tokens step by step"),
        fatal=True,
    )


def views(fields: Fields, *rows: str) -> Callable[[ConfigFile], dict[str, View]]:
    """Only the rows that can differ from our record; the rest is read alike by construction."""

    def read(file: ConfigFile) -> dict[str, View]:
        view = field_view(file, fields, "llama.cpp")
        return {"llama.cpp": {row: view[row] for row in rows}}

    return read


# ---- the file ----------------------------------------------------------------------------------------


def tensor_of(header: Header, name: str) -> Tensor:
    """As it is stored; blocks of numbers are unpacked to float32."""
    value = stored_tensor(header, header.tensors[name], name)
    return value if isinstance(value, Tensor) else dense(value)


def shortest(value: float) -> float:
    """What was meant by a number that went through float32: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def by_factors(rope: RopeConfig) -> bool:
    """llama.cpp's loaders of drafts read YaRN without its betas, and round its range; what they cannot read
    is written as one factor per frequency, which they can."""
    usual = rope.truncate and (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    return rope.kind in ("llama3", "factors") or (rope.kind == "yarn" and not usual)


def _own_concentration(rope: RopeConfig) -> float:
    """What llama.cpp multiplies cos and sin by, by itself."""
    known = rope.kind == "yarn" and not by_factors(rope) and rope.factor > 1
    return 0.1 * math.log(rope.factor) + 1.0 if known else 1.0


def rope_keys(rope: RopeConfig, architecture: str) -> dict[str, Any]:
    """`attn_factor` is what is left next to llama.cpp's own factor on cos and sin."""
    values: dict[str, Any] = {"rope.freq_base": float(rope.theta)}
    scaling = "none" if by_factors(rope) or rope.kind == "default" else rope.kind
    values["rope.scaling.type"] = scaling
    if scaling != "none":
        values["rope.scaling.factor"] = float(rope.factor)
    if scaling == "yarn":
        values["rope.scaling.original_context_length"] = rope.original_max_position
    more = rope.concentration / _own_concentration(rope)
    if more != 1.0:
        values["rope.scaling.attn_factor"] = more
    return {f"{architecture}.{key}": value for key, value in values.items()}


def read_rope(file: ConfigFile, header: Header, architecture: str, head_dim: int) -> RopeConfig:
    """Of a file without our record. Factors are the target's rope where that has the same frequencies."""

    def value(key: str, kind: type, default: Any) -> Any:
        path = f"{architecture}.{key}"
        stated = file.get(path)
        return default if stated is None else file.checked(path, stated, kind, most=2**31)

    theta = value("rope.freq_base", float, 10000.0)
    kind, factor = value("rope.scaling.type", str, "linear"), value("rope.scaling.factor", float, 0.0) or 1.0
    more = value("rope.scaling.attn_factor", float, 1.0)
    if ROPE_FACTORS in header.tensors:
        return _from_factors(file, tensor_of(header, ROPE_FACTORS), theta, head_dim, more)
    if kind == "yarn":
        original = value("rope.scaling.original_context_length", int, value("context_length", int, 0))
        rope = RopeConfig(theta=theta, kind="yarn", factor=factor, original_max_position=original)
        if more == 1.0:
            return rope
        return RopeConfig(**{**asdict(rope), "attention_factor": shortest(more * rope.concentration)})
    if more != 1.0 or kind not in ("none", "linear"):
        raise file.error(f"a rope of type {kind!r} with attn_factor {more} is not supported")
    scaled = kind == "linear" and factor != 1.0
    return RopeConfig(theta=theta, kind="linear", factor=factor) if scaled else RopeConfig(theta=theta)


def _from_factors(file: ConfigFile, factors: Tensor, theta: float, head_dim: int, more: float) -> RopeConfig:
    if file.target is not None and factors.shape == (head_dim // 2,):
        rope = canonical_rope(file.target.config.rope)
        same = rope.theta == theta and torch.allclose(rope_factors(rope, head_dim), factors, rtol=1e-5)
        if same and math.isclose(rope.concentration, more, rel_tol=1e-5):
            file.notes.append("the rope's frequencies are those of the target; its rope is taken")
            return rope
    if factors.shape != (head_dim // 2,) or not bool(((factors > 0) & factors.isfinite()).all()):
        raise file.error(f"{ROPE_FACTORS} must hold {head_dim // 2} finite numbers above 0")
    if more != 1.0:
        raise file.error(
            f"{ROPE_FACTORS} with attn_factor {more:g} is YaRN, and the file does not hold its parameters: "
            "name the target, its rope is tried"
        )
    file.notes.append(
        "the rope is one factor per frequency, which only GGUF can say; --target may name its kind"
    )
    return RopeConfig(theta=theta, kind="factors", factors=tuple(factors.tolist()))


def write_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    config: Any,
    packed: bool = False,
) -> None:
    """`tensors` by llama.cpp's names. Vectors are widened to float32,
    which llama.cpp wants of norms. `packed`: matrices become blocks of Q8_0, but for those that blocks do not
    divide and the embedding, which is read a row at a time. The file gets its name when it is whole."""
    widened = {n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items() if _vector(t)}
    record = json.dumps({"config": asdict(config), "widened": widened}, sort_keys=True)
    if packed and not any(_multiplies(name, tensor) for name, tensor in tensors.items()):
        raise ValueError("q8_0: blocks of 32 divide the rows of none of its matrices; leave it as stored")
    items = []
    for name, tensor in tensors.items():
        dtype = torch.float32 if _vector(tensor) else tensor.dtype
        kind = GGMLQuantizationType.Q8_0 if packed and _multiplies(name, tensor) else KINDS.get(dtype)
        if kind is None:
            raise ValueError(f"{name} is {dtype}: GGUF has no such type; choose --dtype")
        items.append(Item(name, tuple(tensor.shape), kind, partial(tensor.detach)))
    write_items(path, architecture, {"general.type": "model", **metadata, RECORD: record}, items)


def _multiplies(name: str, tensor: Tensor) -> bool:
    """Whether it is the matrix of a product, in rows that blocks divide."""
    is_matrix = tensor.dim() == 2 and tensor.is_floating_point()
    return is_matrix and name != "token_embd.weight" and packs(tensor)


def _vector(tensor: Tensor) -> bool:
    return tensor.dim() < 2 and tensor.is_floating_point()


def read_record(file: ConfigFile) -> tuple[dict[str, Any], dict[str, torch.dtype]] | None:
    """(config's fields, GGUF's name -> the precision a vector had) of a file we wrote, None of others'."""
    text = file.values.get(RECORD)
    if text is None:
        return None
    try:
        data = json.loads(text)
        fields = dict(data["config"])
        widened = {str(name): getattr(torch, str(dtype)) for name, dtype in data["widened"].items()}
        if not all(isinstance(dtype, torch.dtype) for dtype in widened.values()):
            raise TypeError("no dtype")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise file.error(f"the metadata {RECORD} is damaged ({error!r})") from error
    return fields, widened


def _in_range(value: Any) -> bool:
    match value:
        case tuple() | list():
            return all(map(_in_range, value))
        case float():
            return 0 < value < math.inf
        case int():
            return 0 <= value < 2**40
    return True


DFLASH_FORMAT = GGUFFormat(
    kind=DFLASH,
    engines=("llama.cpp",),
    warnings=dflash_warnings,
    views=views(DFLASH_FIELDS, "layer ids", "block size", "mask token"),
    architecture="dflash",
    config_class=DFlashConfig,
    parse=parse_dflash,
    keys=dflash_keys,
    encoder_norm="hidden_norm.weight",
)
EAGLE3_FORMAT = GGUFFormat(
    kind=EAGLE3,
    engines=("llama.cpp",),
    warnings=eagle3_warnings,
    views=views(EAGLE3_FIELDS, "layer ids"),
    architecture="eagle3",
    config_class=Eagle3Config,
    parse=parse_eagle3,
    keys=eagle3_keys,
    encoder_norm="input_norm.weight",
)
