"""``sample``: the same text as in Python, prompts of any kind, nothing that garbles a terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

import elman as package


def test_it_prints_what_python_draws(elman, run):
    words = [
        "--seed",
        "5",
        "--temperature",
        "0.7",
        "--top-k",
        "9",
        "--top-p",
        "0.9",
        "--max-new-tokens",
        "30",
        "--prompt",
    ]
    drawn = package.load(run).generate(
        "the ", seed=5, temperature=0.7, top_k=9, top_p=0.9, max_new_tokens=30, stop=["z"]
    )
    answer = elman("sample", run, *words, "the ", "--stop", "z")
    assert answer.out == f"the {drawn.text}\n"
    assert "seed 5" in answer.err
    result = elman("sample", run, *words, "the ", "--stop", "z", "--json").json
    assert (result["prompt"], result["text"], result["seed"]) == ("the ", drawn.text, 5)
    assert result["tokens"] == list(drawn.tokens)
    asked = {"max_new_tokens": 30, "temperature": 0.7, "top_k": 9, "top_p": 0.9}
    assert result["sampling"].items() >= asked.items()
    assert result["sampling"]["repetition_penalty"] == 1.0  # every setting of one text is there
    assert "prompts" not in result["sampling"]


def test_the_same_seed_gives_the_same_text_and_another_one_another(elman, run):
    first, again, other = (elman("sample", run, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other


def test_a_prompt_file_is_read_as_the_training_text_was(elman, run, tmp_path, monkeypatch):
    file = tmp_path / "prompt"
    file.write_bytes(b"the cat\r\nsat" * 400)  # longer than what is read at once
    answer = elman("sample", run, "--prompt-file", file, "--max-new-tokens", 2)
    assert answer.out.startswith("the cat\nsat" * 400)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the moon")))
    assert elman("sample", run, "--prompt-file", "-", "--max-new-tokens", 0).out == "the moon\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--prompt", "xЖy"], "'Ж'"),
        (["--prompt", "a", "--prompt-file", "b"], "two prompts"),
        (["--prompt-file", "missing"], "missing"),
        (["--stop", ""], "empty stop string"),
        (["--top-p", "0"], "sampling.top_p"),
        (["--temperature", "nan"], "sampling.temperature"),
        (["--repetition-penalty", "-1"], "sampling.repetition_penalty"),
        (["--logit-bias", "the"], "no TEXT=BIAS"),
        (["--suppress-tokens", "99999"], "token 99999 is not in the vocabulary"),
        (["--num-beams", "2", "--top-k", "3"], "top_k has no meaning for num_beams 2"),
        (["--load-state", "missing"], "'missing' cannot be read"),
        (["--interactive", "--json"], "--interactive writes in turns"),
        (["--interactive", "--num-beams", "3"], "--num-beams has no meaning with --interactive"),
        (["--interactive", "--max-new-tokens", "3"], "--max-new-tokens has no meaning with --interactive"),
        (["--num-beams", "3", "--seed", "0"], "--seed has no meaning with --num-beams"),
        (["--num-beams", "3", "--temperature", "0.5"], "--temperature has no meaning with --num-beams"),
    ],
)
def test_a_prompt_or_setting_that_cannot_be_is_one_line_and_nothing_is_printed(elman, run, words, expected):
    answer = elman("sample", run, *words)
    assert (answer.code, answer.out) == (2, "")
    assert expected in answer.err


def test_unknown_characters_can_be_skipped(elman, run):
    with_them = elman("sample", run, "--prompt", "Жthe Ж", "--unknown", "skip", "--json").json
    without = elman("sample", run, "--prompt", "the ", "--json").json
    assert with_them["text"] == without["text"]


def test_a_prompt_file_that_is_no_utf8_is_a_clear_error(elman, run, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"abc\xff")
    answer = elman("sample", run, "--prompt-file", file)
    assert answer.code == 2
    assert "byte 3" in answer.err


def test_what_would_move_the_cursor_is_a_picture_on_a_terminal_only(elman, tiny, tmp_path, monkeypatch):
    file, out = tmp_path / "escapes.txt", tmp_path / "run"
    file.write_text("\x1b[31mred\x07\n" * 60, encoding="utf-8")
    elman("train", file, "--out", out, *tiny)
    words = ["sample", out, "--prompt", "\x1b[31mred", "--max-new-tokens", 1]
    assert "\x1b[31mred" in elman(*words).out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = elman(*words).out
    assert "␛[31mred" in shown
    assert "\x1b" not in shown


def test_bytes_that_are_no_text_come_out_as_valid_utf8_and_json(elman, corpus, tiny, tmp_path):
    out = tmp_path / "run"
    elman("train", corpus, "--out", out, *tiny, "--tokenizer.level", "byte")
    text = elman("sample", out, "--temperature", 5, "--max-new-tokens", 60, "--json").json["text"]
    assert "\ufffd" in text
    text.encode("utf-8")
    assert elman("sample", out, "--temperature", 5, "--max-new-tokens", 60).out == text + "\n"


def test_every_setting_of_choosing_is_a_flag(elman, run):
    words = ["--presence-penalty", "-0.5", "--frequency-penalty", "0.5", "--repetition-penalty", "1.1"]
    words += ["--bad-words", "cat", "--bad-words", "dog", "--logit-bias", "e=-2.5", "--logit-bias", "at=1"]
    words += ["--suppress-tokens", "2", "--suppress-tokens", "3", "--min-p", "0.01", "--typical-p", "0.9"]
    words += ["--epsilon-cutoff", "0.001", "--eta-cutoff", "0.001", "--no-repeat-ngram-size", "4"]
    words += ["--min-new-tokens", "5", "--max-new-tokens", "20", "--json"]
    sampling = elman("sample", run, *words).json["sampling"]
    assert sampling["presence_penalty"] == -0.5
    assert sampling["bad_words"] == ["cat", "dog"]
    assert sampling["logit_bias"] == [["e", -2.5], ["at", 1.0]]
    assert sampling["suppress_tokens"] == [2, 3]
    beams = elman("sample", run, "--num-beams", "3", "--length-penalty", "2", "--max-new-tokens", 8, "--json").json
    assert (beams["sampling"]["num_beams"], len(beams["tokens"])) == (3, 8)


# A place in the text as a file.


def test_going_on_from_a_saved_state_gives_the_text_that_would_have_come(elman, run, tmp_path):
    words = ["--seed", 4, "--temperature", "0.9", "--frequency-penalty", "0.4"]
    whole = elman("sample", run, "--prompt", "the ", *words, "--max-new-tokens", 40, "--json").json["text"]
    state, later = tmp_path / "state", tmp_path / "later"
    first = elman(
        "sample", run, "--prompt", "the ", *words, "--max-new-tokens", 15, "--json", "--save-state", state
    ).json["text"]
    rest = elman(
        "sample", run, "--load-state", state, *words, "--max-new-tokens", 25, "--json", "--save-state", later
    ).json["text"]
    assert first + rest == whole
    assert package.load(run).load_reading(later).text == "the " + whole
    assert elman("sample", run, "--load-state", state, *words, "--max-new-tokens", 25).out == rest + "\n"
    read_on = elman("sample", run, "--load-state", state, "--prompt", " moon", "--max-new-tokens", 0).out
    assert read_on == " moon\n"


def test_a_state_of_another_model_is_one_line(elman, run, corpus, tiny, tmp_path):
    state, other = tmp_path / "state", tmp_path / "other"
    elman("sample", run, "--save-state", state, "--max-new-tokens", 1)
    elman("train", corpus, "--out", other, *tiny, "--seed", 8)
    answer = elman("sample", other, "--load-state", state)
    assert (answer.code, answer.out) == (2, "")
    assert "is a state of another model" in answer.err
    assert answer.err.count("\n") == 1


# In turns.


def in_turns(elman, monkeypatch, run, said, *words):
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    return elman("sample", run, "--interactive", *words)


def test_a_text_is_written_in_turns(elman, run, tmp_path, monkeypatch):
    state = tmp_path / "state"
    said = f"type the cat\n1\n\ndraw 5\nundo\ntemperature 0\nshow 3\nhelp\nsave {state}\ntext\nquit\nnever\n"
    answer = in_turns(elman, monkeypatch, run, said, "--prompt", "a ")
    assert (answer.code, answer.err) == (0, "")
    turns = answer.out.split("> ")
    assert len(turns) == 12
    assert "\n   1  " in turns[0]
    text = package.load(run).load_reading(state).text
    assert text.startswith("a the cat")
    assert len(text) == len("a the cat") + 2
    assert turns[10].startswith(text)
    assert turns[6].count("\n") == 2  # temperature 0 leaves one token
    assert "take back the last step" in turns[8]


def test_settings_of_several_values_are_set_and_taken_back_in_turns(elman, run, monkeypatch):
    said = "show 99\nbad-words 'the cat' a e\nsuppress-tokens 5 6\nbad-words\nsuppress-tokens\nlogit-bias e=50 a=40\n"
    turns = in_turns(elman, monkeypatch, run, said, "--prompt", "the ").out.split("> ")
    every, without, fewer, more, again, biased = (turn.split("\n")[1:-1] for turn in turns[1:7])
    assert len(every) - len(without) == 2  # the cat needs more than one token
    assert len(without) - len(fewer) == 2
    assert len(more) - len(fewer) == 2
    assert again == every
    assert [line.split()[-1] for line in biased[:2]] == ["'e'", "'a'"]


def test_a_search_names_no_seed_and_takes_eight_bits(elman, run):
    words = ["sample", run, "--num-beams", 3, "--max-new-tokens", 6]
    answer = elman(*words, "--engine", "int8")
    assert "6 tokens, found by beam search, ended by" in answer.err
    assert elman(*words, "--json").json["seed"] is None


def test_the_end_of_the_input_ends_it_and_the_place_is_saved(elman, run, tmp_path, monkeypatch):
    state = tmp_path / "state"
    answer = in_turns(elman, monkeypatch, run, "type the\n", "--save-state", state)
    assert (answer.code, answer.err) == (0, "")
    again = in_turns(elman, monkeypatch, run, "text\n", "--load-state", state)
    assert "\nthe\n" in again.out.replace("> the", "\nthe")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("hello", "unknown word 'hello'; did you mean 'help'?"),
        ("repetition_penaltie 2", "did you mean 'repetition-penalty'?"),
        ("999", "there is no option 999"),
        ("0", "there is no option 0"),
        ("draw x", "'x' is not a number of tokens"),
        ("show", "is not a number of tokens"),
        ("undo", "there is no step to take back"),
        ("type Ж", "never saw: 'Ж'"),
        ("temperature -1", "sampling.temperature"),
        ("top-p", "top-p needs something behind it"),
        ("save /no/such/folder/file", "there is no folder '/no/such/folder'"),
        ("num-beams 3", "num_beams has no meaning here"),
        ("bad-words 'the", "opens a quote that nothing closes"),
        ("suppress-tokens a", "sampling.suppress_tokens"),
        ("logit-bias the", "no TEXT=BIAS"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(elman, run, monkeypatch, said, message):
    answer = in_turns(elman, monkeypatch, run, f"{said}\n", "--prompt", "the ")
    assert answer.code == 0
    assert message in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out.count("> ") == 2


def test_the_words_that_are_listed_are_all_accepted(elman, run, monkeypatch):
    listed = in_turns(elman, monkeypatch, run, "xyzzy\n").err.split("accepted: ")[1].split(", ")
    assert {"top-p", "draw"} <= set(map(str.strip, listed))
    for word in map(str.strip, listed):
        for spelling in (word, word.replace("-", "_")):
            said = in_turns(elman, monkeypatch, run, f"{spelling}\n").err
            assert "unknown word" not in said
            assert "no meaning" not in said


def test_what_is_typed_in_turns_may_hold_what_is_skipped(elman, run, monkeypatch):
    answer = in_turns(elman, monkeypatch, run, "type the Жcat\ntext\n", "--unknown", "skip")
    assert answer.err == ""
    assert "the cat" in answer.out
    assert "after temperature and filters" in answer.out


def test_what_a_text_copies_is_said(elman, run, corpus, tmp_path):
    answer = elman("sample", run, "--seed", 3, "--check-copies", run)
    assert "no copy: the longest piece that stands in the training text has" in answer.err
    result = elman("sample", run, "--seed", 3, "--check-copies", corpus, "--json").json
    found = result["copies"]
    assert found["text"] == result["text"][found["start"] : found["start"] + found["longest"]]
    assert found["text"] in corpus.read_text(encoding="utf-8")
    recited = tmp_path / "recited.txt"
    recited.write_text("before " + result["text"] * 5 + " after", encoding="utf-8")
    copied = elman("sample", run, "--seed", 3, "--check-copies", recited, "--json").json["copies"]
    assert copied["longest"] == len(result["text"])
    missing = elman("sample", run, "--check-copies", tmp_path / "nothing.txt")
    assert missing.code == 2
    assert "no file, folder or corpus" in missing.err
    assert elman("sample", run, "--interactive", "--check-copies", run).code == 2


ALONE = """
import json, sys
from elman.cli import main

main(sys.argv[1:])
json.dump(sorted(sys.modules), sys.stderr)
"""


def test_a_first_token_waits_for_no_module_that_it_does_not_need(run, environment):
    """Beside PyTorch, whose import takes most of the time, nothing large is brought in; the compiler neither."""
    words = ["sample", str(run), "--max-new-tokens", "1"]
    for _ in range(2):  # after the first, the step is compiled
        told = subprocess.run(
            [sys.executable, "-c", ALONE, *words], env=environment, capture_output=True, text=True, check=True
        ).stderr
    loaded = set(json.loads(told.splitlines()[-1]))
    assert {"elman.engine", "elman.generation", "torch"} <= loaded
    unneeded = ("training", "inspection", "comparison", "judge", "page")
    assert loaded.isdisjoint({f"elman.{name}" for name in unneeded})
    assert loaded.isdisjoint({"numba", "sympy", "matplotlib", "tokenizers", "transformers", "torch._dynamo"})
