"""The targets and drafts that ship in the package, by name."""

from pathlib import Path

from outpace.checkpoint.base import LoadError

EMBEDDED = Path(__file__).parent.parent / "embedded"
DEFAULT, SOLVER = "default", "solver"  # one continues Python, one solves small problems
TARGETS = {DEFAULT: "target", SOLVER: "solver/target"}
DFLASH, SUFFIX, SOLVER_DFLASH = "dflash", "suffix", "solver/dflash"
DRAFTS = DFLASH, SUFFIX, SOLVER_DFLASH, "solver/eagle3"
OWN_DRAFTS = {DEFAULT: SUFFIX, SOLVER: SOLVER_DFLASH}
TARGET_NAMES = " or ".join(map(repr, TARGETS))
DRAFT_NAMES = ", ".join(map(repr, DRAFTS))
NOT_THERE = f"{{}} is not there: name a checkpoint's folder, a GGUF file, {TARGET_NAMES}"


def target_path(path: str) -> Path:
    """The folder of an embedded target, or `path` itself: a folder or a GGUF file. Raises LoadError where
    there is none."""
    named = EMBEDDED / TARGETS[path] if path in TARGETS else Path(path)
    if not named.exists():
        raise LoadError(NOT_THERE.format(named))
    return named


def draft_path(path: str) -> Path:
    """The folder of an embedded draft, or `path` itself: a folder or a GGUF file. Raises LoadError where
    there is none."""
    named = EMBEDDED / path if path in DRAFTS else Path(path)
    if not named.exists():
        known = f"{DRAFT_NAMES}, 'ngram' or 'none'"
        raise LoadError(f"{named} is not there: name a draft's folder, a GGUF file, {known}")
    return named


def own_draft(target: str) -> str:
    """The default draft of a target: the fastest one that ships with it."""
    return OWN_DRAFTS.get(target, "none")
