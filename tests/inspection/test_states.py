"""Maps, dimensions and matches on states whose form is known."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from elman.errors import UserError
from elman.inspection.states import participation_ratio, principal_axes, states_along
from elman.inspection.states_page import states_page
from elman.inspection.watching import watch


@pytest.fixture(scope="module")
def model(planted):
    return planted.bundle()


@pytest.fixture(scope="module")
def tokens(model, planted):
    return planted.tokens(model)


@pytest.fixture(scope="module")
def found(model, tokens):
    return states_along(model, tokens)


def test_the_dimension_of_known_clouds():
    rng = np.random.default_rng(1)
    line = np.outer(rng.standard_normal(500), rng.standard_normal(20))
    assert participation_ratio(line) == pytest.approx(1)
    q, _ = np.linalg.qr(rng.standard_normal((500, 7)) - 0.0)
    centred = q - q.mean(0)
    assert participation_ratio(centred) == pytest.approx(7, rel=0.02)
    for wide in (centred, centred[:5]):
        variances = np.linalg.svd(wide - wide.mean(0), compute_uv=False) ** 2
        assert participation_ratio(wide) == pytest.approx(variances.sum() ** 2 / (variances**2).sum())
    assert participation_ratio(np.ones((5, 3))) == 0


def test_the_axes_are_those_of_the_covariance():
    rng = np.random.default_rng(2)
    points = rng.standard_normal((80, 6)) * [5, 3, 1, 1, 0.5, 0.1]
    points -= points.mean(0)
    values, vectors = np.linalg.eigh(points.T @ points)
    flat = principal_axes(points)
    for axis in (0, 1):
        expected = points @ vectors[:, -1 - axis]
        assert np.abs(flat[:, axis]) == pytest.approx(np.abs(expected))
        assert flat[np.abs(flat[:, axis]).argmax(), axis] > 0
    assert (flat**2).sum(0) == pytest.approx(values[::-1][:2])
    assert principal_axes(np.zeros((4, 1))).tolist() == [[0, 0]] * 4


def test_a_span_inside_quotes_finds_others_there(model, tokens, planted):
    start = planted.text().index("“") + 1
    span = planted.text()[start - 1 : start + 3]
    found = states_along(model, tokens, part="0.h", span=span)
    after = planted.text().index(span, found.warm_up - 1)  # the first beyond the beginning
    assert (found.span.at, found.span.start) == (span, after + 1)  # the boundary is token 0
    assert planted.QUOTES in found.span_units
    assert found.alike_spans
    for place in found.alike_spans:
        assert place.end <= found.span.start or place.start >= found.span.end


def test_spans_are_in_the_order_of_what_is_shown(model, tokens, planted):
    start = planted.text().index("“") + 1
    found = states_along(model, tokens, part="0.h", span=planted.text()[start - 1 : start + 5])
    watched = watch(model.network, tokens[: found.tokens + 1], ["0.h"])
    states = np.concatenate([piece.values["0.h"].numpy() for piece in watched])
    is_on = states > states.mean(0) + 0.5 * states.std(0)
    likeness = []
    for place in found.alike_spans:
        shares = is_on[place.start : place.end][:, list(found.span_units)].mean(1)
        length = place.end - place.start
        assert min(shares) >= 0.6
        likeness.append(shares.mean() * min(length, 6) / max(length, 6))
    assert len({place.end - place.start for place in found.alike_spans}) > 1
    assert [place.similarity for place in found.alike_spans] == pytest.approx(likeness)
    assert likeness == sorted(likeness, reverse=True)


def test_the_way_from_the_first_state_is_left_out_of_map_and_dimension(model, tokens, planted):
    common = states_along(model, planted.tokens(model, 90), span=planted.text()[9:12])
    assert common.span.start >= 512
    long = states_along(model, planted.tokens(model, 90), span=planted.text()[9:69])
    assert long.tokens > 4 * 512
    assert (long.warm_up, long.spread) == (512, 1000)
    assert long.span.start < 512 - 60
    side_by_side = range(long.span.start, long.span.start + 60)
    early = [moment.position for moment in long.moments if moment.position < 512]
    assert early == list(side_by_side)
    short = states_along(model, tokens[:1101])
    assert (short.given, short.tokens, short.warm_up, short.spread) == (1100, 1088, 272, 816)
    watched = watch(model.network, tokens[:1089], ["0.h"])
    states = np.concatenate([piece.values["0.h"].numpy() for piece in watched])
    assert short.dimensions[0].effective == pytest.approx(participation_ratio(states[272:]), rel=1e-5)
    html = states_page(short).html()
    assert "1,088 of 1,100 tokens, whole blocks of 64" in html
    assert "816 tokens, evenly spaced after the first 272" in html


def test_similar_moments_are_those_of_the_highest_cosine(found, model, tokens, planted):
    assert len(found.alike_moments) == 8
    cosines = [place.similarity for place in found.alike_moments]
    assert cosines == sorted(cosines, reverse=True)
    assert max(cosines) <= 1 + 1e-5
    matrix = np.array(found.side_by_side)
    assert matrix == pytest.approx(matrix.T)
    assert np.diag(matrix) == pytest.approx(np.ones(len(matrix)), abs=1e-3)
    assert found.dimensions[0].units == 12
    assert 1 < found.dimensions[0].effective < 12
    assert sum(found.dimensions[0].explained) <= 1 + 1e-9


def test_other_maps_where_their_library_is_installed(model, tokens, monkeypatch):
    class TSNE:
        def __init__(self, random_state: int) -> None:
            self.random_state = random_state

        def fit_transform(self, points: np.ndarray) -> np.ndarray:
            return np.full((len(points), 2), float(self.random_state))

    manifold = types.ModuleType("sklearn.manifold")
    manifold.TSNE = TSNE
    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.manifold", manifold)
    found = states_along(model, tokens[:2000], method="tsne", seed=4)
    assert {(moment.x, moment.y) for moment in found.moments} == {(4.0, 4.0)}
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(match="umap-learn"):
        states_along(model, tokens[:2000], method="umap")


@pytest.mark.slow
def test_the_map_of_t_sne_keeps_neighbours_together(model, tokens):
    manifold = pytest.importorskip("sklearn.manifold", reason="scikit-learn, which draws this map, is not installed")
    found = states_along(model, tokens[:1100], part="0.h", method="tsne", seed=3)
    watched = list(watch(model.network, tokens[:1100], ["0.h"]))
    states = np.concatenate([piece.values["0.h"].numpy() for piece in watched])
    places = np.array([[moment.x, moment.y] for moment in found.moments])
    states = states[[moment.position for moment in found.moments]]
    mixed = np.random.default_rng(1).permutation(places)
    assert manifold.trustworthiness(states, places, n_neighbors=10) > 0.95
    assert manifold.trustworthiness(states, mixed, n_neighbors=10) < 0.7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"part": "0.c"}, "carries no '0.c'"),
        ({"span": "”“”“"}, "does not occur"),
        ({"span": "aZ"}, "never saw: 'Z'"),
        ({"span": ""}, "is empty"),
    ],
)
def test_bad_input_gets_one_line(model, tokens, arguments, words):
    with pytest.raises(UserError, match=words):
        states_along(model, tokens, **arguments)


def test_a_text_too_short_is_refused(model, tokens):
    with pytest.raises(UserError, match="takes 1,024"):
        states_along(model, tokens[:500])


def test_json_and_page(found):
    assert found.to_dict()["part"] == "all"
    html = states_page(found).html()
    assert html.count("<figure") == 2
    assert "Similar spans" in html
