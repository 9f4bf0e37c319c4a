"""Trainings for a process of a group; `test_distributed.py` starts it twice and reads what it writes.

RANK=r WORLD_SIZE=n MASTER_ADDR=127.0.0.1 MASTER_PORT=p python ranked.py WHAT FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import elman
from elman.data.prepare import Dataset, prepare
from elman.errors import ElmanError
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.settings import Config, resolve
from elman.training import resume
from elman.training.distillation import Teacher
from elman.training.distributed import Ranks, join
from elman.training.loop import Callback, Record, Trainer

TEXT = "".join(
    f"{i % 7} the cat sat on mat {i % 11}; a dog saw {'the moon ' * (i % 3)}and {i * i % 13}.\n" for i in range(160)
)
PAIRS = "".join(f"source {i % 17} of {i}\ttarget {i * 7 % 23}\n" for i in range(90))

QUIET = {
    "sampling": {"every_updates": 1000, "max_new_tokens": 3},
    "evaluation": {"every_updates": 1000, "num_streams": 5},
}
SMALL = {"hidden_size": 10, "embedding_size": 6, "num_layers": 2, "dropout": 0.3}
BASE = {"batch_size": 4, "bptt": 12, "warmup_updates": 4, "learning_rate": 0.01, "max_updates": 100}

CASES: dict[str, dict[str, Any]] = {
    "lstm": {"dtype": "float64", "model": SMALL, "training": {"reset_probability": 0.1}},
    "float32": {"model": SMALL | {"dropout": 0.0}, "training": {}},
    "documents": {
        "dtype": "float64",
        "model": SMALL,
        "data": {"reset_at_documents": True},
        "text": {"document_separator": ";"},
        "training": {"max_updates": 20},
    },
    "pieces": {"dtype": "float64", "model": SMALL, "training": {"accumulate": 3, "max_updates": 40}},
    "muon": {"dtype": "float64", "model": SMALL, "training": {"optimizer": "muon", "max_updates": 20}},
    "mixed": {
        "dtype": "float64",
        "model": {"layers": ["mingru", "transformer"], "hidden_size": 8, "embedding_size": 8, "num_heads": 2},
        "training": {"max_updates": 20},
    },
    "taught": {"dtype": "float64", "model": SMALL, "training": {"reset_probability": 0.1, "max_updates": 30}},
    "pairs": {
        "dtype": "float64",
        "model": {"kind": "seq2seq", "hidden_size": 8, "embedding_size": 6, "dropout": 0.2},
        "data": {"pairs": True},
        "training": {"bptt": 64, "max_updates": 40},
    },
}
"""What is trained by two processes and by one; each process has ``batch_size`` rows."""

SHARDED = {
    "dtype": "float64",
    "model": SMALL | {"tie_weights": True, "embedding_size": 10},
    "training": {"max_updates": 30},
}


def config_of(case: Mapping[str, Any], folder: Path, **training: Any) -> Config:
    """The settings of a case."""
    name = "pairs.tsv" if case.get("data", {}).get("pairs") else "text.txt"
    settings = {**QUIET, **case, "training": BASE | dict(case["training"]) | training, "seed": 5}
    settings["data"] = {"corpus": [str(folder / name)], **case.get("data", {})}
    return resolve({"device": "cpu", **settings})


def write_texts(folder: Path) -> None:
    """The corpora of the cases."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "pairs.tsv").write_text(PAIRS, encoding="utf-8")


def dataset_of(config: Config) -> Dataset:
    """Its tokens."""
    return prepare(config.data, config.text, config.tokenizer)


def options_of(name: str, config: Config) -> dict[str, Any]:
    """What else a trainer of a case takes: a teacher for one of them."""
    if name != "taught":
        return {}
    tokenizer = dataset_of(config).tokenizer
    settings = model_config({"kind": "gru", "hidden_size": 7, "embedding_size": 5})
    network = build_model(settings, tokenizer.size, seed=8, dtype=torch.float64, boundary_id=tokenizer.boundary_id)
    return {"teacher": Teacher([Bundle(network, tokenizer)], temperature=2.0)}


