"""Tasks, equal budgets, and trials that are not done twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elman.errors import ModelFileError, UserError
from elman.inspection import probing
from elman.inspection.probing import KINDS, TASKS, AtLength, Probed, Trial, accuracy_at, probe, settings_of
from elman.inspection.probing_page import overview, probed_page
from elman.models.file import Bundle
from elman.models.kinds import build_model, kind_names, model_class, model_config
from elman.text.tokenizers import CharTokenizer


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_lines_and_answers_at_every_length(name):
    task = TASKS[name]
    text = "".join(probing._lines(task, max(task.learned), 0, 2000))
    assert len(text) > 1000
    assert max(task.learned) < max(task.asked)
    for length in task.asked:
        lines = probing._lines(task, length, 1, 20_000)
        lines = [line for line in lines if task.exact is None or task.exact(line, length)][:10]
        assert lines
        places = list(probing._answers(task, length, "".join(lines), list(map(len, lines))))
        assert len(places) == len(lines)


def counted(text: str, order: int) -> Bundle:
    tokenizer = CharTokenizer(text)
    network = build_model(model_config({"kind": "ngram", "order": order}), tokenizer.size, seed=1, dtype=torch.float32)
    network.count(np.concatenate([[0], tokenizer.encode(text)]))
    return Bundle(network, tokenizer)


def test_a_model_that_knows_is_right_and_one_that_forgets_is_not():
    task = TASKS["anbn"]
    text = "".join("a" * n + "b" * n + "\n" for n in range(1, 9)) * 30
    model = counted(text, 16)
    assert accuracy_at(model, task, 6, num_chars=400).accuracy == 1.0
    assert accuracy_at(model, task, 12, num_chars=400).accuracy == 0.0


def test_an_answer_that_may_come_or_not_is_judged_among_the_answers():
    task = TASKS["dyck-2"]
    text = "()\n[]\n(())\n[[]]\n([])\n[()]\n" * 40
    model = counted(text, 6)
    found = accuracy_at(model, task, 2, num_chars=300)
    assert found.cases >= 20
    assert found.accuracy > 0.5


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"ngram"}))
def test_families_get_about_the_same_number_of_parameters(kind):
    config = model_config(settings_of(kind, 20, 30_000))
    assert model_class(config).predicted_num_parameters(config, 20) == pytest.approx(30_000, rel=0.2)


def test_every_kind_can_be_probed():
    assert set(probing._askable()) == set(kind_names()) - {"stack", "seq2seq"}
    for kind in probing._askable():
        model_config(settings_of(kind, 20, 10_000))


def test_a_finished_trial_is_not_done_again(tmp_path, monkeypatch):
    arguments = {"tasks": ["parity"], "kinds": ["elman", "ngram"], "updates": 2, "parameters": 1000}
    monkeypatch.setattr(probing, "_TRAIN_CHARS", 4000)
    told = []
    found = probe(tmp_path, **arguments, on_trial=told.append)
    assert tuple(told) == found.trials
    assert [trial.kind for trial in found.trials] == ["elman", "ngram"]
    assert all(one.cases >= 20 and 0 <= one.accuracy <= 1 for trial in found.trials for one in trial.by_length)
    assert found.learned == {"parity": 12}

    def refuse(*_args, **_settings):
        pytest.fail("trained again")

    monkeypatch.setattr(probing, "train", refuse)
    assert probe(tmp_path, **arguments) == found
    with pytest.raises(UserError, match="other settings"):
        probe(tmp_path, **{**arguments, "updates": 3})
    (tmp_path / "parity-elman" / "probe.json").write_text("{", "utf-8")
    with pytest.raises(ModelFileError, match="damaged"):
        probe(tmp_path, **arguments)
    html = probed_page(found).html()
    assert "length 12" in html
    assert found.to_dict()["trials"][0]["by_length"][0]["length"] == 6
    assert isinstance(found.trials[0].by_length[0], AtLength)


def trial(task: str, kind: str, *accuracies: float) -> Trial:
    by_length = tuple(AtLength(length, 50, accuracy) for length, accuracy in zip((6, 12, 24), accuracies, strict=True))
    return Trial(task, kind, 1000, 5, by_length)


@pytest.fixture
def probed() -> Probed:
    trials = (
        trial("parity", "lstm", 1.0, 0.9, 0.4),
        trial("parity", "ngram", 0.5, 0.5, 0.95),
        trial("anbn", "lstm", 1.0, 0.89, 1.0),
        trial("anbn", "ngram", 0.9, 0.92, 1.0),
    )
    return Probed(5, 1000, {"parity": 12, "anbn": 12}, trials)


def test_reach_ends_before_the_first_length_that_is_not_mastered(probed):
    reach = {"lstm": {"parity": 12, "anbn": 6}, "ngram": {"parity": None, "anbn": 24}}
    assert probed.reach() == probed.to_dict()["reach"] == reach


def test_one_picture_holds_all_tasks(probed):
    figure = overview(probed)
    assert [panel.get_title() for panel in figure.axes] == ["parity", "anbn"]
    assert [[text.get_text() for text in panel.texts] for panel in figure.axes] == [
        ["100", "90", "40", "50", "50", "95"],
        ["100", "89", "100", "90", "92", "100"],
    ]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["lstm", "ngram"]
    (border,) = figure.axes[0].lines
    assert border.get_xdata() == [1.5, 1.5]  # between what was learned, 6 and 12, and 24
    html = probed_page(probed).html()
    assert html.count("<figure") == 3
    assert "parity (learned to 12)" in html


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tasks": ["partiy"]}, "did you mean 'parity'"),
        ({"kinds": ["seq2seq"]}, "no family"),
        ({"updates": 0}, "accepted: from 1"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, arguments, words):
    with pytest.raises(UserError, match=words):
        probe(tmp_path, **arguments)
