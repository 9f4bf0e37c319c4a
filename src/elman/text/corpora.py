"""Corpora that have a name: two that every Python carries, generators, and downloads checked by their hash.

A download is unpacked once into the cache, as a folder with ``all.txt``, or ``train.txt``, ``valid.txt`` and
``test.txt``; from there it is read like any other file. Where the network cannot be reached, `fetch` takes a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import platformdirs

from elman.config import DataConfig, TextConfig
from elman.errors import ConfigError, ElmanError, MissingExtraError, UserError, nearest
from elman.files import Building, write_atomically
from elman.text import stdlib, synthetic
from elman.text.sources import Corpus, Piece, Source, as_pieces, open_files, separated, utf8, without_empty

_SYNTHETIC = "synthetic:"
_SIZES_FILE = ".sizes.json"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Description:
    """A row of ``elman data list``."""

    name: str
    what: str
    """One sentence."""
    origin: str
    """``built in``, ``generator``, ``download``, or ``your own files``."""
    size: str
    licence: str
    splits: str
    metric: str
    optimum_bits_per_char: float | None = None
    """The entropy rate, where it is known."""

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class File:
    """A file's name, and its digest as ``algorithm:hex`` where one is published."""

    name: str
    digest: str | None = None


@dataclass(frozen=True)
class Download:
    """Where the files of a corpus come from and how they are recognised."""

    what: str
    size: str
    licence: str
    splits: str
    metric: str
    parts: Mapping[str, File]
    """The text file of each part, inside the archive where there is one."""
    archive: File | None = None
    """A zip archive."""
    urls: tuple[str, ...] = ()
    """Of the archive, or of the only file, the first one preferred; none: the user brings the files."""

    @property
    def wanted(self) -> str:
        """What the user may give, in words."""
        if self.archive is not None:
            return self.archive.name
        names = [file.name for file in self.parts.values()]
        return names[0] if len(names) == 1 else f"a folder with {', '.join(names)}"


_CC_BY_SA = "CC BY-SA 3.0, text of Wikipedia: name its authors, share changes alike"
_FRACTIONS = "90/5/5 by the default fractions"
_WIKITEXT_HOST = "https://wikitext.smerity.com"
_METAMIND = "https://s3.amazonaws.com/research.metamind.io/wikitext"


def _wikitext(number: int, size: str, digest: str, raw: bool, mirrors: tuple[str, ...] = ()) -> Download:
    archive = f"wikitext-{number}{'-raw' if raw else ''}-v1.zip"
    folder, ending = (f"wikitext-{number}-raw", "raw") if raw else (f"wikitext-{number}", "tokens")
    return Download(
        what=f"Good articles of Wikipedia, {'as written' if raw else 'in words, rare ones as <unk>'} (Merity 2016).",
        size=size,
        licence=_CC_BY_SA,
        splits="train, valid, test as published",
        metric="bits per byte" if raw else "perplexity per word",
        parts={part: File(f"{folder}/wiki.{part}.{ending}") for part in ("train", "valid", "test")},
        archive=File(archive, f"sha256:{digest}"),
        urls=(f"{_WIKITEXT_HOST}/{archive}", *mirrors, f"{_METAMIND}/{archive}"),
    )


