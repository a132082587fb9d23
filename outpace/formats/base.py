"""The interface of a format, and the reader and writer of all formats that are folders."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.checkpoint.open import LoadError, open_checkpoint
from outpace.checkpoint.save import save_checkpoint
from outpace.checkpoint.strict_json import read_object
from outpace.formats.engines import View
from outpace.formats.fields import ConfigFile, TokenId, copied_names, fingerprint_in
from outpace.formats.spec import (
    EAGLE3,
    EMBEDDING,
    HEAD,
    Description,
    FormatWarning,
    Read,
    TargetFiles,
    check_shapes,
    describe,
    leave_out_copies,
    stored,
    vocabulary_map,
    wanted_shapes,
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """`engines` load it as it is. `warnings(draft)`: the properties it cannot express. `views(file)`: engine
    -> its reading of a config, in words."""

    kind: str
    engines: tuple[str, ...]
    warnings: Callable[[Any], list[FormatWarning]]
    views: Callable[[ConfigFile], dict[str, View]]

    def read(self, path: Path, target: TargetFiles | None = None, token_id: TokenId | None = None) -> Read:
        """Raises LoadError or ValueError for files that are damaged, contradict themselves, or are not
        supported."""
        raise NotImplementedError

    def write(
        self, draft: Description, path: Path, target: TargetFiles | None = None, packed: bool = False
    ) -> None:
        """`packed`: matrices in Q8_0, which only GGUF has. Raises ValueError where `target` is needed."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FolderFormat(Format):
    """config.json and safetensors. `parse(file)`: the draft's config; `to_hf(draft, target)`: config.json.
    `our_name` and `their_name` translate the names of tensors; `copies`: the target's embedding and head are
    written too."""

    parse: Callable[[ConfigFile], Any]
    to_hf: Callable[[Any, TargetFiles | None], dict[str, Any]]
    our_name: Callable[[str], str] = lambda name: name.removeprefix("model.")
    their_name: Callable[[str], str] = lambda name: name
    copies: bool = False

    def read(self, path: Path, target: TargetFiles | None = None, token_id: TokenId | None = None) -> Read:
        checkpoint, where = open_checkpoint(path), str(path)
        held = {self.our_name(name): name for name in checkpoint.names()}
        if len(held) < len(checkpoint.names()):
            raise LoadError(f"{where} holds some tensors with the prefix `model.` and again without it")
        file = ConfigFile(
            where=where, values=checkpoint.config, target=target, names=held.keys(), token_id=token_id
        )
        config, notes = self.parse(file), file.notes
        biases = sorted(name for name in held if name.endswith(".bias"))
        if biases and self.kind == EAGLE3:
            raise LoadError(
                f"{where} holds {', '.join(biases[:3])}: EAGLE-3 has no biases; SGLang would drop those of "
                "q, k and v in silence"
            )
        copied = copied_names(file)
        notes += leave_out_copies(
            where, held, lambda name: stored(checkpoint, name), target, kind=self.kind, copied=copied
        )
        wanted = wanted_shapes(config, held.keys())
        shapes = {name: checkpoint.shape(original) for name, original in held.items()}
        if shapes.get("mask_hidden", ())[:2] == (1, 1):  # as speculators' code has it
            shapes["mask_hidden"] = shapes["mask_hidden"][1:]
        check_shapes(where, wanted, shapes)
        tensors = {name: stored(checkpoint, held[name]).reshape(wanted[name]) for name in wanted}
        notes += vocabulary_map(where, draft_rows(config), config.vocab_size, tensors)
        return describe(config, tensors, fingerprint_in(file) or provenance_fingerprint(path)), notes

    def write(
        self, draft: Description, path: Path, target: TargetFiles | None = None, packed: bool = False
    ) -> None:
        assert not packed
        # the precision of `fc`, the largest tensor that every draft has
        dtype = str(draft.tensors["fc.weight"].dtype).removeprefix("torch.")
        config = self.to_hf(draft, target) | {"dtype": dtype}
        if draft.target_fingerprint:
            config["outpace"] = config.get("outpace", {}) | {"target_fingerprint": draft.target_fingerprint}
        tensors = dict(draft.tensors)
        if self.copies and target is not None:
            tensors |= copies_for(draft, target)
        if self.copies and "mask_hidden" in tensors:  # [1, 1, states], as speculators' code has it
            tensors["mask_hidden"] = tensors["mask_hidden"][None]
        save_checkpoint(path, config, ((self.their_name(name), t) for name, t in tensors.items()))


def provenance_fingerprint(folder: Path) -> str:
    """What training wrote next to the draft; "" without a provenance.json."""
    path = folder / "provenance.json"
    value = read_object(path).get("target_fingerprint") if path.is_file() else None
    return value if isinstance(value, str) else ""


def draft_rows(config: Any) -> int:
    """How many tokens the draft can propose; a DFlash's config has 0 for all."""
    return config.draft_vocab_size or config.vocab_size


def copies_for(draft: Description, target: TargetFiles) -> dict[str, Tensor]:
    """The target's embedding and head, in the draft's precision, where the draft has none of its own."""
    dtype = draft.tensors["fc.weight"].dtype
    originals = {EMBEDDING: target.embedding, HEAD: target.head}
    return {name: get().to(dtype) for name, get in originals.items() if name not in draft.tensors}
