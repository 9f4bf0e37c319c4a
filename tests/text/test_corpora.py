"""Named corpora: what the user's Python gives, what is downloaded, and that nothing unchecked gets in."""

from __future__ import annotations

import ast
import hashlib
import http.server
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elman.config import DataConfig, TextConfig
from elman.errors import ConfigError, ElmanError, UserError
from elman.text import corpora, stdlib
from elman.text.corpora import Download, File, corpus_names, describe, fetch, is_named, open_corpus, open_named
from elman.text.sources import Source


def text_of(source: Source) -> str:
    return "".join(piece.text for piece in source)


def documents_of(source: Source) -> list[str]:
    documents: list[str] = []
    for piece in source:
        if piece.starts_document:
            documents.append("")
        documents[-1] += piece.text
    return documents


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# The table


def test_every_name_is_described_and_only_names_are_names():
    rows = describe()
    assert [row.name for row in rows] == corpus_names()
    assert all(is_named(name) for name in corpus_names())
    assert is_named("synthetic:markov,order=3")
    assert not any(map(is_named, ("stdlib", "./text8", "text8.txt", "synthetic", "markov", "")))
    for row in rows:
        assert all((row.what, row.size, row.licence, row.splits, row.metric, row.origin))
        assert (row.optimum_bits_per_char is not None) == row.name.startswith("synthetic:")
        assert json.loads(json.dumps(row.to_dict()))["name"] == row.name


def test_every_download_has_a_digest_that_can_be_checked():
    for download in corpora.DOWNLOADS.values():
        checked = [download.archive] if download.archive else list(download.parts.values())
        lengths = {"sha256": 64, "md5": 32}
        for file in checked:
            algorithm, _, digest = (file.digest or "").partition(":")
            assert re.fullmatch(f"[0-9a-f]{{{lengths[algorithm]}}}", digest)
        assert set(download.parts) in ({"all"}, {"train", "valid", "test"})
        assert all(url.endswith(download.wanted) for url in download.urls)


# The standard library


def test_prose_is_english_in_documents_without_sessions_tables_and_repetitions(cache):
    source = open_named("stdlib-prose")["all"]
    documents = documents_of(source)
    text = "".join(documents)
    assert len(documents) > 200
    assert 1_000_000 < len(text) < 4_000_000
    assert sum(character.isalpha() or character.isspace() for character in text) / len(text) > 0.9
    assert ">>>" not in text
    assert not re.search(r"^[ \t]*([-=*+])\1{3,}[ \t]*$", text, re.MULTILINE)
    paragraphs = [" ".join(p.split()) for document in documents for p in document.split("\n\n")]
    longer = [paragraph for paragraph in paragraphs if len(paragraph) >= 60]
    assert len(longer) == len(set(longer))
    for known in (json.dumps, subprocess.run):  # a paragraph that is certainly there
        first = inspect.cleandoc(known.__doc__ or "").split("\n\n")[0]
        assert first in text
    digest = hashlib.sha256(text.encode()).hexdigest()
    version = ".".join(map(str, sys.version_info[:3]))
    assert source.report() == [f"Python {version} standard library, {len(text.encode()) / 1e6:.2f} MB, sha256 {digest}"]


def test_the_files_do_not_depend_on_the_order_in_which_folders_are_listed(monkeypatch):
    expected, key = stdlib.source_files(), stdlib.prose_key()
    walk = os.walk

    def reversed_walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, subfolders, names in walk(root):
            subfolders.sort(reverse=True)
            yield folder, subfolders, sorted(names, reverse=True)

    monkeypatch.setattr(stdlib.os, "walk", reversed_walk)
    assert stdlib.source_files() == expected
    assert stdlib.prose_key() == key
    monkeypatch.setattr(stdlib, "PROSE_VERSION", 0)
    assert stdlib.prose_key() != key


def test_prose_is_made_of_paragraphs_that_are_prose_and_new(tmp_path, monkeypatch):
    """A library of three files, cut by hand."""
    long = "A paragraph of more than sixty characters, which would be known if it came again."
    topics = {"x": f"One\n***\n\n{long}\n\n\n   Indented.", "y": f"Two, longer than x? {long}{long}"}
    module = f"First.\n\n    {long}\n\n    Example:\n\n    >>> 1 + 1\n    2\n    "
    files = {
        "a.py": f"{module!r}\ndef f():\n    'Of f.'\n",
        "b.py": f"class C:\n    {f'Of C.{chr(10) * 2}{long}'!r}\n    def m(self):\n        'Of m.\\n======'\n",
        "pydoc_data/topics.py": f"topics = {topics!r}",
    }
    paths = []
    for name, source in files.items():
        paths.append(tmp_path / name)
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_text(source)
    monkeypatch.setattr(stdlib, "source_files", lambda: paths)
    monkeypatch.setattr(stdlib, "_MIN_DOCUMENT", 10)
    monkeypatch.setattr(stdlib, "_MIN_DOCUMENTS_OF_A_CHARACTER", 1)
    assert sorted(stdlib.prose_documents()) == [
        f"First.\n\n{long}\n\nOf f.\n",
        "Of C.\n\nOf m.\n",
        "One\n\nIndented.\n",
        f"Two, longer than x? {long}{long}\n",
    ]


