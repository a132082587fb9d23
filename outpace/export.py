"""Drafts in and out: a file or folder of any known format -> its description, and that into any other."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outpace.chat.vocabulary import gguf_vocabulary
from outpace.drafts import (
    format_gguf_dflash,
    format_gguf_eagle3,
    format_sglang_eagle3,
    format_speculators,
    format_speculators_eagle3,
    format_transformers,
    format_zlab,
)
from outpace.drafts.formats import Description, DFlashDraft, Read, Remark, TargetFiles, converted
from outpace.load import EMBEDDED, open_tokenizer, target_path
from outpace.models.load import parse_config
from outpace.weights.checkpoint import Checkpoint, LoadError, is_gguf, open_checkpoint
from outpace.weights.gguf import GGUFCheckpoint
from outpace.weights.gguf_header import read_header
from outpace.weights.hf import read_config

DFLASH, EAGLE3 = "DFlash", "EAGLE-3"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Format:
    """`write(draft, path, target)`: a folder, or a file for GGUF. `remarks(draft)`: what it cannot hold."""

    kind: str
    read: Callable[..., Read]
    write: Callable[..., None]
    remarks: Callable[..., list[Remark]]
    engines: tuple[str, ...]  # that load it as it is


def _format(kind: str, module: Any, *engines: str) -> Format:
    return Format(kind=kind, read=module.read, write=module.write, remarks=module.remarks, engines=engines)


FORMATS = {
    "zlab": _format(DFLASH, format_zlab, "SGLang", "vLLM"),
    "speculators": _format(DFLASH, format_speculators, "vLLM", "speculators"),
    "gguf": _format(DFLASH, format_gguf_dflash, "llama.cpp"),
    "transformers": _format(DFLASH, format_transformers, "transformers", "vLLM"),
    "sglang-eagle3": _format(EAGLE3, format_sglang_eagle3, "SGLang", "vLLM"),
    "speculators-eagle3": _format(EAGLE3, format_speculators_eagle3, "vLLM", "speculators"),
    "gguf-eagle3": _format(EAGLE3, format_gguf_eagle3, "llama.cpp"),
}
CANONICAL = {DFLASH: "zlab", EAGLE3: "sglang-eagle3"}
# drafts of other kinds, which look much like these
OTHERS = {
    "DFlash2DraftModel": "a DFlash 2 (convolutions and a selector)",
    "DSparkDraftModel": "a DSpark (Markov head)",
    "Qwen3DSparkModel": "a DSpark (Markov head)",
    "Eagle3Qwen3ForCausalLM": "an EAGLE-3 with q/k norms",
    "EagleLlamaForCausalLM": "an EAGLE-1",
    "LlamaForCausalLMEagle": "an EAGLE-1",
}


def draft_path(path: str) -> Path:
    """A folder or a GGUF file; the embedded draft for "default". Raises LoadError where there is none."""
    found = EMBEDDED / "dflash" if path == "default" else Path(path)
    if not found.exists():
        raise LoadError(f"{found} is not there: name a draft's folder, a GGUF file, or 'default'")
    return found


def detect(path: Path) -> str:
    """The name of the format of a draft's files. Raises LoadError for what is none of them."""
    if is_gguf(path):
        architecture = read_header(path).metadata.get("general.architecture")
        names = {"dflash": "gguf", "eagle3": "gguf-eagle3"}
        if architecture not in names:
            raise LoadError(f"{path} is a GGUF of a {str(architecture)[:60]!r}, not of a dflash or an eagle3")
        return names[architecture]
    if path.is_file():
        raise LoadError(f"{path} is a file: name the folder that holds config.json, or a GGUF file")
    hf = read_config(path)
    kind = hf.get("speculators_model_type")
    if kind is not None:
        names = {"dflash": "speculators", "eagle3": "speculators-eagle3"}
        if kind not in names:
            raise LoadError(f"{path}: speculators' {str(kind)[:60]!r} is neither a DFlash nor an EAGLE-3")
        return names[kind]
    if hf.get("model_type") == format_transformers.MODEL_TYPE:
        return "transformers"
    architecture = str((hf.get("architectures") or [""])[0])
    if architecture == format_zlab.ARCHITECTURE:
        return "zlab"
    if architecture in format_sglang_eagle3.ARCHITECTURES:
        return "sglang-eagle3"
    said = OTHERS.get(architecture, f"of the architecture {architecture[:60]!r}")
    raise LoadError(f"{path} is {said}; known are DFlash and EAGLE-3, in the formats {', '.join(FORMATS)}")


