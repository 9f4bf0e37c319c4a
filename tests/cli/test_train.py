"""``train`` and ``resume``: what they write, what they print where, and how they stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elman.cli.display import Display
from elman.cli.running import StopOnSignal
from elman.settings import resolve
from elman.training.folder import Run
from elman.training.loop import Record


def test_a_run_says_on_stdout_where_it_lies_and_on_stderr_how_it_went(elman, corpus, tmp_path, tiny):
    out = tmp_path / "run"
    answer = elman("train", corpus, "--out", out, "--seed", 3, *tiny)
    assert answer.code == 0
    assert f"{out} (seed 3)" in answer.out
    assert f"elman sample {out}" in answer.out
    assert "bits/char at update" in answer.out
    assert "held out: " in answer.err
    assert "sample at temperature 1.5: " in answer.err
    assert "\x1b" not in answer.err
    assert {path.name for path in out.iterdir()} >= {"run.toml", "metrics.jsonl", "model.safetensors", "checkpoints"}


def test_json_is_one_object_with_the_seed(elman, corpus, tmp_path, tiny):
    answer = elman("train", corpus, "--out", tmp_path / "run", "--json", "--seed", 3, *tiny)
    result = answer.json
    assert (result["seed"], result["update"], result["stopped"]) == (3, 8, False)
    assert result["evaluation"]["nats_per_token"] > 0


def test_a_run_folder_is_not_overwritten_unless_asked(elman, corpus, tmp_path, tiny):
    out = tmp_path / "run"
    assert elman("train", corpus, "--out", out, *tiny).code == 0
    answer = elman("train", corpus, "--out", out, *tiny)
    assert answer.code == 2
    assert "--overwrite" in answer.err
    assert elman("train", corpus, "--out", out, "--overwrite", *tiny).code == 0


def test_a_dry_run_writes_nothing_and_tells_the_plan(elman, corpus, tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    answer = elman("train", corpus, "--dry-run", *tiny)
    assert answer.code == 0
    assert "lstm" in answer.out
    assert "max_updates 8" in answer.out
    plan = elman("train", corpus, "--dry-run", "--json", *tiny).json
    assert plan["parameters"] == 8 * plan["vocabulary"] + 4 * 12 * (8 + 12 + 1) + 13 * plan["vocabulary"]
    assert list(tmp_path.iterdir()) == []


def test_run_toml_repeats_the_run(elman, run, tmp_path):
    answer = elman("train", "--config", run / "run.toml", "--out", tmp_path / "again")
    assert answer.code == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_resume_goes_on_to_a_new_budget(elman, corpus, tmp_path, tiny):
    out = tmp_path / "run"
    elman("train", corpus, "--out", out, *tiny)
    result = elman("resume", out, "--training.max_updates", 12, "--json").json
    assert result["update"] == 12
    assert Run.open(out).config().training.max_updates == 12
    assert elman("report", out).code == 0
    page = (out / "report.html").read_text("utf-8")
    assert "changed when it went on: max_updates 8 until update 8, then max_updates 12" in page
    assert "to the last bit" not in page
    answer = elman("resume", out, "--training.bptt", 3)
    assert answer.code == 2
    assert "--training.bptt" in answer.err


@pytest.mark.parametrize(
    ("given", "budgets"),
    [
        (("--training.max_tokens", 500), "max_tokens 500"),
        (("--training.max_updates", 8, "--training.max_seconds", 50), "max_updates 8, max_seconds 50"),
    ],
)
def test_a_run_whose_budget_is_used_up_names_it_and_its_report_does_not(elman, corpus, tmp_path, tiny, given, budgets):
    out = tmp_path / "run"
    assert elman("train", corpus, "--out", out, *(word for word in tiny if "max_updates" not in word), *given).code == 0
    said = elman("resume", out).err
    assert f"its budget is used up ({budgets}); to train longer" in said
    for name in (part.split()[0] for part in budgets.split(", ")):
        assert f"--training.{name.replace('_', '-')} N" in said
    assert elman("report", out).code == 0
    page = (out / "report.html").read_text("utf-8")
    assert "used up" not in page
    assert "going on from" not in page
    assert "to the last bit" in page


def test_a_run_starts_from_another_model_and_says_what_it_took_over(elman, run, tmp_path, tiny):
    (tmp_path / "new.txt").write_text("1 + 2 = 3; the cat sat.\n" * 60)
    few = [word for word in tiny if "model." not in word]
    answer = elman("train", tmp_path / "new.txt", "--from", run, "--out", tmp_path / "run", *few)
    assert answer.code == 0
    assert "tokens matched by their text, " in answer.err
    assert f"started from {str(run)!r}, a model of" in answer.err
    assert Run.open(tmp_path / "run").config().model.hidden_size == 12
    assert Run.open(tmp_path / "run").origin.transfer.num_new == len(set("1+2=3"))
    plan = elman("train", tmp_path / "new.txt", "--from", run, "--dry-run", "--json", *few).json
    assert any("matched by their text" in notice for notice in plan["notices"])
    refused = elman("train", tmp_path / "new.txt", "--from", run, "--out", tmp_path / "b", "--model.hidden_size=9")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "model.hidden_size 9 was given" in refused.err


def test_a_person_s_own_cell_with_settings_of_its_own(elman, corpus, tmp_path, tiny):
    file = tmp_path / "leaky.py"
    file.write_text(
        "from elman.cells.base import Cell, Initial, Parameter, Step\n"
        "from elman.cells.primitives import linear\n"
        "from elman.config import CellConfig\n"
        "class LeakyConfig(CellConfig):\n"
        "    leak: float = 0.9\n"
        "class Leaky(Cell):\n"
        "    Config = LeakyConfig\n"
        "    def parameters(self):\n"
        "        return {'weight': Parameter((self.hidden_size, self.input_size), Initial('orthogonal'))}\n"
        "    def step(self, p, x_BI, state):\n"
        "        h = self.config.leak * state['h'] + linear(x_BI, p['weight']).tanh()\n"
        "        return Step(h, {'h': h}, {})\n",
        encoding="utf-8",
    )
    cell, out = f"{file}:Leaky", tmp_path / "run"
    assert elman("train", corpus, "--out", out, *tiny, "--model.kind", cell, "--model.leak", "0.5").code == 0
    assert Run.open(out).config(cell=cell).model.leak == 0.5
    refused = elman("sample", out)
    assert refused.code == 2
    assert "--cell" in refused.err
    for command in (["sample", out], ["eval", out], ["inspect", "model", out]):
        assert elman(*command, "--cell", cell).code == 0
    wrong = elman("train", corpus, "--out", tmp_path / "b", "--model.kind", cell, "--model.leek", "0.5")
    assert "did you mean 'leak'" in wrong.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_ask_once_there_is_something_to_save_and_are_put_back(number, capfd):
    before = signal.getsignal(number)
    with StopOnSignal(Display(resolve())) as stop:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            signal.raise_signal(number)
        assert interrupted.value.args == (number,)
        assert not stop()
        stop.on_record(Record("notice", {"text": ""}))
        signal.raise_signal(number)
        assert stop()
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == number
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err == "stopping: saving ...\nstill saving ...\n"


def test_ctrl_c_saves_says_how_to_go_on_and_the_run_can_be_resumed(elman, corpus, tmp_path, tiny, environment):
    out = tmp_path / "run"
    endless = [word for word in tiny if "max_updates" not in word] + ["--training.max_updates=1000000"]
    words = [sys.executable, "-m", "elman", "train", str(corpus), "--out", str(out), *endless]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        give_up = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").stat().st_size == 0:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, progress = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert printed.splitlines()[0].endswith(f"elman resume {out}")
    assert f"elman eval {out}" in printed
    assert "Traceback" not in progress
    reached = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert reached["kind"] == "stopped"
    assert elman("eval", out).code == 0
    result = elman("resume", out, "--training.max_updates", reached["update"] + 2, "--json").json
    assert result["update"] == reached["update"] + 2


def test_the_default_folder_is_named_after_corpus_and_kind(elman, corpus, tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    elman("train", corpus, *tiny)
    elman("train", corpus, *tiny, "--model.kind", "gru")
    elman("train", corpus, *tiny)
    assert {path.name for path in Path("runs").iterdir()} == {"tiny-lstm", "tiny-gru", "tiny-lstm-2"}
