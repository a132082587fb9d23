"""The target and the drafts that ship in the package, by name."""

from pathlib import Path

from outpace.checkpoint.base import LoadError

EMBEDDED = Path(__file__).parent.parent / "embedded"
DEFAULT, TARGET = "default", EMBEDDED / "target"
DRAFTS = DFLASH, EAGLE3 = "dflash", "eagle3"
NOT_THERE = f"{{}} is not there: name a checkpoint's folder, a GGUF file, or {DEFAULT!r}"


def target_path(path: str) -> Path:
    """The folder of the embedded target, or `path` itself: a folder or a GGUF file. Raises LoadError where
    there is none."""
    named = TARGET if path == DEFAULT else Path(path)
    if not named.exists():
        raise LoadError(NOT_THERE.format(named))
    return named


def draft_path(path: str) -> Path:
    """The folder of an embedded draft, or `path` itself: a folder or a GGUF file. Raises LoadError where
    there is none."""
    named = EMBEDDED / path if path in DRAFTS else Path(path)
    if not named.exists():
        known = ", ".join(map(repr, DRAFTS))
        raise LoadError(
            f"{named} is not there: name a draft's folder, a GGUF file, {known}, 'ngram' or 'none'"
        )
    return named


def own_draft(target: str) -> str:
    """The default draft of a target: the fastest one that ships with it."""
    return DFLASH if target == DEFAULT else "none"
