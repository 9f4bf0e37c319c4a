"""What each token cost, as lines of JSON and as a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from elman import surprisal as module
from elman.config import TokenizerConfig
from elman.data.prepare import Split, tokenize_text
from elman.errors import UserError
from elman.evaluation import Evaluation
from elman.metrics import Accuracy, CalibrationBin, Score
from elman.surprisal import Surprisal, surprisal_page
from elman.text.building import train_tokenizer
from elman.text.sources import Piece

DOCUMENTS = ("the <b>cat</b>\n", "Größe & 猫")


@pytest.fixture(params=["char", "byte"])
def surprisal(request: pytest.FixtureRequest) -> Surprisal:
    pieces = [Piece(text, True) for text in DOCUMENTS]
    tokenizer = train_tokenizer(TokenizerConfig(level=request.param), pieces)
    ids = np.concatenate(list(tokenizer.encode_pieces(pieces)))
    nats = np.linspace(0.1, 5.0, len(ids) - 1)
    return Surprisal(Split(ids, 0, 0, 2, 0), tokenizer, nats)


def test_each_line_holds_a_token_and_together_they_hold_the_text(surprisal: Surprisal, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 5)
    path = tmp_path / "tokens.jsonl"
    surprisal.write_jsonl(path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["position"] for line in lines] == list(range(len(surprisal.nats)))
    assert [line["token"] for line in lines] == surprisal.split.tokens[1:].tolist()
    assert [line["nats"] for line in lines] == surprisal.nats.tolist()
    (border,) = [line["position"] for line in lines if line["ends_document"]]
    before, after = ("".join(line["text"] for line in part) for part in (lines[:border], lines[border + 1 :]))
    assert (before, after) == DOCUMENTS


def test_lines_that_break_off_leave_the_file_before(surprisal: Surprisal, tmp_path: Path, monkeypatch):
    path = tmp_path / "tokens.jsonl"
    path.write_text("before")
    monkeypatch.setattr(module.json, "dumps", lambda line: '"' if line["position"] < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        surprisal.write_jsonl(path)
    assert path.read_text() == "before"


def page_of(surprisal: Surprisal) -> str:
    accuracy = Accuracy(0.5, 0.9, (CalibrationBin(0.3, 0.2, 10), CalibrationBin(0.8, 0.6, 20)))
    tokens = len(surprisal.nats)
    score = Score(float(surprisal.nats.sum()), tokens, tokens, tokens)
    evaluation = Evaluation(
        score, "carried", 1, 2, 0, 50, block_nats=(1.0,) * 12, block_tokens=(2,) * 12, accuracy=accuracy
    )
    return surprisal_page("the text", evaluation, surprisal).html()


def test_the_page_shows_the_text_escaped_coloured_and_offline(surprisal: Surprisal):
    html = page_of(surprisal)
    assert "&lt;b&gt;" in re.sub(r"<span[^>]*>|</span>", "", html).replace("\n", "")
    assert "<b>cat" not in html
    assert "The whole text." in html
    assert not re.search(r'(?:src|href)="(?:https?:)?//', html)
    assert "expected calibration error" in html
    assert "With 95% confidence between 0.5000 and 0.5000" in html
    assert html.count("<svg") == 1
    assert html == page_of(surprisal)


def test_of_a_long_text_the_beginning_is_shown_and_said(surprisal: Surprisal, monkeypatch):
    monkeypatch.setattr(module, "MAX_SHOWN", 4)
    assert f"The first 4 of {len(surprisal.nats)} tokens." in page_of(surprisal)


def test_a_file_that_cannot_be_written_is_one_line(surprisal: Surprisal, tmp_path: Path):
    with pytest.raises(UserError, match="cannot be written"):
        surprisal.write_jsonl(tmp_path / "nowhere" / "tokens.jsonl")


def test_a_text_of_one_token_has_a_page():
    tokenizer = train_tokenizer(TokenizerConfig(), [Piece("a", True)])
    one = Surprisal(tokenize_text("a", tokenizer), tokenizer, np.zeros(1))
    assert "The whole text." in surprisal_page("a", Evaluation(Score(0.0, 1, 1, 1), "carried", 1, 1, 0, 3), one).html()
