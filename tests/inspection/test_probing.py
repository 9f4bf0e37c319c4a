"""Tasks, equal budgets, and trials that are not done twice."""

from __future__ import annotations

import re
from collections import Counter
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch

import elman
from elman.errors import ModelFileError, TrainingError, UserError
from elman.inspection import probing
from elman.inspection.probing import GROUPS, KINDS, TASKS, AtLength, Probed, Trial, accuracy_of, probe, settings_of
from elman.inspection.probing_page import overview, probed_page
from elman.models.file import Bundle, load_model
from elman.models.kinds import build_model, kind_names, model_class, model_config
from elman.text.tokenizers import CharTokenizer
from elman.translation import reverses_source, write_targets


def recalled(question: str) -> str:
    return dict(re.findall(r"([a-z])(\d)", question))[question[-1]]


def reckoned(question: str) -> str:
    value = 0
    for sign, digit in re.findall(r"([-+*]?)(\d)", question):
        value = value * int(digit) if sign == "*" else value + int(f"{sign}{digit}")
    return str(value % 5)


def closed(question: str) -> str:
    while question != (question := re.sub(r"\(\)|\[\]", "", question)):
        pass
    return question[::-1].translate(str.maketrans("([", ")]"))


SOLVERS = {
    "copying": lambda question: question.strip("|"),
    "selective-copying": lambda question: "".join(re.findall("[a-z]", question)),
    "associative-recall": recalled,
    "anbn": lambda question: (len(question) - 2) * "b",
    "dyck-2": closed,
    "parity": lambda question: str(question.count("1") & 1),
    "modular-arithmetic": reckoned,
    "adding": lambda question: f"{sum(map(int, re.findall(r'[*](.)', question))):02}",
    "agreement": lambda question: "are" if re.match(r"the \w+s ", question) else "is",
}

