"""The gradient in pieces of rows and of time, in half precision and compiled: it is one gradient all the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elman.data.prepare import Dataset, prepare
from elman.data.streams import Segment, share_of
from elman.errors import ConfigError
from elman.models.kinds import kind_names
from elman.models.noise import Noise
from elman.settings import Config, resolve
from elman.training import gradients
from elman.training.gradients import LossScale
from elman.training.loop import Callback, Record, Trainer

MODEL = {"hidden_size": 10, "embedding_size": 6, "num_layers": 2, "dropout": 0.3}
TRAINING = {"batch_size": 5, "bptt": 13, "max_updates": 12, "warmup_updates": 2, "learning_rate": 0.02}
QUIET = {
    "sampling": {"every_updates": 1000, "max_new_tokens": 2},
    "evaluation": {"every_updates": 1000, "num_streams": 3},
}
COUNTED = ("ngram",)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("gradients") / "tiny.txt"
    path.write_text(tiny_text, encoding="utf-8", newline="")
    return path


def config_of(corpus: Path, *, model: Mapping[str, Any] = MODEL, dtype: str = "float64", **training: Any) -> Config:
    settings = {"data": {"corpus": [str(corpus)]}, "model": model, "training": TRAINING | training, "dtype": dtype}
    return resolve({**QUIET, **settings, "seed": 3, "device": "cpu"})


def dataset_of(config: Config) -> Dataset:
    return prepare(config.data, config.text, config.tokenizer)


class Sees(Callback):
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_record(self, record: Record) -> None:
        self.records.append(record)

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.kind == kind]


def trained(config: Config, *callbacks: Callback) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses."""
    trainer = Trainer(config, dataset_of(config), callbacks=callbacks)
    losses = [record.values["nats"] for record in trainer.records() if record.kind == "update"]
    return dict(trainer.network.named_parameters()), losses


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return max(float((tensor - expected[name]).detach().abs().max()) for name, tensor in found.items())


class Weighs(Callback):
    """Adds the mean square of the features to the loss."""

    def loss(self, features_BTF: Tensor, segment: Segment) -> Tensor:
        assert features_BTF.shape[:2] == segment.tokens_BT.shape
        return features_BTF.square().mean()


@pytest.mark.parametrize("callbacks", [(), (Weighs(),)], ids=["plain", "with a term"])
@pytest.mark.parametrize(
    "how",
    [{"accumulate": 2}, {"accumulate": 5}, {"recompute_tokens": 4}, {"accumulate": 2, "recompute_tokens": 1}],
    ids=str,
)
def test_pieces_of_rows_and_of_time_give_one_gradient(
    corpus: Path, how: dict[str, int], callbacks: tuple[Callback, ...]
):
    expected, losses = trained(config_of(corpus), *callbacks)
    found, same = trained(config_of(corpus, **how), *callbacks)
    assert losses == pytest.approx(same, abs=1e-10)
    assert losses[0] != losses[-1]
    assert distance(found, expected) < 1e-10


def test_recomputing_keeps_less(corpus: Path) -> None:
    """Tensors saved for the backward pass grow with the pieces and not with the segment."""

    def saved(**how: int) -> int:
        config = config_of(corpus, bptt=64, max_updates=1, **how)
        trainer = Trainer(config, dataset_of(config))
        kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            segment = trainer.streams.segment(0)
            noise = Noise(1, 0, len(segment.tokens_BT))
            trainer._gradients._forward(segment, segment.num_targets, trainer.state, noise)
        return kept

    assert saved(recompute_tokens=8) < saved() / 4


@pytest.mark.parametrize("kind", [name for name in kind_names() if name not in (*COUNTED, "seq2seq")])
def test_half_precision_changes_little_and_the_state_keeps_its_bits(corpus: Path, kind: str) -> None:
    sizes = {"hidden_size": 16, "embedding_size": 16}
    model = {"kind": kind, **sizes} if kind != "stack" else {"layers": ["mingru", "lstm"], **sizes}
    same = {"max_updates": 2, "recompute_tokens": 5}
    config = config_of(corpus, model=model, dtype="float32", precision="bfloat16", **same)
    half = Trainer(config, dataset_of(config))
    losses = [record.values["nats"] for record in half.records() if record.kind == "update"]
    _, expected = trained(config_of(corpus, model=model, dtype="float32", **same))
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses != expected
    initial = half.network.initial_state(1).tensors
    assert {n: t.dtype for n, t in half.state.tensors.items()} == {n: t.dtype for n, t in initial.items()}
    assert {p.dtype for p in half.network.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("has_units", "dtype", "meant"),
    [(True, "float32", "bfloat16"), (False, "float32", None), (True, "float64", None)],
)
def test_auto_is_bfloat16_where_there_is_hardware_for_it(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, has_units: bool, dtype: str, meant: str | None
) -> None:
    monkeypatch.setattr(gradients, "has_bfloat16_units", lambda device: has_units)
    found, losses = trained(config_of(corpus, dtype=dtype, precision="auto"))
    expected, same = trained(config_of(corpus, dtype=dtype, precision=meant))
    assert losses == same
    assert distance(found, expected) == 0


