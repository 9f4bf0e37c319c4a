"""A log read back: every figure where it belongs, cut or foreign lines without harm; a list of runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elman
from elman.errors import UserError
from elman.training.folder import Run
from elman.training.history import History, list_runs, spread_out, thinned


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Run:
    folder = tmp_path_factory.mktemp("history")
    (folder / "tiny.txt").write_text(tiny_text, encoding="utf-8")
    return elman.train(
        folder / "tiny.txt",
        out=folder / "runs" / "one",
        seed=3,
        model={"hidden_size": 8, "embedding_size": 8},
        training={"batch_size": 2, "bptt": 8, "max_updates": 6, "num_threads": 1},
        evaluation={"every_updates": 3},
        sampling={"max_new_tokens": 5, "temperatures": (0.5,)},
    )


def test_a_history_holds_what_the_log_holds(run):
    records = list(run.records())
    updates = [record for record in records if record["kind"] == "update"]
    history = History.of(run)
    for name in ("update", "tokens", "nats", "grad_norm", "learning_rate"):
        assert getattr(history.curve, name).tolist() == [record[name] for record in updates]
    for name in ("elapsed_seconds", "tokens_per_second"):
        assert getattr(history.curve, name).tolist() == [record["measured"][name] for record in updates]
    assert (history.updates, history.tokens) == (6, updates[-1]["tokens"])
    assert history.seconds == updates[-1]["measured"]["elapsed_seconds"]
    assert [one["update"] for one in history.evaluations] == [3, 6]
    assert history.best == min(history.evaluations, key=lambda one: one["nats_per_token"])
    assert [one["update"] for one in history.samples] == [3, 6]
    assert history.ending == "finished"
    assert history.end["update"] == 6


def test_lines_of_the_log_that_are_no_record_are_left_out(run, tmp_path):
    lines = run.metrics.read_text("utf-8").splitlines()
    odd = ["null", "5", "[]", "{}", "[" * 100_000, '{"kind": "upd']
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], *odd, *lines[1:]]) + "\n", "utf-8")
    assert list(Run(tmp_path).records()) == list(run.records())


def test_what_a_line_lacks_is_unknown():
    records = [
        {"kind": "notice", "text": "a"},
        {"kind": "update", "update": 1},
        {"kind": "update", "update": 2, "nats": None, "measured": {}},
        {"kind": "evaluation", "split": "valid", "update": 2, "nats_per_token": None},
        {"no": "kind"},
        {"kind": "stopped", "update": 2},
    ]
    history = History.read(records)
    assert history.curve.update.tolist() == [1, 2]
    assert np.isnan(history.curve.nats).all()
    assert history.best is None
    assert (history.ending, history.messages) == ("stopped", ("a",))
    assert History.read([*records, {"kind": "update", "update": 3}]).ending == "unfinished"
    empty = History.read([])
    assert (len(empty.curve), empty.seconds, empty.tokens, empty.ending) == (0, None, 0, "unfinished")


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=200), st.integers(1, 50))
def test_thinned_columns_keep_their_sum_and_stay_within_the_limit(values, limit):
    column = np.array(values)
    (thin,) = thinned([column], limit)
    assert len(thin) <= limit
    size = math.ceil(len(values) / limit)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    assert thin == pytest.approx([sum(group) / len(group) for group in groups])


@given(st.sets(st.integers(0, 10**6), max_size=200), st.integers(2, 12))
def test_moments_that_are_spread_out_keep_the_first_and_the_last(moments, limit):
    items = sorted(moments)
    chosen = spread_out(items, limit)
    assert len(chosen) == min(limit, len(items))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= moments
    assert chosen[:1] == items[:1]
    assert chosen[-1:] == items[-1:]
    gaps = np.diff([items.index(one) for one in chosen])
    assert len(gaps) < 2 or gaps[0] <= gaps[-1]  # dense early, sparse late


def test_runs_are_listed_at_any_depth_and_damaged_ones_named(run, tmp_path):
    root = run.path.parent
    found, faults = list_runs(root)
    assert not faults
    (one,) = found
    assert (one.name, one.kind, one.seed, one.corpus, one.ending) == ("one", "lstm", 3, "tiny.txt", "finished")
    assert one.nats_per_token == pytest.approx(History.of(run).best["nats_per_token"])
    assert one.parameters == json.loads((run.path / "environment.json").read_text())["parameters"]
    broken = tmp_path / "deep" / "broken"
    broken.mkdir(parents=True)
    (broken / "run.toml").write_text("no toml", encoding="utf-8")
    found, faults = list_runs(tmp_path)
    assert found == []
    assert len(faults) == 1
    assert str(broken) in faults[0]
    with pytest.raises(UserError, match="no folder"):
        list_runs(Path("nowhere"))