SIZES = {
    "copying": lambda question: len(question) - 1,
    "selective-copying": lambda question: question.count("."),
    "associative-recall": lambda question: len(question) // 2 - 1,
    "anbn": lambda question: len(question) - 1,
    "dyck-2": lambda question: max(np.cumsum([1 if bracket in "([" else -1 for bracket in question])),
    "parity": lambda question: len(question) - 1,
    "modular-arithmetic": lambda question: len(question) // 2,
    "adding": lambda question: sum(map(str.isdigit, question)),
    "agreement": lambda question: question.count(" the "),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_question_is_of_its_length_and_has_the_right_answer(name):
    task = TASKS[name]
    assert max(task.learned) < max(task.asked)
    for length in sorted({*task.learned, *task.asked}):
        examples = probing._different(task, length, 1, 40)
        assert examples
        assert len(set(examples)) == len(examples) <= 40
        for question, answer in examples:
            assert SOLVERS[name](question) == answer
            size = SIZES[name](question)
            # As many a's as the last quarter of a length has numbers: one number alone would be one question.
            assert length - max(1, length // 4) < size <= length if name == "anbn" else size == length


GUESSES = {
    "associative-recall": lambda question: question[-3],
    "modular-arithmetic": lambda question: reckoned(f"0{question[-3:]}"),
    "parity": lambda question: "1",
    "adding": lambda question: "09",
    "agreement": lambda question: "are",
}


def test_every_task_that_can_be_guessed_says_how():
    assert set(GUESSES) == {name for name, task in TASKS.items() if task.guessed}
    for name in set(TASKS) - set(GUESSES):
        assert not any(map(TASKS[name].guess, TASKS[name].asked))


@pytest.mark.parametrize(("name", "length"), [(name, length) for name in GUESSES for length in TASKS[name].asked])
def test_a_guess_is_right_as_often_as_is_said(name, length):
    task, number = TASKS[name], 10_000
    guessed = [GUESSES[name](question) == answer for question, answer in task.draw(length, 3, number)]
    said = task.guess(length)
    assert np.mean(guessed) == pytest.approx(said, abs=4 * np.sqrt(said * (1 - said) / number))


def best_by_end(examples: list[tuple[str, str]]) -> float:
    """Share of right answers of one who knows how often which answer follows which end, each example once."""
    by_end: dict[str, Counter[str]] = {}
    for end, answer in examples:
        by_end.setdefault(end, Counter())[answer] += 1
    return sum(max(answers.values()) for answers in by_end.values()) / len(examples)


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_with_the_last_pair_and_the_key_alone_no_more_is_right(pairs):
    # Four letters hold all cases of three pairs and one letter asked.
    examples = [
        (f"{keys[-1]}{values[-1]}?{keys[asked]}", values[asked])
        for keys in permutations("abcd", pairs)
        for values in product("0123456789", repeat=pairs)
        for asked in range(pairs)
    ]
    # A key that is not the last may be any of those left, and its digit any of ten.
    assert best_by_end(examples) == pytest.approx(TASKS["associative-recall"].guess(pairs))


@pytest.mark.parametrize("terms", [2, 3, 4])
def test_with_the_last_term_alone_no_more_is_right(terms):
    digits = product("01234", repeat=terms)
    examples = []
    for first, *others in digits:
        for signs in product("+-*", repeat=terms - 1):
            question = first + "".join(map("".join, zip(signs, others, strict=True)))
            examples.append((question[-2:], reckoned(question)))
    assert len(examples) == 5**terms * 3 ** (terms - 1)
    assert best_by_end(examples) == pytest.approx(TASKS["modular-arithmetic"].guess(terms))


@pytest.mark.parametrize("name", TASKS)
def test_the_example_of_a_task_is_right(name):
    question, answer = TASKS[name].example()
    assert SOLVERS[name](question) == answer
    assert SIZES[name](question) == TASKS[name].asked[0]


def test_there_are_as_many_questions_of_every_length_that_is_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "_LEARNED_EXAMPLES", 1200)
    path = probing._write_corpus(tmp_path / "parity.txt", TASKS["parity"], 0)
    lines = path.read_text("utf-8").splitlines()
    questions = [question for question, _, answer in (line.partition("\t") for line in lines) if answer]
    assert sorted(map(len, questions)) == [length + 1 for length in range(1, 13) for _ in range(100)]
    assert questions != sorted(questions, key=len)
    before = path.stat().st_mtime_ns
    assert probing._write_corpus(path, TASKS["parity"], 0).stat().st_mtime_ns == before


def counted(examples: list[tuple[str, str]], order: int) -> Bundle:
    tokenizer = CharTokenizer("".join(map("".join, examples)))
    network = build_model(model_config({"kind": "ngram", "order": order}), tokenizer.size, seed=1, dtype=torch.float32)
    texts = [tokenizer.encode(text) for example in examples * 30 for text in example]
    network.count(np.concatenate([np.append(tokenizer.boundary_id, text) for text in texts]))
    return Bundle(network, tokenizer)


def test_a_model_that_knows_is_right_and_one_that_forgets_is_not():
    examples = [("a" * number + "b", "b" * (number - 1)) for number in range(2, 6)]
    model = counted(examples, 14)
    assert accuracy_of(model, examples) == 1.0
    assert accuracy_of(model, [("a" * 12 + "b", "b" * 11)]) == 0.0
    assert accuracy_of(model, [*examples[:3], ("a" * 12 + "b", "b" * 11)]) == 0.75


def test_an_answer_is_right_if_all_of_it_is_and_it_ends_there():
    model = counted([("x", "abc"), ("y", "abd")], 6)
    assert accuracy_of(model, [("x", "abc"), ("y", "abd")]) == 1.0
    assert accuracy_of(model, [("x", "abd"), ("x", "ab"), ("x", "abca"), ("x", "bbc")]) == 0.0


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"ngram"}))
def test_families_get_about_the_same_number_of_parameters(kind):
    config = model_config(settings_of(kind, 20, 30_000))
    assert model_class(config).predicted_num_parameters(config, 20) == pytest.approx(30_000, rel=0.2)


