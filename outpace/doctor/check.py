"""The result of one of the doctor's checks, for people and for machines."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """`message` is one or a few sentences for people, `evidence` plain JSON values. `mistakes`: the known
    mistakes that the check names (`doctor/mistakes.py`). "skipped" gives the reason, and is no failure."""

    name: str
    status: Status
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)
    mistakes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """JSON has no NaN and Inf: they become words."""
        values: dict[str, Any] = _spelled(asdict(self))
        return values


def check_of(
    name: str,
    message: str,
    *,
    errors: Sequence[str] = (),
    warnings: Sequence[str] = (),
    evidence: dict[str, Any] | None = None,
    mistakes: tuple[str, ...] = (),
) -> Check:
    """Errors fail the check, warnings warn; with neither it passes with `message`."""
    status: Status = "fail" if errors else "warn" if warnings else "pass"
    text = "; ".join([*errors, *warnings]) or message
    return Check(name=name, status=status, message=text, evidence=evidence or {}, mistakes=mistakes)


def skipped(name: str, reason: str, evidence: dict[str, Any] | None = None) -> Check:
    return Check(name=name, status="skipped", message=reason, evidence=evidence or {})


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _spelled(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
