"""A text corpus on every machine: the source of Python's standard library, split by file."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

HELD_OUT_SHARE = 20  # one file in twenty is never trained on
NAMES = ("port", "size", "count", "limit", "depth", "width", "level", "index")


@dataclass(frozen=True)
class Document:
    name: str  # path below the corpus root, with forward slashes
    text: str

    @property
    def held_out(self) -> bool:
        """Decided by the name, not the content: the same for slightly different copies in other Python
        versions."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def read_corpus(root: Path | None = None) -> list[Document]:
    """Every UTF-8 `*.py` file below `root` (default: the standard library), sorted by name.

    Raises ValueError when there is no source text to read.
    """
    folder = Path(root or sysconfig.get_path("stdlib"))
    documents = []
    for name in sorted(_sources(folder), key=lambda name: name.split("/")):
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            documents.append(Document(name, text))
    if not documents:
        if root is None:
            why = "this Python ships without its standard library's source"
        else:
            why = "it has none" if folder.is_dir() else "it is not a folder"
        raise ValueError(f"no *.py source below {folder}: {why}; name a folder of Python files")
    return documents


def _sources(root: Path) -> Iterator[str]:
    """Names of the `*.py` files below it; installed packages, often ten times as many, are not looked at."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "site-packages"]
        below = Path(folder).relative_to(root)
        yield from ((below / name).as_posix() for name in files if name.endswith(".py"))


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(train, held out), by `Document.held_out`."""
    train = [d for d in documents if not d.held_out]
    return train, [d for d in documents if d.held_out]


def corpus_hash(documents: list[Document]) -> str:
    """sha256 over names and texts: two runs trained on the same corpus carry the same hash."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.name.encode() + b"\0" + document.text.encode() + b"\0")
    return digest.hexdigest()


def note(rng: torch.Generator) -> tuple[str, str]:
    """A random name and value, such as "limit_48" and "730265", for recall tests."""
    word, number, value = (int(torch.randint(n, (), generator=rng)) for n in (len(NAMES), 100, 10**6))
    return f"{NAMES[word]}_{number:02}", f"{value:06}"
