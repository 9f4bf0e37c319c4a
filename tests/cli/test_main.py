"""Exit codes, one-line errors, and what holds for every command."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

import pytest

import elman as package
from elman.cli import _words, main


def test_help_lists_every_command_and_version_is_the_package_s(elman):
    answer = elman("--help")
    assert answer.code == 0
    for command in ("train", "resume", "eval", "sample", "inspect", "data", "check", "config"):
        assert f" {command} " in answer.out
    assert elman("--version").out.strip() == package.__version__


@pytest.mark.parametrize("command", ["resume", "eval", "sample", "check", "inspect model", "data fetch", "config show"])
def test_every_command_explains_itself(elman, command):
    answer = elman(*command.split(), "--help")
    assert answer.code == 0
    assert "Usage: elman" in answer.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "Did you mean"),
        (["train", "--training.bttp", "3"], "--training.bptt"),
        (["train", "--training.bptt", "many"], "training.bptt is 'many'"),
        (["train", "--training.bptt", "0"], "training.bptt is '0'"),
        (["train", "--model.kind", "lstn"], "did you mean 'lstm'"),
        (["train", "--model.hiden_size", "3"], "did you mean 'hidden_size'"),
        (["train", "--model.kind", "gru", "--model.forget_bias", "1"], "no meaning for model.kind 'gru' (lstm, "),
        (["train", "--training.learning-rate"], "parameter --training.learning-rate requires an argument.\n"),
        (["train", "--training.learning-rate", "--json"], "parameter --training.learning-rate requires an argument.\n"),
        (["shrink", "nowhere", "--ot", "smaller"], "Did you mean --out instead of --ot?"),
        (["train", "--level", "byte"], "Unknown option: --level. Did you mean --tokenizer.level?"),
        (["train", "--max-tokens", "9"], "Did you mean --training.max_tokens or --evaluation.max_tokens?"),
        (["sample", "nowhere", "--sampling.max-new-tokens", "5"], "max-new-tokens. Did you mean --max-new-tokens?"),
        (["sample", "nowhere", "--sampling.max-new-tokens=5"], "max-new-tokens. Did you mean --max-new-tokens?"),
        (["plan", "a.txt"], "'a.txt' is too much: elman plan takes nothing beside its options; elman plan"),
        (["inspect", "model", "x", "y", "z"], "'y z' is too much: elman inspect model takes RUN beside its options;"),
        (["export", "arpa", "x", "y", "z"], "'z' is too much: elman export arpa takes RUN and OUT beside its options;"),
        (["train", "--preset", "demoo"], "demo"),
        (["train", "no such file"], "no such file"),
        (["train", "--config", "no.toml"], "no configuration file"),
        (["resume", "nowhere"], "no run folder 'nowhere'"),
        (["eval", "nowhere"], "no run folder or model file"),
        (["sample", "nowhere", "--temperature", "-1"], "sampling.temperature"),
        (["inspect", "modle", "x"], "model"),
        (["check", "lstn"], "lstm"),
        (["data", "fetch", "nothing"], "accepted"),
        (["compare", "text.txt", "--seeds", "1.5"], 'unable to convert "1.5" into int'),
        (["inspect", "gradients", "nowhere", "--lags", "2.5"], 'unable to convert "2.5" into int'),
        (["inspect", "units", "nowhere", "--seed", "-1"], "for --seed. Must be >= 0"),
        (["inspect", "state", "nowhere", "--seed", "-1"], "for --seed. Must be >= 0"),
        (["inspect", "closing", "nowhere", "--seed", "-1"], "for --seed. Must be >= 0"),
        (["inspect", "probe", "nowhere", "--seed", "-1"], "for --seed. Must be >= 0"),
        (["diagnose", "nowhere", "--seed", "-1"], "for --seed. Must be >= 0"),
        (["sample", "nowhere", "--seed", "-1"], "for --seed. Must be >= 0"),
        (["train", ""], "a name in data.corpus is empty"),
        (["train", "\x1b[31m\u202e"], "'\\x1b[31m\\u202e'"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_exit_code_2(elman, words, expected):
    answer = elman(*words)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("elman: error: ")
    assert expected in answer.err
    assert answer.err.count("\n") == 1


LONG = "x" * 300  # a system allows 255


@pytest.mark.parametrize(
    "words",
    [
        f"train {LONG}",
        f"train --config {LONG}",
        f"train --from {LONG}",
        f"train --out {LONG}",
        f"resume {LONG}",
        f"lr-find {LONG}",
        f"tune {LONG} --out tuned",
        f"compare {LONG} --kinds elman,gru --tokens 100 --out compared",
        f"eval {LONG}",
        f"score {LONG}",
        f"sample {LONG}",
        f"translate {LONG}",
        f"diagnose {LONG}",
        f"report {LONG}",
        f"runs {LONG}",
        f"shrink {LONG} --rank 2 --out smaller",
        f"export arpa {LONG} out.arpa",
        f"check ./{LONG}.py:Cell",
        f"inspect model {LONG}",
        f"inspect gradients {LONG}",
        f"inspect saliency {LONG}",
        f"inspect units {LONG} text.txt",
        f"inspect embeddings {LONG}",
        f"inspect ngram {LONG}",
        f"data inspect {LONG}",
        f"data prepare {LONG} --out prepared",
        f"data fetch tiny-shakespeare --from {LONG}",
    ],
    ids=lambda words: words.replace(LONG, "LONG"),
)
def test_a_path_that_no_file_can_have_is_a_mistake_and_no_bug(elman, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    answer = elman(*words.split())
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("elman: error: ")
    assert "File name too long" in answer.err
    assert answer.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_closed_path_is_a_mistake_and_other_refusals_of_the_system_are_not(elman, monkeypatch):
    errors = [PermissionError(13, "Permission denied", "closed/text"), PermissionError(13, "Permission denied")]

    def fail() -> None:
        raise errors.pop(0)

    monkeypatch.setattr("elman.text.corpora.describe", fail)
    answer = elman("data", "list")
    assert answer.code == 2
    assert answer.err == "elman: error: cannot open 'closed/text': Permission denied; give another path\n"
    answer = elman("data", "list")
    assert answer.code == 1
    assert answer.err.startswith("elman: bug: PermissionError")


@pytest.mark.parametrize("words", ["train --model.kind lsmt", "eval --nonsense", "train nowhere.txt --out run"])
def test_of_several_processes_on_a_machine_the_first_speaks_and_the_others_wait(elman, monkeypatch, tmp_path, words):
    """What is refused before they meet; a process that nobody ends meanwhile speaks after all."""
    monkeypatch.chdir(tmp_path)
    waits: list[float] = []
    monkeypatch.setattr("elman.cli.time.sleep", waits.append)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    for rank, expected in (("0", []), ("1", [10.0])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert elman(*words.split()).code == 2
        assert waits == expected
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    answer = elman(*words.split())
    assert answer.err.count("\n") == 1
    assert waits == [10.0], "what has met may differ, and says what is wrong at once"


def test_an_unexpected_failure_is_one_line_and_the_traceback_is_there_when_asked_for(elman, monkeypatch):
    def fail() -> None:
        raise TypeError("line one\nline two")

    monkeypatch.setattr("elman.text.corpora.describe", fail)
    answer = elman("data", "list")
    assert answer.code == 1
    assert answer.err == ("elman: bug: TypeError: line one line two; run with ELMAN_TRACEBACK=1 for the traceback\n")
    monkeypatch.setenv("ELMAN_TRACEBACK", "1")
    with pytest.raises(TypeError):
        main(["data", "list"])


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (KeyboardInterrupt(15), 143), (MemoryError(), 1)]
)
def test_interruptions_and_lack_of_memory_have_their_codes(elman, monkeypatch, error, code):
    def fail() -> None:
        raise error

    monkeypatch.setattr("elman.text.corpora.describe", fail)
    answer = elman("data", "list")
    assert answer.code == code
    assert answer.err.count("\n") == 1


PRINTING = ["--help", "config schema", "inspect embeddings RUN"]


def spoken(words, run, environment, redirection):
    """A process of its own, its streams as a shell sets them: the exit code and what it complains of."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "elman"]
    words = words.replace("RUN", str(run)).split()
    ran = subprocess.run([*command, *words], capture_output=True, env=environment, check=False)
    return ran.returncode, ran.stderr.decode()


