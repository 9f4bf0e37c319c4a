"""Every kind of input gives the same text; what cannot be read is one clear line."""

from __future__ import annotations

import bz2
import csv
import encodings.aliases
import gzip
import io
import json
import lzma
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.config import DataConfig, TextConfig
from elman.errors import ConfigError, TextError, UserError
from elman.text import decoding, sources
from elman.text.corpora import open_corpus
from elman.text.sources import Corpus, Source, StringSource

TEXT = "Ein Bär.\nzwei 漢字 👩\n\nthird line"


def opened(*specs: object, raw: bool = False, field: str | None = None, **text: object) -> Corpus:
    return open_corpus(DataConfig(corpus=tuple(map(str, specs)), field=field), TextConfig(**text), raw=raw)


def documents(source: Source) -> list[str]:
    found: list[str] = []
    for piece in source.pieces():
        assert piece.text
        if piece.starts_document:
            found.append("")
        found[-1] += piece.text
    return found


def read(*specs: object, **settings: object) -> list[str]:
    return documents(opened(*specs, **settings).parts["all"])


def report(*specs: object, **settings: object) -> str:
    source = opened(*specs, **settings).parts["all"]
    documents(source)
    return "; ".join(source.report())


def error(*specs: object, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        read(*specs, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few bytes, so that characters, line ends and separators lie across them."""
    monkeypatch.setattr(decoding, "BLOCK_BYTES", 3)


def test_a_file_is_one_document_and_can_be_read_again(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, "utf-8")
    source = opened(tmp_path / "a.txt").parts["all"]
    assert documents(source) == documents(source) == [TEXT]
    assert source.report() == []


def test_several_files_are_documents_in_the_order_given(tmp_path):
    for name in "ba":
        (tmp_path / name).write_text(name)
    corpus = opened(tmp_path / "b", tmp_path / "a")
    assert documents(corpus.parts["all"]) == ["b", "a"]
    assert corpus.name == f"{tmp_path / 'b'} and 1 more"


def test_a_folder_is_all_its_files_by_path_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c", ".hidden", ".git/x", "a/.y"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert read(tmp_path) == ["a/b/c", "a/z.md", "b.txt"]


def test_a_folder_without_files_and_a_glob_without_match_are_errors(tmp_path):
    assert "holds no files" in error(tmp_path)
    assert "no file matches" in error(tmp_path / "*.txt")


def test_a_glob_is_its_files_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert read(tmp_path / "**/*.txt") == ["a.txt", "b.txt", "sub/d.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert read(tmp_path / "a[1].txt") == ["x"]


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("x")
    assert "did you mean 'shakespeare.txt'" in error(tmp_path / "shakespear.txt")
    assert "did you mean 'stdlib-prose'" in error("stdlib-pros")
    assert "no file, folder or corpus" in error(tmp_path / "none" / "x")


def test_standard_input_is_read_once_and_can_be_passed_over_twice(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), "utf-8"))
    source = opened("-").parts["all"]
    path = source.files[0].path
    assert documents(source) == documents(source) == [TEXT]
    assert path.exists()
    del source
    assert not path.exists()
    assert "at most once" in error("-", "-")


def test_a_bad_byte_on_standard_input_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ok\n\xff"), "utf-8"))
    assert "standard input: byte 0xff at offset 3, line 2" in error("-")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_a_pipe_with_a_name_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"through",))
    writer.start()
    source = opened(tmp_path / "pipe").parts["all"]
    writer.join()
    assert documents(source) == documents(source) == ["through"]


def test_given_parts_are_kept_apart_and_said(tmp_path):
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.txt").write_text(part)
    (tmp_path / "notes.md").write_text("x")
    corpus = opened(tmp_path)
    assert {part: documents(source) for part, source in corpus.parts.items()} == {
        "train": ["train"],
        "valid": ["valid"],
        "test": ["test"],
    }
    assert list(corpus.parts) == ["train", "valid", "test"]
    assert any("notes.md" in remark for remark in corpus.parts["train"].report())


def test_given_parts_under_the_names_of_published_corpora(tmp_path):
    (tmp_path / "wiki.train.tokens").write_text("a")
    (tmp_path / "wiki.test.tokens.gz").write_bytes(gzip.compress(b"b", mtime=0))
    corpus = opened(tmp_path)
    assert {part: documents(source) for part, source in corpus.parts.items()} == {"train": ["a"], "test": ["b"]}
    (tmp_path / "train.txt").write_text("c")
    assert "both given for one part" in error(tmp_path)


def test_a_training_file_alone_is_an_ordinary_folder(tmp_path):
    (tmp_path / "train.txt").write_text("a")
    assert read(tmp_path) == ["a"]


def test_a_named_corpus_stands_alone(tmp_path):
    assert "stands alone" in error("stdlib-prose", tmp_path)
    assert "no meaning" in error("stdlib-prose", field="text")


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files(tmp_path, suffix, small_blocks):
    compress = COMPRESSORS[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(TEXT.encode()) + compress(b" and more"))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(compress(json.dumps({"text": TEXT}).encode()))
    (tmp_path / f"c.csv{suffix}").write_bytes(compress(f'text\n"{TEXT}"\n'.encode()))
    assert read(tmp_path / f"a.txt{suffix}") == [TEXT + " and more"]
    assert read(tmp_path / f"b.jsonl{suffix}") == read(tmp_path / f"c.csv{suffix}") == [TEXT]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_damaged_compressed_files_are_errors(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    whole = COMPRESSORS[suffix](os.urandom(5000).hex().encode())
    for data in (whole[: len(whole) // 2], whole[:-1], b"not compressed at all"):
        path.write_bytes(data)
        assert f"a.txt{suffix}" in error(path)


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": TEXT}, {"text": "", "id": 1}, {"text": "a\u2028b\r\nc"}, {"text": None}, {"text": "z"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows[:3]) + "\n\n", "utf-8", newline="\n")
    with path.open("a", encoding="utf-8") as stream:
        stream.write("\n".join(map(json.dumps, rows[3:])))
    assert read(path) == [TEXT, "a\u2028b\nc", "z"]
    assert report(path) == "1 CR LF turned into LF; 1 row(s) without a text left out; 1 empty document(s) left out"
    assert read(path, newlines="keep")[1] == "a\u2028b\r\nc"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2 holds a JSON list"),
        ('{"texts": "a", "id": 3}', "line 2 has no field 'text'; did you mean 'texts'? accepted: id, texts"),
        ('{"text": 5}', "line 2: 'text' holds int"),
        ('{"text": "\\ud800"}', "line 2: the lone surrogate U+D800"),
        ("[" * 100_000, "line 2 is not"),
        ('{"text": ' + "9" * 5000 + "}", "line 2 is not usable JSON"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    assert said in error(tmp_path / "a.jsonl")


def test_csv_and_tsv(tmp_path):
    long = "x" * 200_000  # more than the csv module's default limit
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (tmp_path / f"a{suffix}").open("w", encoding="utf-8-sig", newline="") as stream:
            writer = csv.writer(stream, delimiter=delimiter)
            writer.writerows([["id", "body"], [1, TEXT], [], [2, 'say "hi", \t ok'], [3, long], [4, ""]])
        assert read(tmp_path / f"a{suffix}", field="body") == [TEXT, 'say "hi", \t ok', long]
        assert "no field 'bod'; did you mean 'body'? accepted: body, id" in error(tmp_path / f"a{suffix}", field="bod")
    assert csv.field_size_limit() == 131072


@pytest.mark.parametrize("rows", ["text,id\na,1\nb\n", 'text,id\n"a,1\n', 'text,id\n"a"b,1\n'])
def test_bad_csv_is_named(tmp_path, rows):
    (tmp_path / "a.csv").write_text(rows)
    assert "a.csv, line " in error(tmp_path / "a.csv")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [TEXT, None, "two"], "n": [1, 2, 3]}), path)
    assert read(path) == [TEXT, "two"]
    assert "1 row(s) without a text" in report(path)
    assert "'n' holds int" in error(path, field="n")
    assert "did you mean 'text'? accepted: n, text" in error(path, field="txt")
    path.write_bytes(b"PAR1 but no more")
    assert "cannot be read as parquet" in error(path)


def test_a_setting_without_meaning_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    assert "no meaning for plain text" in error(tmp_path / "a.txt", field="text")
    assert "no meaning for .jsonl" in error(tmp_path / "a.jsonl", document_separator="x")


@pytest.mark.parametrize("block", [1, 2, 3, 4096])
def test_a_byte_that_is_not_utf8_is_found(tmp_path, monkeypatch, block):
    monkeypatch.setattr(decoding, "BLOCK_BYTES", block)
    path = tmp_path / "a.txt"
    path.write_bytes("é\n漢\nx".encode() + b"\xe9t\xe9")
    said = error(path)
    assert "a.txt: byte 0xe9 at offset 8, line 3, is not utf-8" in said
    assert "--text.encoding cp1252" in said
    assert "--tokenizer.level byte" in said
    path.write_bytes("é\r\n".encode() + "漢".encode()[:2])
    assert "byte 0xe6 at offset 4, line 2" in error(path)
    path.write_bytes(b"a\rb\r\xff")
    assert "offset 4, line 3" in error(path)
    assert read(path, encoding="latin-1") == ["a\nb\nÿ"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "cp1252", "shift_jis", "gb18030", "utf-16-le", "utf-8-sig"])
def test_other_encodings(tmp_path, encoding, small_blocks):
    text = {"cp1252": "Bär €\n", "shift_jis": "かな\n"}.get(encoding, TEXT)
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert read(tmp_path / "a.txt", encoding=encoding) == [text]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("order", ["le", "be"])
def test_wide_encodings_are_recognised_by_their_mark(tmp_path, encoding, order):
    (tmp_path / "a.txt").write_bytes(f"\ufeff{TEXT}".encode(f"{encoding}-{order}"))
    assert error(tmp_path / "a.txt").endswith(f"train with --text.encoding {encoding}")
    assert read(tmp_path / "a.txt", encoding=encoding) == [TEXT]


def test_text_that_may_be_utf16_without_a_mark_is_remarked(tmp_path):
    (tmp_path / "a.txt").write_bytes("plain".encode("utf-16-le"))
    assert "utf-16-le" in report(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"a\x00bcdefgh")
    assert read(tmp_path / "a.txt") == ["a\x00bcdefgh"]
    assert report(tmp_path / "a.txt") == ""


def test_an_unknown_encoding_names_the_nearest(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert "did you mean 'latin-1'" in error(tmp_path / "a.txt", encoding="latin-l")
    assert "unknown" in error(tmp_path / "a.txt", encoding="hex")


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"PK\x03\x04\xff", "a zip archive"), (b"%PDF-1.4\n\xff", "a PDF"), (gzip.compress(b"x", mtime=0), "gzip data")],
)
def test_binary_files_are_recognised(tmp_path, data, what):
    (tmp_path / "good.txt").write_text("x")
    (tmp_path / "bad").write_bytes(data)
    assert f"bad looks like {what}" in error(tmp_path)
    (tmp_path / "bad").write_bytes(b"\x7fELF\x00\xff")
    assert "looks like a binary file" in error(tmp_path)


def test_raw_reading_keeps_bytes_that_are_not_utf8(tmp_path, small_blocks):
    data = b"\xef\xbb\xbf" + bytes(range(256)) + b"\r\n"
    (tmp_path / "a.bin").write_bytes(data)
    (tmp_path / "b.txt").write_bytes("\ufeffé\r\n".encode())
    raw, text = read(tmp_path / "a.bin", tmp_path / "b.txt", raw=True)
    assert sources.utf8(raw) == data
    assert text == "é\n"
    assert "1 file(s) are not UTF-8" in report(tmp_path / "a.bin", raw=True)


def test_byte_order_marks(tmp_path, small_blocks):
    for name in "ab":
        (tmp_path / name).write_bytes("\ufeffx\ufeff".encode())
    assert read(tmp_path) == ["x\ufeff", "x\ufeff"]
    assert report(tmp_path) == "2 byte order mark(s) removed"
    assert read(tmp_path, bom="keep") == ["\ufeffx\ufeff"] * 2
    assert report(tmp_path, bom="keep") == "2 byte order mark(s) kept as a character"


@pytest.mark.parametrize("block", [1, 2, 3, 4, 100])
def test_line_ends_across_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(decoding, "BLOCK_BYTES", block)
    (tmp_path / "a.txt").write_bytes(b"a\r\n\r\nb\r\rc\nd\r")
    assert read(tmp_path / "a.txt") == ["a\n\nb\n\nc\nd\n"]
    assert report(tmp_path / "a.txt") == "2 CR LF turned into LF; 3 lone CR turned into LF"
    assert read(tmp_path / "a.txt", newlines="keep") == ["a\r\n\r\nb\r\rc\nd\r"]
    assert report(tmp_path / "a.txt", newlines="keep") == ""


@given(st.text(st.sampled_from("a\r\n\ufeffé漢"), max_size=30), st.integers(1, 7))
def test_line_ends_are_those_of_universal_newlines(tmp_path_factory, text, block):
    path = tmp_path_factory.getbasetemp() / "universal.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "BLOCK_BYTES", block)
        found = "".join(read(path))
    assert found == path.read_text("utf-8-sig")


@given(
    st.text(st.sampled_from("ab-"), max_size=40),
    st.sampled_from(["-", "--", "-a-", "b"]),
    st.integers(1, 9),
)
def test_a_separator_cuts_documents_wherever_blocks_end(tmp_path_factory, text, separator, block):
    path = tmp_path_factory.getbasetemp() / "separated.txt"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "BLOCK_BYTES", block)
        assert read(path, document_separator=separator) == [part for part in text.split(separator) if part]


def test_a_separator_that_does_not_occur_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    assert "'x' does not occur" in report(tmp_path / "a.txt", document_separator="x")
    with pytest.raises(ValueError, match="document_separator"):
        TextConfig(document_separator="")


def test_long_documents_come_in_pieces(monkeypatch):
    monkeypatch.setattr(sources, "_MAX_PIECE", 4)
    pieces = list(StringSource("abcdefghij").pieces())
    assert [tuple(piece) for piece in pieces] == [("abcd", True), ("efgh", False), ("ij", False)]
    assert list(StringSource("").pieces()) == []


def test_the_report_is_that_of_one_pass(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\n")
    source = opened(tmp_path / "a.txt").parts["all"]
    for _ in range(3):
        documents(source)
    assert source.report() == ["1 CR LF turned into LF"]


def test_the_fingerprint_changes_with_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a")
    before = opened(path).parts["all"].fingerprint()
    assert opened(path).parts["all"].fingerprint() == before
    path.write_text("ab")
    assert opened(path).parts["all"].fingerprint() != before


def test_no_corpus_is_an_error():
    with pytest.raises(ConfigError, match="at least one"):
        open_corpus(DataConfig(corpus=()), TextConfig())


def test_a_folder_named_as_a_file_of_the_system_is_refused():
    if Path("/dev/null").exists():
        with pytest.raises(TextError, match="neither a file nor a folder"):
            opened("/dev/null")


@pytest.mark.parametrize("spec", ["x" * 5000, "~no-such-user-here/x"])
def test_a_name_that_the_system_refuses_is_one_line(spec):
    assert "cannot open" in error(spec)


def test_raw_documents_are_cut_at_separators_too(tmp_path, small_blocks):
    (tmp_path / "a.bin").write_bytes("a漢\xff".encode() + b"\xff" + "漢b".encode())
    assert [sources.utf8(text) for text in read(tmp_path / "a.bin", raw=True, document_separator="漢")] == [
        b"a",
        b"\xc3\xbf\xff",
        b"b",
    ]


def _is_refused(path: Path, encoding: str) -> bool:
    """Whether an encoding is refused as such; text that is not in it is another matter."""
    try:
        read(path, encoding=encoding)
    except ConfigError:
        return True
    except TextError:
        return False
    return False


def test_every_encoding_that_python_knows_reads_a_file_or_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"hello, world\n" * 3)
    names = {*encodings.aliases.aliases.values(), "idna", "undefined", "punycode", "charmap", "a\0b", "\udcff", ""}
    refused = {name for name in names if _is_refused(path, name)}
    assert {"idna", "undefined", "base64_codec", "rot_13", "a\0b", "\udcff", ""} <= refused
    assert not {"utf_8", "latin_1", "cp1252", "utf_16_le", "shift_jis"} & refused


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="Windows and macOS have no file names outside Unicode")
def test_a_name_that_is_no_text_is_refused_at_opening(tmp_path):
    (tmp_path / "b\udcff.txt").write_text("x")
    for spec in (tmp_path / "b\udcff.txt", tmp_path, tmp_path / "*.txt"):
        assert error(spec).endswith(r"b\xff.txt is not UTF-8; rename it")
    assert r"[\xff] is not UTF-8" in error(tmp_path / "b[\udcff]")
    assert r"none\xff is not UTF-8" in error(tmp_path / "none\udcff")


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names are Unicode there")
def test_a_name_that_is_no_text_is_shown_where_it_is_left_out(tmp_path):
    for name in ("train.txt", "valid.txt", "b\udcff.txt"):
        (tmp_path / name).write_text("x")
    source = opened(tmp_path).parts["train"]
    assert documents(source) == ["x"]
    assert r"left out of" in source.report()[1]
    assert source.report()[1].endswith(r": b\xff.txt")
