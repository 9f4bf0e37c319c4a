"""A teacher's part of the loss by its equation, its state beside the student's, and runs that outlive its files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from elman.data.prepare import Dataset, Split
from elman.errors import ConfigError, ModelFileError
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, model_config
from elman.models.noise import Noise
from elman.settings import resolve
from elman.text.tokenizers import CharTokenizer
from elman.training import distillation
from elman.training.checkpoint import newest_checkpoint
from elman.training.distillation import Teacher, load_teacher, state_of_student
from elman.training.folder import Run
from elman.training.loop import Trainer
from elman.training.run import dry_run, resume, train

TOKENIZER = CharTokenizer("abcdefg")
V, B, T = TOKENIZER.size, 3, 5
TOKENS = np.concatenate([[0], np.random.default_rng(3).integers(1, V, size=B * 4 * T)])
ROWS = TOKENS[:-1].reshape(B, -1), TOKENS[1:].reshape(B, -1)


def model(kind: str = "lstm", seed: int = 1, **settings: Any) -> Bundle:
    """A model of the tokens, its weights far from those that it starts with."""
    sizes = {} if kind == "ngram" else {"embedding_size": 4, "hidden_size": 6}
    config = model_config({"kind": kind, **sizes, **settings})
    network = build_model(config, V, seed=seed, dtype=torch.float64, boundary_id=TOKENIZER.boundary_id)
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    if kind == "ngram":
        network.count(TOKENS)
    return Bundle(network, TOKENIZER, {"corpus": "old.txt", "updates": 7})


# The loss.


def softmax(z: NDArray[Any]) -> NDArray[Any]:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softened(p: NDArray[Any], temperature: float) -> NDArray[Any]:
    powers = p ** (1 / temperature)
    return powers / powers.sum(-1, keepdims=True)


WEIGHT = torch.rand(B, T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def read(bundle: Bundle, leaf: bool = False) -> torch.Tensor:
    """What its head reads along the first segment."""
    tokens = torch.from_numpy(ROWS[0][:, :T])
    with torch.no_grad():
        features, _ = bundle.network.features(tokens, bundle.network.initial_state(B))
    return features.requires_grad_(leaf)


@pytest.mark.parametrize("student", [{}, {"output": "mixture"}, {"output": "adaptive", "output_cutoffs": (3, 6)}])
@pytest.mark.parametrize("others", [("gru",), ("gru", "window", "elman"), ("ngram",)])
@pytest.mark.parametrize(("weight", "temperature"), [(0.3, 1.0), (1.0, 2.5), (0.6, 0.7)])
def test_the_objective_is_the_papers_equation_in_numpy(student, others, weight, temperature):
    own = model(**student)
    models = [model(kind, seed=number + 2) for number, kind in enumerate(others)]
    teacher = Teacher(models, weight=weight, temperature=temperature)
    features = read(own)
    lesson = teacher.read(torch.from_numpy(ROWS[0][:, :T]), teacher.initial_state(B))
    found = teacher.mixed(torch.tensor(0.25).double(), own.network.head, features, lesson, WEIGHT).item()
    with torch.no_grad():
        q = own.network.head.log_probs(features).exp().numpy()
        p = np.mean([one.network.head.log_probs(read(one)).exp().numpy() for one in models], axis=0)
    cross = -(softened(p, temperature) * np.log(softened(q, temperature))).sum(-1)
    expected = (1 - weight) * 0.25 + weight * temperature**2 * (WEIGHT.numpy() * cross).sum()
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_its_gradient_is_the_difference_of_the_softened_distributions_times_the_temperature(temperature):
    """Hinton et al. 2015, equation 2, times T^2."""
    own, other = model(), model("gru", seed=5)
    teacher = Teacher([other], weight=0.4, temperature=temperature)
    features = read(own, leaf=True)
    lesson = teacher.read(torch.from_numpy(ROWS[0][:, :T]), teacher.initial_state(B))
    teacher.mixed(torch.zeros(()).double(), own.network.head, features, lesson, WEIGHT).backward()
    matrix, bias = own.network.head.weight.detach().numpy(), own.network.head.bias.detach().numpy()
    q = softmax((features.detach().numpy() @ matrix.T + bias) / temperature)
    with torch.no_grad():
        p = softmax(other.network.head.logits(read(other)).numpy() / temperature)
    of_logits = 0.4 * temperature * (q - p) * WEIGHT.numpy()[..., None]
    np.testing.assert_allclose(features.grad.numpy(), of_logits @ matrix, rtol=0, atol=1e-13)
    np.testing.assert_allclose(own.network.head.bias.grad.numpy(), of_logits.sum((0, 1)), rtol=0, atol=1e-13)
    assert all(parameter.grad is None for parameter in other.network.parameters())


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    own = model()
    teacher = Teacher([Bundle(own.network, TOKENIZER)], weight=1.0, temperature=2.0)
    own.network.requires_grad_(True)
    lesson = teacher.read(torch.from_numpy(ROWS[0][:, :T]), teacher.initial_state(B))
    features = read(own, leaf=True)
    teacher.mixed(torch.zeros(()).double(), own.network.head, features, lesson, WEIGHT).backward()
    assert features.grad.abs().max() < 1e-14


def test_in_pieces_it_is_the_same(monkeypatch):
    own = model()
    teacher = Teacher([model("gru"), model("window")], temperature=2.0)
    lesson = teacher.read(torch.from_numpy(ROWS[0][:, :T]), teacher.initial_state(B))
    found = []
    for at_once in (distillation._LOGITS_AT_ONCE, 4 * V, 1):
        monkeypatch.setattr(distillation, "_LOGITS_AT_ONCE", at_once)
        features = read(own, leaf=True)
        total = teacher.mixed(torch.zeros(()).double(), own.network.head, features, lesson, WEIGHT)
        own.network.zero_grad()
        total.backward()
        found.append((total.detach(), features.grad, own.network.head.weight.grad.clone()))
    for one in found[1:]:
        for mine, whole in zip(one, found[0], strict=True):
            torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)


# The state.


def trainer(teacher: Teacher, tokens: NDArray[Any] = TOKENS, **sections: Any) -> Trainer:
    """A training that changes nothing, in pieces of time and rows where that is asked for."""
    split = Split(tokens, num_chars=len(tokens) - 1, num_bytes=len(tokens) - 1, num_documents=1, num_unknown=0)
    training = {
        "batch_size": B, "bptt": T, "optimizer": "sgd", "schedule": "constant", "warmup_updates": 0,
        "learning_rate": 1e-300, "max_grad_norm": "none", "max_updates": 100, "reset_probability": 0.0,
    }  # fmt: skip
    settings = {
        "model": {"kind": "lstm", "embedding_size": 4, "hidden_size": 6},
        "sampling": {"max_new_tokens": 0}, "device": "cpu", "dtype": "float64",
        **sections, "training": training | sections.get("training", {}),
    }  # fmt: skip
    return Trainer(resolve(settings), Dataset(TOKENIZER, split, None, None, "t", "0" * 64, ()), teacher=teacher)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"training": {"accumulate": 2}},
        {"training": {"recompute_tokens": 2}},
        {"training": {"accumulate": 3, "recompute_tokens": 3}},
        {"data": {"reset_at_documents": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("at_once", [2**22, 2 * V])
def test_the_teacher_reads_the_stream_with_a_state_carried_like_the_students(settings, at_once, monkeypatch):
    monkeypatch.setattr(distillation, "_LOGITS_AT_ONCE", at_once)
    tokens = np.where(np.arange(len(TOKENS)) % 7 == 0, 0, TOKENS)  # documents of seven
    inputs, targets = (torch.from_numpy(row.reshape(B, -1)) for row in (tokens[:-1], tokens[1:]))
    resets = inputs == 0 if "data" in settings else None
    others = [model("gru", seed=3), model("lstm", seed=4)]
    training = trainer(Teacher(others, weight=0.7, temperature=2.0), tokens, **settings)
    network = training.network
    with torch.no_grad():  # over the whole text at once
        p = torch.stack([
            one.network.head.log_probs(one.network.features(inputs, one.network.initial_state(B), resets)[0]).exp()
            for one in others
        ]).mean(0)  # fmt: skip
    state = network.initial_state(B)
    steps = (record.values for record in training.records() if record.kind == "update")
    for update, values in zip(range(8), steps, strict=False):
        piece = slice(update % 4 * T, update % 4 * T + T)
        state = network.initial_state(B) if piece.start == 0 else state
        reset_BT = None if resets is None else resets[:, piece]
        features, after = network.features(inputs[:, piece], state, reset_BT)
        logits = network.head.logits(features)
        hard = functional.cross_entropy(logits.flatten(0, 1), targets[:, piece].flatten())
        p_T = p[:, piece].sqrt() / p[:, piece].sqrt().sum(-1, keepdim=True)
        soft = functional.cross_entropy((logits / 2).flatten(0, 1), p_T.flatten(0, 1))
        loss = 0.3 * hard + 0.7 * 4 * soft
        names, parameters = zip(*network.named_parameters(), strict=True)
        expected = torch.autograd.grad(loss, parameters)
        assert values["nats"] == pytest.approx(hard.item(), rel=1e-12)
        for name, parameter, gradient in zip(names, parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12, msg=f"{name} at {update}")
        state = after.detach()
    assert not any(tensor.requires_grad for tensor in training.state.tensors.values())


def test_a_stream_that_is_reset_by_chance_is_reset_for_the_teacher_too():
    other = model("gru", seed=3)
    training = trainer(Teacher([other]), training={"reset_probability": 0.5})
    network, inputs = training.network, torch.from_numpy(ROWS[0])
    initial = (network.initial_state(B), other.network.initial_state(B))
    states, num_reset = initial, 0
    steps = (record for record in training.records() if record.kind == "update")
    for update, _ in zip(range(12), steps, strict=False):
        piece = slice(update % 4 * T, update % 4 * T + T)
        states = initial if piece.start == 0 else states
        drawn = Noise(training.config.seed, update, B).uniform((B,), "reset", torch.device("cpu")) < 0.5
        num_reset += int(drawn.sum())
        pairs = zip((network, other.network), states, initial, strict=True)
        with torch.no_grad():
            states = tuple(one.features(inputs[:, piece], s.reset(drawn, first))[1] for one, s, first in pairs)
        own = state_of_student(training.state).tensors
        of_teacher = {n: t for n, t in training.state.tensors.items() if n not in own}
        for found, expected in ((own, states[0].tensors), (of_teacher, states[1].tensors)):
            assert [n.rpartition(".")[2] for n in found] == [n.rpartition(".")[2] for n in expected]
            for mine, theirs in zip(found.values(), expected.values(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert 8 <= num_reset <= 28  # of 36


# Runs.

TEXT = "the cat sat on the mat. the dog saw the moon.\n" * 40


def settings(**training: Any) -> dict[str, Any]:
    return {
        "model": {"hidden_size": 8, "embedding_size": 6},
        "sampling": {"max_new_tokens": 5, "temperatures": [0.8]},
        "training": {"batch_size": 4, "bptt": 16, "learning_rate": 0.01, "num_threads": 1, "max_updates": 10}
        | training,
        "evaluation": {"every_updates": 5},
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="module")
def teachers(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    lstm = train(corpus, out=folder / "lstm", **settings(max_updates=30))
    ngram = train(corpus, out=folder / "ngram", model={"kind": "ngram"}, sampling={"max_new_tokens": 2})
    return lstm.path, ngram.path


def updates(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "measured"} for r in run.records() if r["kind"] == "update"]


def assert_same(one: Run, other: Run) -> None:
    assert updates(one) == updates(other)
    ends = [newest_checkpoint(run.checkpoints)[1] for run in (one, other)]
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    assert any(name.startswith("state.teacher1.") for name in ends[0].tensors)
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name
    assert one.model.read_bytes() == other.model.read_bytes()


@pytest.fixture(scope="module")
def taught(corpus: Path, teachers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("taught") / "run"
    return train(corpus, out=out, teachers=teachers, teacher_temperature=2.0, **settings())


def test_a_run_says_who_taught_it_and_goes_on_bit_for_bit_without_its_teachers(corpus, teachers, taught, tmp_path):
    copies = [shutil.copytree(path, tmp_path / path.name) for path in teachers]
    polls = iter(range(9))
    stopped = train(
        corpus,
        out=tmp_path / "stopped",
        teachers=copies,
        teacher_temperature=2.0,
        should_stop=lambda: next(polls, None) is None,
        **settings(),
    )
    for path in copies:
        shutil.rmtree(path)
    assert [record["kind"] for record in stopped.records()][-1] == "stopped"
    assert 0 < len(updates(stopped)) < 10
    resume(stopped.path)
    assert_same(stopped, taught)
    (said,) = [r["text"] for r in taught.records() if r["kind"] == "notice" and "learns from" in r["text"]]
    first, second = (f"{str(name)!r}, a model of text.txt after" for name in teachers)
    assert f"learns from {first} 30 updates and {second} 1 update as well; weight 0.5, temperature 2" in said
    about = load_model(taught.path).provenance["teacher"]
    assert (about["weight"], about["temperature"]) == (0.5, 2.0)
    assert [one["updates"] for one in about["models"]] == [30, 1]
    assert load_model(taught.teacher / "1.safetensors").network.config.hidden_size == 8


def test_it_learns_otherwise_than_from_the_text_alone(corpus, taught, tmp_path):
    alone = train(corpus, out=tmp_path / "alone", **settings())
    assert updates(alone)[0]["nats"] == updates(taught)[0]["nats"]  # nothing is learned yet
    assert updates(alone)[1]["nats"] != updates(taught)[1]["nats"]
    assert not alone.teacher.exists()
    assert "teacher" not in load_model(alone.path).provenance


def test_the_settings_of_a_run_bring_its_teachers_with_them(taught, tmp_path):
    assert_same(train(config=taught.path / "run.toml", out=tmp_path / "again"), taught)


def test_resuming_on_its_own_asks_for_the_same_teachers(corpus, teachers, tmp_path):
    polls = iter(range(9))
    given = {"out": tmp_path / "run", "resume": "auto", **settings()}
    train(corpus, teachers=teachers[0], should_stop=lambda: next(polls, None) is None, **given)
    for other in (
        {},
        {"teachers": teachers[1]},
        {"teachers": teachers},
        {"teachers": teachers[0], "teacher_weight": 0.6},
        {"teachers": teachers[0], "teacher_temperature": 2.0},
    ):
        with pytest.raises(ConfigError, match="learns from another teacher, or with another weight"):
            train(corpus, **other, **given)
    run = train(corpus, teachers=teachers[0], **given)
    assert len(updates(run)) == 10


def test_a_wrong_temperature_leaves_the_run_that_it_would_replace(corpus, teachers, taught, tmp_path):
    run = Run(shutil.copytree(taught.path, tmp_path / "run"))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    for temperature in (1e300, 1e30, 1e-45):
        with pytest.raises(ConfigError, match=r"and a temperature from 0\.01 to 100"):
            train(
                corpus,
                out=run.path,
                overwrite=True,
                teachers=teachers[0],
                teacher_temperature=temperature,
                **settings(),
            )
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("temperature", [0.01, 100.0])
def test_at_the_ends_of_the_range_it_learns(temperature, corpus, teachers, tmp_path):
    given = {"teachers": teachers[0], "teacher_temperature": temperature, **settings(max_updates=80)}
    first, *_, last = updates(train(corpus, out=tmp_path / "run", **given))
    assert last["nats"] < 0.9 * first["nats"]


def test_resuming_on_its_own_takes_the_copy_of_a_teacher_that_is_gone(corpus, teachers, taught, tmp_path):
    polls = iter(range(9))
    copies = [shutil.copytree(path, tmp_path / path.name) for path in teachers]
    given = {"out": tmp_path / "run", "resume": "auto", **settings()}
    train(corpus, teachers=copies, teacher_temperature=2.0, should_stop=lambda: next(polls, None) is None, **given)
    shutil.rmtree(copies[1])
    for other in (
        {"teachers": copies, "teacher_temperature": 3.0},
        {"teachers": copies, "teacher_weight": 0.6, "teacher_temperature": 2.0},
        {"teachers": [copies[1], copies[0]], "teacher_temperature": 2.0},
    ):
        with pytest.raises(ConfigError, match="learns from another teacher, or with another weight"):
            train(corpus, **other, **given)
    with pytest.raises(ModelFileError, match="no run folder or model file"):  # one of two
        train(corpus, teachers=copies[1], teacher_temperature=2.0, **given)
    with pytest.raises(ModelFileError, match="no run folder or model file"):  # no run to take it from
        train(corpus, teachers=copies, teacher_temperature=2.0, **{**given, "out": tmp_path / "other"})
    run = train(corpus, teachers=copies, teacher_temperature=2.0, **given)
    assert_same(run, taught)
    (said,) = [r["text"] for r in run.records() if r["kind"] == "notice" and "any more" in r["text"]]
    assert said == f"no model at {str(copies[1])!r} any more: the run's own copy in {str(run.teacher)!r} teaches"


def test_a_dry_run_has_a_lesson_too(corpus, teachers):
    plan = dry_run(corpus, teachers=[teachers[0]], teacher_weight=0.9, **settings())
    beginning = f"learns from {str(teachers[0])!r}, a model of"
    assert any(notice.startswith(beginning) and "weight 0.9" in notice for notice in plan.notices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_weight": 0.0}, "accepted: a weight above 0 and up to 1"),
        ({"teacher_weight": 1.5}, "a teacher of weight 1.5 at temperature 1"),
        ({"teacher_temperature": -1.0}, "and a temperature from 0.01 to 100"),
        ({"teacher_temperature": 1e300}, r"at temperature 1e\+300; accepted"),
        ({"teacher_temperature": 1e-45}, "and a temperature from 0.01 to 100"),
        ({"teacher_temperature": math.nan}, "at temperature nan; accepted"),
        ({"teachers": ""}, "a teacher's name is empty; accepted: a run folder or a model file"),
        ({"teachers": ["", "nowhere"]}, "a teacher's name is empty"),
        ({"teachers": (), "teacher_weight": 0.5}, "have no meaning without one: give --teacher as well"),
        ({"training": {"num_negatives": 3}}, "num_negatives never sees the whole vocabulary: leave one of them out"),
        ({"model": {"kind": "ngram"}, "training": {}, "evaluation": {}}, "'ngram' is counted and learns from no"),
        ({"tokenizer": {"level": "byte"}}, r"has other tokens \(char, 1\d of them\) than this training \(byte, 257\)"),
        ({"teachers": "nowhere"}, "no run folder or model file 'nowhere'"),
    ],
    ids=str,
)
def test_what_cannot_be_taught_is_refused_in_one_line_and_leaves_nothing(changes, message, corpus, teachers, tmp_path):
    with pytest.raises((ConfigError, ModelFileError), match=message) as raised:
        train(corpus, out=tmp_path / "run", **{"teachers": teachers[0], **settings(), **changes})
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_other_models_in_the_folder_of_a_run_are_not_learned_from(corpus, teachers, tmp_path):
    run = train(corpus, out=tmp_path / "run", teachers=teachers[0], **settings(max_updates=2))
    first = run.teacher / "1.safetensors"
    kept = first.read_bytes()
    bundle = load_model(first)
    save_model(first, Bundle(bundle.network, bundle.tokenizer, {**bundle.provenance, "seed": 99}))
    with pytest.raises(ModelFileError, match=r"its models are not those that teacher.json names"):
        resume(run.path, max_updates=4)
    first.write_bytes(kept)
    about = run.teacher / "teacher.json"
    about.write_text(json.dumps({"weight": 0.5}), encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"teacher.json' is damaged \(KeyError"):
        resume(run.path, max_updates=4)
    about.write_bytes(b"{")
    with pytest.raises(ModelFileError, match=r"teacher.json' is damaged"):
        resume(run.path, max_updates=4)


def test_a_checkpoint_belongs_to_its_teacher(corpus, teachers, tmp_path):
    run = train(corpus, out=tmp_path / "run", teachers=teachers[0], **settings(max_updates=2))
    shutil.rmtree(run.teacher)
    with pytest.raises(ModelFileError, match=r"the checkpoint has teacher \{.*this run None"):
        resume(run.path, max_updates=4)


def test_a_model_in_other_bits_teaches_as_well(corpus, teachers, tmp_path):
    """A student in float64 of a teacher in float32."""
    teacher = load_teacher([teachers[0]])
    run = train(corpus, out=tmp_path / "run", teachers=teachers[0], dtype="float64", **settings(max_updates=3))
    assert len(updates(run)) == 3
    assert teacher.to_dict()["models"] == load_model(run.path).provenance["teacher"]["models"]
