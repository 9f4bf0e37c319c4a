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


def test_a_teacher_is_given_by_its_run(elman, corpus, run, tmp_path, tiny):
    out = tmp_path / "taught"
    answer = elman(
        "train", corpus, "--out", out, "--teacher", run, "--teacher", run, "--teacher-weight", 0.3,
        "--teacher-temperature", 2, *tiny,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert "learns from 2 models as well" in answer.err
    assert "weight 0.3, temperature 2" in answer.err
    refused = elman("train", corpus, "--out", tmp_path / "other", "--teacher-weight", 0.3, *tiny)
    assert refused.code == 2
    assert "give --teacher as well" in refused.err
