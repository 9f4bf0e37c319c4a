"""Planted units are found and proved; units that only know are not taken for ones that act."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from elman.errors import UserError
from elman.inspection import units
from elman.inspection.recording import plan_for, record
from elman.inspection.units import find_units
from elman.inspection.units_page import units_page
from elman.inspection.watching import watch
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config


@pytest.fixture(scope="module")
def model(planted) -> Bundle:
    return planted.bundle()


@pytest.fixture(scope="module")
def found(model, planted):
    return find_units(model, planted.tokens(model), units=["0.h:1"])


def claim_of(found, label):
    return next(claim for claim in found.claims if claim.label == label)


def test_the_planted_units_are_found_and_pass_both_tests(found, planted):
    quotes, line = claim_of(found, "quotes"), claim_of(found, "line-position")
    assert (quotes.part, quotes.unit, quotes.sign) == ("0.h", planted.QUOTES, 1)
    assert (line.part, line.unit, line.sign) == ("0.h", planted.LINE, 1)
    assert quotes.score == quotes.chosen_score == 1.0
    assert line.score > 0.95
    for claim in (quotes, line):
        assert claim.untrained_score < claim.score_interval[0]
        assert claim.beats_untrained
        assert claim.effect_interval[0] <= claim.effect <= claim.effect_interval[1]
        assert claim.passes_intervention
        assert claim.holds
    # Held as inside quotes, the closing sign comes more often; held as outside, less.
    assert quotes.shift_true > 0.01 > 0 > quotes.shift_false
    assert found.claims[0].holds


def test_a_unit_that_knows_and_does_not_act_fails_the_intervention(planted):
    deaf = planted.bundle(listens=False)
    claim = claim_of(find_units(deaf, planted.tokens(deaf), labels=["quotes"]), "quotes")
    assert (claim.unit, claim.score) == (planted.QUOTES, 1.0)
    assert claim.beats_untrained
    assert claim.effect == 0.0
    assert not claim.passes_intervention
    assert not claim.holds


def test_an_untrained_model_makes_no_claim_that_holds(planted):
    shape = planted.bundle()
    fresh = build_model(shape.network.config, shape.network.vocab_size, seed=11, dtype=torch.float32)
    found = find_units(Bundle(fresh, shape.tokenizer), planted.tokens(shape), labels=["quotes", "line-position"])
    assert not any(claim.holds for claim in found.claims)


def test_passages_show_the_unit_where_it_is_high(found):
    claim = claim_of(found, "quotes")
    assert len(claim.passages) == 5
    for passage in claim.passages:
        assert passage.value > 0.9
        assert passage.before.rfind("“") > passage.before.rfind("”") or passage.at == "“"


def test_probes_beat_their_controls(found):
    for probe in found.probes:
        if probe.label in ("quotes", "line-position"):
            assert probe.score > max(probe.shuffled, probe.untrained)
            assert probe.score > 0.9


def test_the_profile_of_a_graded_unit_rises(found):
    values = [value for _, value in claim_of(found, "line-position").profile]
    assert all(np.diff(values) > 0)
    assert claim_of(found, "quotes").profile == ()


def test_dead_and_saturated_units_are_named(planted):
    model = planted.bundle()
    layer = model.network.layers[0]
    with torch.no_grad():
        layer.weight_ih[[7, 8]] = layer.weight_hh[[7, 8]] = 0
        layer.bias[7], layer.bias[8] = 0.3, 4
    (health,) = find_units(model, planted.tokens(model), labels=["quotes"], max_tokens=1100).health
    assert set(health.dead) == {7, 8}
    assert 8 in health.saturated
    assert 7 not in health.saturated


def test_own_labels_by_expression(model, planted):
    found = find_units(model, planted.tokens(model), labels=["inside=“[^”]*"], max_tokens=1100)
    (claim,) = found.claims
    assert (claim.unit, claim.score) == (planted.QUOTES, 1.0)
    assert claim.consequence == ""  # the whole prediction is looked at
    assert claim.effect > claim.random_interval[1]


def test_a_graded_label_that_is_mostly_at_its_highest_is_judged(model, planted, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "_UNTRAINED_SEEDS", (0,))
    tokens = planted.tokens(model)
    marks = np.where(np.arange(len(tokens) - 1) % 10 < 8, 5, 2)
    (tmp_path / "mostly.txt").write_text(" ".join(map(str, marks)), "utf-8")
    found = find_units(model, tokens, label_file=tmp_path / "mostly.txt", max_tokens=1100)
    assert found.claims
    assert all(math.isfinite(claim.shift_true) and math.isfinite(claim.nats_lost) for claim in found.claims)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_same_seed_gives_the_same_result_and_nothing_is_changed(model, planted):
    before = {name: tensor.clone() for name, tensor in model.network.tensors().items()}
    first, second = (find_units(model, planted.tokens(model), labels=["quotes"], max_tokens=1100) for _ in range(2))
    assert first == second
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.network.tensors().items())


def test_a_label_of_a_few_places_is_not_judged(model, planted, monkeypatch):
    monkeypatch.setattr(units, "_UNTRAINED_SEEDS", (0,))
    lines = planted.text(120).splitlines(keepends=True)
    for count, is_absent in ((4, True), (5, False)):
        kept = [
            line
            if index % 60 < 30 and index % 60 // 6 < count and index % 6 == 3
            else line.translate({8220: 97, 8221: 98})
            for index, line in enumerate(lines)
        ]
        text = "".join(kept)
        assert text.count("“") == 2 * count
        half = len(text[: len(text) // 128 * 64])
        assert text[:half].count("”") == text[half:].count("“") == count
        tokens = np.concatenate([[0], model.tokenizer.encode(text)])
        found = find_units(model, tokens, labels=[], max_tokens=len(text))
        assert ("quotes" in found.absent) == is_absent
        if is_absent:
            with pytest.raises(UserError, match="20 tokens or more, in 5 places or more"):
                find_units(model, tokens, labels=["quotes"])


def test_whole_blocks_are_read_and_the_rest_is_said(found, model, planted):
    assert found.given == found.tokens == len(planted.tokens(model)) - 1
    assert f"{found.tokens:,} tokens." in units_page(found).html()
    short = find_units(model, planted.tokens(model)[:1501], labels=["quotes"], max_tokens=1100)
    assert (short.given, short.tokens) == (1100, 1088)
    assert "1,088 of 1,100 tokens, whole blocks of 64." in units_page(short).html()


def test_a_unit_that_tells_by_low_values_is_shown_where_it_is_lowest(planted):
    model = planted.bundle()
    layer = model.network.layers[0]
    with torch.no_grad():  # the same network, with the sign of the unit turned round
        layer.weight_ih[planted.QUOTES] *= -1
        layer.bias[planted.QUOTES] *= -1
        model.network.head.weight[:, planted.QUOTES] *= -1
    found = find_units(model, planted.tokens(model), labels=["quotes"], units=["0.h:3", "0.h:1"])
    (claim,) = found.claims
    assert (claim.unit, claim.sign, claim.score) == (planted.QUOTES, -1, 1.0)
    assert all(passage.value < -0.9 for passage in claim.passages)
    by_unit = {one.unit: one for one in found.shown}
    assert all(one.is_asked for one in by_unit.values())
    assert all(passage.value > 0.9 for passage in by_unit[3].passages)
    html = units_page(found).html()
    assert html.count("Where it is lowest in all of the text: low values tell the label.") == 1
    assert html.count("Where it is highest in all of the text.") == 1


def test_a_value_is_rounded_by_the_scale_of_its_unit(found):
    one = next(one for one in found.shown if one.is_asked)
    assert [one.unit for one in found.shown if one.is_asked] == [1]
    for scale, value, rounded in ((1.0, -4e-7, 0.0), (297.0, 302.3456, 302.3), (2e-4, 1.23456e-4, 1.235e-4)):
        assert replace(one, scale=scale).rounded(value) == pytest.approx(rounded, rel=1e-9, abs=0)
        assert math.copysign(1, replace(one, scale=scale).rounded(value)) == 1


@pytest.mark.parametrize("kind", ["lstm", "mamba", "window", "transformer"])
def test_other_kinds_are_searched_too(kind, planted, monkeypatch):
    monkeypatch.setattr(units, "_UNTRAINED_SEEDS", (0,))
    model = planted.bundle()
    settings = {"hidden_size": 8, "num_layers": 1, "feedforward_size": 8, "num_heads": 2, "attention_window": 8}
    names = {"mamba": 3, "transformer": 5}.get(kind, 1)
    config = model_config({"kind": kind, **dict(list(settings.items())[:names])})
    network = build_model(config, model.tokenizer.size, seed=2, dtype=torch.float32)
    found = find_units(Bundle(network, model.tokenizer), planted.tokens(model)[:1100], labels=["quotes"])
    assert found.claims
    assert all(0 <= claim.score <= 1 for claim in found.claims)


@pytest.mark.parametrize(
    ("arguments", "length", "words"),
    [
        ({"units": ["0.h:12"]}, None, "0.h has the units 0 to 11"),
        ({"units": ["0.c:1"]}, None, "no '0.c'"),
        ({"units": ["7"]}, None, "PART:NUMBER"),
        ({"units": ["0.h:٣"]}, None, "0.h has the units 0 to 11"),
        ({"units": [f"0.h:{'9' * 5000}"]}, None, "0.h has the units 0 to 11"),
        ({"labels": ["quotes", "quotes"]}, None, "two labels have the name 'quotes'"),
        ({"labels": ["x=a", "x=b"]}, None, "two labels have the name 'x'"),
        ({"labels": ["digits"]}, None, "digits.*give another text or label"),
        ({"labels": ["brackets"]}, None, "brackets"),
        ({"labels": ["none=zzz"]}, None, "matches of zzz"),
        ({}, 900, "takes 1,024 and more"),
    ],
)
def test_bad_input_gets_one_line(model, arguments, length, words, planted):
    with pytest.raises(UserError, match=words) as caught:
        find_units(model, planted.tokens(model)[:length], **arguments)
    assert "\n" not in str(caught.value)


def test_labels_that_were_not_asked_for_are_left_out_where_they_are_absent(found):
    assert {"digits", "brackets", "comments"} <= set(found.absent)
    assert {claim.label for claim in found.claims} >= {"quotes", "line-position", "word-start"}


def test_memory_is_bounded_and_what_is_kept_is_what_was_read(model, planted):
    plan = plan_for(10**7, 1 << 13)
    assert plan.num_kept * (1 << 13) <= 1 << 25
    assert 0.4 < plan.middle_row / plan.num_kept < 0.6
    tokens = planted.tokens(model, 100)[:2049]
    whole = np.concatenate([piece.values["0.h"].numpy() for piece in watch(model.network, tokens, ["0.h"])])
    few = plan_for(2048, 1 << 15)
    assert few.num_kept == 1024
    recording = record(model.network, tokens, ["0.h"], few)
    assert recording.values["0.h"] == pytest.approx(whole[few.positions], abs=1e-6)
    assert recording.state.tensors["0.h"][0].numpy() == pytest.approx(whole[few.middle - 1], abs=1e-6)


def test_json_and_page(found):
    values = found.to_dict()
    assert [claim["holds"] for claim in values["claims"]] == [claim.holds for claim in found.claims]
    html = units_page(found).html()
    assert "quotes: unit 3 of 0.h, holds" in html
    assert "Unit 1 of 0.h" in html


@pytest.mark.skipif(
    importlib.util.find_spec("playwright") is None or shutil.which("chromium") is None,
    reason="needs playwright and chromium to open the page",
)
def test_a_browser_shows_the_page_without_a_network(found, tmp_path):
    from playwright.sync_api import sync_playwright

    path = tmp_path / "units.html"
    units_page(found).write(path)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        requests, faults = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: faults.append(message.text))
        page.goto(path.as_uri())
        assert requests == [path.as_uri()]
        assert faults == []
        assert page.locator("figure svg").count() >= 2
        assert page.locator("figure svg").first.bounding_box()["width"] > 300
        colours = page.locator(".coloured span").evaluate_all(
            "spans => new Set(spans.map(span => getComputedStyle(span).backgroundColor)).size"
        )
        assert colours > 3
        assert page.get_by_role("heading", name="quotes: unit 3 of 0.h, holds").is_visible()
        # What every claim says stands on paper and in half a window, without a scroll.
        page.set_viewport_size({"width": 790, "height": 800})
        rooms = page.locator(".wide").evaluate_all("rooms => rooms.map(room => room.scrollWidth - room.clientWidth)")
        assert max(rooms) == 0
        browser.close()