DOWNLOADS: Mapping[str, Download] = {
    "tiny-shakespeare": Download(
        what="40,000 lines of Shakespeare's plays (Karpathy 2015).",
        size="1.1 MB",
        licence="public domain text",
        splits="90/10 with --data.valid_fraction 0 --data.test_fraction 0.1",
        metric="bits per character",
        parts={
            "all": File("input.txt", "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
        },
        urls=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
    ),
    "text8": Download(
        what="The start of Wikipedia in 26 letters and the space (Mahoney 2006).",
        size="100 MB",
        licence=_CC_BY_SA,
        splits=_FRACTIONS,
        metric="bits per character",
        parts={"all": File("text8", "md5:3bea1919949baf155f99411df5fada7e")},
        archive=File("text8.zip", "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
        urls=("https://mattmahoney.net/dc/text8.zip", "http://mattmahoney.net/dc/text8.zip"),
    ),
    "enwik8": Download(
        what="The first 100 million bytes of Wikipedia with its markup (Hutter prize).",
        size="100 MB",
        licence=_CC_BY_SA,
        splits=_FRACTIONS,
        metric="bits per byte, at --tokenizer.level byte",
        parts={
            "all": File("enwik8", "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),
        },
        archive=File("enwik8.zip", "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
        urls=(
            "https://mattmahoney.net/dc/enwik8.zip",
            "http://mattmahoney.net/dc/enwik8.zip",
            "https://data.deepai.org/enwik8.zip",
        ),
    ),
    "wikitext-2": _wikitext(2, "13 MB", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c", raw=False),
    "wikitext-2-raw": _wikitext(
        2,
        "13 MB",
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        raw=True,
        mirrors=("https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",),
    ),
    "wikitext-103": _wikitext(
        103, "540 MB", "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590", raw=False
    ),
    "wikitext-103-raw": _wikitext(
        103, "540 MB", "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794", raw=True
    ),
    "ptb": Download(
        what="Wall Street Journal in words, 10,000 of them, without capitals and signs (Mikolov 2010).",
        size="5.9 MB",
        licence="Penn Treebank text, licensed by the LDC: not offered here, bring your own copy",
        splits="train, valid, test as published",
        metric="perplexity per word",
        parts={
            "train": File("ptb.train.txt", "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420"),
            "valid": File("ptb.valid.txt", "md5:aa0affc06ff7c36e977d7cd49e3839bf"),
            "test": File("ptb.test.txt", "md5:8b80168b89c18661a38ef683c0dc3721"),
        },
    ),
}
"""Every corpus that is not made on the spot."""

_PSF = "PSF-2.0, the licence of Python"
_BUILT_IN: Mapping[str, Description] = {
    "stdlib-prose": Description(
        "stdlib-prose",
        "English prose cut from your own Python: help topics and docstrings. The default.",
        "built in",
        "1.5 MB",
        _PSF,
        _FRACTIONS,
        "bits per character",
    ),
    "stdlib-code": Description(
        "stdlib-code",
        "The source files of your own Python's standard library, a file a document.",
        "built in",
        "10 MB",
        _PSF,
        _FRACTIONS,
        "bits per character",
    ),
}


def corpus_names() -> list[str]:
    """Every name that can stand for a corpus; generators without their parameters."""
    return [*_BUILT_IN, *DOWNLOADS, *(_SYNTHETIC + name for name in synthetic.GENERATORS)]


def is_named(name: str) -> bool:
    """Whether this is the name of a corpus, and not of a file; a wrong ``synthetic:`` is one too, for `open_named`."""
    return name in _BUILT_IN or name in DOWNLOADS or name.startswith(_SYNTHETIC)


def describe() -> list[Description]:
    """What there is to know about each named corpus, in the order of `corpus_names`."""
    downloads = [
        Description(
            name,
            download.what,
            "download" if download.urls else "your own files",
            download.size,
            download.licence,
            download.splits,
            download.metric,
        )
        for name, download in DOWNLOADS.items()
    ]
    return [*_BUILT_IN.values(), *downloads, *map(_describe_generator, synthetic.GENERATORS)]


def _describe_generator(name: str) -> Description:
    generator = synthetic.parse(name)
    _, *parameters = generator.specification.split(",")
    return Description(
        _SYNTHETIC + name,
        (generator.__doc__ or "").partition("\n")[0].replace("``", ""),
        "generator",
        f"as asked: {','.join(parameters)}",
        "none: made by a program",
        _FRACTIONS,
        "bits per character, and answers" if generator.has_answers else "bits per character",
        generator.known().entropy_bits_per_char,
    )


def open_corpus(data: DataConfig, text: TextConfig, *, raw: bool = False) -> Corpus:
    """Open what `data.corpus` names: a corpus of `corpus_names`, or else files (see `elman.text.sources.open_files`).

    A name goes before a file of the same name, which ``./name`` reaches.

    Raises:
        UserError: if something is missing or does not fit together; TextError for a text.
    """
    if data.pairs and text.document_separator is not None:
        raise ConfigError("text.document_separator has no meaning with data.pairs: an example is two texts of one row")
    named = [name for name in data.corpus if is_named(name)]
    if not named:
        return open_files(data, text, raw=raw, names=corpus_names())
    if len(data.corpus) > 1:
        raise ConfigError(f"the named corpus {named[0]!r} stands alone; give ./{named[0]} if you mean a file")
    if data.field is not None:
        raise ConfigError(f"data.field {data.field!r} has no meaning for the named corpus {named[0]!r}")
    if data.source_field or data.target_field:
        raise ConfigError(f"data.source_field and data.target_field have no meaning for the named corpus {named[0]!r}")
    return Corpus(named[0], open_named(named[0], text, raw=raw, pairs=data.pairs))


def open_named(
    name: str, text: TextConfig | None = None, *, raw: bool = False, pairs: bool = False
) -> Mapping[str, Source]:
    """The parts of a named corpus: ``{"all": source}``, or ``train``, ``valid`` and ``test``.

    A download that is not in the cache is fetched. ``text.document_separator`` cuts documents into smaller ones: with
    a line end, every example of a generated task is a document.

    Args:
        name: one of `corpus_names`; a generator may have parameters, ``synthetic:parity,length=8``.
        text: how the bytes of a download become characters.
        raw: read a download that is not valid UTF-8 as bytes, for the byte tokenizer.
        pairs: source and target of every example as two documents; generated tasks alone have such.

    Raises:
        UserError: the name or a parameter is unknown, or a setting has no meaning for this corpus.
        ElmanError: the corpus is not in the cache and cannot be downloaded.
    """
    text = text or TextConfig()
    made: Mapping[str, Callable[[], Iterable[str]]] = {"stdlib-prose": _prose, "stdlib-code": stdlib.code_documents}
    if pairs:
        return {"all": _GeneratedPairs(_task(name))}
    if name in made or name.startswith(_SYNTHETIC):
        if text.encoding != TextConfig().encoding:
            raise ConfigError(f"text.encoding {text.encoding!r} has no meaning for {name}, which is made as characters")
        if name in made:
            return {"all": _Library(text.document_separator, made[name])}
        return {"all": _Generated(text.document_separator, synthetic.parse(name.removeprefix(_SYNTHETIC)))}
    folder = fetch(name)
    only = folder / "all.txt"
    parts = open_files(DataConfig(corpus=(str(only if only.exists() else folder),)), text, raw=raw).parts
    return {part: _Licensed(source, f"{name}: {DOWNLOADS[name].licence}") for part, source in parts.items()}


class _Made(Source):
    """Documents made by a function on every pass."""

    def __init__(self, separator: str | None) -> None:
        self._separator = separator

    @abstractmethod
    def _documents(self) -> Iterable[Iterable[str]]:
        """The texts of each document."""

    def pieces(self) -> Iterator[Piece]:
        for texts in self._documents():
            pieces = as_pieces(texts) if self._separator is None else separated(texts, self._separator, Counter())
            yield from without_empty(pieces, Counter())


class _Generated(_Made):
    def __init__(self, separator: str | None, generator: synthetic.Generator) -> None:
        super().__init__(separator)
        self._generator = generator

    def _documents(self) -> Iterable[Iterable[str]]:
        return [self._generator.chunks()]

    def fingerprint(self) -> str:
        return f"{_SYNTHETIC}{self._generator.specification} version {synthetic.VERSION} {self._separator!r}"

    def report(self) -> list[str]:
        if self._separator is not None:
            return []  # the line ends that became borders are no characters any more
        known = self._generator.known()
        return [f"best possible: {known.entropy_bits_per_char:.4f} bits per character ({known.optimum})"]


def _task(name: str) -> synthetic.Task:
    """The generator of examples that a name stands for. Raises ConfigError where it is none."""
    generator = synthetic.parse(name.removeprefix(_SYNTHETIC)) if name.startswith(_SYNTHETIC) else None
    if not isinstance(generator, synthetic.Task):
        tasks = [_SYNTHETIC + task for task, one in synthetic.GENERATORS.items() if issubclass(one, synthetic.Task)]
        raise ConfigError(
            f"{name!r} has no pairs of source and target; with data.pairs give your own files (.tsv, .csv, .jsonl, "
            f".parquet, lines with a tab) or one of {', '.join(tasks)}"
        )
    return generator


@dataclass(frozen=True)
class _GeneratedPairs(Source):
    """The examples of a task: each question a source, its answer a target."""

    task: synthetic.Task

    def pieces(self) -> Iterator[Piece]:
        for chunk in self.task.chunks():
            for question, answer in self.task.examples_in(chunk):
                yield from (Piece(question, True), Piece(answer, True))

    def fingerprint(self) -> str:
        return f"pairs of {_SYNTHETIC}{self.task.specification} version {synthetic.VERSION}"


class _Library(_Made):
    def __init__(self, separator: str | None, make: Callable[[], Iterable[str]]) -> None:
        super().__init__(separator)
        self._make = make

    @cached_property
    def _texts(self) -> list[str]:
        return list(self._make())

    @cached_property
    def _sha256(self) -> str:
        return _sha256(self._texts)

    def _documents(self) -> Iterable[Iterable[str]]:
        return ((text,) for text in self._texts)

    def fingerprint(self) -> str:
        return f"{self._sha256} {self._separator!r}"

    def report(self) -> list[str]:
        size = sum(len(utf8(text)) for text in self._texts) / 1e6
        return [f"{stdlib.python_name()} standard library, {size:.2f} MB, sha256 {self._sha256}"]


@dataclass(frozen=True)
class _Licensed(Source):
    source: Source
    note: str

    def pieces(self) -> Iterator[Piece]:
        return self.source.pieces()

    def fingerprint(self) -> str | None:
        return self.source.fingerprint()

    def report(self) -> list[str]:
        return [self.note, *self.source.report()]


def cache_folder() -> Path:
    """Where downloads and whatever takes long to make are kept: ``$ELMAN_CACHE``, or the user's cache folder."""
    return Path(os.environ.get("ELMAN_CACHE") or platformdirs.user_cache_path("elman", appauthor=False)).expanduser()


def _prose() -> list[str]:
    """The prose of this Python, from the cache where it is there and whole."""
    path = cache_folder() / "text" / f"stdlib-prose-{stdlib.prose_key()}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_bytes())
        if kept["sha256"] == _sha256(kept["documents"]):
            return list(kept["documents"])
    documents = stdlib.prose_documents()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"sha256": _sha256(documents), "documents": documents}).encode())
    return documents


def _sha256(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(utf8(text))
    return digest.hexdigest()


def fetch(name: str, source: Path | None = None) -> Path:
    """The folder in the cache that holds a corpus, downloaded and unpacked if it is not there yet.

    Args:
        name: one of `DOWNLOADS`.
        source: the file to take instead of the network, checked against the same digests: the archive, or the text
            inside it; for several files the folder that holds them.

    Raises:
        UserError: the name is unknown, or the file given is not what was published.
        ElmanError: no address could be reached, or the cache cannot be written.
    """
    if name not in DOWNLOADS:
        why = "is made on the spot: nothing to fetch" if is_named(name) else f"is no corpus{nearest(name, DOWNLOADS)}"
        raise UserError(f"{name!r} {why}")
    download, folder = DOWNLOADS[name], cache_folder() / "corpora" / name
    if source is None and _is_whole(folder):
        return folder
    if source is not None and not source.exists():
        raise UserError(f"there is no {source}; accepted for {name}: {download.wanted}")
    try:
        with Building(folder.parent) as building:
            unpacked = building.path / name
            unpacked.mkdir()
            _unpack(name, download, source or _downloaded(name, download, building.path / "download"), unpacked)
            sizes = {path.name: path.stat().st_size for path in unpacked.iterdir()}
            (unpacked / _SIZES_FILE).write_text(json.dumps(sizes), encoding="utf-8")
            if folder.exists():
                folder.rename(building.path / "old")
            unpacked.rename(folder)
    except OSError as error:
        if _is_whole(folder):  # another process was quicker
            return folder
        raise ElmanError(f"{name} cannot be kept in {folder}: {error}; ELMAN_CACHE names another folder") from None
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether every file unpacked here still has its size."""
    try:
        sizes = json.loads((folder / _SIZES_FILE).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _downloaded(name: str, download: Download, target: Path) -> Path:
    """The archive or only file from the first address that gives the right one."""
    by_hand = f"elman data fetch {name} --from"
    if not download.urls:
        raise UserError(f"{name} cannot be downloaded ({download.licence}); give {download.wanted}: {by_hand} FOLDER")
    try:
        import pooch  # type: ignore[import-untyped]  # ships no types
    except ImportError:
        raise MissingExtraError("pooch", "data", f"downloading {name}") from None
    get = pooch.HTTPDownloader(progressbar=False, timeout=30, headers={"User-Agent": "Mozilla/5.0 (elman)"})
    wanted = download.archive or next(iter(download.parts.values()))
    reasons = []
    for url in download.urls:
        try:
            get(url, str(target), None)
        except (OSError, ValueError) as error:
            reasons.append(type(error).__name__)
            continue
        if _matches(target, wanted):
            return target
        reasons.append("another file than published")
    raise ElmanError(
        f"{name} could not be downloaded from {download.urls[0]} ({', '.join(dict.fromkeys(reasons))}); "
        f"bring {wanted.name} ({wanted.digest}) from elsewhere: {by_hand} FILE"
    )


def _unpack(name: str, download: Download, source: Path, folder: Path) -> None:
    """Copy each part into the folder under a name of ours, checking what has a digest."""
    if download.archive is not None and source.is_file() and _matches(source, download.archive):
        with zipfile.ZipFile(source) as archive:
            for part, file in download.parts.items():
                with archive.open(file.name) as stream:
                    _copy(stream, folder / f"{part}.txt")
    elif source.is_dir() or len(download.parts) == 1:
        for part, file in download.parts.items():
            given = source / Path(file.name).name if source.is_dir() else source
            if not given.is_file() or not _matches(given, file):
                raise UserError(_refusal(name, download, given))
            with given.open("rb") as stream:
                _copy(stream, folder / f"{part}.txt")
    else:
        raise UserError(_refusal(name, download, source))


def _refusal(name: str, download: Download, given: Path) -> str:
    digests = [file.digest for file in (download.archive, *download.parts.values()) if file and file.digest]
    problem = "is not the file that was published as" if given.is_file() else "is missing for"
    return f"{given} {problem} {name}; accepted: {download.wanted}, {' or '.join(digests)}"


def _matches(path: Path, file: File) -> bool:
    """Whether a file has the published digest; without one there is nothing to trust."""
    if file.digest is None:
        return False
    algorithm, _, expected = file.digest.partition(":")
    begin = partial(hashlib.new, algorithm, usedforsecurity=False)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, begin).hexdigest() == expected


def _copy(stream: IO[bytes], target: Path) -> None:
    with target.open("wb") as copy:
        shutil.copyfileobj(stream, copy, _BLOCK_BYTES)
