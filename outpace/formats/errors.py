"""What is wrong with a draft's files whoever reads them, and what is only strange."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.formats.engines import View
from outpace.formats.fields import NEUTRAL
from outpace.formats.spec import TargetFiles, vocabulary_map
from outpace.ops.quant import Quant

SHIFTS = ("sample_from_anchor", "shift_label", "projector_type")


@dataclass(frozen=True, kw_only=True)
class Files:
    """A draft's files before anyone has judged them: `config` is empty for GGUF. `body`: the object that has
    the sizes."""

    config: Mapping[str, Any]
    specs: Mapping[str, tuple[tuple[int, ...], str]]  # tensor -> shape, dtype
    get: Callable[[str], Tensor | Quant] | None

    @property
    def body(self) -> Mapping[str, Any]:
        value = self.config.get("transformer_layer_config")
        return value if isinstance(value, dict) else self.config

    @property
    def inner(self) -> Mapping[str, Any]:
        value = self.config.get("dflash_config") or self.config.get("eagle_config")
        return value if isinstance(value, dict) else {}

    @property
    def fc(self) -> tuple[int, ...]:
        return self.specs.get("fc.weight", self.specs.get("encoder.fc.weight", ((0, 0), "")))[0]

    @property
    def view(self) -> View:
        """The rows that no engine reads by a rule of its own."""
        dtypes = {dtype for _, dtype in self.specs.values() if dtype not in ("I64", "BOOL")}
        return {
            "hidden sizes": f"{self.fc[0]} <- {self.fc[-1]}" if self.fc[0] else "",
            "dtype": ", ".join(sorted(dtypes)),
            "anchor slot": "slot 0, unshifted",
        }


def find_errors(files: Files, target: TargetFiles, meant: View) -> dict[str, str]:
    """Row -> what is wrong, and the fix. `meant`: the draft in words, as far as it could be read."""
    errors = {
        "layer ids": _depth(meant, target),
        "hidden sizes": _sizes(files, target, meant),
        "vocabulary": _vocabulary(files, target),
        "mask token": _mask(meant, target),
        "anchor slot": _shift(files),
        "attention bias": _biases(files),
        "dtype": _quantised(files),
    }
    return {check: value for check, value in errors.items() if value}


def _states(meant: View) -> list[int]:
    words = meant.get("layer ids", "")
    return [int(k) for k in words.removeprefix("hs ").split(", ")] if words.startswith("hs ") else []


def _depth(meant: View, target: TargetFiles) -> str:
    far = [k for k in _states(meant) if not 0 < k <= target.config.num_layers]
    if not far:
        return ""
    layers = target.config.num_layers
    return f"hs {far[0]} is no output of one of the target's {layers} layers: is it another target's draft?"


def _sizes(files: Files, target: TargetFiles, meant: View) -> str:
    width = files.config.get("target_hidden_size") or files.body.get("hidden_size")
    count, columns = len(_states(meant)), files.fc[-1]
    if columns and width and count and columns != count * width:
        return (
            f"fc takes {columns} columns, and {count} states of {width} are {count * width}: the list of "
            "layers and fc are not of one draft"
        )
    theirs = target.config.hidden_size
    if width and width != theirs:
        return f"it reads states of {width}, the target's have {theirs}: it is another target's draft"
    made_for = files.config.get("num_target_layers") or files.inner.get("num_target_layers")
    if made_for and made_for != target.config.num_layers:
        return f"it is for a target of {made_for} layers, this one has {target.config.num_layers}"
    return ""


def _vocabulary(files: Files, target: TargetFiles) -> str:
    size = files.body.get("vocab_size")
    if size and size != target.config.vocab_size:
        return f"it is for a vocabulary of {size:,}, the target has {target.config.vocab_size:,}"
    if "d2t" not in files.specs or files.get is None:
        return ""
    tensors = {n: files.get(n) for n in ("d2t", "t2d") if n in files.specs}
    plain = {n: t for n, t in tensors.items() if isinstance(t, Tensor)}
    rows = files.specs["d2t"][0][0]
    try:
        vocabulary_map("the draft", rows, target.config.vocab_size, plain)
    except (ValueError, RuntimeError) as error:
        return str(error).removeprefix("the draft: ")
    return ""


def _mask(meant: View, target: TargetFiles) -> str:
    """A token that a text can hold would be proposed from, and sometimes be there."""
    value = meant.get("mask token", "")
    if not value.isdigit():
        return ""
    token = int(value)
    if token >= target.config.vocab_size:
        return f"{token} is outside the target's vocabulary of {target.config.vocab_size:,}"
    tokenizer = target.tokenizer()
    text = tokenizer.id_to_token(token)
    special = {i for i, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    if text is None or token in special:
        return ""
    return (
        f"{token} is {text!r}, which text is made of: a draft cannot tell it from a MASK. Take an id that no "
        "text yields, and train with it"
    )


def _shift(files: Files) -> str:
    for key in SHIFTS:
        value = files.inner.get(key, files.config.get(key))
        if value not in NEUTRAL[key]:
            return (
                f"{key} is {str(value)[:40]}: this draft proposes from another slot, which readers of "
                f"a plain "
                "DFlash do not do"
            )
    return ""


def _biases(files: Files) -> str:
    held = sorted(name for name in files.specs if name.endswith("_proj.bias"))
    flag = bool(files.body.get("attention_bias"))
    if not files.config or bool(held) == flag:
        return ""
    if held:
        return f"the files hold {held[0]}, and attention_bias is not true: SGLang drops it in silence"
    return "attention_bias is true, and the files hold no biases: engines would add what was never trained"


def _quantised(files: Files) -> str:
    packed = sorted(n for n, (_, dtype) in files.specs.items() if dtype.startswith(("F8", "I8", "U8")))
    if not packed and not files.config.get("quantization_config"):
        return ""
    return f"quantised ({', '.join(packed[:2]) or 'quantization_config'}): start from the bfloat16 draft"


def find_notes(files: Files, target: TargetFiles) -> dict[str, str]:
    """Row -> what is strange, though all engines read it alike."""
    values = {}
    positions = files.body.get("max_position_embeddings")
    most = target.config.max_position_embeddings
    if isinstance(positions, int) and positions < most:
        values["positions"] = (
            f"the target goes to {most:,}; past {positions:,} expect fewer draft tokens to be right, or "
            f"an error"
        )
    message = str(files.config.get("dtype") or files.config.get("torch_dtype") or "").removeprefix("torch.")
    stored = files.specs.get("fc.weight", ((), ""))[1]
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    if message and stored in names and message != names[stored]:
        values["dtype"] = f"config.json specifies {message}, the tensors are {names[stored]}"
    if files.config and "rope_theta" not in _rope_keys(files.body):
        ours = target.config.rope.theta
        values["rope"] = f"no rope_theta is given; the target has {ours:,.0f}. Was the draft trained without?"
    return values


def _rope_keys(body: Mapping[str, Any]) -> set[str]:
    names = {key for key in ("rope_theta",) if body.get(key) is not None}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(body.get(key), dict):
            names |= body[key].keys()
    return names
