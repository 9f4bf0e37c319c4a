"""The scorecard: paths counted in known graphs, costs that grow as they must, and what it prints and draws."""

from __future__ import annotations

import json

import pytest
import torch

from elman.comparison.scorecard import (
    Growth,
    gradient_path,
    measure,
    picture,
    scorecard_page,
    table,
    write_scorecard,
)
from elman.errors import UserError
from elman.models.kinds import build_model, model_config


def small(kind: str, **settings):
    config = model_config({"kind": kind, "hidden_size": 8, "embedding_size": 8, **settings})
    return build_model(config, 66, seed=1, dtype=torch.float64)


def steps(kind: str, **settings) -> list[int]:
    network = small(kind, **settings)
    return [gradient_path(network, distance) for distance in (6, 7, 8, 14)]  # further than a short convolution reaches


@pytest.mark.parametrize(
    ("kind", "per_token"),
    [
        ("lstm", 2),  # c' = f c + i g: a product and a sum
        ("mingru", 2),  # h' = (1 - z) h + z g
        ("elman", None),
        ("gru", None),
        ("mamba", None),
    ],
)
def test_the_path_through_a_state_of_fixed_size_grows_with_each_token(kind, per_token):
    six, seven, eight, fourteen = steps(kind)
    assert seven - six == eight - seven > 0
    assert fourteen - eight == 6 * (eight - seven)
    if per_token is not None:
        assert eight - seven == per_token


def test_the_path_through_attention_does_not_grow():
    assert len(set(steps("transformer", num_heads=2))) == 1
    assert steps("transformer", num_heads=2, num_layers=3) == steps(
        "transformer", num_heads=2
    )  # the last layer is nearest


def test_growth_of_a_power_of_one_size_and_of_nothing():
    assert Growth((10, 100, 1000), (3.0, 300.0, 30000.0)).exponent == pytest.approx(2.0)
    assert Growth((10,), (3.0,)).exponent is None
    assert Growth((10, 100), (0.0, 0.0)).exponent is None


@pytest.fixture(scope="module")
def measured():
    lines: list[str] = []
    found = measure(
        ("lstm", "transformer"),
        num_parameters=20_000,
        lengths=(4, 32),
        positions=(2, 64, 128),
        distances=(2, 8),
        seconds=0.01,
        device="cpu",
        tell=lines.append,
    )
    return found, lines


def test_every_way_is_measured_with_the_same_number_of_parameters(measured):
    found, lines = measured
    assert [card.way for card in found.cards] == ["lstm", "transformer, cache", "transformer, reading again"]
    figures = [
        *(f"training in rows of {length}" for length in (4, 32)),
        "reading at once, and token by token, a row of 256",
        *(f"one more token, at {position}" for position in (2, 64, 128)),
        *(f"the gradient's path over {distance}" for distance in (2, 8)),
    ]
    without = [f"one more token without a cache, at {position}" for position in (2, 64, 128)]
    assert lines == [
        *(f"measuring lstm (1 of 2): {figure}" for figure in figures),
        *(f"measuring transformer (2 of 2): {figure}" for figure in (*figures, *without)),
    ]
    for card in found.cards:
        assert card.parameters == pytest.approx(20_000, rel=0.05)
        assert card.training.sizes == (4, 32)
        assert min(*card.training.costs, *card.generation.costs, card.parallelism) > 0
        assert card.share_of_peak is None if "transformer" in card.way else card.share_of_peak > 0


def test_state_and_paths_grow_as_they_must(measured):
    lstm, cached, again = measured[0].cards
    assert lstm.state.exponent == pytest.approx(0.0, abs=1e-9)
    assert cached.state.costs[2] / cached.state.costs[1] == pytest.approx(127 / 63)  # what came before the token
    assert again.state is None
    assert lstm.gradient_path.exponent > 0.5
    assert cached.gradient_path.exponent == pytest.approx(0.0, abs=1e-9)


def test_a_window_bounds_what_is_carried():
    sizes = {"num_parameters": 20_000, "lengths": (4,), "positions": (8, 64), "distances": (2,)}
    found = measure(("transformer",), window=8, seconds=0.001, device="cpu", **sizes)
    assert len(set(found.cards[0].state.costs)) == 1


def test_it_is_one_object_one_table_one_picture(measured, tmp_path):
    found, _ = measured
    whole = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert whole["cards"][0]["state"]["exponent"] == pytest.approx(0.0, abs=1e-9)
    rows = table(found)
    assert [row[0] for row in rows] == [card.way for card in found.cards]
    assert rows[2][6] == "–"
    page, image = write_scorecard(found, tmp_path / "out")
    html = page.read_text(encoding="utf-8")
    assert html == scorecard_page(found).html()
    assert all(card.way in html for card in found.cards)
    assert image.read_text(encoding="utf-8").startswith("<?xml")
    assert len(picture(found).axes) == 4


def test_whoever_stops_before_the_end_keeps_what_is_measured(tmp_path):
    kept = []

    def tell(line):
        if line.startswith("measuring gru"):
            raise KeyboardInterrupt

    sizes = {"num_parameters": 20_000, "lengths": (4,), "positions": (2,), "distances": (2,)}
    with pytest.raises(KeyboardInterrupt):
        measure(("lstm", "gru"), seconds=0.001, device="cpu", tell=tell, keep=kept.append, **sizes)
    (found,) = kept
    assert ([card.way for card in found.cards], found.is_complete) == (["lstm"], False)
    page, _ = write_scorecard(found, tmp_path)
    assert "It was stopped" in page.read_text(encoding="utf-8")


def test_a_size_that_no_width_has_is_refused_before_anything_is_measured():
    with pytest.raises(UserError, match=r"the nearest, width \d+, has [\d,]+") as caught:
        measure(("lstm", "mamba"), num_parameters=5_000, device="cpu", tell=pytest.fail)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(UserError, match="start at 1"):
        measure(("lstm",), lengths=(0, 4))
    with pytest.raises(UserError, match="did you mean 'lstm'"):
        measure(("lsmt",), lengths=(4,), positions=(2,), device="cpu", seconds=0.001)
    with pytest.raises(UserError, match="has no hidden_size"):
        measure(("ngram",), lengths=(4,), positions=(2,), device="cpu", seconds=0.001)
