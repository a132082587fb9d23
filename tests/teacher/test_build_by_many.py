"""Processes that torchrun starts make one teacher cache: the bytes of one process's."""

from pathlib import Path

from processes import torchrun
from test_build import RECIPE, contents, make

from outpace.checkpoint.publish import one_writer
from outpace.teacher.store import TeacherCache, read_meta

SCRIPT = Path(__file__).with_name("building.py")


def test_a_killed_process_costs_its_shard_and_no_byte(tmp_path):
    """Four shards by two processes, of which one dies in the last; three go on. What is there can be read."""
    assert RECIPE.shards == 4
    alone, folder = make(tmp_path / "alone", RECIPE), tmp_path / "many"
    failed = torchrun(2, SCRIPT, folder, 3)
    assert failed.returncode != 0 and "SIGKILL" in failed.stderr
    assert len(read_meta(folder).shards) == 2
    assert TeacherCache.open(folder, unfinished=True).verify() == sum(s.nbytes for s in alone.meta.shards[:2])
    done = torchrun(3, SCRIPT, folder, -1)
    assert done.returncode == 0, done.stderr[-2000:]
    assert contents(folder) == contents(tmp_path / "alone")


def test_a_second_build_of_one_folder_is_refused(tmp_path):
    with one_writer(tmp_path / "cache"):
        failed = torchrun(2, SCRIPT, tmp_path / "cache", -1)
    assert failed.returncode != 0 and "is being written by process" in failed.stderr
