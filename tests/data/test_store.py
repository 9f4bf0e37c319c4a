"""Token files: the smallest type, exact contents, damage found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.data.store import DamagedStoreError, TokenStore, compact, smallest_dtype, write_tokens


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
