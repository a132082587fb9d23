"""The cost of a step on this machine, for one target and draft: the table that the controller reads."""

import hashlib
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.save import write_json
from outpace.checkpoint.strict_json import read_object
from outpace.decode.request import GREEDY
from outpace.drafts.base import Draft
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors
from outpace.ops.dispatch import built


@dataclass(frozen=True, kw_only=True)
class Point:
    """Seconds at one batch size and one context (tokens remembered per row).

    verify[i], draft[i]: of widths[i] positions per row, root included. `verify` is the target's forward, its
    logits and the acceptance rule; `draft` is one proposal and the observation of what was verified
    (0 for one position); `rest` is everything else of a step, the controller's own time included; `show` is
    showing the draft one more token of every row after steps in which it rested, and `wake` what its first
    proposal then takes more than the next ones; `plain` is a step of autoregressive decoding. `spread`: half
    of the timings lie within this share of their median, for the median width.
    """

    batch: int
    context: float
    verify: tuple[float, ...]
    draft: tuple[float, ...]
    rest: float
    plain: float
    show: float = 0.0
    wake: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Touched:
    """Distinct experts that n consecutive tokens of real text touch in a layer, of `experts`, `per_token` for
    each: the mean over layers and places. `rho` fits measured[i] = K + rho (independent - K)."""

    experts: int
    per_token: int
    widths: tuple[int, ...]
    measured: tuple[float, ...]
    rho: float

    def independent(self, n: int) -> float:
        """E (1 - (1 - K/E)^n): what n tokens would touch if none knew of the others (MoESD, 2505.19645)."""
        return self.experts * (1 - (1 - self.per_token / self.experts) ** n)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """`acceptance`: how often a draft token was right where the one before it was, on the text measured."""

    fingerprint: str
    widths: tuple[int, ...]  # positions, ascending, from 1
    points: tuple[Point, ...]
    acceptance: float
    touched: Touched | None = None
    described: dict[str, str]  # target, draft and machine, for people

    def __post_init__(self) -> None:
        """Raises ValueError for what no measurement gives."""
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths {list(self.widths)}: they must ascend from 1")
        if not self.points or len({(p.batch, p.context) for p in self.points}) < len(self.points):
            raise ValueError("a cost table needs points, one at each batch size and context")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance {self.acceptance} is no share")
        for p in self.points:
            numbers = (*p.verify, *p.draft, p.rest, p.plain, p.show, p.wake, p.context)
            if len(p.verify) != len(self.widths) or len(p.draft) != len(self.widths):
                raise ValueError(f"{len(p.verify)} and {len(p.draft)} costs for {len(self.widths)} widths")
            if (
                not all(math.isfinite(x) and x >= 0 for x in numbers)
                or min(*p.verify, p.plain) <= 0
                or p.batch < 1
            ):
                raise ValueError(f"batch {p.batch}, context {p.context}: a cost is not a time")

    @property
    def widest(self) -> int:
        return self.widths[-1]

    def verify_seconds(self, n: int, context: float, batch: int = 1) -> float:
        """A forward that verifies n positions of every row (C_verify). Between measured widths, contexts and
        batch sizes lines are drawn, and beyond the widest and the longest the last ones go on. A batch
        beyond the measured ones costs what as many positions do in the largest of them; one below, what
        the smallest does."""
        return self._at("verify", n, context, batch)

    def draft_seconds(self, width: int, context: float, batch: int = 1) -> float:
        """A proposal of at most `width` positions, and showing the draft what became of it (C_draft)."""
        return self._at("draft", width, context, batch) if width > 1 else 0.0

    def rest_seconds(self, batch: int = 1) -> float:
        """What a step takes alongside."""
        return self._near(batch).rest

    def show_seconds(self, batch: int = 1) -> float:
        """What a plain step leaves for later: showing the draft its token."""
        return self._near(batch).show

    def wake_seconds(self, batch: int = 1) -> float:
        """What a proposal takes more after a rest."""
        return self._near(batch).wake

    def plain_seconds(self, context: float, batch: int = 1) -> float:
        """A step of autoregressive decoding, with neither a draft to show states to nor a
        proposal to verify."""
        near = self._near(batch).batch
        points = sorted((p for p in self.points if p.batch == near), key=lambda p: p.context)
        return _line([p.context for p in points], [p.plain for p in points], max(context, points[0].context))

    def round_seconds(self, n: int, context: float, batch: int = 1, width: int | None = None) -> float:
        """A whole step: drafted to `width` positions (default n), n of them verified."""
        drafted = self.draft_seconds(width or n, context, batch)
        return drafted + self.verify_seconds(n, context, batch) + self.rest_seconds(batch)

    def break_even(self, n: int, context: float, batch: int = 1) -> float:
        """The tau at which steps of n positions are as fast as steps without draft tokens."""
        return self.round_seconds(n, context, batch) / self.round_seconds(1, context, batch)

    @property
    def noisy(self) -> bool:
        """Something else ran: half of the timings do not even lie within half of their median."""
        return max(p.spread for p in self.points) > 0.5

    @cached_property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({p.batch for p in self.points}))

    def _near(self, batch: int) -> Point:
        return min(self.points, key=lambda p: abs(p.batch - batch))

    def _at(self, part: str, n: float, context: float, batch: int) -> float:
        below = [b for b in self.batches if b <= batch]
        above = [b for b in self.batches if b > batch]
        if below and above:
            low, high = below[-1], above[0]
            share = (batch - low) / (high - low)
            return (1 - share) * self._of(part, n, context, low) + share * self._of(part, n, context, high)
        if not below:
            return self._of(part, n, context, above[0])
        return self._of(part, n * batch / below[-1], context, below[-1])

    def _of(self, part: str, n: float, context: float, batch: int) -> float:
        points = sorted((p for p in self.points if p.batch == batch), key=lambda p: p.context)
        seconds = [_line(self.widths, getattr(p, part), n) for p in points]
        # a shorter context than the shortest costs no less: attention is not all there is
        return _line([p.context for p in points], seconds, max(context, points[0].context))


