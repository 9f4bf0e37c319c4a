"""Token files: the smallest type, exact contents, damage found."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.data import store as module
from elman.data.store import (
    SHARD_UNIT,
    DamagedStoreError,
    TokenStore,
    compact,
    shard_path,
    smallest_dtype,
    write_tokens,
)


@pytest.mark.parametrize(
    ("vocabulary_size", "bytes_each"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4), (2**24, 4)]
)
def test_the_type_is_the_smallest_that_holds_the_largest_id(vocabulary_size, bytes_each):
    dtype = smallest_dtype(vocabulary_size)
    assert (dtype.kind, dtype.itemsize) == ("u", bytes_each)
    assert np.iinfo(dtype).max >= vocabulary_size - 1
    last = np.array([vocabulary_size - 1])
    assert compact(last, vocabulary_size).tolist() == last.tolist()


@pytest.mark.parametrize("ids", [[-1], [256], [0, 300]])
def test_an_id_that_would_wrap_around_is_refused(tmp_path, ids):
    with write_tokens(tmp_path / "t", 256) as writer, pytest.raises(ValueError, match="do not fit"):
        writer.append(np.array(ids))


@given(st.lists(st.lists(st.integers(0, 69_999), max_size=5), max_size=5), st.sampled_from([70_000, 10**6]))
def test_what_is_appended_is_read(tmp_path_factory, arrays, size):
    path = tmp_path_factory.getbasetemp() / "tokens.bin"
    with write_tokens(path, size) as writer:
        for ids in arrays:
            writer.append(np.array(ids, np.int64))
    assert writer.store.read().tolist() == [i for ids in arrays for i in ids]


def _stored(path) -> TokenStore:
    with write_tokens(path, 300) as writer:
        writer.append(np.arange(300))
    return writer.store


def test_a_file_is_mapped_and_cannot_be_written_through(tmp_path):
    tokens = _stored(tmp_path / "t").read()
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize("damage", ["shorter", "longer", "bit", "gone"])
def test_damage_is_found(tmp_path, damage):
    path = tmp_path / "t"
    store = _stored(path)
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    {
        "shorter": lambda: path.write_bytes(data[:-1]),
        "longer": lambda: path.write_bytes(data + b"\0"),
        "bit": lambda: path.write_bytes(data),
        "gone": path.unlink,
    }[damage]()
    with pytest.raises(DamagedStoreError):
        store.read()


# Shards.


@pytest.fixture
def small_unit(monkeypatch):
    """A page of bytes is the least that can be mapped to a place of its own."""
    monkeypatch.setattr(module, "SHARD_UNIT", mmap.PAGESIZE)
    return mmap.PAGESIZE


@pytest.mark.parametrize("vocabulary_size", [256, 300, 70_000])
@pytest.mark.parametrize("more", [None, -1, 0, 2], ids=["one", "less than 3 shards", "3 shards", "more than 3"])
def test_several_files_are_read_as_one_array(small_unit, tmp_path, vocabulary_size, more):
    num_tokens = 1 if more is None else 3 * small_unit + more
    ids = np.random.default_rng(1).integers(0, vocabulary_size, num_tokens)
    with write_tokens(tmp_path / "t.bin", vocabulary_size, shard_tokens=5) as writer:
        for piece in np.array_split(ids, 7):
            writer.append(piece)
    assert writer.store.shard_tokens == small_unit
    assert len(list(tmp_path.iterdir())) == len(writer.store.crc32) == -(-num_tokens // small_unit)
    tokens = writer.store.read()
    assert tokens.tolist() == ids.tolist()
    assert tokens.dtype == smallest_dtype(vocabulary_size)
    assert tokens[small_unit - 2 : small_unit + 2].tolist() == ids[small_unit - 2 : small_unit + 2].tolist()
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_shards_are_mapped_as_long_as_a_part_of_them_is_in_use(small_unit, tmp_path):
    def mapped() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    with write_tokens(tmp_path / "t.bin", 256, shard_tokens=1) as writer:
        writer.append(np.arange(3 * small_unit) % 256)
    part = writer.store.read()[small_unit : small_unit + 3]
    gc.collect()
    assert mapped() == 3
    assert part.tolist() == [small_unit % 256 + i for i in range(3)]
    del part
    gc.collect()
    assert mapped() == 0


@pytest.mark.parametrize("damage", ["shorter", "longer", "bit", "gone", "swapped"])
def test_a_damaged_shard_is_found_and_named(small_unit, tmp_path, damage):
    with write_tokens(tmp_path / "t.bin", 256, shard_tokens=1) as writer:
        writer.append(np.random.default_rng(1).integers(0, 256, 4 * small_unit))
    path = shard_path(tmp_path / "t.bin", 2)
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    {
        "shorter": lambda: path.write_bytes(data[:-1]),
        "longer": lambda: path.write_bytes(data + b"\0"),
        "bit": lambda: path.write_bytes(data),
        "gone": path.unlink,
        "swapped": lambda: path.write_bytes(shard_path(tmp_path / "t.bin", 1).read_bytes()),
    }[damage]()
    with pytest.raises(DamagedStoreError, match="t-00002"):
        writer.store.read()


def test_a_shard_ends_where_a_page_of_any_machine_does():
    assert SHARD_UNIT % (1 << 16) == 0