def open_target_files(path: str) -> TargetFiles:
    checkpoint = open_checkpoint(target_path(path))
    config = parse_config(checkpoint.config)
    tokenizer = partial(open_tokenizer, checkpoint)
    return TargetFiles(
        path=str(checkpoint.folder),
        config=config,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        vocabulary=partial(_vocabulary, checkpoint, config.vocab_size),
    )


def _vocabulary(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    if isinstance(checkpoint, GGUFCheckpoint):
        return {k: v for k, v in checkpoint.metadata.items() if k.startswith("tokenizer.")}
    return gguf_vocabulary(open_tokenizer(checkpoint), vocab_size)


def read_draft(path: Path, target: TargetFiles | None = None) -> tuple[str, Description, list[str]]:
    """(format, draft, what a person should know about these files). Raises LoadError or ValueError."""
    name = detect(path)
    if name == "zlab" and target is not None:
        draft, notes = format_zlab.read(path, target, lambda token: target.tokenizer().token_to_id(token))
        return name, draft, notes
    read = FORMATS[name].read(path, target)
    return name, read[0], read[1]


def kind_of(draft: Description) -> str:
    return DFLASH if isinstance(draft, DFlashDraft) else EAGLE3


def export_draft(
    draft: Description,
    to: str,
    out: Path,
    target: TargetFiles | None = None,
    dtype: torch.dtype | None = None,
) -> list[Remark]:
    """Write a draft in a format; what comes back are the engines that will not take it as it is meant.

    Raises ValueError where the format cannot hold it or holds the other kind, where the target does not fit
    the draft, or is needed and missing.
    """
    kind = kind_of(draft)
    if to == "gguf" and kind == EAGLE3:
        to = "gguf-eagle3"
    if to not in FORMATS:
        raise ValueError(f"--to {to}: the formats are {', '.join(FORMATS)}")
    chosen = FORMATS[to]
    if chosen.kind != kind:
        of_kind = [name for name, f in FORMATS.items() if f.kind == kind]
        raise ValueError(f"--to {to} holds a {chosen.kind}; this is a {kind}: choose {' or '.join(of_kind)}")
    found = chosen.remarks(draft)
    fatal = [remark for remark in found if remark.fatal]
    if fatal:
        told = "; ".join(f"{r.engine} {r.said}" for r in fatal)
        raise ValueError(f"{to} cannot hold this draft: {told}")
    check_fit(draft, target)
    check_place(out, is_file=to.startswith("gguf"))
    out.parent.mkdir(parents=True, exist_ok=True)
    chosen.write(replace(draft, tensors=converted(draft.tensors, dtype)), out, target)
    return found


def check_place(out: Path, is_file: bool) -> None:
    """Raises ValueError where something else would be overwritten: a folder's weights are replaced."""
    if is_file and out.is_dir():
        raise ValueError(f"{out} is a folder; GGUF is one file: name it draft.gguf")
    if not is_file and out.is_file():
        raise ValueError(f"{out} is a file; this format is a folder")
    if out.is_dir() and any(out.iterdir()):
        try:
            detect(out)
        except ValueError:
            raise ValueError(f"{out} holds something that is no draft: choose another folder") from None


def import_draft(path: Path, out: Path, target: TargetFiles | None = None) -> tuple[str, str, list[str]]:
    """Any format -> ours: z-lab's for a DFlash, SGLang's for an EAGLE-3. (found, written, notes)."""
    name, draft, notes = read_draft(path, target)
    to = CANONICAL[kind_of(draft)]
    if out.exists() and path.resolve() == out.resolve():
        raise ValueError(f"{out} is the draft itself: choose another folder")
    for remark in export_draft(draft, to, out, target):
        notes.append(f"{remark.check}: {remark.engine} {remark.said}")
    return name, to, notes


def check_fit(draft: Description, target: TargetFiles | None) -> None:
    """Raises ValueError where draft and target cannot belong together."""
    if target is None:
        return
    t = target.config
    if isinstance(draft, DFlashDraft):
        width, layers = draft.config.hidden_size, draft.config.num_target_layers
    else:  # it does not say how deep its target is, only what it reads of it
        width, layers = draft.config.target_hidden_size, max(t.num_layers, max(draft.config.layer_ids) + 1)
    for what, ours, theirs in (
        ("hidden_size", width, t.hidden_size),
        ("vocab_size", draft.config.vocab_size, t.vocab_size),
        ("num_hidden_layers", layers, t.num_layers),
    ):
        if ours != theirs:
            raise ValueError(f"this draft is for a target with {what} {ours}; {target.path} has {theirs}")
