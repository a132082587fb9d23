"""Writing without loss: a folder appears whole, has one writer, and a full disk is one clear line."""

import ctypes
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outpace.checkpoint.base import LoadError

STAGING = ".writing"  # ends the name of a folder that is being written
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# what libraries make of it: safetensors' own error, and torch.save's and numpy's, which name no cause
FULL_WORDS = (
    "No space left",
    "File too large",
    "PytorchStreamWriter failed",
    "inline_container",
    "iostream error",
    "requested and",
)


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """A new folder to write in; when the block ends it takes the place of `folder` in one rename.

    Until then `folder` is as it was, and a block that raises or is killed changes nothing. Files of the old
    folder that were not written again are kept, except weights. Within another such block the staging folder
    itself is given. One process at a time: see `one_writer`. Raises ValueError where `folder` is a file, and
    for a full disk.
    """
    if folder.name.endswith(STAGING):
        yield folder
        return
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}{STAGING}")
    with one_writer(folder), disk(folder):
        shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
        staging.mkdir()
        try:
            yield staging
            if folder.exists():
                _carry_over(folder, staging)
            _sync(staging)
            _take_place(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)  # now the old folder


def _carry_over(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        weights = entry.suffix == ".safetensors" or entry.name.endswith(".safetensors.index.json")
        if weights or entry.suffix == ".tmp" or (new / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def _sync(folder: Path) -> None:
    """The folder's files and names are on the disk."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            _sync_path(path)


def _sync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_place(new: Path, folder: Path) -> None:
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):  # no such call here: for a moment there is no folder of that name
        aside = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        new.rename(folder)
        aside.rename(new)
    _sync_path(folder.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done: int = rename(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE)
    return done == 0


@contextmanager
def one_writer(path: Path) -> Iterator[None]:
    """One process at a time writes the file or folder `path`: holds a lock file beside it, which names its
    owner and goes when the block ends. A killed process holds nothing. Raises ValueError where another
    process has it."""
    lock = path.with_name(f".{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = lock.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise ValueError(
                f"{path} is being written by {owner}: wait for it, or name another folder"
            ) from None
        if lock.exists() and os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
            break
        file.close()  # its owner has just removed it
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.close()


@contextmanager
def disk(path: Path, nbytes: int | None = None) -> Iterator[None]:
    """A full disk, a quota or a file size limit ends in one line that names the file, the bytes needed (where
    `nbytes` says them) and the bytes left. Raises LoadError, a ValueError, for it."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        full = getattr(error, "errno", None) in FULL or any(word in str(error) for word in FULL_WORDS)
        if not full:
            raise
        if path.name.endswith(STAGING):  # the name that the user gave
            path = path.with_name(path.name.removeprefix(".").removesuffix(STAGING))
        place = next(p for p in (path, *path.parents) if p.exists())
        needed = "" if nbytes is None else f"it needs {nbytes:,} bytes, "
        raise LoadError(
            f"{path} could not be written, the disk is full or a limit is reached: {needed}"
            f"{shutil.disk_usage(place).free:,} bytes are free there. Make room and run the same command "
            "again; what was there before is unchanged"
        ) from error


@contextmanager
def replaced(path: Path, nbytes: int | None = None) -> Iterator[Path]:
    """A temporary name to write one file under; when the block ends it is on the disk and gets the name
    `path`. For a file within a folder that is locked or being published; see `written` for others."""
    temporary = path.with_name(path.name + ".tmp")
    with disk(path, nbytes):
        try:
            yield temporary
            _sync_path(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def written(path: Path, nbytes: int | None = None) -> Iterator[Path]:
    """`replaced` for one process at a time; raises ValueError for a second one, and for a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with one_writer(path), replaced(path, nbytes) as temporary:
        yield temporary