@pytest.mark.parametrize("words", PRINTING)
def test_a_reader_that_goes_away_is_no_error(run, environment, words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "elman", *words.replace("RUN", str(run)).split()]
    ran = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


@pytest.mark.parametrize("words", PRINTING)
def test_a_full_disk_under_the_output_is_one_line(run, environment, words):
    code, said = spoken(words, run, environment, "> /dev/full")
    assert (code, said.count("\n")) == (1, 1)
    assert "cannot be written: No space left on device" in said


@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-"])
def test_a_stream_that_was_closed_takes_nothing_with_it(run, environment, tmp_path, streams):
    state = tmp_path / "place"
    words = f"sample RUN --max-new-tokens 3 --save-state {state}"
    assert spoken(words, run, environment, streams)[0] == 0
    assert state.stat().st_size


def test_standard_input_that_was_closed_is_empty(run, environment):
    code, said = spoken("score RUN -", run, environment, "<&-")
    assert code == 2
    assert "the text is empty" in said


def test_output_is_utf8_whatever_the_locale(run, environment):
    ascii_only = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "elman", "sample", str(run), "--prompt", "猫は月を見た", "--max-new-tokens", "1"]
    ran = subprocess.run(words, capture_output=True, env=environment | ascii_only, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.decode("utf-8").startswith("猫は月を見た")


def test_a_switch_takes_a_value_like_any_other_setting():
    assert _words(["--training.trim", "true", "a"]) == ["--training.trim=true", "a"]
    assert _words(["--training.trim", "a", "true"]) == ["--training.trim", "a", "true"]
    assert _words(["--json", "true"]) == ["--json", "true"]


def test_output_may_go_to_anything_that_takes_text():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["config", "show", "--seed", "5"]) == 0
    assert printed.getvalue().startswith("seed = 5\n")
