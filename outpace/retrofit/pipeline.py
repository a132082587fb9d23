"""Frame of a retrofit of a target on disk: settings, layers, calibration text, evaluation, saving."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.publish import published
from outpace.checkpoint.save import write_json
from outpace.checkpoint.shipped import target_path
from outpace.checkpoint.tokenizer import open_template
from outpace.config import Ranges, check_ranges
from outpace.formats.convert import write_folder
from outpace.loading import open_target
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.retrofit.evaluate import evaluate, texts_of
from outpace.text.corpus import Document, split

HELD_OUT_TEXTS = 4
MOST = float("inf")
Texts = list[list[int]]  # token ids, each from the beginning of a document


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings(ABC):
    """`layers`: which; none: all with full attention. `rows` texts of `row_tokens` for calibration."""

    NAME: ClassVar[str]
    RANGES: ClassVar[Ranges] = {
        "rows": (1, MOST),
        "row_tokens": (2, MOST),
        "seed": (0, MOST),
    }
    layers: tuple[int, ...] = ()
    rows: int = 8
    row_tokens: int = 1024
    seed: int = 1

    def __post_init__(self) -> None:
        check_ranges(self, self.RANGES, f"retrofit {self.NAME}: ")

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

    @property
    def extra_rows(self) -> int:
        """Texts that `attach` needs besides those of calibration."""
        return 0

    @abstractmethod
    def attach(self, target: Decoder, texts: Texts, validation: Texts) -> dict[str, Any]:
        """Give the target its retrofit, in place, calibrated on `rows` + `extra_rows` texts; -> its part of
        the report. `validation`: the held-out texts. Raises ValueError for settings that do not fit."""


def retrofit(
    path: str,
    settings: RetrofitSettings,
    documents: Sequence[Document],
    out: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Write out/, a checkpoint with the original tensors untouched, tokenizer and template, and the
    report settings.NAME.json, which is returned. Raises ValueError for settings that do not fit the target
    and for an `out` with contents."""
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise ValueError(f"{out} is there already: name another folder")
    target, tokenizer = open_target(path)
    settings.layers_of(target.config)
    on_stage("reading text")
    train, held_out = split(list(documents))
    texts = texts_of(
        tokenizer, train, settings.rows + settings.extra_rows, settings.row_tokens, settings.seed
    )
    validation = texts_of(tokenizer, held_out, HELD_OUT_TEXTS, settings.row_tokens, settings.seed)
    made_from, before = fingerprint(target), evaluate(target, validation)
    on_stage(f"calibrating on {settings.rows} texts")
    values = settings.attach(target, texts, validation)
    on_stage("evaluating on held-out text")
    after = evaluate(target, validation, before.pop("log_probabilities"))
    del after["log_probabilities"]
    report = {
        "settings": asdict(settings) | values.pop("settings"),
        "made_from": made_from,
        "calibration_tokens": sum(map(len, texts[: settings.rows])),
        **values,
        "held_out": {"texts": len(validation), "before": before, "after": after},
    }
    on_stage("saving")
    with published(out) as new:
        write_folder(target, new, tokenizer, open_template(open_checkpoint(target_path(path))))
        write_json(new / f"{settings.NAME}.json", report)
    return report
