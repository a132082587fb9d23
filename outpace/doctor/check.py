"""A Check: one thing the doctor looked at, the status, and what it rests on."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """`message` is for people: what was found, in one or a few sentences. `evidence` is for machines: plain
    JSON values. "skipped" always says why, and is no failure."""

    name: str
    status: Status
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """NaN and Inf, which JSON has not, as the words."""
        values: dict[str, Any] = _spelled(asdict(self))
        return values


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _spelled(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