def test_no_character_of_the_prose_stands_in_few_documents_alone():
    documents = stdlib.prose_documents()
    found = Counter(character for document in documents for character in set(document))
    # A document that became too short goes as a whole, which may take a character below the bound.
    assert min(found.values()) >= stdlib._MIN_DOCUMENTS_OF_A_CHARACTER // 2


def test_prose_is_kept_and_a_damaged_copy_is_made_anew(cache, monkeypatch):
    num_made = 0

    def prose_documents() -> list[str]:
        nonlocal num_made
        num_made += 1
        return ["the first\n", "the second\n"]

    monkeypatch.setattr(stdlib, "prose_documents", prose_documents)
    made = open_named("stdlib-prose")["all"].fingerprint()
    assert open_named("stdlib-prose")["all"].fingerprint() == made
    assert num_made == 1
    (kept,) = (cache / "text").iterdir()
    for damage in (b"", b"[]", b'{"sha256": "0", "documents": ["x"]}', kept.read_bytes().replace(b"the", b"teh", 1)):
        kept.write_bytes(damage)
        assert open_named("stdlib-prose")["all"].fingerprint() == made
    assert num_made == 5
    monkeypatch.setenv("ELMAN_CACHE", str(kept))  # a file: nothing can be kept there
    assert documents_of(open_named("stdlib-prose")["all"]) == ["the first\n", "the second\n"]


def test_code_is_the_source_files_in_order():
    documents = documents_of(open_named("stdlib-code")["all"])
    assert sum(map(len, documents)) > 5_000_000
    assert Path(json.__file__).read_text(encoding="utf-8") in documents
    assert all(ast.parse(document) is not None for document in documents[::50])
    names = [path.as_posix() for path in stdlib.source_files()]
    assert names == sorted(names)
    assert not [name for name in names if re.search(r"/(tests?|site-packages|idlelib|tkinter|__pycache__)/", name)]
    assert "\r" not in "".join(documents)


def test_a_python_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="without the source files of its standard library"):
        stdlib.source_files()


# Generators


def test_a_generator_is_one_document_or_one_per_line():
    whole = open_named("synthetic:parity,examples=5,length=3")["all"]
    assert len(documents_of(whole)) == 1
    lines = open_named("synthetic:parity,examples=5,length=3", TextConfig(document_separator="\n"))["all"]
    assert documents_of(lines) == text_of(whole).splitlines()
    assert whole.fingerprint() != lines.fingerprint()
    assert whole.fingerprint() != open_named("synthetic:parity,examples=5,length=3,seed=1")["all"].fingerprint()
    assert "0.5000 bits per character" in whole.report()[0]
    assert text_of(whole) == text_of(whole)


@pytest.mark.parametrize("name", ["synthetic:markow", "synthetic:parity,len=3"])
def test_a_wrong_generator_is_refused_when_the_corpus_is_opened(name):
    with pytest.raises(UserError, match="did you mean"):
        open_corpus(DataConfig(corpus=(name,)), TextConfig())


def test_settings_without_meaning_are_refused():
    with pytest.raises(ConfigError, match=r"text\.encoding"):
        open_named("synthetic:parity", TextConfig(encoding="cp1252"))
    with pytest.raises(ConfigError, match=r"data\.field"):
        open_corpus(DataConfig(corpus=("synthetic:parity",), field="text"), TextConfig())


