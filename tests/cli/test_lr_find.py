"""``elman lr-find``: a curve, a proposal that can be pasted, JSON, a page."""

from __future__ import annotations

import json

SMALL = (
    "--model.hidden-size=16",
    "--model.embedding-size=8",
    "--training.batch-size=8",
    "--training.bptt=16",
    "--training.num-threads=1",
    "--num-updates=20",
)


def test_it_prints_a_curve_and_a_proposal(elman, tiny_corpus, tmp_path):
    page = tmp_path / "rates.html"
    result = elman("lr-find", tiny_corpus, *SMALL, "--html", page)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split() == ["rate", "nats"]
    assert lines[1].startswith("1.0e-05")
    assert lines[-1].startswith("proposed  --training.learning-rate ")
    assert "<svg" in page.read_text()


def test_json_is_one_object(elman, tiny_corpus):
    result = elman("lr-find", tiny_corpus, *SMALL, "--json")
    found = json.loads(result.out)
    assert found.keys() == {"suggestion", "lowest", "steepest", "remark", "rates", "nats", "smoothed"}
    assert len(found["rates"]) == len(found["nats"]) == len(found["smoothed"]) == 20