def test_every_kind_can_be_probed():
    assert set(probing._askable()) == set(kind_names()) - {"stack", "seq2seq"}
    for kind in probing._askable():
        model_config(settings_of(kind, 20, 10_000))


def test_the_families_compared_by_default_stand_in_one_group_each():
    assert sorted(KINDS) == sorted({kind for kinds in GROUPS.values() for kind in kinds})
    assert set(KINDS) <= set(probing._askable())


@pytest.fixture
def small(monkeypatch) -> dict[str, object]:
    monkeypatch.setattr(probing, "_LEARNED_EXAMPLES", 1200)
    monkeypatch.setattr(probing, "_ASKED_CASES", 40)
    return {"tasks": ["parity"], "kinds": ["elman", "ngram"], "updates": 2, "parameters": 1000, "rates": [0.003]}


def test_a_finished_trial_is_not_done_again(tmp_path, monkeypatch, small):
    told = []
    found = probe(tmp_path, **small, on_trial=told.append)
    assert tuple(told) == found.trials
    assert [(trial.kind, trial.learning_rate) for trial in found.trials] == [("elman", 0.003), ("ngram", None)]
    assert all(0 < one.cases <= 40 and 0 <= one.accuracy <= 1 for trial in found.trials for one in trial.by_length)
    assert found.learned == {"parity": 12}
    assert found.trials[1].state_size == 5  # of order 6

    def refuse(*_args, **_settings):
        pytest.fail("trained again")

    monkeypatch.setattr(probing, "_train", refuse)
    assert probe(tmp_path, **small) == found
    with pytest.raises(UserError, match=r"other settings \(updates\): give another folder"):
        probe(tmp_path, **{**small, "updates": 3})
    with pytest.raises(UserError, match=r"other settings \(rates\)"):
        probe(tmp_path, **{**small, "rates": [0.01]})
    with monkeypatch.context() as patch:
        patch.setattr(elman, "__version__", "0.0.9")
        with pytest.raises(UserError, match=r"other settings \(version\)"):
            probe(tmp_path, **small)
    html = probed_page(found).html()
    assert "length 12" in html
    assert found.to_dict()["trials"][0]["by_length"][0]["length"] == 6
    assert isinstance(found.trials[0].by_length[0], AtLength)


COUNTED = {"tasks": ["anbn"], "kinds": ["ngram"]}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, text: path.write_text("{", "utf-8"),
        lambda path, text: path.write_text("[" * 100_000, "utf-8"),
        lambda path, text: path.write_bytes(b"\xff"),
        lambda path, text: path.write_text(re.sub(r'"accuracy": [\d.]+', '"accuracy": NaN', text), "utf-8"),
        lambda path, text: path.write_text(re.sub(r'"accuracy": [\d.]+', '"accuracy": 7', text), "utf-8"),
        lambda path, text: (path.unlink(), path.mkdir()),
    ],
    ids=["cut", "deep", "bytes", "no number", "above one", "folder"],
)
def test_a_damaged_trial_is_named(tmp_path, damage):
    probe(tmp_path, **COUNTED)
    path = tmp_path / "anbn-ngram" / "probe.json"
    damage(path, path.read_text("utf-8"))
    with pytest.raises(ModelFileError, match=r"probe\.json is damaged: remove it"):
        probe(tmp_path, **COUNTED)


@pytest.mark.parametrize("text", ["a\tb\n", ""])
def test_examples_that_were_exchanged_are_not_learned_from(tmp_path, text):
    found = probe(tmp_path, **COUNTED)
    (tmp_path / "anbn-ngram" / "probe.json").unlink()
    (tmp_path / "anbn-0.txt").write_text(text, "utf-8")
    with pytest.raises(ModelFileError, match=r"anbn-0\.txt holds other examples than were written there: remove it"):
        probe(tmp_path, **COUNTED)
    (tmp_path / "anbn-0.txt").unlink()
    assert [one.by_length for one in probe(tmp_path, **COUNTED).trials] == [one.by_length for one in found.trials]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for out, words in (("file", "give another folder"), ("file/sub", "give another folder"), ("", "is empty")):
        with pytest.raises(UserError, match=words):
            probe(out, **COUNTED)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_more_parameters_than_any_width_has_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"1,000,000,000,000 parameters; accepted for lstm: up to \d\d"):
        settings_of("lstm", 20, 10**12)


