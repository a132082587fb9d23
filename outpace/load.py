"""Two paths -> target, draft, tokenizer; the name "default" is the model that ships in the package."""

from pathlib import Path

from tokenizers import Tokenizer

from outpace.chat.tokenizer import read_tokenizer
from outpace.drafts.dflash import BoundDFlash, DFlash
from outpace.drafts.load import load_dflash
from outpace.drafts.ngram import NGram
from outpace.models.decoder import Decoder
from outpace.models.load import load_target
from outpace.weights.checkpoint import LoadError

EMBEDDED = Path(__file__).parent / "embedded"
DEFAULT = "default"


def target_folder(path: str) -> Path:
    """A folder, or the embedded one for "default". Raises LoadError where there is none."""
    folder = EMBEDDED / "target" if path == DEFAULT else Path(path)
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder: name a checkpoint's, or {DEFAULT!r}")
    return folder


def open_target(path: str) -> tuple[Decoder, Tokenizer]:
    folder = target_folder(path)
    return load_target(folder), read_tokenizer(folder)


def open_draft(path: str, target: Decoder, tokenizer: Tokenizer) -> BoundDFlash | NGram | None:
    """ "none", "ngram", "default" (the embedded DFlash) or a folder in z-lab's DFlash format."""
    if path == "ngram":
        return NGram()
    draft = open_dflash(path, tokenizer)
    return None if draft is None else draft.bind(target)


def open_dflash(path: str, tokenizer: Tokenizer) -> DFlash | None:
    """The draft by itself; None for the names that stand for no weights."""
    if path in ("none", "ngram"):
        return None
    return load_dflash(draft_folder(path), tokenizer)


def draft_folder(path: str) -> Path:
    folder = EMBEDDED / "dflash" if path == DEFAULT else Path(path)
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder: name a draft's, {DEFAULT!r}, 'ngram' or 'none'")
    return folder
