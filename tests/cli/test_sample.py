"""``sample``: the same text as in Python, prompts of any kind, nothing that garbles a terminal."""

from __future__ import annotations

import io
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
    assert result["sampling"] == {"max_new_tokens": 30, "temperature": 0.7, "top_k": 9, "top_p": 0.9}


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