def test_float16_scales_its_loss_and_an_overflow_halves_the_scale_and_skips_nothing(corpus: Path) -> None:
    config = config_of(corpus, dtype="float32", precision="float16", max_updates=6, model=MODEL | {"dropout": 0.0})
    trainer = Trainer(config, dataset_of(config))
    scale = trainer._gradients.scale
    assert scale is not None
    scale.factor = 2.0**40  # the gradient cannot be finite
    records = list(trainer.records())
    losses = [record.values["nats"] for record in records if record.kind == "update"]
    _, expected = trained(config_of(corpus, dtype="float32", max_updates=6, model=MODEL | {"dropout": 0.0}))
    assert losses == pytest.approx(expected, rel=0.02)
    assert "skipped" not in [record.kind for record in records]
    assert 1.0 < scale.factor < 2.0**40
    assert trainer.checkpoint().trainer["loss_scale"]["factor"] == scale.factor


def test_the_scale_doubles_after_2000_good_updates_and_is_never_below_one() -> None:
    scale = LossScale()
    for _ in range(2000):
        scale.count()
    assert scale.factor == 2.0**17
    assert all(scale.halve() for _ in range(17))
    assert scale.factor == 1.0
    assert not scale.halve()
    again = LossScale()
    again.restore(scale.to_dict())
    assert again.factor == 1.0


def test_what_cannot_be_compiled_goes_on_without_and_says_so(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Any, **options: Any) -> Any:
        def compiled(*arguments: Any) -> Any:
            raise RuntimeError("no compiler\n  here\nand more")

        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    sees = Sees()
    found, losses = trained(config_of(corpus, compile=True), sees)
    expected, same = trained(config_of(corpus))
    assert losses == same
    assert distance(found, expected) == 0
    told = [record.values["text"] for record in sees.of("notice") if "training.compile" in record.values["text"]]
    why = "this model is not compiled here (RuntimeError: no compiler here); the training goes on without"
    assert told == [f"training.compile: {why}"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler uses what PyTorch warns of
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile wants a C++ compiler")
@pytest.mark.parametrize(
    "model",
    [
        {"kind": "window", "window_size": 4, "hidden_size": 8, "embedding_size": 6},  # no loop: compiled soon
        {"kind": "elman", "hidden_size": 8, "embedding_size": 6},
    ],
    ids=lambda model: model["kind"],
)
def test_compiled_or_not_it_is_the_same(corpus: Path, model: dict[str, Any]) -> None:
    sees = Sees()
    found, losses = trained(config_of(corpus, model=model, bptt=3, compile=True), sees)
    expected, same = trained(config_of(corpus, model=model, bptt=3))
    assert not [record for record in sees.of("notice") if "training.compile" in record.values["text"]]
    assert losses == pytest.approx(same, abs=1e-9)
    assert distance(found, expected) < 1e-9


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"accumulate": 6}, "accumulate 6 is more than batch_size 5"),
        ({"recompute_tokens": 13}, "recompute_tokens 13 cuts no segment of training.bptt 13"),
        ({"precision": "bfloat16"}, "'bfloat16' is for dtype float32, and dtype is float64"),
        ({"shard": True, "optimizer": "muon"}, "'muon' needs whole parameters, and shard divides them"),
        ({"shard": True, "averaging": "exponential"}, "'exponential' needs whole weights"),
        ({"shard": True, "compile": True}, "compile True needs whole parameters, and shard divides them"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(corpus: Path, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config_of(corpus, **settings)


@pytest.fixture
def segment() -> Segment:
    tokens = torch.arange(24).view(4, 6)
    weight = torch.ones(4, 6)
    weight[2:, 5] = 0
    return Segment(tokens, tokens + 1, weight, tokens % 5 == 0, 22, True)


@pytest.mark.parametrize("num_parts", range(1, 7))
def test_the_parts_of_a_segment_hold_each_row_once(segment: Segment, num_parts: int) -> None:
    parts = [segment.part(number, num_parts) for number in range(num_parts)]
    assert sum(part.num_targets for part in parts) == segment.num_targets
    assert all(len(part.tokens_BT) for part in parts)
    rows = [part for part in parts if part.num_targets]
    for name in ("tokens_BT", "targets_BT", "weight_BT", "reset_BT"):
        assert torch.equal(torch.cat([getattr(part, name) for part in rows]), getattr(segment, name))
    assert all(part.starts_anew for part in parts)


def test_shares_are_as_equal_as_can_be_and_in_order() -> None:
    for total in range(20):
        for num_parts in range(1, 9):
            shares = [range(total)[share_of(total, number, num_parts)] for number in range(num_parts)]
            assert [thing for share in shares for thing in share] == list(range(total))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_masks_of_pieces_are_those_of_the_whole() -> None:
    def masks() -> Iterator[Tensor]:
        yield Noise(1, 2, 6).dropout(torch.ones(6, 9, 4), 0.5, "here")
        masked = {}
        pieces = []
        for first in (0, 4):
            rows = Noise(1, 2, 6).of_rows(first)
            kept: dict[str, Tensor] = {}
            times = [
                Noise(1, 2, 6, rows.first_row, 9, start, kept).dropout(torch.ones(4 - first // 2, 3, 4), 0.5, "here")
                for start in (0, 3, 6)
            ]
            pieces.append(torch.cat(times, dim=1))
            masked[first] = kept
        assert all(len(kept) == 1 for kept in masked.values())
        yield torch.cat(pieces)

    whole, in_pieces = masks()
    assert torch.equal(whole, in_pieces)
    assert 0 < float((whole == 0).float().mean()) < 1
