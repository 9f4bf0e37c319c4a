"""The report on runs and on new networks: what it says in words, along training, and from the log."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from elman.errors import ConfigError, TextError, UserError
from elman.inspection.gates import Memory
from elman.inspection.gradients import (
    Clipping,
    GradientReport,
    Study,
    clipping_of,
    inspect_gradients,
    inspect_kinds,
    state_map,
    study,
)
from elman.inspection.gradients_page import along_training, by_distance, gradients_page
from elman.inspection.watching import places
from elman.judge import find_subject
from elman.models.contract import LanguageModel
from elman.models.file import load_model
from elman.models.kinds import build_model, model_config
from elman.training.folder import Run
from elman.training.run import train

TOKENS = np.concatenate([[0], np.random.default_rng(1).integers(1, 5, 400)])


def network_of(kind: str = "elman", **settings: object) -> LanguageModel:
    config = model_config({"kind": kind, "hidden_size": 6, "embedding_size": 6, **settings})
    return build_model(config, 5, seed=1, dtype=torch.float64)


def scaled(factor: float) -> LanguageModel:
    """A vanilla network at zero, where it is linear, with a recurrent matrix of one singular value."""
    network = network_of()
    network.get_parameter("embedding").data.zero_()
    network.get_parameter("layers.0.weight_hh").data.mul_(factor)
    return network


def lstm_of(
    *,
    input_gate: float,
    forget_gate: float,
    candidate: float = 0.0,
    output_gate: float = 0.0,
    into_candidate: float = 0.0,
    into_output_gate: float = 0.0,
) -> LanguageModel:
    """An LSTM that does not read its tokens: by its biases, and by what the last output is multiplied with."""
    network = network_of("lstm")
    blocks = network.get_parameter("layers.0.weight_hh").data.view(4, 6, 6)
    blocks *= torch.tensor([0.0, 0.0, into_candidate, into_output_gate], dtype=torch.float64)[:, None, None]
    network.get_parameter("layers.0.weight_ih").data.zero_()
    given = torch.tensor([input_gate, forget_gate, candidate, output_gate], dtype=torch.float64)
    network.get_parameter("layers.0.bias").data.copy_(given.repeat_interleave(6))
    return network


def clipping(num_clipped: int, max_grad_norm: float | None = 1.0) -> Clipping:
    return Clipping(max_grad_norm, 200, num_clipped, 0, 0.2, 0.9, (200,), (0.2,), (0.9,))


def verdict_of(network: LanguageModel, **options: object) -> Study:
    return study("it", network, TOKENS, 100, 3, **{"whole": False, **options})


def test_a_gradient_that_vanishes_is_told_with_what_would_help():
    found = verdict_of(scaled(0.8))
    assert found.verdict.trend == "vanishes"
    assert found.verdict.ratio == pytest.approx(0.8**99, rel=0.05)
    assert found.verdict.hundredth_left_at == math.ceil(1 + math.log(0.01) / math.log(0.8))
    assert "a gated kind (lstm, gru, mingru) has one" in found.verdict.words
    assert "clipping does nothing against it" in found.verdict.words
    assert "recurrent_init" not in found.verdict.words
    assert found.by_lag[1] == 1.0


def test_a_gradient_that_explodes_is_told_with_what_would_help():
    found = verdict_of(scaled(1.1))
    assert found.verdict.trend == "explodes"
    assert "clipping bounds what it does to the weights" in found.verdict.words
    assert "clipping does nothing" not in found.verdict.words
    uniform = scaled(1.1)
    uniform.config = uniform.config.model_copy(update={"recurrent_init": "uniform"})
    assert "model.recurrent_init orthogonal" in verdict_of(uniform).verdict.words


def test_a_gradient_that_lives_is_told_so():
    found = verdict_of(scaled(1.0))
    assert found.verdict.trend == "is kept"
    assert "clipping" not in found.verdict.words


def test_what_clipping_did_is_told_by_the_log():
    exploding, vanishing = scaled(1.1), scaled(0.8)
    words = verdict_of(exploding, clipping=clipping(50)).verdict.words
    assert "and did in 50 of 200 updates (training.max_grad_norm 1)" in words
    words = verdict_of(exploding, clipping=clipping(0)).verdict.words
    assert "training.max_grad_norm 1 was never reached and bounded nothing: the largest norm was 0.9" in words
    words = verdict_of(exploding, clipping=clipping(0, None)).verdict.words
    assert "nothing bounded what it did to the weights: training.max_grad_norm would" in words
    words = verdict_of(vanishing, clipping=clipping(50)).verdict.words
    assert "clipping, in 50 of 200 updates, does nothing against it" in words
    assert "clipping" not in verdict_of(vanishing, clipping=clipping(0)).verdict.words


def test_forget_gates_that_shut_are_named():
    found = verdict_of(network_of("lstm", forget_bias=-2.0), whole=True)
    assert found.verdict.trend == "vanishes"
    assert found.memory == Memory(6, 100, 0, 0.0)
    assert "the forget gates of 0 of 6 units would keep more than a hundredth" in found.verdict.words
    assert "a model.forget_bias above -2 starts them further open" in found.verdict.words
    assert "saturated" not in found.verdict.words
    drawn = network_of("lstm", forget_bias=None)
    assert "a model.forget_bias of 1 and more" in verdict_of(drawn, whole=True).verdict.words


def test_a_memory_that_its_tanh_lets_nothing_into_is_named():
    forget = 0.97
    bias = math.log(forget / (1 - forget))
    full = lstm_of(input_gate=20.0, forget_gate=bias, candidate=math.atanh(0.1), into_output_gate=1.0)
    # Step n leaves 0.1 (1 - f^n) / (1 - f), where the tanh of this is 0.95 and more from some step on.
    free = math.ceil(math.log(1 - math.atanh(0.95) * (1 - forget) / 0.1) / math.log(forget)) - 1
    found = verdict_of(full, whole=True)
    assert found.verdict.trend == "vanishes"
    assert found.memory is not None
    assert (found.memory.units, found.memory.keeping) == (6, 6)
    assert found.memory.saturated == pytest.approx(1 - free / 400)
    words = found.verdict.words
    assert "the forget gates of 6 of 6 units would keep more than a hundredth" in words
    assert f"saturated at {1 - free / 400:.1%} of the tokens" in words
    assert "(gru, qrnn)" in words
    assert "further open" not in words
    rows = {row.name: row for row in found.saturation}
    assert (rows["tanh(0.c)"].low, rows["tanh(0.c)"].high) == (0.0, pytest.approx(1 - free / 400))
    assert "tanh(0.c)" in gradients_page(report_of(found)).html()


def test_more_of_a_memory_that_its_tanh_lets_nothing_into_is_not_advised():
    full = lstm_of(input_gate=20.0, forget_gate=5.0, candidate=0.1, into_output_gate=1.0)
    full.get_parameter("layers.0.bias").data[8:12] = -2.0  # four of the six forget
    found = verdict_of(full, whole=True)
    assert found.verdict.trend == "vanishes"
    assert (
        "the forget gates of 2 of 6 units would keep more than a hundredth; the tanh that these" in found.verdict.words
    )
    assert "model.forget_bias" not in found.verdict.words


def report_of(*studies: Study) -> GradientReport:
    return GradientReport("text", "text", 3, 100, studies, None)


def test_a_memory_that_is_open_on_either_side_is_not_blamed():
    # It is read by a gate that is nearly shut and has a steep matrix, on which way all comes that is there at first.
    found = verdict_of(
        lstm_of(input_gate=20.0, forget_gate=20.0, candidate=0.004, output_gate=-9.0, into_output_gate=1e3), whole=True
    )
    assert found.verdict.trend == "vanishes"
    words = found.verdict.words
    assert "of what is one token back and keeps 1 of that over 98 steps" in words
    assert "model.forget_bias is not what is missing" in words
    assert "saturated" not in words
    assert "further open" not in words


def test_the_way_of_a_gradient_that_lives_is_named():
    by_memory = verdict_of(lstm_of(input_gate=-20.0, forget_gate=20.0))
    assert by_memory.verdict.words.startswith("it is kept: 1 of it is left 100 steps back, mostly by the additive way")
    by_matrix = verdict_of(lstm_of(input_gate=20.0, forget_gate=-20.0, output_gate=20.0, into_candidate=1.0))
    assert "it is kept: 1 of it is left 100 steps back, mostly through the matrix" in by_matrix.verdict.words
    assert "mostly" not in verdict_of(scaled(1.0)).verdict.words  # there is one way alone


def test_gates_that_no_setting_opens_are_named():
    words = verdict_of(network_of("gru"), whole=True).verdict.words
    assert "its gates have learned, or were drawn, to forget" in words
    assert "forget_bias" not in words


def test_the_map_of_the_state_of_a_linear_network(linear_network):
    network = linear_network([[0.9, 0.0], [0.0, 0.5]])
    tokens = np.tile([0, 1, 2], 60)
    found = state_map(network, places(network, tokens, 2, 110))
    assert found.is_complete
    assert found.spectral_radius == pytest.approx(0.9)
    assert found.products[1] == pytest.approx([math.log10(0.9), math.log10(0.5)])
    assert found.products[100] == pytest.approx([100 * math.log10(0.9), 100 * math.log10(0.5)])
    assert found.exponents == pytest.approx([math.log(0.9), math.log(0.5)], abs=1e-6)


def test_of_a_large_state_the_largest_alone_are_looked_at(monkeypatch):
    network = network_of("lstm")
    chosen = places(network, TOKENS, 2, 12)
    whole = state_map(network, chosen)
    monkeypatch.setattr("elman.inspection.gradients._NUM_DIRECTIONS", 3)
    monkeypatch.setattr("elman.inspection.gradients._MAX_MATRIX", 11)
    part = state_map(network, chosen)
    assert (whole.size, whole.is_complete, part.is_complete, part.spectral_radius) == (12, True, False, None)
    assert set(part.products) == {1, 10}
    assert part.products[10] == pytest.approx(whole.products[10][:3], abs=0.02)
    assert len(whole.products[10]) == 12
    assert part.exponents == whole.exponents


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat; a dog saw the moon.\n" * 60, encoding="utf-8")
    done = train(
        text,
        out=folder / "run",
        seed=3,
        model={"kind": "lstm", "hidden_size": 8, "embedding_size": 4},
        training={"max_updates": 6, "batch_size": 4, "bptt": 16, "max_grad_norm": 0.5, "learning_rate": 0.02},
        evaluation={"every_updates": 6},
        sampling={"max_new_tokens": 1},
        checkpoint={"every_updates": 2, "keep": 9},
    )
    return done.path


def test_a_run_is_followed_from_its_first_weights_to_its_model(run):
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    report = inspect_gradients([run], max_lag=20, num_places=2)
    assert [one.name for one in report.studies] == [
        "at initialisation",
        "update 2",
        "update 4",
        "the model, update 6",
    ]
    first, last = report.studies[0], report.studies[-1]
    assert len({study.gradient for study in report.studies}) == 4
    lines = by_distance(report.studies).axes[0].get_lines()
    between = [to_rgb(line.get_color()) for line in lines[1:-1]]
    assert between == sorted(between, reverse=True)  # light to dark
    assert len({line.get_color() for line in lines}) == 4
    assert {one.name for one in first.matrices} == {"layers.0.weight_ih", "layers.0.weight_hh"}
    assert not report.studies[1].matrices
    assert "beyond 16 steps, where training.bptt cuts it off" in last.verdict.words
    assert report.clipping is not None
    assert report.clipping.num_updates == 6
    norms = [record["grad_norm"] for record in Run.open(run).records() if record["kind"] == "update"]
    assert report.clipping.num_clipped == sum(norm > 0.5 for norm in norms)
    assert report.clipping.largest_norms == tuple(norms)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["split"] == "test"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_initial_weights_are_those_that_training_began_with(run):
    bundle = load_model(run)
    tokens = find_subject(run, bundle).tokens.tokens
    network = build_model(bundle.network.config, bundle.network.vocab_size, seed=3, dtype=torch.float32)
    expected = study("new", network, tokens, 10, 2, whole=False)
    assert inspect_gradients([run], max_lag=10, num_places=2).studies[0].gradient == expected.gradient


def test_several_models_are_held_against_each_other_on_one_text(run, tmp_path):
    model = run / "model.safetensors"
    other = tmp_path / "other.txt"
    other.write_text("a cat and a dog; the moon.\n" * 4, encoding="utf-8")
    report = inspect_gradients([run, model], other, max_lag=20, num_places=2)
    assert [one.name for one in report.studies] == [str(run), str(model)]
    assert report.studies[0].gradient == report.studies[1].gradient
    assert Path(report.corpus).name == "other.txt"
    assert report.clipping is None
    assert report.stages == ()  # a model file has no past
    with pytest.raises(TextError, match="400 in a row and one more"):
        inspect_gradients([run], other)
    with pytest.raises(UserError, match="without its corpus"):
        inspect_gradients([model])
    with pytest.raises(UserError, match="accepted: 2 lags and more"):
        inspect_gradients([run], max_lag=1)


def test_several_runs_are_followed_along_what_all_have_kept(run, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (gone,) = (other / "checkpoints").glob("update-00000004-*")
    shutil.rmtree(gone)
    report = inspect_gradients([run, other], max_lag=20, num_places=2)
    alone = {study.name: study.by_lag for study in inspect_gradients([run], max_lag=20, num_places=2).studies}
    assert [stage.name for stage in report.stages] == ["at initialisation", "update 2"]  # update 6 is the model of both
    for stage in report.stages:
        assert stage.by_lag == {str(run): alone[stage.name], str(other): alone[stage.name]}
    assert [one.name for one in report.studies] == [str(run), str(other)]
    picture = along_training(report)
    assert [panel.get_title() for panel in picture.axes] == ["at initialisation", "update 2", "the model"]
    assert len({panel.get_ylim() for panel in picture.axes}) == 1
    assert "Along the training" in gradients_page(report).html()
    shutil.copytree(run, tmp_path / "third")
    monkeypatch.setattr("elman.inspection.gradients._MAX_STAGES", 2)
    few = inspect_gradients([run, tmp_path / "third"], max_lag=20, num_places=2)
    assert [stage.name for stage in few.stages] == ["at initialisation", "update 4"]


def test_new_networks_of_several_kinds_and_their_page(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat; a dog saw the moon.\n" * 20, encoding="utf-8")
    kinds = ["mingru", "transformer"]
    report = inspect_kinds(kinds, text, hidden_size=8, max_lag=6, num_places=1)
    assert [one.kind for one in report.studies] == kinds
    assert [one.state_map is None for one in report.studies] == [False, True]
    html = gradients_page(report).html()
    assert html.count("<svg") > 4
    for kind in kinds:
        assert kind in html
    # A run folder that is called by its kind is not called by it twice.
    named = [replace(one, name=name) for one, name in zip(report.studies, ["runs/mingru", "runs/a"], strict=True)]
    (legend,) = by_distance(tuple(named)).legends  # above the picture, where no line runs through it
    assert [text.get_text() for text in legend.get_texts()] == ["runs/mingru", "runs/a (transformer)"]
    with pytest.raises(UserError, match="'window' carries tokens alone"):
        inspect_kinds(["window"], text)
    with pytest.raises(ConfigError, match="did you mean 'lstm'"):
        inspect_kinds(["lstn"], text)


def test_the_page_of_a_run_shows_the_log(run):
    html = gradients_page(inspect_gradients([run], max_lag=6, num_places=2)).html()
    assert "Gradients while it trained" in html
    assert "training.max_grad_norm" in html
    assert "by the additive way alone" in html


def test_a_log_without_updates_says_nothing(run, tmp_path):
    (tmp_path / "run.toml").write_bytes((run / "run.toml").read_bytes())
    other = Run.open(tmp_path)
    assert clipping_of(other, other.config()) is None


def test_what_is_asked_for_alone_is_computed_alone():
    found = study("it", network_of(), TOKENS, 10, 2, whole=False)
    assert (found.matrices, found.state_map, found.saturation) == ((), None, ())
    assert replace(found, name="other").by_lag == found.by_lag
