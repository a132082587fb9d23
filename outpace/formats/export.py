"""Drafts out and in: a description into any format, and any format into ours."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoint.gguf import GGUFCheckpoint
from outpace.checkpoint.open import Checkpoint, open_checkpoint
from outpace.checkpoint.shipped import target_path
from outpace.checkpoint.tokenizer import generation_stops, open_tokenizer
from outpace.formats.load import CANONICAL, FORMATS, detect, kind_of, read_draft, target_fingerprints
from outpace.formats.spec import (
    EAGLE3,
    HEAD,
    Description,
    DFlashDraft,
    FormatWarning,
    TargetFiles,
    converted,
    stored,
)
from outpace.models.load import load_target, parse_config
from outpace.text.gguf_tokenizer import gguf_vocabulary

EMBEDDING = "model.embed_tokens.weight"  # of a target
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
PACKED = "q8_0"


def open_target_files(path: str) -> TargetFiles:
    checkpoint = open_checkpoint(target_path(path))
    config = parse_config(checkpoint.config)
    tokenizer = partial(open_tokenizer, checkpoint)
    return TargetFiles(
        path=str(checkpoint.folder),
        config=config,
        embedding=partial(stored, checkpoint, EMBEDDING),
        head=partial(_head, checkpoint, config.tie_word_embeddings),
        tokenizer=tokenizer,
        vocabulary=partial(_vocabulary, checkpoint, config.vocab_size),
        fingerprints=lambda: _fingerprints(checkpoint),
    )


def _fingerprints(checkpoint: Checkpoint) -> list[str]:
    """Of the target as commands open it, with the stop tokens of generation_config.json."""
    target = load_target(checkpoint)
    stops = (*target.config.eos_token_ids, *generation_stops(checkpoint.folder))
    target.config = replace(target.config, eos_token_ids=tuple(dict.fromkeys(stops)))
    return target_fingerprints(target)


def _head(checkpoint: Checkpoint, tied: bool) -> Tensor:
    return stored(checkpoint, EMBEDDING if tied and HEAD not in checkpoint.names() else HEAD)


def _vocabulary(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    if isinstance(checkpoint, GGUFCheckpoint):
        return {k: v for k, v in checkpoint.metadata.items() if k.startswith("tokenizer.")}
    return gguf_vocabulary(open_tokenizer(checkpoint), vocab_size)


def export_draft(
    draft: Description,
    to: str,
    out: Path,
    target: TargetFiles | None = None,
    dtype: torch.dtype | None = None,
    packed: bool = False,
    allow_lossy: bool = False,
) -> list[FormatWarning]:
    """Write a draft in a format -> warnings on the engines that will misread it.
    `packed`: its matrices in 8-bit blocks (Q8_0), which only GGUF has. `allow_lossy`: write it though one of
    the engines that load the format computes something else.

    Raises ValueError if the format cannot hold it or holds the other kind, where the target does not fit
    the draft, or is needed and missing.
    """
    kind = kind_of(draft)
    if to == "gguf" and kind == EAGLE3:
        to = "gguf-eagle3"
    if to not in FORMATS:
        raise ValueError(f"--to {to}: the formats are {', '.join(FORMATS)}")
    chosen, is_gguf = FORMATS[to], to.startswith("gguf")
    if packed and not is_gguf:
        raise ValueError(f"--dtype {PACKED}: only gguf holds packed blocks, not {to}")
    if chosen.kind != kind:
        of_kind = [name for name, f in FORMATS.items() if f.kind == kind]
        raise ValueError(f"--to {to} holds a {chosen.kind}; this is a {kind}: choose {' or '.join(of_kind)}")
    warnings = chosen.warnings(draft)
    for refused, end in ((True, ""), (False, "; --allow-lossy-format writes it nevertheless")):
        lost = [w for w in warnings if (w.fatal if refused else w.lossy and not allow_lossy)]
        if lost:
            message = "; ".join(f"{w.engine} {w.message}" for w in lost)
            raise ValueError(f"{to} cannot hold this draft: {message}{end}")
    check_fit(draft, target)
    check_place(out, is_file=is_gguf)
    out.parent.mkdir(parents=True, exist_ok=True)
    chosen.write(replace(draft, tensors=converted(draft.tensors, dtype)), out, target, packed)
    return warnings


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
    if target is not None and target.fingerprints is not None and draft.target_fingerprint:
        actual = target.fingerprints()
        if draft.target_fingerprint not in actual:
            notes.append(
                f"bound to {target.path} (fingerprint {actual[0][:12]}); it was made for another target"
            )
            draft = replace(draft, target_fingerprint=actual[0])
    for warning in export_draft(draft, to, out, target):
        notes.append(f"{warning.check}: {warning.engine} {warning.message}")
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
