"""The tokenizer and the chat template that a checkpoint holds."""

from tokenizers import Tokenizer

from outpace.checkpoint.gguf import GGUFCheckpoint
from outpace.checkpoint.open import Checkpoint
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