def test_the_model_of_a_trial_can_be_asked_by_others(tmp_path, small):
    found = probe(tmp_path, **{**small, "kinds": ["gru", "transformer"]})
    bundle = load_model(tmp_path / "parity-gru")
    (written,) = write_targets(
        bundle.network, bundle.tokenizer, [bundle.tokenizer.encode("0110=")], reverse_source=reverses_source(bundle)
    )
    assert not any(map(str.isspace, written.text))
    assert found.trials[0].state_size == 2 * bundle.network.config.hidden_size
    assert found.trials[1].state_size is None  # keys and values of all that was read


@pytest.mark.slow
def test_what_is_easy_is_learned(tmp_path):
    found = probe(tmp_path, tasks=["agreement"], kinds=["gru", "ngram"], updates=200, rates=[0.01])
    gru, ngram = ({one.length: one.accuracy for one in trial.by_length} for trial in found.trials)
    assert gru[4] > 0.9
    assert ngram[4] < 0.65  # the subject is beyond its five words


def test_the_rate_that_answers_most_is_taken_and_the_search_ends_where_all_is_right(tmp_path, monkeypatch, small):
    tried, shares = [], {0.001: 0.5, 0.002: 0.7, 0.004: 0.7, 0.008: 0.99, 0.016: 1.0}

    def train(_dataset, _data, _level, _model, _updates, rate, _seed):
        tried.append(rate)
        if rate == 0.3:
            raise TrainingError("the loss is no number")
        return rate

    monkeypatch.setattr(probing, "_train", train)
    monkeypatch.setattr(probing, "accuracy_of", lambda rate, _examples: shares[rate])
    best = lambda *rates: probing._best(TASKS["parity"], None, None, {}, 1, rates, 0)  # noqa: E731
    assert best(0.001, 0.002, 0.004) == (0.002, 0.002)
    assert best(0.3, 0.008, 0.016) == (0.008, 0.008)
    assert tried == [0.001, 0.002, 0.004, 0.3, 0.008]
    with pytest.raises(TrainingError, match="no number"):
        best(0.3)


def test_a_family_keeps_the_rate_of_one_task_for_all(tmp_path, monkeypatch, small):
    tried, really = [], probing._best

    def best(task, *others):
        tried.append((task.name, others[-2]))
        return really(task, *others)

    monkeypatch.setattr(probing, "_best", best)
    told = []
    found = probe(tmp_path, **{**small, "tasks": ["anbn", "adding"], "rates": [0.01, 1e-6]}, on_trial=told.append)
    rate = found.trials[0].learning_rate
    assert tried == [("parity", (0.01, 1e-6)), ("anbn", (rate,)), ("adding", (rate,))]
    assert [trial.learning_rate for trial in found.trials] == [rate, None, rate, None]
    # The training by which the rate was found is told too, once.
    assert [(trial.task, trial.kind) for trial in told] == [
        ("parity", "elman"), ("anbn", "elman"), ("anbn", "ngram"), ("adding", "elman"), ("adding", "ngram")
    ]  # fmt: skip
    assert probe(tmp_path, **{**small, "rates": [0.01, 1e-6]}).trials[0].learning_rate == rate
    assert len(tried) == 3


def trial(task: str, kind: str, *accuracies: float) -> Trial:
    by_length = tuple(AtLength(length, 50, accuracy) for length, accuracy in zip((6, 12, 24), accuracies, strict=True))
    return Trial(task, kind, 1000, 64, 0.003, by_length, 1.5)


