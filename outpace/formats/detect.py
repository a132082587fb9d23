"""The formats that drafts come in: which one a path holds, and its description."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.checkpoint.gguf_header import read_header
from outpace.checkpoint.hf import read_config
from outpace.checkpoint.open import LoadError, is_gguf
from outpace.drafts.suffix import ARCHITECTURE
from outpace.formats import gguf_dflash as format_gguf_dflash
from outpace.formats import gguf_eagle3 as format_gguf_eagle3
from outpace.formats import sglang_eagle3 as format_sglang_eagle3
from outpace.formats import speculators as format_speculators
from outpace.formats import speculators_eagle3 as format_speculators_eagle3
from outpace.formats import transformers as format_transformers
from outpace.formats import zlab as format_zlab
from outpace.formats.spec import Description, DFlashDraft, FormatWarning, Read, TargetFiles
from outpace.formats.zlab import TokenId

DFLASH, EAGLE3 = "DFlash", "EAGLE-3"


@dataclass(frozen=True, kw_only=True)
class Format:
    """`write(draft, path, target)`: a folder, or a file for GGUF. `remarks(draft)`: the parts it cannot hold.
    `engines` load it as it is."""

    kind: str
    read: Callable[..., Read]
    write: Callable[..., None]
    remarks: Callable[..., list[FormatWarning]]
    engines: tuple[str, ...]


def _format(kind: str, module: Any, *engines: str) -> Format:
    return Format(kind=kind, read=module.read, write=module.write, remarks=module.remarks, engines=engines)


FORMATS = {
    "zlab": _format(DFLASH, format_zlab, "SGLang", "vLLM"),
    "speculators": _format(DFLASH, format_speculators, "vLLM", "speculators"),
    "gguf": _format(DFLASH, format_gguf_dflash, "llama.cpp"),
    "transformers": _format(DFLASH, format_transformers, "transformers"),
    "sglang-eagle3": _format(EAGLE3, format_sglang_eagle3, "SGLang", "vLLM"),
    "speculators-eagle3": _format(EAGLE3, format_speculators_eagle3, "vLLM", "speculators"),
    "gguf-eagle3": _format(EAGLE3, format_gguf_eagle3, "llama.cpp"),
}
CANONICAL = {DFLASH: "zlab", EAGLE3: "sglang-eagle3"}
OF_SPECULATORS = {"dflash": "speculators", "eagle3": "speculators-eagle3", "peagle": "speculators-eagle3"}
OF_GGUF = {"dflash": "gguf", "eagle3": "gguf-eagle3"}
# drafts of other kinds, which look much like these
OTHERS = {
    ARCHITECTURE: "answers that are looked up: it has no weights",
    "DSparkDraftModel": "a DSpark: it has a Markov head",
    "Qwen3DSparkModel": "a DSpark: it has a Markov head",
    "Eagle3Qwen3ForCausalLM": "an EAGLE-3 with q/k norms",
    "EagleLlamaForCausalLM": "an EAGLE-1",
    "LlamaForCausalLMEagle": "an EAGLE-1",
}


def kind_of(draft: Description) -> str:
    return DFLASH if isinstance(draft, DFlashDraft) else EAGLE3


def detect(path: Path) -> str:
    """The name of the format of a draft's files. Raises LoadError for what is none of them."""
    if is_gguf(path):
        architecture = str(read_header(path).metadata.get("general.architecture"))[:60]
        if architecture not in OF_GGUF:
            raise LoadError(f"{path} is a GGUF of {architecture!r}; drafts are 'dflash' or 'eagle3'")
        return OF_GGUF[architecture]
    if path.is_file():
        raise LoadError(f"{path} is a file: name the folder that holds config.json, or a GGUF file")
    hf = read_config(path)
    kind = hf.get("speculators_model_type")
    if kind is not None:
        if not isinstance(kind, str) or kind not in OF_SPECULATORS:
            raise LoadError(f"{path}: speculators' {str(kind)[:60]!r} is neither a DFlash nor an EAGLE-3")
        return OF_SPECULATORS[kind]
    if hf.get("model_type") == format_transformers.MODEL_TYPE:
        return "transformers"
    architectures = hf.get("architectures") or [""]
    architecture = str(architectures[0])[:60] if isinstance(architectures, list) else ""
    if architecture in format_zlab.ARCHITECTURES:
        return "zlab"
    if architecture in format_sglang_eagle3.ARCHITECTURES:
        return "sglang-eagle3"
    other = f" ({OTHERS[architecture]})" if architecture in OTHERS else ""
    raise LoadError(
        f"{path}: architectures [{architecture}]{other} is no draft that is known here; known are DFlash and "
        f"EAGLE-3, in the formats {', '.join(FORMATS)}"
    )


def read_draft(
    path: Path, target: TargetFiles | None = None, token_id: TokenId | None = None
) -> tuple[str, Description, list[str]]:
    """(format, draft, what a person should know about these files). `token_id` finds a MASK that is named by
    its text. Raises LoadError or ValueError."""
    name = detect(path)
    if name == "zlab":
        draft, notes = format_zlab.read(path, target, token_id or _tokens_of(target))
        return name, draft, notes
    read = FORMATS[name].read(path, target)
    return name, read[0], read[1]


def _tokens_of(target: TargetFiles | None) -> TokenId | None:
    return None if target is None else lambda token: target.tokenizer().token_to_id(token)
