"""How much memory training takes as the corpus grows: prepared in shards, mapped, never held.

    python benchmarks/shards.py [MEGABYTES ...]

For each size a text of English prose is written and prepared at byte level in shards of 16 million tokens; an epoch's
worth of places in it is then trained on in a process of its own. The table says what that process held at most: memory
of its own, and pages of the files, which the system takes back when it needs them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import elman
from elman.config import DataConfig, TextConfig, TokenizerConfig
from elman.data.prepare import prepare_folder
from elman.text.corpora import open_named
from elman.training.loop import Callback, Record

SHARD_TOKENS = 16 * 2**20


class Watch(Callback):
    """Keeps the largest figures that the kernel gives for this process, in MB."""

    def __init__(self) -> None:
        self.own = self.of_files = 0.0

    def on_record(self, record: Record) -> None:
        """Look after every record."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        own, of_files = (int(lines[name].split()[0]) / 1000 for name in ("RssAnon", "RssFile"))
        self.own, self.of_files = max(self.own, own), max(self.of_files, of_files)


def prose(num_bytes: int) -> Iterator[bytes]:
    """English prose of about this size."""
    text = "".join(piece.text for piece in open_named("stdlib-prose")["all"].pieces()).encode()
    while num_bytes > 0:
        yield text[:num_bytes]
        num_bytes -= len(text)


def prepared(folder: Path, megabytes: int) -> dict[str, float]:
    """Prepare a corpus in this process; the largest memory meanwhile is that of the process."""
    with (folder / "text.txt").open("wb") as file:
        file.writelines(prose(megabytes * 1_000_000))
    data = DataConfig(corpus=str(folder / "text.txt"))
    prepare_folder(folder / "corpus", data, TextConfig(), TokenizerConfig(level="byte"), shard_tokens=SHARD_TOKENS)
    (folder / "text.txt").unlink()
    watch = Watch()
    watch.on_record(Record("notice", {}))
    return {"files": len(list((folder / "corpus").glob("*.bin"))), "preparing": watch.own}


def trained(folder: Path) -> dict[str, float]:
    """Train on the corpus of a folder in this process."""
    watch = Watch()
    elman.train(
        folder / "corpus",
        out=folder / "run",
        callbacks=[watch],
        model={"hidden_size": 64, "embedding_size": 32},
        training={"batch_size": 64, "bptt": 64, "max_updates": 200, "num_threads": 1},
        evaluation={"every_updates": 100, "max_tokens": 100_000},
        sampling={"max_new_tokens": 10},
    )
    return {"training": watch.own, "pages": watch.of_files}


def main() -> None:
    """Measure each size in processes of its own, and print the table."""
    if len(sys.argv) == 4 and sys.argv[1] in ("prepare", "train"):
        folder = Path(sys.argv[2])
        print(json.dumps(prepared(folder, int(sys.argv[3])) if sys.argv[1] == "prepare" else trained(folder)))
        return
    print("| text, MB | token files | memory when prepared, MB | memory in training, MB | mapped pages in it, MB |")
    print("|--:|--:|--:|--:|--:|")
    for megabytes in map(int, sys.argv[1:] or ("10", "100", "300")):
        with tempfile.TemporaryDirectory(prefix="elman-shards-") as folder:
            figures: dict[str, float] = {}
            for what in ("prepare", "train"):
                words = [sys.executable, __file__, what, folder, str(megabytes)]
                figures |= json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        row = (megabytes, figures["files"], *(f"{figures[name]:.0f}" for name in ("preparing", "training", "pages")))
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
