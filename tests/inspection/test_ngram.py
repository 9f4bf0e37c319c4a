"""The table of sparsity, against sets of tuples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from elman.errors import UserError
from elman.inspection.ngram import inspect_ngram, orders_of
from elman.models.arpa import write_arpa
from elman.models.file import Bundle, load_model
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer
from elman.training.run import train

ORDER = 4


@pytest.mark.parametrize("smoothing", ["kneser_ney", "add_k"])
def test_the_table_counts_what_sets_count(smoothing):
    rng = np.random.default_rng(1)
    text, other = (np.concatenate([[0], rng.integers(1, 5, 80)]) for _ in range(2))
    config = model_config({"kind": "ngram", "order": ORDER, "smoothing": smoothing})
    network = build_model(config, 6, seed=1, dtype=torch.float32)
    network.count(text)
    table = orders_of(Bundle(network, CharTokenizer("abcd")), other)

    def grams(tokens: np.ndarray, size: int) -> list[tuple[int, ...]]:
        ends = range(max(2, size), len(tokens) + 1)
        return [tuple(tokens[end - size : end].tolist()) for end in ends]

    seen = {size: set(grams(text, size)) for size in range(ORDER + 1)}
    known = {size: {gram[:-1] for gram in grams(text, size + 1)} for size in range(ORDER)}
    for of_order in table:
        size = of_order.order
        theirs = grams(other, size)
        assert of_order.counted == len(seen[size])
        assert of_order.unseen == pytest.approx(np.mean([gram not in seen[size] for gram in theirs]))
        assert of_order.context_unseen == pytest.approx(np.mean([gram[:-1] not in known[size - 1] for gram in theirs]))
        depths = [next(d for d in range(size + 1) if d == size or gram[d:] in seen[size - d]) for gram in theirs]
        assert of_order.backoff_depth == pytest.approx(np.mean(depths))
    assert 0 < table[-1].context_unseen < table[-1].unseen < 1


def test_the_held_out_part_of_a_run_or_another_text(tmp_path, tiny_corpus):
    run = train(tiny_corpus, out=tmp_path / "run", model={"kind": "ngram", "order": 3}, sampling={"max_new_tokens": 1})
    table = inspect_ngram(run.path)
    assert (table.split, len(table.orders)) == ("test", 3)
    assert table.orders[2].unseen < 0.1
    other = tmp_path / "other.txt"
    other.write_text("zzz the cat zzz", encoding="utf-8")
    write_arpa(load_model(run.path), tmp_path / "m.arpa")
    tables = [inspect_ngram(where, other) for where in (run.path, tmp_path / "m.arpa")]
    assert [order.unseen for order in tables[0].orders[1:]] == [order.unseen for order in tables[1].orders[1:]]
    assert (tables[0].split, tables[0].tokens) == ("text", 15)
    assert tables[0].orders[2].unseen > 0.3


def test_another_kind_is_refused():
    lstm = build_model(model_config({"kind": "lstm"}), 6, seed=None, dtype=torch.float32)
    with pytest.raises(UserError, match="counts no n-grams"):
        orders_of(Bundle(lstm, CharTokenizer("abcd")), np.zeros(3, np.int64))


def test_a_model_alone_has_no_held_out_part(tmp_path):
    network = build_model(model_config({"kind": "ngram"}), 6, seed=1, dtype=torch.float32)
    write_arpa(Bundle(network, CharTokenizer("abcd")), Path(tmp_path / "m.arpa"))
    with pytest.raises(UserError, match="without its corpus"):
        inspect_ngram(tmp_path / "m.arpa")
