"""What a stopped measurement has already measured, kept in one file until the report is whole."""

import json
from pathlib import Path
from typing import Any

from outpace.weights.save import write_json


class Kept:
    """Values by name in folder/progress.json. A file of another `key` (other settings, target or draft) is
    not read: what it holds answers another question."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.path = folder / "progress.json"
        self.held: dict[str, Any] = {"key": json.loads(json.dumps(key)), "values": {}}
        if self.path.is_file():
            found = json.loads(self.path.read_text())
            if found["key"] == self.held["key"]:
                self.held = found

    @property
    def names(self) -> list[str]:
        return list(self.held["values"])

    def __contains__(self, name: str) -> bool:
        return name in self.held["values"]

    def __getitem__(self, name: str) -> Any:
        return self.held["values"][name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.held["values"][name] = value
        write_json(self.path, self.held)

    def done(self) -> None:
        self.path.unlink(missing_ok=True)
