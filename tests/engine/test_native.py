"""Machine code on disk: kept, read again without Numba, and made anew where it is not whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import elman
from elman.engine import native

KINDS = ("float64*", "int64")


def doubled(x, size):
    for i in range(size):
        x[i] *= 2.0
    return size


def made():
    return {"doubled": native.compiled(doubled, KINDS, "int64")}


def call(address: int) -> tuple[int, np.ndarray]:
    x, result = np.arange(5.0), np.zeros(2, np.int64)
    error = native.function(address, KINDS)(result.ctypes.data, result.ctypes.data + 8, x.ctypes.data, 5)
    assert error == 0
    return int(result[0]), x


def test_code_is_kept_and_read_again(tmp_path):
    path = tmp_path / "new" / "doubled.code"
    for make in (made, lambda: pytest.fail("it is compiled again")):
        given, x = call(native.link(native.kept(path, make)["doubled"]))
        assert given == 5
        np.testing.assert_array_equal(x, [0, 2, 4, 6, 8])
    assert [entry.name for entry in path.parent.iterdir()] == ["doubled.code"]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:-1] + b"\x77", lambda data: b"", None])
def test_code_that_is_not_whole_is_made_anew(tmp_path, damage):
    path = tmp_path / "doubled.code"
    native.kept(path, made)
    whole = path.read_bytes()
    if damage is None:
        path.unlink()
    else:
        assert damage(whole) != whole
        path.write_bytes(damage(whole))
    assert call(native.link(native.kept(path, made)["doubled"]))[0] == 5
    native.kept(path, lambda: pytest.fail("it was not written again"))


def test_without_a_place_to_keep_it_it_still_runs(tmp_path):
    (tmp_path / "file").write_text("")
    assert call(native.link(native.kept(tmp_path / "file" / "doubled.code", made)["doubled"]))[0] == 5


def test_a_compiled_model_draws_without_numba(tmp_path):
    """In a process of its own, after another has compiled it."""
    script = tmp_path / "draw.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "from elman.engine import Engine\n"
        "from elman.models.kinds import build_model, model_config\n"
        "config = model_config({'kind': 'elman', 'hidden_size': 5, 'embedding_size': 3})\n"
        "engine = Engine(build_model(config, 7, seed=1, dtype=torch.float32), num_threads=1)\n"
        "engine.read([1, 2], engine.initial_state(1))\n"
        "print('numba' in sys.modules)\n",
        encoding="utf-8",
    )
    path = str(Path(elman.__file__).parents[1])
    where = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    answers = [
        subprocess.run([sys.executable, script], env=where, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert answers[1] == "False\n"
