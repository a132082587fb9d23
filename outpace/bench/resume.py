"""What a stopped measurement has already measured, line by line in one file until the report is whole."""

import json
import os
from pathlib import Path
from typing import Any


class Kept:
    """Values by name in folder/progress.jsonl; its first line is `key`. A file of another key (other
    settings, target or draft) is not read: what it holds answers another question; the first value kept
    replaces it. A line that a kill cut short was never kept."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.path = folder / "progress.jsonl"
        self.head = _line({"key": key})
        self.values: dict[str, Any] = {}
        self.size = 0  # bytes of the file that are ours and whole
        data = self.path.read_bytes() if self.path.is_file() else b""
        if data.startswith(self.head):
            whole = data[: data.rindex(b"\n") + 1]
            self.size = len(whole)
            for line in whole[len(self.head) :].splitlines():
                self.values |= json.loads(line)

    @property
    def names(self) -> list[str]:
        return list(self.values)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(self.size)
            file.seek(self.size)
            file.write((b"" if self.size else self.head) + _line({name: value}))
            file.flush()
            os.fsync(file.fileno())
            self.size = file.tell()
        self.values[name] = value

    def done(self) -> None:
        self.path.unlink(missing_ok=True)


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
