"""What is in a checkpoint: architecture, shapes, parameters, bytes, what is missing or left over."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outpace.checkpoint.open import Checkpoint, LoadError, open_checkpoint
from outpace.doctor.checkpoint import CheckpointUnderTest, Finding, config_findings, tensor_findings
from outpace.doctor.value_scan import deep_findings
from outpace.models.config import ModelConfig
from outpace.models.load import Comparison, compare, parse_config
from outpace.models.weights import count


@dataclass(frozen=True, kw_only=True)
class Inspection:
    folder: str
    config: ModelConfig
    parameters: int
    active_parameters: int  # that one token's forward reads; of the embedding, one row
    nbytes: int
    dtypes: dict[str, int]  # safetensors dtype -> bytes
    parts: dict[str, tuple[int, int]]  # part -> (parameters, bytes)
    kv_bytes_per_token: int  # float32, growing layers only
    comparison: Comparison

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "architecture": self.config.architecture,
            "layers": self.config.num_layers,
            "hidden_size": self.config.hidden_size,
            "heads": [self.config.num_heads, self.config.num_kv_heads, self.config.head_dim],
            "experts": [self.config.num_experts, self.config.experts_per_token],
            "vocab_size": self.config.vocab_size,
            "sliding_window": self.config.sliding_window,
            "max_position_embeddings": self.config.max_position_embeddings,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "bytes": self.nbytes,
            "bytes_by_dtype": self.dtypes,
            "parts": {k: {"parameters": p, "bytes": b} for k, (p, b) in self.parts.items()},
            "kv_bytes_per_token_float32": self.kv_bytes_per_token,
            "missing": self.comparison.missing,
            "left_over": self.comparison.left_over,
            "wrong_shape": [list(map(str, row)) for row in self.comparison.wrong_shape],
            "wrong_dtype": [list(row) for row in self.comparison.wrong_dtype],
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """Gate A. `inspection` is None where the path cannot be opened or its config not parsed."""

    path: str
    inspection: Inspection | None
    findings: tuple[Finding, ...]
    deep: bool = False

    @property
    def passed(self) -> bool:
        return not any(finding.fault for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        values = {"folder": self.path} if self.inspection is None else self.inspection.as_json()
        findings = [asdict(finding) for finding in self.findings]
        return values | {"passed": self.passed, "deep": self.deep, "findings": findings}


def validate_checkpoint(
    path: Path | str, *, deep: bool = False, on_bytes: Callable[[int, int], None] = lambda n, total: None
) -> Report:
    """What is in a checkpoint and what is wrong with it, from headers alone; `deep` reads every value, and
    tells `on_bytes` how many bytes it has just read and how many there are. Raises nothing that a checkpoint
    can cause."""
    try:
        checkpoint = open_checkpoint(path)
    except LoadError as error:
        return Report(
            path=str(path), inspection=None, findings=(Finding(name=error.kind, message=str(error)),)
        )
    findings, result = config_findings(checkpoint), None
    try:
        result = inspect_target(checkpoint)
    except ValueError as error:
        findings.append(_unparsed(error, checkpoint.config))
    if result is not None:
        specs = {name: (shape, dtype) for name, shape, dtype in checkpoint.specs()}
        findings += tensor_findings(CheckpointUnderTest(checkpoint, result.config, result.comparison, specs))
    if deep:
        total = sum(b for _, b in count(checkpoint.specs())[0].values())
        findings += deep_findings(checkpoint, lambda n: on_bytes(n, total))
    return Report(path=str(path), inspection=result, findings=tuple(findings), deep=deep)


def _unparsed(error: ValueError, hf: dict[str, Any]) -> Finding:
    """The finding of a config that no parser takes."""
    if not isinstance(error, LoadError):
        return Finding(name="config", message=str(error), fix="fetch the config.json of this model")
    text = "GPT-OSS, Llama, Qwen3 and Qwen3-MoE are read"
    if any(word in str(hf.get("architectures")).lower() for word in ("draft", "eagle")):
        text = "this is a draft, not a target: name it with --draft"
    return Finding(name="architecture", message=str(error), fix=text)


def inspect_target(source: Checkpoint | Path | str) -> Inspection:
    """Reads headers only. Raises LoadError where there is no checkpoint to read, ValueError where its config
    cannot be parsed."""
    checkpoint = open_checkpoint(source) if isinstance(source, Path | str) else source
    config = parse_config(checkpoint.config)
    parts, dtypes = count(checkpoint.specs())
    total = sum(p for p, _ in parts.values())
    experts = parts.get("experts", (0, 0))[0]
    used = config.experts_per_token / config.num_experts if config.num_experts else 1.0
    idle = experts * (1 - used)
    embedding = config.vocab_size * config.hidden_size
    unread = 0 if config.tie_word_embeddings else embedding - config.hidden_size
    growing = sum(config.kv_numbers(i) + config.index_numbers(i) for i in config.full_layers)
    return Inspection(
        folder=str(checkpoint.folder),
        config=config,
        parameters=total,
        active_parameters=round(total - idle - unread),
        nbytes=sum(b for _, b in parts.values()),
        dtypes=dtypes,
        parts=parts,
        kv_bytes_per_token=growing * 4,
        comparison=compare(checkpoint, config),
    )
