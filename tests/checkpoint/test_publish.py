"""Writing loses nothing: killed at any moment, by two processes at once, on a full disk."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from outpace.checkpoint import publish
from outpace.checkpoint.base import LoadError
from outpace.checkpoint.publish import one_writer, published, written
from outpace.checkpoint.save import save_checkpoint, write_atomically

SIZE = 41


def save(folder, value, shard_bytes=2**40):
    tensors = [(f"layer.{i}", torch.full((SIZE,), float(value + i))) for i in range(3)]
    save_checkpoint(folder, {"value": value}, iter(tensors), shard_bytes=shard_bytes)


def held(folder):
    """The value that the config and all weights agree on."""
    value = json.loads((folder / "config.json").read_text())["value"]
    files = sorted(folder.glob("model*.safetensors"))
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    assert sorted(tensors) == ["layer.0", "layer.1", "layer.2"]
    assert all(t.eq(value + i).all() for i, t in enumerate(tensors[n] for n in sorted(tensors)))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert {f.name for f in files} == set(json.loads(index.read_text())["weight_map"].values())
    else:
        assert [f.name for f in files] == ["model.safetensors"]
    return value


def in_child(run):
    """-> the wait status of a forked process that runs `run`."""
    child = os.fork()
    if not child:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new(tmp_path, monkeypatch, exchange):
    """New shards where one file was and back, killed before the n-th rename, unlink, mkdir or fsync."""
    folder, seen = tmp_path / "model", set()
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda a, b: False)
    for n in range(60):
        for path in tmp_path.iterdir():
            publish.shutil.rmtree(path)
        save(folder, 1)
        (folder / "tokenizer.json").write_text("kept")

        def killed(n=n):
            left = [n]

            def counting(call):
                def run(*args, **kwargs):
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left[0] -= 1
                    return call(*args, **kwargs)

                return run

            for name in ("rename", "replace", "unlink", "mkdir", "fsync", "rmdir"):
                setattr(os, name, counting(getattr(os, name)))
            if exchange:
                publish._exchange = counting(publish._exchange)
            save(folder, 2, shard_bytes=4 * SIZE)

        status = in_child(killed)
        if exchange:
            seen.add(held(folder))
            assert (folder / "tokenizer.json").read_text() == "kept"
        else:  # between two renames the old folder has another name
            seen.add(held(folder if folder.exists() else tmp_path / ".model.old"))
        save(folder, 3)  # what a killed process left behind is in nobody's way
        assert held(folder) == 3
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and seen == {1, 2} and n > 8
            assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
            return
    raise AssertionError("it never ran to its end")


def test_a_block_that_raises_changes_nothing(tmp_path):
    folder = tmp_path / "model"
    save(folder, 1)
    with pytest.raises(KeyError), published(folder) as new:
        save(new, 2)
        assert held(new) == 2 and held(folder) == 1
        raise KeyError
    assert held(folder) == 1 and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_other_files_stay_and_old_weights_go(tmp_path):
    folder = tmp_path / "model"
    save(folder, 1, shard_bytes=4 * SIZE)
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("a")
    save(folder, 2)
    assert held(folder) == 2 and (folder / "notes" / "a.txt").read_text() == "a"


def test_a_second_writer_is_refused_by_name(tmp_path):
    folder = tmp_path / "model"
    code = f"""
        import sys, time
        from pathlib import Path
        from outpace.checkpoint.publish import one_writer
        with one_writer(Path({str(folder)!r})):
            print("holds it", flush=True)
            time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "holds it\n"
        with pytest.raises(ValueError, match=f"is being written by process {child.pid} on .+: wait for it"):
            save(folder, 1)
        assert not folder.exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    save(folder, 1)  # a killed process holds nothing
    assert held(folder) == 1


def limited(run, size):
    """In a process whose files may not grow past `size`: the kernel refuses, as it does on a full disk.
    -> the message of the error."""
    read, write = os.pipe()

    def child():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            run()
        except ValueError as error:
            os.write(write, str(error).encode())

    status = in_child(child)
    os.close(write)
    with os.fdopen(read) as message:
        return message.read(), status


@pytest.mark.parametrize("kind", ["folder", "file", "atomic"])
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, kind):
    folder = tmp_path / "model"
    save(folder, 1)

    def write():
        if kind == "folder":
            save(folder, 2)
        elif kind == "file":
            with written(folder / "file", 5000) as temporary:
                temporary.write_bytes(b"x" * 5000)
        else:
            write_atomically(folder / "file", b"x" * 5000)

    message, status = limited(write, 300)
    assert status == 0
    assert "the disk is full or a limit is reached" in message and "bytes are free" in message
    assert ("it needs 5,000 bytes" in message) == (kind != "folder") or "it needs 492 bytes" in message
    assert held(folder) == 1 and not (folder / "file").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_other_errors_pass_as_they_are(tmp_path):
    with pytest.raises(ZeroDivisionError), written(tmp_path / "file"):
        raise ZeroDivisionError
    with pytest.raises(LoadError, match="of its own"), published(tmp_path / "folder"):
        raise LoadError("of its own: No space left")
    with pytest.raises(ValueError, match="is a file"):
        (tmp_path / "file").write_text("")
        save(tmp_path / "file", 1)
    with one_writer(tmp_path / "a"), one_writer(tmp_path / "b"):
        pass
