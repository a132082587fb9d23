"""`outpace retrofit mla`: calibrate, factor, evaluate and save latent KV of a target on disk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.retrofit import mla
from outpace.retrofit.calibrate import Moments, calibrate
from outpace.retrofit.evaluate import judge
from outpace.retrofit.pipeline import JUDGED, RetrofitSettings, open_for, save_retrofit, texts_for
from outpace.text.corpus import Document

REPORT = "mla.json"
ALLOCATIONS = ("marginal", "equal")
BALANCES = (1.0, 0.3, 0.1, 0.03)  # of keys against values, tried on texts apart
FRACTIONS = (0.75, 0.5, 0.25)  # of 2 K D, at which errors are reported

Bases = Mapping[int, mla.Basis]


@dataclass(frozen=True, kw_only=True)
class MlaSettings(RetrofitSettings):
    """`rank`: latent dimensions of a layer, in the mean; 0: half of keys and values. `allocate`: "marginal",
    ranks of equal marginal loss, or "equal". `balance`: what keys weigh against values with the method
    "loss"; 0: the best of a few, tried."""

    NAME: ClassVar[str] = "mla"
    method: str = mla.LOSS
    rank: int = 0
    allocate: str = "marginal"
    balance: float = 0.0
    rows: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("method", mla.METHODS), ("allocate", ALLOCATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"retrofit mla: {name} {getattr(self, name)!r}: it must be one of {', '.join(known)}"
                )
        if self.allocate == "marginal" and self.method == mla.SVD:
            raise ValueError("retrofit mla: svd sees no data, so it cannot weigh ranks: allocate = equal")

    @property
    def searches(self) -> bool:
        """Whether a balance is yet to be found."""
        return self.method == mla.LOSS and not self.balance

    def ranks(self, bases: Bases, rank: int) -> dict[int, int]:
        return mla.ranks_of(bases, rank) if self.allocate == "marginal" else dict.fromkeys(bases, rank)


def retrofit_mla(
    path: str,
    settings: MlaSettings,
    documents: Sequence[Document],
    out: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Write out/, a checkpoint where the original tensors are untouched; -> the report, also out/mla.json.
    Raises ValueError for settings that this target cannot have, and for an `out` that holds something."""
    target, tokenizer = open_for(path, out)
    layers, rank = asked_of(target, settings)
    on_stage("reading text")
    texts, validation = texts_for(tokenizer, documents, settings, extra=JUDGED if settings.searches else 0)
    on_stage(f"calibrating {len(layers)} layers on {settings.rows} texts")
    moments = calibrate(target, texts[: settings.rows], layers)
    table = [
        {"method": method, "fraction": fraction, "layers": [asdict(e) for e in result]}
        for method, fraction, result in error_table(target, moments)
    ]
    on_stage("factoring")
    balance, tried = chosen_balance(target, moments, rank, settings, texts[settings.rows :])
    bases = bases_of(target, moments, settings.method, balance)
    ranks = settings.ranks(bases, rank)
    lost = mla.errors(target, bases, moments, ranks)
    before = judge(target, validation)
    whose = fingerprint(target)
    mla.attach(target, bases, ranks)
    on_stage("judging on held-out text")
    after = judge(target, validation, before.pop("log_probabilities"))
    del after["log_probabilities"]
    remembered = (replace(target.config, use_mla_kv=False), target.config)
    numbers = [sum(map(config.kv_numbers, layers)) for config in remembered]
    report = {
        "settings": asdict(settings) | {"layers": layers},
        "made_from": whose,
        "calibration_tokens": sum(map(len, texts[: settings.rows])),
        "balance": balance if settings.method == mla.LOSS else None,
        "balances_tried": tried,
        "ranks": {str(i): r for i, r in ranks.items()},
        "numbers_per_token": dict(zip(("before", "after"), numbers, strict=True)),
        "parameters": sum(p.numel() for a in target.attentions if a.latent for p in a.latent.parameters()),
        "errors": [asdict(e) for e in lost],
        "errors_by_method": table,
        "held_out": {"texts": len(validation), "before": before, "after": after},
    }
    on_stage("saving")
    save_retrofit(target, tokenizer, path, out, report, REPORT)
    return report


def asked_of(target: Decoder, settings: MlaSettings) -> tuple[list[int], int]:
    """-> layers and mean rank."""
    config = target.config
    if config.mla_ranks:
        raise ValueError("retrofit mla: this target has latents already: start from the one it was made from")
    whole = 2 * config.num_kv_heads * config.head_dim
    rank = settings.rank or whole // 2
    if rank > whole:
        raise ValueError(f"retrofit mla: rank {rank}: keys and values of a layer have {whole} dimensions")
    return settings.layers_of(config), rank


def bases_of(target: Decoder, moments: Mapping[int, Moments], method: str, balance: float) -> Bases:
    return {i: mla.basis(method, target.attentions[i], m, balance) for i, m in moments.items()}


def error_table(target: Decoder, moments: Mapping[int, Moments]) -> list[tuple[str, float, list[mla.Error]]]:
    """Every method at every fraction, all layers of one rank."""
    entries = []
    for method in mla.METHODS:
        bases = bases_of(target, moments, method, mla.BALANCE)
        for fraction in FRACTIONS:
            ranks = {i: max(1, round(fraction * len(b.mean))) for i, b in bases.items()}
            entries.append((method, fraction, mla.errors(target, bases, moments, ranks)))
    return entries


def chosen_balance(
    target: Decoder,
    moments: Mapping[int, Moments],
    rank: int,
    settings: MlaSettings,
    texts: list[list[int]],
) -> tuple[float, dict[str, float]]:
    """The one of BALANCES with the least divergence on `texts`; -> it, and all divergences. The target is as
    it was afterwards."""
    if not settings.searches:
        return settings.balance or mla.BALANCE, {}
    tried = {}
    before = judge(target, texts)["log_probabilities"]
    for balance in BALANCES:
        bases = bases_of(target, moments, settings.method, balance)
        mla.attach(target, bases, settings.ranks(bases, rank))
        tried[f"{balance:g}"] = judge(target, texts, before)["kl"]
        mla.detach(target)
    return min(BALANCES, key=lambda b: tried[f"{b:g}"]), tried
