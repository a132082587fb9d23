"""Cost tables on disk: found by the fingerprint of target, draft and machine, refused where it differs."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.save import write_json
from outpace.checkpoint.strict_json import read_object
from outpace.decode.costs import Costs, Point, Touched

FORMAT = 3


def cache_folder() -> Path:
    """Where tables are kept: $OUTPACE_CACHE, else $XDG_CACHE_HOME/outpace, else ~/.cache/outpace."""
    own, users = os.environ.get("OUTPACE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(users) if users else Path.home() / ".cache") / "outpace"


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
