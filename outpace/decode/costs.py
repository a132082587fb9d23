"""The cost of a step on this machine, for one target and draft: the table that the controller reads."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

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
from outpace.ops.dispatch import built, cpu_capability

MAX_SPREAD, MIN_CPU = 0.5, 0.85  # a measurement beyond either was disturbed by other processes


@dataclass(frozen=True, kw_only=True)
class Point:
    """Seconds at one batch size and one context (cached tokens per row).

    verify[i], draft[i]: of widths[i] positions per row, root included. `verify` is the target's forward, its
    logits and the acceptance rule; `draft` is one proposal and the observation of the step before it (0 for
    one position); `rest` is everything else of a step with draft tokens, the controller included, and `idle`
    of one without (None: as much); `show` is the observation of one more token per row after these, and
    `wake` the time by which the first proposal then exceeds `draft`; `settle` is the time by which its verify
    pass, and the steps without a draft after it, exceed `verify`: a processor is slower at what it did not
    just do; `plain` is a step of autoregressive decoding; `prompt` is a token of a prompt's chunk. `spread`:
    interquartile range of the timings over their median, for the median width. `cpu`: share of the time in
    which the main thread ran on the processor, 1 on a GPU.
    """

    batch: int
    context: float
    verify: tuple[float, ...]
    draft: tuple[float, ...]
    rest: float
    plain: float
    idle: float | None = None
    lone: float | None = None
    show: float = 0.0
    wake: float = 0.0
    settle: float = 0.0
    prompt: float = 0.0
    spread: float = 0.0
    cpu: float = 1.0

    @property
    def busy(self) -> bool:
        """Other processes used the processor during the measurement."""
        return self.spread > MAX_SPREAD or self.cpu < MIN_CPU


@dataclass(frozen=True, kw_only=True)
class Touched:
    """Distinct experts that n consecutive tokens of real text use in a layer, of `experts`, `per_token` for
    each: mean over layers and text positions. `rho` fits measured[i] = K + rho (independent - K)."""

    experts: int
    per_token: int
    widths: tuple[int, ...]
    measured: tuple[float, ...]
    rho: float

    def independent(self, n: int) -> float:
        """E (1 - (1 - K/E)^n): the same for independent tokens (MoESD, 2505.19645)."""
        return self.experts * (1 - (1 - self.per_token / self.experts) ** n)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """`acceptance`: acceptance rate of a draft token whose parent was accepted, on the text measured."""

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
            single = p.rest, p.idle or 0.0, p.lone or 0.0, p.plain, p.show, p.wake, p.settle
            numbers = (*p.verify, *p.draft, *single, p.prompt, p.context)
            if len(p.verify) != len(self.widths) or len(p.draft) != len(self.widths):
                raise ValueError(f"{len(p.verify)} and {len(p.draft)} costs for {len(self.widths)} widths")
            if (
                not all(math.isfinite(x) and x >= 0 for x in numbers)
                or min(*p.verify, p.plain) <= 0
                or p.batch < 1
            ):
                raise ValueError(f"batch {p.batch}, context {p.context}: a cost is not a time")

    def verify_seconds(self, n: int, context: float, batch: int = 1) -> float:
        """A forward that verifies n positions of every row (C_verify). Linear between measured widths,
        contexts and batch sizes, and beyond the largest width and context. A batch beyond the largest
        measured one costs as much as the same number of positions in that one; one below the smallest, as
        much as the smallest."""
        return self._at("verify", n, context, batch)

    def draft_seconds(self, width: int, context: float, batch: int = 1) -> float:
        """A proposal of at most `width` positions, and the observation of the step before it (C_draft)."""
        return self._at("draft", width, context, batch) if width > 1 else 0.0

    def rest_seconds(self, n: int, batch: int = 1) -> float:
        """Everything of a step of n positions besides draft and verify."""
        point = self._nearest(batch)
        return point.rest if n > 1 or point.idle is None else point.idle

    def lone_seconds(self, context: float, batch: int = 1) -> float:
        """A forward of one position that follows a proposal of which nothing is verified."""
        return max(self._nearest(batch).lone or 0.0, self.verify_seconds(1, context, batch))

    def show_seconds(self, batch: int = 1) -> float:
        """The observation, later, of an autoregressive step's tokens."""
        return self._nearest(batch).show

    def wake_seconds(self, batch: int = 1) -> float:
        """The first proposal after a rest, beyond `draft_seconds`."""
        return self._nearest(batch).wake

    def settle_seconds(self, batch: int = 1) -> float:
        """The first verify pass after a rest, and the steps without a draft after it, beyond their usual."""
        return self._nearest(batch).settle

    def plain_seconds(self, context: float, batch: int = 1) -> float:
        """A step of autoregressive decoding, without a draft."""
        points = self._points(self._nearest(batch).batch)
        return _line([p.context for p in points], [p.plain for p in points], max(context, points[0].context))

    def round_seconds(self, n: int, context: float, batch: int = 1, width: int | None = None) -> float:
        """A whole step: drafted to `width` positions (default n), n of them verified."""
        drafted = self.draft_seconds(width or n, context, batch)
        return drafted + self.verify_seconds(n, context, batch) + self.rest_seconds(width or n, batch)

    def break_even(self, n: int, context: float, batch: int = 1) -> float:
        """The tau at which steps of n positions are as fast as steps without draft tokens."""
        return self.round_seconds(n, context, batch) / self.round_seconds(1, context, batch)

    @property
    def busy(self) -> bool:
        """Other processes used the processor while a point was measured; the costs are too high."""
        return any(p.busy for p in self.points)

    @cached_property
    def derived(self) -> dict[tuple[int, ...], Any]:
        """What a controller has derived from the table."""
        return {}

    @cached_property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({p.batch for p in self.points}))

    def _nearest(self, batch: int) -> Point:
        return min(self.points, key=lambda p: abs(p.batch - batch))

    def _points(self, batch: int) -> list[Point]:
        return sorted((p for p in self.points if p.batch == batch), key=lambda p: p.context)

    def _at(self, part: str, n: float, context: float, batch: int) -> float:
        below = max((b for b in self.batches if b <= batch), default=None)
        above = min((b for b in self.batches if b > batch), default=None)
        if below is None:
            assert above is not None
            return self._of(part, n, context, above)
        if above is None:
            return self._of(part, n * batch / below, context, below)
        share = (batch - below) / (above - below)
        return (1 - share) * self._of(part, n, context, below) + share * self._of(part, n, context, above)

    def _of(self, part: str, n: float, context: float, batch: int) -> float:
        points = self._points(batch)
        seconds = [_line(self.widths, getattr(p, part), n) for p in points]
        # a context below the smallest one costs as much: attention is not all of a forward
        return _line([p.context for p in points], seconds, max(context, points[0].context))


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation; beyond the last point the last slope, if it is positive."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    slope = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])
    if x > xs[-1]:
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    return ys[i] + slope * (x - xs[i])