@pytest.fixture
def probed() -> Probed:
    trials = (
        trial("parity", "lstm", 1.0, 0.9, 0.4),
        trial("parity", "ngram", 0.5, 0.5, 0.95),
        trial("anbn", "lstm", 1.0, 0.89, 1.0),
        trial("anbn", "ngram", 0.9, 0.92, 1.0),
    )
    return Probed(5, 1000, (0.003,), {"parity": 12, "anbn": 12}, trials)


def test_reach_ends_before_the_first_length_that_is_not_mastered(probed):
    reach = {"lstm": {"parity": 12, "anbn": 6}, "ngram": {"parity": None, "anbn": 24}}
    assert probed.reach() == probed.to_dict()["reach"] == reach


def test_one_picture_holds_all_tasks(probed):
    figure = overview(probed)
    assert [panel.get_title() for panel in figure.axes] == ["parity", "anbn"]
    assert [panel.get_xlabel() for panel in figure.axes] == ["digits", "a's"]
    assert [[text.get_text() for text in panel.texts] for panel in figure.axes] == [
        ["100", "90", "40", "50", "50", "95", "50", "50", "50"],
        ["100", "89", "100", "90", "92", "100", "0", "0", "0"],
    ]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["lstm", "ngram", "guess"]
    between_groups, above_guess, border = figure.axes[0].lines
    assert border.get_xdata() == [1.5, 1.5]  # between what was learned, 6 and 12, and 24
    assert between_groups.get_ydata() == [0.5, 0.5]
    assert above_guess.get_ydata() == [1.5, 1.5]
    shades = np.asarray(figure.axes[0].images[0].get_array())
    # Above a guess of one half.
    np.testing.assert_allclose(shades, [[1.0, 0.8, 0.0], [0.0, 0.0, 0.9], [0.0, 0.0, 0.0]], atol=1e-12)
    html = probed_page(probed).html()
    assert html.count("<figure") == 3
    question, answer = TASKS["parity"].example()
    assert f"“{question}” is answered by “{answer}”. Its length is 6, which counts digits." in html
    assert "families by what carries their past" in html


def test_the_guess_of_each_length_stands_beside_the_answers():
    trials = (trial("associative-recall", "qrnn", 0.5, 0.2, 0.1), trial("associative-recall", "minlstm", 0.5, 0.2, 0.1))
    found = Probed(5, 1000, (0.003,), {"associative-recall": 6}, trials)
    falling = (0.25, 0.175, 0.1375)  # of 6, 12 and 24 pairs
    assert found.guess("associative-recall") == pytest.approx(falling)
    assert found.to_dict()["guess"]["associative-recall"] == pytest.approx(falling)
    shades = np.asarray(overview(found).axes[0].images[0].get_array())
    np.testing.assert_allclose(shades[0], [1 / 3, 0.025 / 0.825, 0], atol=1e-12)
    html = probed_page(found).html()
    assert "25.0%" in html
    assert "17.5%" in html
    assert "families by what carries their past" not in html  # both are of none of the groups


def test_a_family_of_no_group_stands_with_the_others():
    trials = (trial("parity", "lstm", 1, 1, 1), trial("parity", "qrnn", 1, 1, 1))
    assert "; others (qrnn)." in probed_page(Probed(5, 1000, (0.003,), {"parity": 12}, trials)).html()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tasks": ["partiy"]}, "did you mean 'parity'"),
        ({"kinds": ["seq2seq"]}, "no family"),
        ({"kinds": ["qrnn", "lstm", "qrnn"]}, "family 'qrnn' is given 2 times"),
        ({"tasks": ["anbn", "anbn"]}, "task 'anbn' is given 2 times"),
        ({"updates": 0}, "accepted: from 1"),
        ({"rates": []}, "rates none; accepted: one and more"),
        ({"rates": [0.01, 2.0]}, "between 0 and 1"),
    ],
)
def test_bad_input_gets_one_line(tmp_path, arguments, words):
    with pytest.raises(UserError, match=words):
        probe(tmp_path, **arguments)
