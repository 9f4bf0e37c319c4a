"""``elman bench``: figures, JSON, a page, and nothing promised that was not recorded."""

from __future__ import annotations

import pytest

from elman.cli import main
from elman.training import bench as benches


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for name, value in (("NUM_PARAMETERS", 5000), ("_ROWS", 2), ("_STEPS", 4), ("_MATRIX_SIZE", 64)):
        monkeypatch.setattr(benches, name, value)
    monkeypatch.setattr(benches, "_COPIED_NUMBERS", 2**12)
    monkeypatch.setattr(benches, "median_seconds", lambda call, seconds: call() or 0.1)
    monkeypatch.setattr(benches, "RECORDED", {"cpu-1min": benches.Recorded(60.0, ((300, 1.8), (1200, 1.5)))})


def test_it_prints_the_machine_the_families_and_what_to_expect(elman, tmp_path):
    page = tmp_path / "bench.html"
    answer = elman("bench", "elman", "--seconds", "0.01", "--html", page)
    assert answer.code == 0, answer.err
    assert "GFLOP/s" in answer.out
    assert "written tokens/s" in answer.out
    assert "cpu-1min: 100 ms an update here, about 600 updates in its time; so many came to 1.65 nats" in answer.out
    assert "tiny-shakespeare elsewhere" in answer.out
    assert "<table" in page.read_text()


def test_it_expects_nothing_beyond_what_is_recorded(elman, monkeypatch):
    monkeypatch.setattr(benches, "RECORDED", {"cpu-1min": benches.Recorded(60.0, ((5000, 1.8), (9000, 1.5)))})
    answer = elman("bench", "elman", "--seconds", "0.01")
    assert "5,000 came to 1.80 nats per character of tiny-shakespeare elsewhere, fewer end higher" in answer.out


def test_json_is_one_object(elman):
    found = elman("bench", "elman", "--seconds", "0.01", "--json").json
    assert found.keys() == {"machine", "families", "presets"}
    assert found["presets"][0]["expected_nats"] == pytest.approx(1.65)


def test_an_unknown_family_is_an_error_that_names_the_nearest(elman):
    answer = elman("bench", "lsmt")
    assert answer.code == 2
    assert "lstm" in answer.err


@pytest.mark.parametrize("seconds", ["0", "-1", "inf"])
def test_a_time_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "lstm", "--seconds", seconds]) == 2
    assert f"--seconds is {seconds}; accepted: a number above 0" in capsys.readouterr().err
