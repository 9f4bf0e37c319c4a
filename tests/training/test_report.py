"""The report of a run: what it shows is what the run holds, and nothing about it endangers a training."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import elman
from elman.training import keeper
from elman.training.folder import Run
from elman.training.history import History
from elman.training.report import judged_in, model_sha256, report_page, write_report
from elman.visible import clean


class Text(HTMLParser):
    """The text of a page, its tables as rows of cells, and whatever it would fetch."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.rows, self.fetched, self._cell = "", [], [], False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        self.text += data
        if self._cell:
            self.rows[-1][-1] += data


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"hidden_size": 8, "embedding_size": 8},
        "training": {"batch_size": 2, "bptt": 8, "max_updates": 6, "num_threads": 1},
        "evaluation": {"every_updates": 3},
        "sampling": {"max_new_tokens": 12, "temperatures": (0.5, 1.0)},
        **changes,
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("report") / "tiny.txt"
    path.write_text(tiny_text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(corpus: Path) -> Run:
    return elman.train(corpus, out=corpus.parent / "run", seed=3, **settings())


@pytest.fixture(scope="module")
def html(run: Run) -> str:
    """The page of the run."""
    return report_page(run).html()


def shown(run: Run) -> Text:
    return Text(report_page(run).html())


def test_a_report_shows_what_the_run_holds(run, html):
    page, history = Text(html), History.of(run)
    assert page.fetched == []
    for sample in history.samples:
        assert clean(sample["text"]) in page.text
    best = history.best
    (row,) = [row for row in page.rows if row and row[0].startswith("estimate")]
    assert [float(cell) for cell in row[1:4]] == pytest.approx(
        [best["nats_per_token"], best["perplexity"], best["bits_per_char"]], rel=1e-3
    )
    settings_shown = {row[0]: row[1:] for row in page.rows if row and "." in row[0]}
    assert settings_shown["model.hidden_size"] == ["8", "256"]
    assert settings_shown["training.max_updates"] == ["6", "none"]
    assert "training.optimizer" not in settings_shown  # its default
    assert f"elman train --config {run.path / 'run.toml'} --out again" in page.text
    assert "in 6 updates" in page.text
    assert "The test part, where there is one, has not been looked at" in page.text


def test_the_same_run_gives_the_same_page(run, html):
    assert report_page(run).html() == html


def test_what_was_judged_is_shown_for_this_very_model_alone(run):
    page = run.path / "judged.json"
    score = {"nats_per_token": 1.2345, "perplexity": 3.4367, "bits_per_char": 1.781, "bits_per_byte": None}
    judgement = {**score, "split": "test", "baselines": {"uniform": {**score, "nats_per_token": 4.321}}}
    text = {
        "name": "temperature 0.5",
        "entropy": 1.0,
        "distinct": [0.1, 0.2, 0.3, 0.4],
        "known_words": 0.5,
        "text": "ab",
    }
    judged = {"model_sha256": model_sha256(run), "judgement": judgement, "temperatures": [text]}
    try:
        page.write_text(json.dumps(judged), encoding="utf-8")
        assert judged_in(run) == judged
        rows = {row[0]: row[1:] for row in shown(run).rows if row}
        assert rows["this model, the test part"] == ["1.234", "3.437", "1.781", "–"]
        assert rows["guessing blindly"][0] == "4.321"
        assert rows["temperature 0.5"] == ["1.000", "0.2000", "0.4000", "50.0%"]
        page.write_text(json.dumps({**judged, "model_sha256": "of another"}), encoding="utf-8")
        assert judged_in(run) == {}
        page.write_text("{", encoding="utf-8")
        assert judged_in(run) == {}
    finally:
        page.unlink()


def test_a_run_that_never_began_a_count_and_one_without_a_validation_part_have_a_report(corpus, tmp_path):
    counted = elman.train(corpus, out=tmp_path / "counted", model={"kind": "ngram", "order": 2})
    assert "counted in one pass" in shown(counted).text
    blind = elman.train(corpus, out=tmp_path / "blind", **settings(data={"valid_fraction": 0.0, "test_fraction": 0.0}))
    (blind.metrics).write_text("", encoding="utf-8")
    (blind.path / "environment.json").unlink()
    page = shown(blind)
    assert "No part of the text was held out" in page.text
    assert "has not come to its end" in page.text


def test_text_of_any_bytes_can_stand_in_a_page(run, tmp_path):
    sample = {"kind": "sample", "update": 9, "prompt": "\udc80<b>", "temperature": 1.0, "text": "\x07 ]]> </pre>"}
    odd = Run(tmp_path)
    for name in ("run.toml", "environment.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    with odd.metrics.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(json.dumps(sample) + "\n")
    assert "\u2407 ]]> </pre>" in Text(write_report(odd).read_text(encoding="utf-8")).text


def test_a_report_that_fails_is_a_notice_and_the_run_is_whole(corpus, run, tmp_path, monkeypatch):
    def fail(run: Run) -> Path:
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(keeper, "write_report", fail)
    other = elman.train(corpus, out=tmp_path / "run", seed=3, **settings())
    assert other.model.read_bytes() == run.model.read_bytes()
    assert not (other.path / "report.html").exists()
    assert any("ZeroDivisionError: no luck" in message for message in History.of(other).messages)
    assert History.of(other).ending == "finished"


def test_trainings_end_with_their_report_and_an_overwritten_run_keeps_no_old_judgement(
    corpus, tmp_path, reports, monkeypatch
):
    run = elman.train(corpus, out=tmp_path / "run", **settings())
    page = run.path / "report.html"
    assert "in 6 updates" in Text(page.read_text(encoding="utf-8")).text
    (run.path / "judged.json").write_text("{}", encoding="utf-8")
    elman.resume(run.path, max_updates=8)
    assert "in 8 updates" in Text(page.read_text(encoding="utf-8")).text
    monkeypatch.setattr(keeper, "write_report", lambda run: run.path)
    elman.train(corpus, out=run.path, overwrite=True, **settings())
    assert not page.exists()
    assert not (run.path / "judged.json").exists()
