"""``elman data``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from elman.cli.flags import AllFlags, ConfigFile, Corpus, Json, Preset, Switch, resolved

if TYPE_CHECKING:
    from elman.data.duplicates import Deduplicated
    from elman.data.inspect import CorpusReport
    from elman.text.sources import Corpus as Sources

app = App(name="data", help="Corpora: list them, fetch them, look at a text before training.")


@app.command(name="list")
def list_corpora(*, json: Json = False) -> None:
    """The corpora that have a name."""
    from elman.cli.output import print_json, print_table
    from elman.text.corpora import describe

    described = describe()
    if json:
        print_json({"corpora": [corpus.to_dict() for corpus in described]})
        return
    rows = [(corpus.name, f"{corpus.what}\n{corpus.origin}, {corpus.size}") for corpus in described]
    print_table("", ["name", "what"], rows, text_columns=2)


@app.command
def fetch(
    name: str,
    /,
    *,
    source: Annotated[Path | None, Parameter(name="--from", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Download a corpus into the cache, checked by its digest; or take it from a file of yours.

    Args:
        name: A name from `elman data list`.
        source: The file to take instead of the network, or the folder that holds several.
    """
    from elman.cli.output import print_json
    from elman.text import corpora

    folder = corpora.fetch(name, source)
    if json:
        print_json({"name": name, "folder": str(folder)})
    else:
        print(f"{name} lies in {folder}; train on it: elman train {name}")


@app.command
def prepare(
    *corpus: Corpus,
    out: Path,
    shard_tokens: int | None = None,
    dedup: Switch = False,
    threshold: float | None = None,
    preset: Preset = None,
    config: ConfigFile = None,
    json: Json = False,
    flags: AllFlags | None = None,
) -> None:
    """Write a text as tokens into a folder, which is a corpus for `elman train` here and on other machines.

    Args:
        out: The folder.
        shard_tokens: Begin a new file after so many tokens, rounded up to a multiple of 65536; none: a file a part.
        dedup: Leave documents out that repeat others, exactly or nearly; given held-out parts stay as they are.
        threshold: Share of their text from which on two documents are alike; none: 0.8.
    """
    from elman.cli.output import print_json
    from elman.data.duplicates import DEFAULT_THRESHOLD, without_duplicates
    from elman.data.prepare import prepare_folder
    from elman.errors import UserError

    settings = resolved(flags, preset, config, corpus)
    if threshold is not None and not dedup:
        raise UserError("--threshold says when two documents are alike: give --dedup as well")
    if dedup and settings.data.pairs:
        raise UserError("--dedup has no meaning with data.pairs: a source and its target cannot go one by one")
    found: list[Deduplicated] = []

    def change(corpus: Sources) -> Sources:
        if dedup:
            found.append(without_duplicates(corpus, DEFAULT_THRESHOLD if threshold is None else threshold))
        return found[0].corpus if found else corpus

    dataset = prepare_folder(
        out, settings.data, settings.text, settings.tokenizer, shard_tokens=shard_tokens, change=change
    )
    splits = {"train": dataset.train, "valid": dataset.valid, "test": dataset.test}
    tokens = {name: len(split.tokens) - 1 for name, split in splits.items() if split is not None}
    files = len(list(out.glob("*.bin")))
    if json:
        went = {"duplicates": found[0].to_dict()} if found else {}
        print_json({"folder": str(out), "tokens": tokens, "files": files, "vocabulary": dataset.tokenizer.size, **went})
    else:
        if found:
            _print_duplicates(found[0])
        counts = ", ".join(f"{name} {count:,}" for name, count in tokens.items())
        print(f"{counts} tokens in {files} files; train on them: elman train {shlex.quote(str(out))}")


@app.command
def inspect(
    *corpus: Corpus, preset: Preset = None, config: ConfigFile = None, json: Json = False, flags: AllFlags | None = None
) -> None:
    """Look at a text as training would read it: counts, vocabulary, first pairs, and what would go wrong."""
    from elman.cli.output import print_json
    from elman.data.inspect import inspect_corpus
    from elman.data.prepare import prepare

    settings = resolved(flags, preset, config, corpus)
    dataset = prepare(settings.data, settings.text, settings.tokenizer)
    report = inspect_corpus(dataset, settings.data, settings.training)
    if json:
        print_json(report.to_dict())
    else:
        _print(report)


_REPEATED_SHOWN = 10


def _print_duplicates(found: Deduplicated) -> None:
    from elman.cli.output import print_table
    from elman.visible import clean

    rows = [
        (
            name,
            f"{part.documents:,}",
            f"{part.exact:,}",
            f"{part.near:,}",
            _percent(part.chars_left_out / max(1, part.chars)),
        )
        for name, part in found.parts.items()
    ]
    print_table("", ["part", "documents", "equal to others", "nearly so", "of the text"], rows)
    for one in found.repeated[:_REPEATED_SHOWN]:
        how = "equal to" if one.exact else f"{one.similarity:.0%} like"
        print(f"{one.part} {one.document:,} is {how} {one.of_part} {one.of_document:,}: {clean(repr(one.begins))}")
    if len(found.repeated) > _REPEATED_SHOWN:
        print(f"and {len(found.repeated) - _REPEATED_SHOWN:,} more, which --json lists")


def _print(report: CorpusReport) -> None:
    from elman.cli.output import print_table
    from elman.visible import clean

    print(f"{clean(report.name)}, SHA-256 {report.sha256}")
    parts = report.parts.values()
    counts = ("documents", "characters", "bytes", "tokens", "unknown", "lines", "longest_line")
    rows = [(name.replace("_", " "), *(f"{getattr(part, name):,}" for part in parts)) for name in counts]
    shares = ("duplicate_lines", "duplicate_documents", "lines_in_train", "spans_in_train")
    rows += [(name.replace("_", " "), *(_percent(getattr(part, name)) for part in parts)) for name in shares]
    print_table("", ["", *report.parts], rows)
    print(f"vocabulary    {len(report.vocabulary):,} tokens of level {report.level}, {report.num_unused:,} never used")
    print(f"most frequent {_counted(report.most_frequent)}")
    print(f"rarest        {_counted(report.least_frequent)}")
    updates = f"{report.segments_per_epoch:,} updates an epoch"
    batches = "pairs at once" if report.bptt is None else f"streams of segments of {report.bptt}"
    print(f"batches       {report.batch_size} {batches}, {updates}")
    for pair in report.pairs:
        print(f"pair          {pair.inputs!r} -> {pair.targets!r}")
    for notice in report.notices:
        print(f"note          {clean(notice)}")
    for warning in report.warnings:
        print(f"warning       {clean(warning)}")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _counted(tokens: tuple[tuple[str, int], ...]) -> str:
    return "  ".join(f"{token!r} {count:,}" for token, count in tokens)
