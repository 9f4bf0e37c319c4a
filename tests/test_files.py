"""Files and folders that are whole or not there: killed writers, two writers at once, what is no plain file."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import elman
from elman.files import Building, clear_building, clear_writing, replacing, write_atomically


@contextmanager
def process(code: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has said a line; it is killed in the end."""
    environment = os.environ | {"PYTHONPATH": str(Path(elman.__file__).parents[1])}
    started = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout.readline()
        yield started
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait()
        started.stdout.close()


WRITES = """
import sys, time
from pathlib import Path
from elman.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half of what is ")
    file.flush()
    print("half", flush=True)
    time.sleep(1000)
"""

BUILDS = """
import sys, time
from pathlib import Path
from elman.files import Building
with Building(Path(sys.argv[1])) as building:
    (building.path / "part").write_bytes(b"1")
    print("begun", flush=True)
    time.sleep(1000)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_writer_that_is_killed_leaves_the_file_as_it_was_and_the_next_one_clears_up(tmp_path):
    path = tmp_path / "page.html"
    write_atomically(path, b"old")
    with process(WRITES, path):
        assert path.read_bytes() == b"old"
    assert names(tmp_path) == [".elman-writing-page.html", "page.html"]
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["page.html"]


def test_two_who_write_one_file_do_not_mix(tmp_path):
    path = tmp_path / "page.html"
    with process(WRITES, path):
        write_atomically(path, b"of another")
        assert path.read_bytes() == b"of another"
        clear_writing(tmp_path)
        assert names(tmp_path) == [".elman-writing-page.html", "page.html"]
        assert (tmp_path / ".elman-writing-page.html").read_bytes() == b"half of what is "
    clear_writing(tmp_path)
    assert names(tmp_path) == ["page.html"]


def test_files_of_others_are_not_touched(tmp_path):
    path, mine = tmp_path / "page.html", tmp_path / "page.html.tmp"
    mine.write_bytes(b"mine")
    (tmp_path / ".elman-writing-page.html").symlink_to(mine)
    (tmp_path / ".elman-writing-page.html.2").mkdir()
    os.mkfifo(tmp_path / ".elman-writing-page.html.3")
    there = names(tmp_path)
    write_atomically(path, b"new")
    clear_writing(tmp_path)
    assert path.read_bytes() == b"new"
    assert mine.read_bytes() == b"mine"
    assert names(tmp_path) == sorted([*there, "page.html"])


@pytest.mark.parametrize("name", ["x" * 255, "\N{SNOWMAN}" * 85])
def test_the_longest_names_can_be_written(name, tmp_path):
    write_atomically(tmp_path / name, b"old")
    with process(WRITES, tmp_path / name):
        pass
    write_atomically(tmp_path / name, b"new")
    assert (tmp_path / name).read_bytes() == b"new"
    assert names(tmp_path) == [name]


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666, 0o755])
def test_what_is_replaced_keeps_its_permissions_and_what_is_new_has_those_of_the_umask(mode, tmp_path):
    path = tmp_path / "page.html"
    umask = os.umask(0o027)
    try:
        write_atomically(path, b"old")
        assert permissions(path) == 0o640
        path.chmod(mode)
        with replacing(path) as file:
            assert permissions(tmp_path / ".elman-writing-page.html") == mode
            file.write(b"new")
        assert permissions(path) == mode
        with process(WRITES, path):
            path.unlink()
        write_atomically(path, b"again")  # of what is left, nothing counts
        assert permissions(path) == 0o640
    finally:
        os.umask(umask)
    assert names(tmp_path) == ["page.html"]


def test_an_error_amid_a_file_keeps_the_one_before(tmp_path):
    path = tmp_path / "tokens.jsonl"
    write_atomically(path, b"old")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["tokens.jsonl"]


def test_a_link_stays_one_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "page.html", tmp_path / "page.html"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_link_to_nothing_yet_stays_one_and_links_in_a_circle_are_an_error(tmp_path):
    link, one, other = tmp_path / "page.html", tmp_path / "one", tmp_path / "other"
    link.symlink_to(tmp_path / "new.html")
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "new.html").read_bytes() == b"new"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)) as raised:
        write_atomically(one, b"new")
    assert (raised.value.errno, raised.value.filename) == (errno.ELOOP, str(one))
    assert one.is_symlink()


@pytest.mark.parametrize("place", ["folder", "file/page.html", "nowhere/page.html"])
def test_an_error_names_the_file_that_was_to_be_written(place, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(OSError) as raised:  # noqa: PT011
        write_atomically(tmp_path / place, b"new")
    assert raised.value.filename == str(tmp_path / place)
    assert names(tmp_path) == ["file", "folder"]


def test_a_folder_that_comes_in_the_way_is_named(tmp_path):
    path = tmp_path / "page.html"
    with pytest.raises(IsADirectoryError) as raised, replacing(path):
        path.mkdir()
    assert raised.value.filename == str(path)
    assert names(tmp_path) == ["page.html"]


def test_a_device_and_a_pipe_are_written_as_they_are(tmp_path):
    write_atomically(Path("/dev/null"), b"gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"through")
    reader.join(10)
    assert read == [b"through"]
    assert names(tmp_path) == ["pipe"]


def test_what_a_killed_process_was_building_goes_and_what_a_living_one_builds_stays(tmp_path):
    with process(BUILDS, tmp_path):
        (folder,) = tmp_path.iterdir()
        clear_building(tmp_path)
        with Building(tmp_path) as mine:
            assert sorted(tmp_path.iterdir()) == sorted([folder, mine.path])
        assert (folder / "part").read_bytes() == b"1"
        assert names(tmp_path) == [folder.name]
    assert names(tmp_path) == [folder.name]
    with Building(tmp_path) as mine:
        assert names(tmp_path) == [mine.path.name]


def test_what_is_built_and_renamed_stays(tmp_path):
    with Building(tmp_path / "new") as building:
        (building.path / "part").write_bytes(b"1")
        building.path.rename(tmp_path / "new" / "whole")
        clear_building(tmp_path / "new")
    assert (tmp_path / "new" / "whole" / "part").read_bytes() == b"1"
    assert names(tmp_path / "new") == ["whole"]


def test_folders_of_others_are_not_touched(tmp_path):
    (tmp_path / ".building-mine").mkdir()
    (tmp_path / "elman-building-mine").mkdir()
    clear_building(tmp_path)
    clear_building(tmp_path / "absent")
    assert names(tmp_path) == [".building-mine", "elman-building-mine"]