def results(config: Config, ranks: Ranks | None = None, **options: Any) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Train: the trainer, and weights, losses and the last estimate."""
    trainer = Trainer(config, dataset_of(config), ranks=ranks, **options)
    losses, norms = [], []
    for record in trainer.records():
        if record.kind == "update":
            losses.append(record.values["nats"])
            norms.append(record.values["grad_norm"])
    estimate = trainer.last_evaluation or {}
    found = {name: tensor.detach().clone() for name, tensor in trainer.bundle.network.named_parameters()}
    found |= {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64),
        "estimate": torch.tensor([estimate["nats_total"], estimate["tokens"]], dtype=torch.float64),
    }
    return trainer, found


class StopAt(Callback):
    """Stops this process, and so all, at an update; counts the records of each kind."""

    def __init__(self, update: int | None = None) -> None:
        self.update, self.is_due = update, False
        self.kinds: list[str] = []

    def __call__(self) -> bool:
        return self.is_due

    def on_record(self, record: Record) -> None:
        self.kinds.append(record.kind)
        self.is_due = record.kind == "update" and record.values["update"] == self.update


def equalities(folder: Path, ranks: Ranks) -> None:
    """Every case, and a divided model."""
    for name, case in CASES.items():
        config = config_of(case, folder)
        _, found = results(config, ranks, **options_of(name, config))
        save_file(found, folder / f"{name}-{ranks.rank}.safetensors")
    for name, training in (("sharded", {}), ("sharded-pieces", {"accumulate": 2, "recompute_tokens": 5})):
        _, found = results(config_of(SHARDED, folder, shard=True, **training), ranks)
        if ranks.rank == 0:
            save_file(found, folder / f"{name}.safetensors")


def on_devices(folder: Path) -> None:
    """A case on a CUDA device for each process."""
    with join() as ranks:
        _, found = results(config_of(CASES["float32"] | {"device": "cuda"}, folder), ranks)
    cpu = {name: tensor.cpu() for name, tensor in found.items()}
    save_file(cpu, folder / f"cuda-{os.environ['RANK']}.safetensors")


def runs(folder: Path) -> None:
    """Whole runs with folders: undisturbed, stopped by the second process and resumed twice; divided, the same."""
    rank = int(os.environ["RANK"])
    for name, training in (("whole", {}), ("divided", {"shard": True})):
        settings: dict[str, Any] = {
            **QUIET,
            **SHARDED,
            "device": "cpu",
            "training": BASE | {"max_updates": 24, **training},
            "seed": 5,
        }
        settings["evaluation"] = {"every_updates": 7, "num_streams": 3}
        corpus = folder / "text.txt"
        elman.train(corpus, out=folder / name, **settings)
        stop = StopAt(5 if rank else None)
        elman.train(corpus, out=folder / f"{name}-stopped", callbacks=[stop], should_stop=stop, **settings)
        stop = StopAt(13 if rank else None)
        resume(folder / f"{name}-stopped", callbacks=[stop], should_stop=stop)
        if name == "whole" and rank == 0:
            shutil.copytree(folder / "whole-stopped", folder / "whole-at-13")
        resume(folder / f"{name}-stopped")


def endless(folder: Path, *words: str) -> None:
    """Train until somebody ends it, a divided model where that is asked for; say when it has begun, and the end."""
    rank = int(os.environ["RANK"])

    class Begun(Callback):
        def on_record(self, record: Record) -> None:
            if record.kind == "update" and record.values["update"] == 3:
                (folder / f"begun-{rank}").write_text(str(os.getpid()))
            time.sleep(0.01)

    config = config_of(CASES["float32"], folder, max_updates=10**6, shard="divided" in words)
    try:
        with join() as ranks:
            for _ in Trainer(config, dataset_of(config), callbacks=[Begun()], ranks=ranks).records():
                pass
    except ElmanError as error:
        told = {"error": type(error).__name__, "text": str(error)}
        (folder / f"end-{rank}.json").write_text(json.dumps(told))
        sys.stdout.flush()
        os._exit(1)  # threads of the group may wait for the lost process yet


def main() -> None:
    """Do what is asked for."""
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "equalities":
        with join() as ranks:
            equalities(folder, ranks)
    else:
        {"runs": runs, "endless": endless, "devices": on_devices}[what](folder, *sys.argv[3:])


if __name__ == "__main__":
    main()