# Downloads


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def zipped(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def register(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a corpus of our own into the table, under the name ``toy``."""

    def put(parts: dict[str, File], archive: File | None = None, urls: tuple[str, ...] = ()) -> None:
        toy = Download("A toy.", "1 KB", "free", "none", "bits", parts, archive, urls)
        monkeypatch.setattr(corpora, "DOWNLOADS", {**corpora.DOWNLOADS, "toy": toy})

    return put


def test_an_archive_gives_its_parts_and_nothing_else(register, cache, tmp_path):
    members = {f"wiki/{part}.raw": f"{part} text\n" for part in ("train", "valid", "test")}
    archive = zipped(tmp_path / "toy.zip", {**members, "../../escaped.txt": "out", "/absolute.txt": "out"})
    parts = {part: File(f"wiki/{part}.raw") for part in ("train", "valid", "test")}
    register(parts, File("toy.zip", sha256(archive.read_bytes())))
    folder = fetch("toy", archive)
    assert folder == cache / "corpora" / "toy"
    assert sorted(p.name for p in cache.rglob("*.txt")) == ["test.txt", "train.txt", "valid.txt"]
    assert not list(tmp_path.rglob("escaped.txt"))
    archive.unlink()
    opened = open_named("toy")
    assert {part: text_of(source) for part, source in opened.items()} == {
        part: f"{part} text\n" for part in ("train", "valid", "test")
    }
    assert "toy: free" in opened["train"].report()


def test_the_text_inside_an_archive_is_accepted_by_its_own_digest(register, tmp_path):
    text = tmp_path / "anything"
    text.write_bytes(b"to be\r\nor not")
    register({"all": File("inner", sha256(text.read_bytes()))}, File("toy.zip", sha256(b"something else")))
    fetch("toy", text)
    source = open_named("toy")["all"]
    assert text_of(source) == "to be\nor not"
    assert source.report()[0] == "toy: free"


def test_a_folder_of_ones_own_files_is_checked_file_by_file(register, tmp_path):
    files = {"train": b"a b c\n", "valid": b"b\n", "test": b"c\n"}
    register({part: File(f"ptb.{part}.txt", f"md5:{hashlib.md5(data).hexdigest()}") for part, data in files.items()})
    with pytest.raises(UserError, match=r"cannot be downloaded .* elman data fetch toy --from FOLDER"):
        fetch("toy")
    for part, data in files.items():
        with pytest.raises(UserError, match=r"ptb\.\w+\.txt is missing for toy"):
            fetch("toy", tmp_path)
        (tmp_path / f"ptb.{part}.txt").write_bytes(data)
    (tmp_path / "ptb.test.txt").write_bytes(b"d\n")
    with pytest.raises(UserError, match=r"ptb\.test\.txt is not the file that was published as toy; accepted: .*md5:"):
        fetch("toy", tmp_path)
    (tmp_path / "ptb.test.txt").write_bytes(b"c\n")
    fetch("toy", tmp_path)
    assert text_of(open_named("toy")["test"]) == "c\n"
    assert list(open_named("toy")) == ["train", "valid", "test"]


def test_a_wrong_file_is_refused_and_leaves_nothing(cache, tmp_path):
    wrong = tmp_path / "input.txt"
    wrong.write_text("First Citizen:\n")
    with pytest.raises(UserError, match=r"input\.txt is not the file that was published as tiny-shakespeare"):
        fetch("tiny-shakespeare", wrong)
    with pytest.raises(UserError, match="is not the file that was published as wikitext-2"):
        fetch("wikitext-2", wrong)
    with pytest.raises(UserError, match=r"there is no .*nowhere"):
        fetch("text8", tmp_path / "nowhere")
    assert list((cache / "corpora").iterdir()) == []


def test_without_a_network_the_error_says_how_to_bring_the_file(cache):
    pytest.importorskip("pooch")
    with pytest.raises(ElmanError, match=r"bring enwik8\.zip .*elman data fetch enwik8 --from FILE") as raised:
        fetch("enwik8")
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 1


def test_unknown_names_and_made_ones_cannot_be_fetched():
    with pytest.raises(UserError, match="did you mean 'text8'"):
        fetch("text9")
    with pytest.raises(UserError, match="made on the spot"):
        fetch("synthetic:parity")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on this machine, and the folder that it serves."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


def test_the_first_mirror_with_the_right_file_is_taken(register, served, monkeypatch):
    pytest.importorskip("pooch")
    monkeypatch.setenv("NO_PROXY", "*")
    host, folder = served
    (folder / "wrong.txt").write_text("changed")
    (folder / "right.txt").write_text("as published")
    urls = (f"{host}/missing.txt", f"{host}/wrong.txt", f"{host}/right.txt")
    register({"all": File("right.txt", sha256(b"as published"))}, urls=urls)
    assert text_of(open_named("toy")["all"]) == "as published"
    (folder / "right.txt").unlink()
    assert text_of(open_named("toy")["all"]) == "as published"
    (corpora.cache_folder() / "corpora" / "toy" / "all.txt").write_text("cut")
    with pytest.raises(ElmanError, match=r"HTTPError, another file than published"):
        fetch("toy")


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, register):
    (tmp_path / "file").write_text("x")
    register({"all": File("file", sha256(b"x"))})
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ElmanError, match="ELMAN_CACHE names another folder"):
        fetch("toy", tmp_path / "file")
