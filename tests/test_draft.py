"""Writing in turns: what may come next, choosing it, taking back, drawing anew."""

from __future__ import annotations

import math

import pytest
import torch

from elman.config import SamplingConfig
from elman.draft import Draft
from elman.errors import ConfigError, UserError
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.reading import Reading
from elman.text.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("abcdef")


@pytest.fixture
def place() -> Reading:
    config = model_config({"kind": "gru", "hidden_size": 9, "embedding_size": 5})
    network = build_model(config, TOKENIZER.size, seed=1, dtype=torch.float64)
    network.head.bias.data[TOKENIZER.boundary_id] = -20.0
    return Reading.start(Bundle(network, TOKENIZER)).read("abc")


def test_options_are_the_most_probable_tokens_with_the_present_settings(place):
    draft = Draft(place, SamplingConfig(temperature=0.5))
    scores = torch.tensor(place.logits_V) / 0.5
    scores[TOKENIZER.unknown_id] = -math.inf
    expected = scores.softmax(0).sort(descending=True)
    options = draft.options(3)
    assert [option.token for option in options] == expected.indices[:3].tolist()
    assert [option.probability for option in options] == pytest.approx(expected.values[:3].tolist())
    assert [option.text for option in options] == [TOKENIZER.vocabulary[option.token] for option in options]
    assert len(draft.options(100)) == 7  # <unk> is none
    draft.change("temperature", 0)
    assert len(draft.options(100)) == 1


def test_steps_are_taken_and_taken_back(place):
    draft = Draft(place)
    second = draft.options()[1].text
    draft.choose(2)
    assert draft.text == "abc" + second
    draft.write("fed")
    assert draft.text == "abc" + second + "fed"
    assert draft.draw(4) == "length"
    assert len(draft.text) == 11
    for expected in (7, 4, 3):
        draft.undo()
        assert len(draft.text) == expected
    assert draft.place is place
    with pytest.raises(UserError, match="no step to take back"):
        draft.undo()


def test_drawing_anew_gives_another_text_and_the_same_steps_the_same(place):
    def steps(seed):
        draft = Draft(place, SamplingConfig(temperature=1.5), seed=seed)
        draft.draw(8)
        first = draft.text
        draft.undo()
        draft.draw(8)
        return first, draft.text

    assert steps(1) == steps(1) != steps(2)
    assert len(set(steps(1))) == 2


def test_the_model_may_end_the_text(place):
    place.bundle.network.head.bias.data[TOKENIZER.boundary_id] = 50.0
    draft = Draft(Reading.start(place.bundle).read("a"), SamplingConfig(min_new_tokens=0))
    assert draft.options()[0].ends_text
    assert draft.draw(5) == "boundary"
    assert draft.text == "a"
    with pytest.raises(UserError, match="option 1 is the end of the text"):
        draft.choose(1)
    with pytest.raises(UserError, match="no step to take back"):
        draft.undo()


def test_a_setting_that_cannot_be_changes_nothing(place):
    draft = Draft(place)
    for name, value, error in (
        ("temperature", "-1", ConfigError),
        ("suppress_tokens", [99], UserError),
        ("warmth", 1, ConfigError),
        ("max_new_tokens", 5, UserError),
    ):
        with pytest.raises(error):
            draft.change(name, value)
    assert draft.settings == SamplingConfig()
    draft.change("top_p", "0.5")
    assert draft.settings.top_p == 0.5


@pytest.mark.parametrize("number", [0, 8])
def test_an_option_that_is_not_there_is_refused(place, number):
    with pytest.raises(UserError, match=f"there is no option {number}: give 1 to 7"):
        Draft(place).choose(number)


def test_it_is_saved_where_it_stands(place, tmp_path):
    draft = Draft(place)
    draft.write("de")
    draft.save(tmp_path / "place")
    assert Reading.load(tmp_path / "place", place.bundle).text == "abcde"
