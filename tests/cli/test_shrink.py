"""``shrink``: what it prints and refuses."""

from __future__ import annotations


def test_it_prints_what_a_smaller_model_costs(elman, run, tmp_path):
    out = tmp_path / "small.safetensors"
    answer = elman("shrink", run, "--out", out, "--sparsity", "0.5")
    assert answer.code == 0, answer.err
    assert "nats per token" in answer.out
    assert "of them not zero" in answer.out
    assert f"elman eval {out}" in answer.out
    again = elman("shrink", run, "--out", tmp_path / "low", "--rank", 3, "--json").json
    assert again["after"]["parameters"] < again["before"]["parameters"]
    assert again["after"]["nats_per_token"] - again["before"]["nats_per_token"] == again["cost_nats_per_token"]


def test_a_mistake_is_one_line(elman, run, tmp_path):
    answer = elman("shrink", run, "--out", tmp_path / "small.safetensors")
    assert answer.code == 2
    assert answer.err == "elman: error: nothing to do: give --rank, or --sparsity, or both\n"


def test_a_place_that_cannot_be_written_and_a_file_in_place_of_a_run_are_one_line(elman, run, tmp_path):
    answer = elman("shrink", run, "--out", "/proc/small", "--sparsity", "0.5")
    assert answer.code == 2
    assert answer.err.startswith("elman: error: '/proc/small' cannot be written (")
    assert answer.err.endswith("): give another --out\n")
    answer = elman("shrink", run / "model.safetensors", "--out", tmp_path / "small", "--sparsity", "0.5")
    assert answer.code == 2
    assert answer.err.endswith("is judged on the validation text of its run; give the run folder\n")
    assert answer.err.count("\n") == 1


def test_a_teacher_without_a_name_is_refused_as_such(elman, corpus, tmp_path, tiny):
    answer = elman("train", corpus, "--out", tmp_path / "taught", "--teacher", "", *tiny)
    assert answer.code == 2
    assert answer.err == "elman: error: a teacher's name is empty; accepted: a run folder or a model file\n"


def test_a_teacher_is_given_by_its_run(elman, corpus, run, tmp_path, tiny):
    out = tmp_path / "taught"
    answer = elman(
        "train", corpus, "--out", out, "--teacher", run, "--teacher", run, "--teacher-weight", 0.3,
        "--teacher-temperature", 2, *tiny,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert answer.err.count(f"{str(run)!r}, a model of") == 2
    assert "weight 0.3, temperature 2" in answer.err
    refused = elman("train", corpus, "--out", tmp_path / "other", "--teacher-weight", 0.3, *tiny)
    assert refused.code == 2
    assert "give --teacher as well" in refused.err
