"""What both retrofits of a target on disk have alike: settings, the folder, the layers, text, saving."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer

from outpace.checkpoint.open import open_checkpoint, target_path
from outpace.checkpoint.publish import published
from outpace.checkpoint.save import write_json
from outpace.checkpoint.tokenizer import open_template
from outpace.formats.convert import write_folder
from outpace.loading import open_target
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.retrofit.evaluate import texts_of
from outpace.text.corpus import Document, split

HELD_OUT_TEXTS = 4  # texts


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings:
    """`layers`: which; none: all with full attention. `rows` texts of `row_tokens`: what is calibrated on."""

    NAME: ClassVar[str]
    layers: tuple[int, ...] = ()
    rows: int = 8
    row_tokens: int = 1024
    seed: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), {"rows": 1, "row_tokens": 2}.get(field.name, 0)
            if isinstance(value, int | float) and not value >= least:
                raise ValueError(f"retrofit {self.NAME}: {field.name} {value}: it must be at least {least}")

    def layers_of(self, config: ModelConfig) -> list[int]:
        """Raises ValueError for layers that cannot be retrofitted."""
        full = config.full_layers
        unfit = [i for i in self.layers if i not in full]
        if unfit or len(set(self.layers)) < len(self.layers) or not full:
            raise ValueError(
                f"retrofit {self.NAME}: layers {list(self.layers)}: each once, of those with full attention: "
                f"{full}"
            )
        return list(self.layers) or full


def open_for(path: str, out: Path) -> tuple[Decoder, Tokenizer]:
    """The target that a retrofit is made of. Raises ValueError for an `out` that holds something."""
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise ValueError(f"{out} is there already: name another folder")
    return open_target(path)


def texts_for(
    tokenizer: Tokenizer, documents: Sequence[Document], settings: RetrofitSettings, extra: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """Texts to calibrate on, `extra` more than settings.rows, and held-out ones to evaluate on."""
    train, held_out = split(list(documents))
    texts = texts_of(tokenizer, train, settings.rows + extra, settings.row_tokens, settings.seed)
    return texts, texts_of(tokenizer, held_out, HELD_OUT_TEXTS, settings.row_tokens, settings.seed)


def save_retrofit(
    target: Decoder, tokenizer: Tokenizer, path: str, out: Path, report: dict[str, Any], name: str
) -> None:
    """out/: the checkpoint with the tokenizer and template that it came with, and its report."""
    with published(out) as new:
        write_folder(target, new, tokenizer, open_template(open_checkpoint(target_path(path))))
        write_json(new / name, report)