def _line(xs: tuple[float, ...] | list[float], ys: tuple[float, ...] | list[float], x: float) -> float:
    """Lines between the points; the last one goes on, if it rises."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    slope = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])
    if x > xs[-1]:
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    return ys[i] + slope * (x - xs[i])


def rising(ys: list[float]) -> list[float]:
    """The nearest sequence, by squares, that never falls: neighbours that do are averaged."""
    blocks: list[tuple[float, int]] = []
    for y in ys:
        mean, count = y, 1
        while blocks and blocks[-1][0] > mean:
            before, n = blocks.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


# ---- what a table belongs to --------------------------------------------------------------------


def fingerprint(target: Decoder, draft: Draft, rule: str = GREEDY) -> str:
    """Of target, draft, machine, and the acceptance rule (decode.request.COST_RULES): a table measured for
    another of them is not used."""
    parts = [*machine(target).items(), ("target", identity(target)), ("draft", identity(draft))]
    parts += [("rule", rule)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def machine(target: Decoder) -> dict[str, str]:
    """What decides how fast the same forward runs."""
    cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if cuda else _processor(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "kernels": "none" if cuda else built(),
        "torch": torch.__version__,
        "outpace": version("outpace"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _some_bytes(tensor: Tensor) -> bytes:
    """Of its first and its last row, wherever they lie: flattening could copy gigabytes."""
    if not tensor.numel():
        return b""
    ends = [tensor.detach(), tensor.detach()]
    while ends[0].dim() > 1:
        ends = [ends[0][0], ends[1][-1]]
    few = torch.cat((ends[0].reshape(-1)[:16], ends[1].reshape(-1)[-16:]))
    return few.view(torch.uint8).cpu().numpy().tobytes()


def identity(thing: Any) -> str:
    """Config, and of every tensor its name, shape, dtype and a few bytes: a model of the size of gpt-oss is
    known again without reading it. Of a dataclass, its fields, but for the target it is bound to."""
    if isinstance(thing, nn.Module):
        digest = hashlib.sha256(repr(getattr(thing, "config", None)).encode())
        for name, tensor in sorted(named_tensors(thing)):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + _some_bytes(tensor))
        return f"{type(thing).__name__} {digest.hexdigest()}"
    if isinstance(thing, Tensor):
        return f"{tuple(thing.shape)} {thing.dtype} {hashlib.sha256(_some_bytes(thing)).hexdigest()}"
    if is_dataclass(thing):
        values = [(f.name, getattr(thing, f.name)) for f in fields(thing)]
        known = [f"{name}={identity(v)}" for name, v in values if not isinstance(v, Decoder)]
        return f"{type(thing).__name__}({', '.join(known)})"
    return repr(thing)


FORMAT = 3


def table_path(folder: Path, fingerprint: str) -> Path:
    return folder / "costs" / f"{fingerprint[:24]}.json"


def write_costs(costs: Costs, folder: Path) -> Path:
    """-> the file, written under another name and renamed. Raises OSError where it cannot be."""
    path = table_path(folder, costs.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, **asdict(costs)})
    return path


def read_costs(folder: Path, fingerprint: str) -> Costs | None:
    """The table of this target, draft and machine; None where none was kept.

    Raises LoadError, naming the file, for one that is damaged, of another format, or of something else.
    """
    path = table_path(folder, fingerprint)
    if not path.exists():
        return None
    costs = from_json(read_object(path), str(path))
    if costs.fingerprint != fingerprint:
        raise LoadError(f"{path} was measured for another target, draft or machine: {costs.described}")
    return costs


def stored_for(config: ModelConfig, folder: Path) -> Costs | None:
    """The newest stored table of a target of this shape, on this machine; None without one."""
    shape = f"{config.architecture}, {config.num_layers} layers"
    files = sorted(folder.glob("costs/*.json"), key=lambda path: -path.stat().st_mtime)
    for path in files:
        try:
            costs = from_json(read_object(path), str(path))
        except LoadError:
            continue
        experts = costs.touched.experts if costs.touched else 0
        if costs.described.get("target") == shape and experts == config.num_experts and not costs.noisy:
            return costs
    return None


def from_json(values: dict[str, Any], where: str) -> Costs:
    """Raises LoadError for what `write_costs` does not write."""
    if values.get("format") != FORMAT:
        raise LoadError(f"{where} has format {values.get('format')!r}; this version reads {FORMAT}")
    try:
        points = tuple(
            Point(**{**p, "verify": tuple(p["verify"]), "draft": tuple(p["draft"])}) for p in values["points"]
        )
        value = values["touched"]
        if value is not None:
            value = Touched(
                **{**value, "widths": tuple(value["widths"]), "measured": tuple(value["measured"])}
            )
        rest = {name: values[name] for name in ("fingerprint", "acceptance", "described")}
        return Costs(widths=tuple(values["widths"]), points=points, touched=value, **rest)
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(
            f"{where} is no cost table ({error!r}): outpace calibrate --force measures again"
        ) from error
