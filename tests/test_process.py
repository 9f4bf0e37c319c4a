"""What a process is lent for a while, and then as it was: threads, the smallest numbers, freed memory."""

from __future__ import annotations

import platform
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

import elman
from elman import process
from elman.process import denormals_flushed, freed_memory_kept, num_threads
from elman.training.loop import Trainer

SMALLEST = torch.finfo(torch.float32).smallest_normal

SHARE_THAT_IS_ZERO = """
import torch
from elman.process import denormals_flushed
torch.set_num_threads(2)
with denormals_flushed():
    print(((torch.full((4_000_000,), 1e-38) * 1e-2) == 0).double().mean().item())
print((torch.tensor(1e-38) * 1e-2 == 0).item())
"""

PAGES_AND_PEAK = """
import resource, torch
from elman.process import freed_memory_kept

def pages_of_ten_pieces():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(2**25)  # 128 MiB, more than glibc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def mebibytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

print(pages_of_ten_pieces())
start = mebibytes()
with freed_memory_kept():
    pages_of_ten_pieces()  # until pieces of this size have a place
    print(pages_of_ten_pieces())
    print(mebibytes() - start)
print(mebibytes() - start)
"""


def is_flushed() -> bool:
    return bool(torch.tensor(SMALLEST) / 2 == 0)


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    torch.set_flush_denormal(False)


def test_numbers_below_the_smallest_normal_one_are_zero_for_a_while():
    quarters = torch.tensor([SMALLEST, -SMALLEST]) / 4
    assert quarters.tolist() == [SMALLEST / 4, -SMALLEST / 4]
    with denormals_flushed():
        assert (torch.tensor([SMALLEST, -SMALLEST]) / 4).tolist() == [0.0, 0.0]
        assert (torch.tensor([SMALLEST, -SMALLEST]) * 4).tolist() == [SMALLEST * 4, -SMALLEST * 4]
    assert not is_flushed()


def test_who_flushed_them_before_goes_on_doing_so():
    torch.set_flush_denormal(True)
    with pytest.raises(ZeroDivisionError), denormals_flushed():
        1 / 0  # noqa: B018 - whatever ends the block
    assert is_flushed()


def test_threads_that_are_started_meanwhile_flush_them_too():
    done = subprocess.run([sys.executable, "-c", SHARE_THAT_IS_ZERO], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.0", "False"]


def test_training_flushes_them_and_the_process_does_not_afterwards(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    seen = []
    step = Trainer._observe
    monkeypatch.setattr(Trainer, "_observe", lambda trainer: seen.append(is_flushed()) or step(trainer))
    elman.train(tmp_path / "text.txt", out=tmp_path / "run", training={"max_updates": 2})
    assert seen
    assert all(seen)
    assert not is_flushed()


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting: see the next test"
)
def test_memory_that_is_freed_is_kept_for_a_while_and_then_given_back():
    done = subprocess.run([sys.executable, "-c", PAGES_AND_PEAK], capture_output=True, text=True, check=True)
    before, kept, held, left = map(float, done.stdout.split())
    cleared_once = before / 10
    assert kept < cleared_once
    assert held > 120
    assert left < 10


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: asked.append(name) or object())
    monkeypatch.setattr(process.sys, "platform", "linux")
    with freed_memory_kept():
        pass
    assert asked == [None]


def test_training_keeps_freed_memory_and_gives_it_back(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    course = []

    @contextmanager
    def watched():
        course.append("kept")
        yield
        course.append("given back")

    monkeypatch.setattr(process, "freed_memory_kept", watched)
    step = Trainer._observe
    monkeypatch.setattr(Trainer, "_observe", lambda trainer: course.append("update") or step(trainer))
    elman.train(tmp_path / "text.txt", out=tmp_path / "run", training={"max_updates": 2})
    assert (course[0], course[-1]) == ("kept", "given back")
    assert course.count("update") >= 2
    assert course.count("kept") == 1


def test_the_number_of_threads_is_given_back():
    before = torch.get_num_threads()
    with num_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with num_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
