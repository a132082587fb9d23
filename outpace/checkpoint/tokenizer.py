"""The tokenizer and the chat template that a checkpoint holds."""

from pathlib import Path

from tokenizers import Tokenizer

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.gguf import GGUFCheckpoint
from outpace.checkpoint.open import Checkpoint
from outpace.checkpoint.strict_json import read_object
from outpace.text.gguf_tokenizer import tokenizer_from_gguf
from outpace.text.template import ChatTemplate, folder_template, gguf_template
from outpace.text.tokenizer import read_tokenizer


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """A GGUF file's own vocabulary; else the tokenizer.json next to the weights."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return tokenizer_from_gguf(checkpoint.metadata)
    return read_tokenizer(checkpoint.folder)


def open_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The chat template that a GGUF file, or a folder, holds."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return gguf_template(checkpoint.metadata)
    return folder_template(checkpoint.folder)


def generation_stops(folder: Path) -> tuple[int, ...]:
    """The ids of `eos_token_id` in generation_config.json, none where there is no such file. config.json
    often names one alone: gpt-oss's `<|return|>`, while `<|call|>` ends a turn too.

    Raises LoadError for a file that holds anything but ids.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    value = read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise LoadError(f"{path}: eos_token_id is {str(value)[:60]}, not a token's id or a list of them")
    return tuple(ids)
