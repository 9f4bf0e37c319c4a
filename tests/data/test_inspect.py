"""The report on a corpus: its counts against plain Python on the text itself, and each warning where it is due."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elman.config import DataConfig, TextConfig, TokenizerConfig, TrainingConfig
from elman.data import inspect as inspect_module
from elman.data.inspect import CorpusReport, inspect_corpus
from elman.data.prepare import prepare

WORDS = ("about", "brown", "cloud", "dwarf", "extra", "fjord", "group", "hazel", "input", "jumpy", "knave", "quilt")


def clean_text(num_lines: int = 800, start: int = 0) -> str:
    """Lines of six words, no two alike, without anything to warn of."""
    lines = []
    for number in range(start, start + num_lines):
        digits = [number // len(WORDS) ** place % len(WORDS) for place in range(3)]
        lines.append(" ".join(WORDS[(digit + shift) % len(WORDS)] for digit in digits for shift in (0, 5)))
    return "\n".join(lines) + "\n"


@pytest.fixture
def report_on(tmp_path: Path) -> Callable[..., CorpusReport]:
    def report(
        text: str | dict[str, str],
        level: str = "char",
        *,
        newlines: str = "lf",
        max_size: int | None = None,
        batch_size: int = 4,
        bptt: int = 8,
        **data: Any,
    ) -> CorpusReport:
        folder = tmp_path / "corpus"
        folder.mkdir()
        for name, content in ({"text.txt": text} if isinstance(text, str) else text).items():
            (folder / name).write_text(content, encoding="utf-8", newline="")
        tokenizer = TokenizerConfig(level=level, max_size=max_size)
        config = DataConfig(corpus=(str(folder),), **data)
        dataset = prepare(config, TextConfig(newlines=newlines), tokenizer, cache=tmp_path / "cache")
        return inspect_corpus(dataset, config, TrainingConfig(batch_size=batch_size, bptt=bptt))

    return report


def test_a_text_without_faults_has_no_warnings_and_true_counts(report_on):
    text = clean_text()
    report = report_on(text, valid_fraction=0.1, test_fraction=0.0)
    assert report.warnings == ()
    train_text = text[: int(0.9 * len(text))]
    train, valid = report.parts["train"], report.parts["valid"]
    assert list(report.parts) == ["train", "valid"]
    assert (train.characters, train.tokens, train.documents) == (len(train_text), len(train_text), 1)
    assert (train.lines, valid.lines) == (720, 80)
    assert train.longest_line == max(map(len, train_text.splitlines()))
    assert (train.duplicate_lines, train.duplicate_documents, train.lines_in_train) == (0.0, 0.0, None)
    assert valid.lines_in_train == 0.0
    counts = Counter(train_text)
    assert report.most_frequent == tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10])
    assert [count for _, count in report.least_frequent] == sorted(counts.values())[:10]
    assert report.vocabulary[2:] == tuple(sorted(counts))
    assert report.num_unused == 2  # the boundary of the only document is never a target, nor is <unk>
    assert json.loads(json.dumps(report.to_dict()))["parts"]["train"]["characters"] == len(train_text)


def test_the_first_pairs_are_one_token_apart_and_go_on(report_on):
    report = report_on("hello world, " * 40, valid_fraction=0, test_fraction=0, batch_size=2, bptt=5)
    assert [(pair.inputs, pair.targets) for pair in report.pairs] == [
        ("<|endoftext|>hell", "hello"),
        ("o wor", " worl"),
        ("ld, h", "d, he"),
    ]
    assert (report.batch_size, report.bptt, report.segments_per_epoch) == (2, 5, 52)


def test_pairs_of_words_are_readable(report_on):
    report = report_on("a b c\n" * 100, "word", valid_fraction=0, test_fraction=0, bptt=4)
    assert (report.pairs[0].inputs, report.pairs[0].targets) == ("<|endoftext|> a b c", "a b c <eos>")
    assert report.most_frequent[0] == ("<eos>", 100)


@pytest.mark.parametrize("level", ["char", "byte", "word", "bpe"])
def test_every_level_sees_the_same_text(report_on, level, monkeypatch):
    monkeypatch.setattr(inspect_module, "_CHUNK", 7)  # cuts inside lines, characters and documents
    documents = {
        "a.txt": "één twee drie vier vijf zes\nzeven\n",
        "b.txt": "één twee drie vier vijf zes\n",
        "c.txt": "負けるな一茶これにあり、痩蛙、いざ行かん\n",
    }
    documents["d.txt"] = documents["b.txt"]
    max_size = 300 if level == "bpe" else None
    report = report_on(documents, level, max_size=max_size, valid_fraction=0, test_fraction=0)
    train = report.parts["train"]
    assert (train.documents, train.lines, train.longest_line) == (4, 5, 27)
    assert train.duplicate_lines == 2 / 4  # 4 lines are long enough, two of them a repetition
    assert train.duplicate_documents == 1 / 4


def test_held_out_lines_that_stand_in_the_training_part_are_counted_exactly(report_on, monkeypatch):
    monkeypatch.setattr(inspect_module, "_CHUNK", 64)
    train, other = clean_text(300), clean_text(30, start=1000)
    known = "".join(train.splitlines(keepends=True)[100:110])
    report = report_on({"train.txt": train, "valid.txt": other + known, "test.txt": other})
    assert report.parts["valid"].lines_in_train == 10 / 40
    assert report.parts["test"].lines_in_train == 0.0
    assert [w for w in report.warnings if w.startswith("25.0% of the valid lines stand in the training part")]
    assert not [w for w in report.warnings if "test lines" in w]


def inside(odd: str) -> str:
    return clean_text(400) + odd + clean_text(400, start=400)


HAN = "".join(map(chr, range(0x4E00, 0x4E00 + 600)))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "small": ({"text": "hello world\n", "valid_fraction": 0, "test_fraction": 0}, "will shrink them to 1 x 8"),
    "one line": ({"text": "word " * 3000}, "a line of 13,500 characters"),
    "rare": ({"text": HAN * 2}, "600 different characters in a text of 1,080"),
    "once": ({"text": inside(HAN[:20])}, "characters occur once"),
    "binary": ({"text": inside("\x01\x02\x03" * 4000)}, "this looks like a binary file"),
    "nul": ({"text": inside("\0\0")}, "2 NUL characters"),
    "control": ({"text": inside("\x1b[0m\x85")}, "2 control characters"),
    "cr": ({"text": clean_text().replace("\n", "\r\n"), "newlines": "keep"}, "carriage returns are left"),
    "replaced": ({"text": inside("\ufffd")}, "1 replacement characters U+FFFD"),
    "mojibake": ({"text": inside("donâ€™t")}, "UTF-8 that was read as another encoding"),
    "repeated": (
        {"text": clean_text(100) * 10, "test_fraction": 0.1, "valid_fraction": 0},
        "88.9% of the training lines",
    ),
    "no valid": ({"text": clean_text(), "valid_fraction": 0}, "there is no validation part"),
    "short valid": ({"text": clean_text(), "valid_fraction": 0.01}, "the valid part has 288 tokens"),
    "cut vocabulary": ({"text": clean_text(), "level": "word", "max_size": 10}, "of the training words are <unk>"),
    "no documents": ({"text": clean_text(), "reset_at_documents": True}, "data.reset_at_documents has no effect"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_would_go_wrong_is_said(report_on, case):
    settings, expected = BAD[case]
    report = report_on(**settings)
    assert [warning for warning in report.warnings if expected in warning], report.warnings
    assert all("\n" not in warning for warning in report.warnings)


def test_repeated_documents_and_unknown_words_are_said(report_on):
    page = clean_text(40)
    report = report_on(
        {f"{n:02}.txt": page if n % 2 else clean_text(40, start=40 * n) for n in range(20)}, test_fraction=0.0
    )
    assert [w for w in report.warnings if "of the training documents are repeated" in w]


def test_a_held_out_part_of_another_language_is_said(report_on):
    report = report_on({"train.txt": clean_text(300), "valid.txt": "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία. " * 60})
    assert [w for w in report.warnings if "of the valid part is <unk>" in w]


def test_a_corpus_of_pairs_is_shown_as_sources_and_targets(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("ab\tba\n" * 5 + "cd\tdc\n" * 5, encoding="utf-8")
    data = DataConfig(corpus=str(path), pairs=True, valid_fraction=0, test_fraction=0)
    dataset = prepare(data, TextConfig(), TokenizerConfig(), tmp_path / "cache")
    report = inspect_corpus(dataset, data, TrainingConfig())
    assert [(pair.inputs, pair.targets) for pair in report.pairs] == [("ab", "ba")] * 3
    assert (report.batch_size, report.bptt, report.segments_per_epoch) == (10, None, 1)
    assert any("10 pairs, fewer than batch_size 32" in warning for warning in report.warnings)


def test_runs_of_characters_that_stand_in_the_training_part_are_counted(report_on):
    train, fresh = clean_text(400), clean_text(100, start=1200)
    copied = train[1000:1400]
    report = report_on({"train.txt": train, "valid.txt": fresh[:2000] + copied + fresh[2000:], "test.txt": fresh})
    inside = {train[i : i + 50] for i in range(len(train) - 49)}
    for name, text in {"valid": fresh[:2000] + copied + fresh[2000:], "test": fresh}.items():
        runs = [text[i : i + 50] for i in range(len(text) - 49)]
        expected = sum(run in inside for run in runs) / len(runs)
        assert report.parts[name].spans_in_train == pytest.approx(expected, abs=1e-12)
    assert report.parts["valid"].spans_in_train > report.parts["test"].spans_in_train
    assert report.parts["train"].spans_in_train is None


def test_of_a_large_corpus_an_even_sample_of_runs_is_looked_at(report_on, monkeypatch):
    monkeypatch.setattr(inspect_module, "_MAX_SPANS", 2000)
    train, fresh = clean_text(800), clean_text(400, start=1200)
    valid = fresh[:8000] + train[5000:13000]
    report = report_on({"train.txt": train, "valid.txt": valid, "test.txt": fresh})
    assert report.parts["valid"].spans_in_train == pytest.approx(0.5, abs=0.1)
    assert any("runs of 50 characters of the valid part" in warning or "lines stand" in warning
               for warning in report.warnings)  # fmt: skip
