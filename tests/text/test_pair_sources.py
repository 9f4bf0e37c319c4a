"""Pairs from files: the same examples from every format, borders between examples, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from elman.config import DataConfig, TextConfig, TokenizerConfig
from elman.data.pairs import Pairs
from elman.data.prepare import prepare
from elman.errors import ConfigError, TextError
from elman.text.corpora import open_corpus
from elman.text.sources import Source

EXAMPLES = [("eins", "one"), ("zwei, drei", "two"), ("vier fünf", "four"), ('"sechs"', "six")]


def opened(path: Path | str, **data: object) -> Source:
    return open_corpus(DataConfig(corpus=str(path), pairs=True, **data), TextConfig()).parts["all"]


def examples_of(source: Source) -> list[tuple[str, str]]:
    pieces = list(source.pieces())
    assert all(piece.starts_document for piece in pieces)
    texts = [piece.text for piece in pieces]
    return list(zip(texts[::2], texts[1::2], strict=True))


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def csv(separator: str, header: str) -> str:
    return header + "".join(f"{quoted(s)}{separator}{quoted(t)}\n" for s, t in EXAMPLES)


FORMATS = {
    "a.tsv": csv("\t", "source\ttarget\n"),
    "b.tsv": csv("\t", ""),
    "c.csv": csv(",", "source,target\n"),
    "d.csv": csv(",", ""),
    "e.txt": "".join(f"{s}\t{t}\n" for s, t in EXAMPLES),
    "f.txt": "\n".join(f"{s}\t{t}\ta third column is left out" for s, t in EXAMPLES) + "\n\n",
    "g.jsonl": "".join(json.dumps({"id": 1, "target": t, "source": s}) + "\n" for s, t in EXAMPLES),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_examples(tmp_path, name):
    path = tmp_path / name
    path.write_text(FORMATS[name], encoding="utf-8")
    source = opened(path)
    assert examples_of(source) == EXAMPLES
    assert any("no header" in remark for remark in source.report()) == (name in ("b.tsv", "d.csv"))


def test_parquet_gives_them_too(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"target": [t for _, t in EXAMPLES], "source": [s for s, _ in EXAMPLES]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert examples_of(opened(tmp_path / "a.parquet")) == EXAMPLES


def test_columns_are_chosen_by_name(tmp_path):
    (tmp_path / "a.tsv").write_text("id\ten\tde\n1\tone\teins\n2\ttwo\tzwei\n", encoding="utf-8")
    found = examples_of(opened(tmp_path / "a.tsv", source_field="de", target_field="en"))
    assert found == [("eins", "one"), ("zwei", "two")]


def test_a_pair_with_an_empty_half_is_left_out_whole(tmp_path):
    (tmp_path / "a.txt").write_text("a\tb\n\tc\nd\t\n  \te\nf\tg\n", encoding="utf-8")
    source = opened(tmp_path / "a.txt")
    assert examples_of(source) == [("a", "b"), ("f", "g")]
    assert source.report() == ["3 pair(s) with an empty source or target left out"]
    (tmp_path / "a.jsonl").write_text('{"source": "a", "target": null}\n{"source": "b", "target": "c"}\n')
    assert examples_of(opened(tmp_path / "a.jsonl")) == [("b", "c")]


@pytest.mark.parametrize(
    ("name", "content", "data", "says"),
    [
        ("a.txt", "a\tb\nno tab\n", {}, "a.txt, line 2 has no tab; with data.pairs each line is a source, a tab"),
        ("a.tsv", "just one column\n", {}, "a.tsv, line 1: one column; data.pairs needs two"),
        ("a.tsv", "a\tb\nc\n", {}, "a.tsv, line 2: a row of 1 columns, line 1 has 2"),
        ("a.tsv", "source\ttarged\na\tb\n", {}, "no field 'target'; did you mean 'targed'?"),
        ("a.tsv", "de\ten\na\tb\n", {"source_field": "ge"}, "no field 'ge'"),
        (
            "a.jsonl",
            '{"source": "a"}\n',
            {},
            "a.jsonl, line 1 has no field 'target'; accepted: source; choose with --data",
        ),
        (
            "a.jsonl",
            '{"source": "a", "target": 7}\n',
            {},
            "'target' holds int, not text; choose with --data.target_field",
        ),
        ("a.jsonl", "[1]\n", {}, "every line must be an object with 'source' and 'target'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, name, content, data, says):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TextError) as raised:
        list(opened(tmp_path / name, **data).pieces())
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["stdlib-prose", "tiny-shakespeare", "synthetic:markov", "synthetic:dyck"])
def test_corpora_without_pairs_are_refused(name):
    with pytest.raises(ConfigError, match=r"has no pairs of source and target.*synthetic:reversing"):
        opened(name)


def test_settings_without_a_meaning_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a\tb\n")
    with pytest.raises(ConfigError, match=r"source_field and data.target_field have no meaning for plain text"):
        opened(tmp_path / "a.txt", source_field="x")
    with pytest.raises(ConfigError, match="have no meaning for the named corpus"):
        opened("synthetic:reversing", source_field="x")
    with pytest.raises(ConfigError, match=r"document_separator has no meaning with data.pairs"):
        open_corpus(DataConfig(corpus=str(tmp_path / "a.txt"), pairs=True), TextConfig(document_separator="|"))


def test_generated_tasks_are_pairs_of_question_and_answer():
    assert examples_of(opened("synthetic:parity,length=3,examples=4"))[0][0].endswith("=")
    found = examples_of(opened("synthetic:reversing,examples=50,longest=6"))
    assert len(found) == 50
    assert all(target == source[::-1] for source, target in found)
    assert {len(source) for source, _ in found} == {1, 2, 3, 4, 5, 6}


# What prepare makes of them.


@pytest.mark.parametrize(("level", "valid", "test"), [("char", 0.1, 0.2), ("word", 0.13, 0.07), ("byte", 0.11, 0.16)])
def test_cuts_fall_between_examples_only(tmp_path, level, valid, test):
    lines = [(f"source {i} " + "x" * (i % 7), f"target {i} " + "y" * (i % 5)) for i in range(60)]
    (tmp_path / "a.txt").write_text("".join(f"{s}\t{t}\n" for s, t in lines), encoding="utf-8")
    data = DataConfig(corpus=str(tmp_path / "a.txt"), pairs=True, valid_fraction=valid, test_fraction=test)
    dataset = prepare(data, TextConfig(), TokenizerConfig(level=level), tmp_path / "cache")
    numbers = []
    for split in (dataset.train, dataset.valid, dataset.test):
        assert split.num_documents % 2 == 0
        pairs = Pairs(split.tokens, 4, dataset.tokenizer.boundary_id)
        assert split.num_documents == 2 * pairs.num_examples
        numbers.append(pairs.num_examples)
        if level == "byte":
            decoded = [dataset.tokenizer.decode(pairs.source(i)) for i in range(pairs.num_examples)]
            first = sum(numbers[:-1])
            assert decoded == [source for source, _ in lines[first : first + len(decoded)]]
    assert sum(numbers) == 60
    assert np.allclose(numbers, np.array([1 - valid - test, valid, test]) * 60, atol=1.01)


def test_one_example_is_for_training_and_the_same_text_without_pairs_is_another_dataset(tmp_path):
    (tmp_path / "a.tsv").write_text("text\ttarget\nab\tcd\n", encoding="utf-8")
    pairs = DataConfig(corpus=str(tmp_path / "a.tsv"), pairs=True, source_field="text")
    one = prepare(pairs, TextConfig(), TokenizerConfig(), tmp_path / "cache")
    assert (one.train.num_documents, one.valid, one.test) == (2, None, None)
    alone = DataConfig(corpus=str(tmp_path / "a.tsv"))
    assert prepare(alone, TextConfig(), TokenizerConfig(), tmp_path / "cache").train.num_documents == 1