def rising(ys: list[float]) -> list[float]:
    """Isotonic regression: the nearest non-decreasing sequence in squares."""
    blocks: list[tuple[float, int]] = []
    for y in ys:
        mean, count = y, 1
        while blocks and blocks[-1][0] > mean:
            before, n = blocks.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def fingerprint(target: Decoder, draft: Draft, rule: str = GREEDY) -> str:
    """Hash of target, draft, machine and acceptance rule (decode.request.COST_RULES); a cost table is used
    for one of them only."""
    parts = [*machine(target).items(), ("target", identity(target)), ("draft", identity(draft))]
    parts += [("rule", rule)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def machine(target: Decoder) -> dict[str, str]:
    """Everything that determines how fast the same forward runs."""
    cuda = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if cuda else _processor(),
        "vector": cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "dtype": str(target.dtype).removeprefix("torch."),
        "kv_cache_dtype": target.kv_cache_dtype_name,
        "activation_dtype": target.activation_dtype_name,
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
    """A few values of the first and of the last row; flattening the tensor could copy gigabytes."""
    if not tensor.numel():
        return b""
    ends = [tensor.detach(), tensor.detach()]
    while ends[0].dim() > 1:
        ends = [ends[0][0], ends[1][-1]]
    few = torch.cat((ends[0].reshape(-1)[:16], ends[1].reshape(-1)[-16:]))
    return few.view(torch.uint8).cpu().numpy().tobytes()


def identity(thing: Any) -> str:
    """Text that identifies a draft or a target. Of a module: config, and name, shape, dtype and a few bytes
    of every tensor, so that a large model need not be read. Of a dataclass: its fields, except the target."""
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


FORMAT = 8


def table_path(folder: Path, fingerprint: str) -> Path:
    return folder / "costs" / f"{fingerprint[:24]}.json"


def write_costs(costs: Costs, folder: Path) -> Path:
    """-> the file, which is replaced atomically. Raises OSError."""
    path = table_path(folder, costs.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, **asdict(costs)})
    return path


def read_costs(folder: Path, fingerprint: str) -> Costs | None:
    """The stored table with this fingerprint; None if there is none.

    Raises LoadError, naming the file, for a table that is damaged, of another format or fingerprint.
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
        if costs.described.get("target") == shape and experts == config.num_experts and not costs.busy:
            return costs
    return None


def from_json(values: dict[str, Any], where: str) -> Costs:
    """Raises LoadError for what `write_costs` does not write."""
    if values.get("format") != FORMAT:
        raise LoadError(f"{where} has format {values.get('format')!r}; this version reads {FORMAT}")
    try:
        points, touched = values["points"], values["touched"]
        return Costs(
            points=tuple(_record(Point, p, "verify", "draft") for p in points),
            touched=None if touched is None else _record(Touched, touched, "widths", "measured"),
            widths=tuple(values["widths"]),
            **{name: values[name] for name in ("fingerprint", "acceptance", "described")},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(
            f"{where} is not a cost table ({error!r}): `outpace calibrate --force` measures a new one"
        ) from error


Record = TypeVar("Record", Point, Touched)


def _record(kind: type[Record], values: dict[str, Any], *lists: str) -> Record:
    return kind(**{**values, **{name: tuple(values[name]) for name in lists}})
