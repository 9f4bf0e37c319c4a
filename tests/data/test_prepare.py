"""Splits without overlap, counts, notices, the cache, bounded memory."""

from __future__ import annotations

import gc
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elman
from elman.config import DataConfig, TextConfig, TokenizerConfig
from elman.data import prepare as module
from elman.data.prepare import Dataset, Split, prepare, prepare_folder, tokenize_text
from elman.errors import ConfigError, ElmanError, ModelFileError, TextError
from elman.settings import resolve
from elman.text.sources import Piece, Source, StringSource
from elman.text.tokenizers import BOUNDARY, CharTokenizer, WordTokenizer

TEXT = "".join(f"line {i} of the text, é漢\n" for i in range(100))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def prepared(path: Path, cache: Path, tokenizer: object = None, encoding: str = "utf-8", **data: object) -> Dataset:
    settings = DataConfig(corpus=str(path), **data)
    return prepare(settings, TextConfig(encoding=encoding), tokenizer or TokenizerConfig(), cache)


def text_of(dataset: Dataset, split: Split | None) -> str:
    assert split is not None
    assert split.tokens[0] == dataset.tokenizer.boundary_id
    return dataset.tokenizer.decode(split.tokens[1:])


@pytest.mark.parametrize("level", ["char", "byte", "bpe"])
def test_parts_are_the_text_without_overlap_or_gap(tmp_path, cache, level):
    path = tmp_path / "a.txt"
    path.write_text(TEXT, "utf-8", newline="")
    dataset = prepared(path, cache, TokenizerConfig(level=level), valid_fraction=0.1, test_fraction=0.2)
    train, valid, test = (text_of(dataset, part) for part in (dataset.train, dataset.valid, dataset.test))
    assert train + valid + test == TEXT
    n = len(TEXT)
    assert (len(train), len(train + valid)) == (n * 7 // 10, n * 8 // 10)
    assert dataset.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    for part, text in ((dataset.train, train), (dataset.valid, valid), (dataset.test, test)):
        assert (part.num_chars, part.num_bytes, part.num_documents) == (len(text), len(text.encode()), 1)
        assert isinstance(part.tokens, np.memmap)
        assert part.tokens.dtype == (np.uint8 if level == "char" else np.uint16)


def test_the_tenth_of_tiny_shakespeares_length_is_the_published_one():
    cuts = module._cuts(1_115_394, array("q"), DataConfig(valid_fraction=0.0, test_fraction=0.1))
    assert cuts == (1_003_854, 1_003_854)
    assert 1_115_394 - cuts[1] == 111_540


def test_decimal_fractions_are_exact():
    assert module._cuts(1000, array("q"), DataConfig(valid_fraction=0.05, test_fraction=0.05)) == (900, 950)


@given(
    st.integers(1, 300),
    st.lists(st.integers(1, 299), max_size=8, unique=True).map(sorted),
    st.sampled_from([0.0, 0.01, 0.1, 0.4]),
    st.sampled_from([0.0, 0.01, 0.1, 0.4]),
)
def test_cuts_keep_each_part_and_move_to_borders(num_chars, borders, valid, test):
    borders = [border for border in borders if border < num_chars]
    config = DataConfig(valid_fraction=valid, test_fraction=test)
    exact = module._cuts(num_chars, array("q"), config)
    cuts = module._cuts(num_chars, array("q", borders), config)
    asked = np.diff([0, *exact, num_chars])
    got = np.diff([0, *cuts, num_chars])
    assert got[0] >= 1
    assert ((got > 0) == (asked > 0)).all()
    assert all(cut in borders or cut in exact for cut in cuts)
    if valid and test:
        for cut, was, before, after in zip(cuts, exact, asked, asked[1:], strict=False):
            near = [border for border in borders if 2 * abs(border - was) < min(before, after)]
            assert cut == (min(near, key=lambda border: abs(border - was)) if near else was)


def test_documents_stay_whole_where_a_border_is_near(tmp_path, cache):
    rows = [f"document {i}: " + "x" * (20 + i % 7) for i in range(100)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    dataset = prepared(path, cache, valid_fraction=0.1, test_fraction=0.1)
    parts = [text_of(dataset, part).split(BOUNDARY) for part in (dataset.train, dataset.valid, dataset.test)]
    assert [row for part in parts for row in part] == rows
    assert [part.num_documents for part in (dataset.train, dataset.valid, dataset.test)] == [len(p) for p in parts]
    assert dataset.train.num_chars == sum(map(len, parts[0]))
    assert dataset.train.tokens.size == 1 + dataset.train.num_chars + dataset.train.num_documents - 1


def test_a_document_that_is_cut_goes_on_in_the_next_part(tmp_path, cache):
    for name, text in (("a", "a" * 60), ("b", "b" * 40)):
        (tmp_path / f"{name}.txt").write_text(text)
    dataset = prepared(tmp_path / "?.txt", cache, valid_fraction=0.1, test_fraction=0.1)
    assert text_of(dataset, dataset.train) == "a" * 60 + BOUNDARY + "b" * 20
    assert text_of(dataset, dataset.valid) == "b" * 10
    assert dataset.valid.num_documents == 1


def test_no_validation_part_is_said(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    dataset = prepared(path, cache, valid_fraction=0.0, test_fraction=0.0)
    assert (dataset.valid, dataset.test) == (None, None)
    assert "there is no validation part: data.valid_fraction is 0" in dataset.notices


@pytest.mark.parametrize("length", [1, 2, 3, 13, 19, 20, 21])
def test_tiny_corpora_are_trained_on(tmp_path, cache, length):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijklmnopqrstuvw"[:length])
    dataset = prepared(path, cache)
    assert dataset.train.num_chars >= 1
    total = sum(part.num_chars for part in (dataset.train, dataset.valid, dataset.test) if part)
    assert total == length
    assert (dataset.valid is None) == any("too small" in notice for notice in dataset.notices)


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_an_empty_corpus_is_an_error(tmp_path, cache, data):
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(TextError, match="is empty"):
        prepared(path, cache)
    assert list((cache / "tokens").iterdir()) == []


def test_a_corpus_without_words_is_an_error_at_word_level(tmp_path, cache):
    (tmp_path / "a.txt").write_text("   ")
    with pytest.raises(TextError, match="no tokens at level 'word'"):
        prepared(tmp_path / "a.txt", cache, TokenizerConfig(level="word"))


def test_the_vocabulary_is_of_the_training_part_and_the_rest_is_counted(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("a" * 80 + "b" * 10 + "ac" * 5)
    dataset = prepared(path, cache, valid_fraction=0.1, test_fraction=0.1)
    assert dataset.tokenizer.vocabulary[2:] == ("a",)
    assert [part.num_unknown for part in (dataset.train, dataset.valid, dataset.test)] == [0, 10, 5]
    assert "valid: 10 of 10 characters are <unk>" in dataset.notices
    assert "test: 5 of 10 characters are <unk>" in dataset.notices


def test_given_files_are_the_parts(tmp_path, cache):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for part, text in (("train", "a b\n" * 9), ("valid", "b c\n"), ("test", "a\n")):
        (folder / f"{part}.txt").write_text(text)
    dataset = prepared(folder, cache, TokenizerConfig(level="word"))
    assert [text_of(dataset, p) for p in (dataset.train, dataset.valid, dataset.test)] == [
        "a b\n" * 9,
        "b <unk>\n",
        "a\n",
    ]
    assert dataset.sha256 == hashlib.sha256(b"a b\n" * 9 + b"b c\n" + b"a\n").hexdigest()
    (folder / "valid.txt").write_text("")
    assert prepared(folder, cache).valid is None
    (folder / "train.txt").write_text("")
    with pytest.raises(TextError, match="training part"):
        prepared(folder, cache)


def test_bytes_that_are_not_utf8_are_modelled_as_they_are(tmp_path, cache):
    data = bytes(range(256)) * 4
    (tmp_path / "a.bin").write_bytes(data)
    dataset = prepared(tmp_path / "a.bin", cache, TokenizerConfig(level="byte"), valid_fraction=0.0, test_fraction=0.0)
    assert dataset.train.tokens[1:].astype(np.uint8).tobytes() == data
    assert dataset.train.num_bytes == len(data)
    assert dataset.sha256 == hashlib.sha256(data).hexdigest()


def test_the_second_call_reads_the_cache(tmp_path, cache, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode().replace(b"\n", b"\r\n"))
    first = prepared(path, cache)
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built again"))
    second = prepared(path, cache)
    assert second.train.tokens.tolist() == first.train.tokens.tolist()
    assert second.notices == first.notices == ("100 CR LF turned into LF",)
    assert (second.sha256, second.corpus_name) == (first.sha256, str(path))
    assert len(list((cache / "tokens").iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text(TEXT + "x"),
        lambda path: os.utime(path, (1, 1)),
        {"valid_fraction": 0.2},
        {"tokenizer": TokenizerConfig(min_count=2)},
        {"tokenizer": TokenizerConfig(level="byte")},
        {"tokenizer": CharTokenizer(TEXT + "?")},
        {"encoding": "latin-1"},
    ],
)
def test_whatever_changes_the_tokens_changes_the_cache_key(tmp_path, cache, change):
    path = tmp_path / "a.txt"
    path.write_text(TEXT, "utf-8")
    prepared(path, cache)
    if callable(change):
        change(path)
        prepared(path, cache)
    else:
        prepared(path, cache, **change)
    assert len(list((cache / "tokens").iterdir())) == 2


def test_a_tokenizer_file_that_changes_is_noticed(tmp_path, cache):
    (tmp_path / "a.txt").write_text(TEXT)
    path = tmp_path / "tokenizer.json"
    settings = TokenizerConfig(level="bpe", path=str(path))
    sizes = []
    for size in (265, 275):
        made = prepared(tmp_path / "a.txt", cache, TokenizerConfig(level="bpe", max_size=size)).tokenizer
        path.write_text(json.dumps(made.to_dict()["tokenizer"]))
        sizes.append(prepared(tmp_path / "a.txt", cache, settings).tokenizer.size)
    assert sizes == [265, 275]


@pytest.mark.parametrize("file", ["train.bin", "valid.bin", "dataset.json"])
@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "empty"])
def test_a_damaged_cache_entry_is_made_again(tmp_path, cache, file, damage):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    whole = prepared(path, cache).train.tokens.tolist()
    (entry,) = (cache / "tokens").iterdir()
    data = bytearray((entry / file).read_bytes())
    if damage == "gone":
        (entry / file).unlink()
    else:
        data[len(data) // 2] ^= 1
        (entry / file).write_bytes({"cut": data[:-5], "bit": data, "empty": b""}[damage])
    assert prepared(path, cache).train.tokens.tolist() == whole
    assert [found.name for found in (cache / "tokens").iterdir()] == [entry.name]
    assert module._load(entry) is not None


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    (tmp_path / "file").write_text("in the way")
    dataset = prepared(path, tmp_path / "file")
    folder = Path(dataset.train.tokens.filename).parent
    assert "cannot be written" in dataset.notices[0]
    assert folder.exists()
    del dataset
    gc.collect()
    assert not folder.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from elman.config import DataConfig, TextConfig, TokenizerConfig
from elman.data import prepare as module

module._encode = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "cache":
    module.prepare(DataConfig(corpus=sys.argv[1]), TextConfig(), TokenizerConfig(level="byte"), Path(sys.argv[2]))
module.prepare_folder(Path(sys.argv[2], "out"), DataConfig(corpus=sys.argv[1]), TextConfig(), TokenizerConfig())
"""


@pytest.mark.parametrize("where", ["cache", "folder"])
def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path, cache, where):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    home = cache / "tokens" if where == "cache" else tmp_path / "prepared"
    if where == "cache":
        prepared(path, cache)
    environment = os.environ | {"PYTHONPATH": str(Path(elman.__file__).parents[1])}
    words = [sys.executable, "-c", KILLED, str(path), str(cache if where == "cache" else home), where]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len([found for found in home.iterdir() if any(found.glob("*.bin"))]) == 1 + (where == "cache")
    if where == "cache":  # it need not make anything itself
        prepared(path, cache)
    else:
        prepare_folder(home / "out", DataConfig(corpus=str(path)), TextConfig(), TokenizerConfig())
    (entry,) = home.iterdir()
    assert not entry.name.startswith(".")


class _Unknown(Source):
    """A source that cannot tell whether it has changed."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def pieces(self):
        return iter([Piece(self.texts.pop(0), True)])


def test_a_corpus_that_changes_while_it_is_read_is_an_error(tmp_path, cache, monkeypatch):
    corpus = module.Corpus("moving", {"all": _Unknown(["a" * 100, "a" * 100, "a" * 101])})
    monkeypatch.setattr(module, "open_corpus", lambda *_, **__: corpus)
    with pytest.raises(ElmanError, match="changed while it was read"):
        prepared(tmp_path, cache)


def test_a_source_that_cannot_be_recognised_is_not_cached(tmp_path, cache, monkeypatch):
    corpus = module.Corpus("unknown", {"all": _Unknown(["ab" * 50] * 3)})
    monkeypatch.setattr(module, "open_corpus", lambda *_, **__: corpus)
    assert prepared(tmp_path, cache).train.num_chars == 90
    assert not list((cache / "tokens").iterdir())


def test_a_text_is_encoded_for_evaluation_from_a_string_or_a_source():
    tokenizer = CharTokenizer("ab")
    split = tokenize_text("abc", tokenizer)
    assert split.tokens.tolist() == [0, 2, 3, 1]
    assert (split.num_chars, split.num_bytes, split.num_documents, split.num_unknown) == (3, 3, 1, 1)
    stored = tokenize_text(StringSource("abc"), tokenizer)
    assert isinstance(stored.tokens, np.memmap)
    assert stored.tokens.tolist() == split.tokens.tolist()
    assert tokenize_text("abc", tokenizer, unknown="skip").tokens.tolist() == [0, 2, 3]
    with pytest.raises(TextError, match="'c'"):
        tokenize_text("abc", tokenizer, unknown="error")
    assert tokenize_text("", tokenizer).tokens.tolist() == [0]
    with pytest.raises(TextError, match="empty"):
        tokenize_text(StringSource(""), tokenizer)
    assert tokenize_text("a <unk>\n", WordTokenizer(["a"])).tokens.tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize("level", ["char", "byte"])
def test_memory_does_not_grow_with_the_text(tmp_path, cache, level):
    path = tmp_path / "a.txt"
    path.write_text(TEXT * 10_000, "utf-8")
    tracemalloc.start()
    try:
        dataset = prepared(path, cache, TokenizerConfig(level=level))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert dataset.train.num_chars > 20_000_000
    assert peak < 16_000_000


def test_a_missing_tokenizer_file_is_named(tmp_path, cache):
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(ModelFileError, match=r"none\.json"):
        prepared(tmp_path / "a.txt", cache, TokenizerConfig(level="bpe", path=str(tmp_path / "none.json")))


# Prepared folders.


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """A text of some pages of tokens, prepared in one file a part and in shards of a page."""
    monkeypatch.setattr("elman.data.store.SHARD_UNIT", mmap.PAGESIZE)
    path = tmp_path / "a.txt"
    path.write_text(TEXT * 10, "utf-8", newline="")
    settings = DataConfig(corpus=str(path), valid_fraction=0.1, test_fraction=0.2)
    for name, shard_tokens in (("one", None), ("many", 1)):
        prepare_folder(tmp_path / name, settings, TextConfig(), TokenizerConfig(), shard_tokens=shard_tokens)
    path.unlink()
    return tmp_path / "one", tmp_path / "many"


def test_a_prepared_folder_is_a_corpus_of_its_own(shards, cache):
    one, many = (prepared(folder, cache) for folder in shards)
    assert len(list(shards[1].glob("train-*.bin"))) > 3
    for part in ("train", "valid", "test"):
        assert getattr(one, part).tokens.tolist() == getattr(many, part).tokens.tolist()
        assert replace(getattr(one, part), tokens=None) == replace(getattr(many, part), tokens=None)
    assert text_of(many, many.train) + text_of(many, many.valid) + text_of(many, many.test) == TEXT * 10
    assert (one.sha256, one.corpus_name, one.notices) == (many.sha256, many.corpus_name, many.notices)
    assert not cache.exists()


def test_training_and_judging_on_shards_is_bit_for_bit_that_on_one_file(shards, tmp_path):
    runs = [
        elman.train(
            folder,
            out=tmp_path / "runs" / folder.name,
            model={"hidden_size": 8, "embedding_size": 4},
            training={"max_updates": 6, "batch_size": 8, "bptt": 50, "num_threads": 1},
            sampling={"max_new_tokens": 3},
        )
        for folder in shards
    ]
    assert runs[0].model.read_bytes() == runs[1].model.read_bytes()
    losses = [[r["nats"] for r in run.records() if r["kind"] == "update"] for run in runs]
    assert losses[0] == losses[1]
    scores = [elman.evaluate(run.path).evaluation.score for run in runs]
    assert scores[0] == scores[1] == elman.evaluate(runs[0].path, shards[1]).evaluation.score
    elman.resume(runs[1].path, max_updates=8)


def test_the_settings_of_prepared_tokens_are_those_they_were_made_with(shards, tmp_path):
    config = resolve({"data": {"corpus": str(shards[1])}}, preset="pytorch-word-lm")
    assert (config.data.valid_fraction, config.data.test_fraction, config.tokenizer.level) == (0.1, 0.2, "char")
    for wrong, message in (
        ({"tokenizer": {"level": "word"}}, r"tokenizer\.level 'word' was given, '.*' has 'char': leave it out"),
        ({"data": {"valid_fraction": 0.3}}, r"data\.valid_fraction 0\.3 was given, '.*' has 0\.1: leave it out"),
        ({"text": {"newlines": "keep"}}, r"text\.newlines 'keep' was given"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve({**wrong, "data": {"corpus": str(shards[1])} | wrong.get("data", {})})
    assert resolve({"data": {"corpus": str(shards[1]), "reset_at_documents": True}}).data.reset_at_documents


def test_what_is_no_folder_of_prepared_tokens_any_more_is_refused(shards, tmp_path):
    data = bytearray((shards[1] / "train-00001.bin").read_bytes())
    data[5] ^= 1
    (shards[1] / "train-00001.bin").write_bytes(data)
    with pytest.raises(TextError, match=r"is damaged: .*train-00001.* has been altered"):
        prepared(shards[1], tmp_path / "cache")
    with pytest.raises(TextError, match="has other tokens than the model"):
        prepared(shards[0], tmp_path / "cache", CharTokenizer("ab"))
    text = (shards[0] / "dataset.json").read_text("utf-8")
    for broken in (text[:-9], "", text.replace("char", "byte"), f"{hashlib.sha256(b'{}').hexdigest()}\n{{}}"):
        (shards[0] / "dataset.json").write_text(broken, "utf-8")
        with pytest.raises(TextError, match="is damaged"):
            prepared(shards[0], tmp_path / "cache")
    settings = DataConfig(corpus=str(shards[1]))
    with pytest.raises(ConfigError, match="is prepared already"):
        prepare_folder(tmp_path / "new", settings, TextConfig(), TokenizerConfig())
    with pytest.raises(ConfigError, match="holds something"):
        prepare_folder(shards[0], settings, TextConfig(), TokenizerConfig())


def test_a_folder_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    with pytest.raises(TextError, match="cannot write the tokens"):
        prepare_folder(path / "b", DataConfig(corpus=str(path)), TextConfig(), TokenizerConfig())
    (tmp_path / "empty.txt").touch()
    data = DataConfig(corpus=str(tmp_path / "empty.txt"))
    with pytest.raises(TextError, match="empty"):
        prepare_folder(tmp_path / "out", data, TextConfig(), TokenizerConfig())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "empty.txt"]
