"""The display tells the truth, fits its terminal, and cannot be garbled by a sample."""

from __future__ import annotations

import io
import math
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

from elman.cli.display import Dashboard, Display, picture
from elman.settings import resolve
from elman.training.folder import Run
from elman.training.loop import Record

HOSTILE = "\x1b[31m[red]a\tb\x00\x07\r[/red][link=x]\u202eabc\u2028\x85\ud800é漢字🙂 " * 9


def update(number: int, nats: float, elapsed: float, progress: float = 0.25, speed: float = 50.0) -> dict[str, Any]:
    return {
        "kind": "update",
        "update": number,
        "epoch": 0,
        "tokens": 100 * number,
        "nats": nats,
        "grad_norm": 0.5,
        "learning_rate": 0.002,
        "measured": {"elapsed_seconds": elapsed, "progress": progress, "seconds": 0.1, "tokens_per_second": speed},
    }


def evaluation(number: int, nats: float | None, best: bool) -> dict[str, Any]:
    return {"kind": "evaluation", "update": number, "nats_per_token": nats, "best": best}


def sample(number: int, text: str, temperature: float = 0.8) -> dict[str, Any]:
    return {"kind": "sample", "update": number, "prompt": "", "temperature": temperature, "text": text}


def drawn(dashboard: Dashboard, width: int = 80, height: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(dashboard)
    return console.file.getvalue().splitlines()


def test_loss_and_speed_are_those_of_the_last_second():
    dashboard = Dashboard(resolve())
    for number in range(1, 41):
        dashboard.see(update(number, nats=10.0 if number < 20 else 2.0, elapsed=number / 10))
    assert dashboard.nats == pytest.approx(2.0)
    assert dashboard.tokens_per_second == pytest.approx(1000)
    assert dashboard.seconds_left == pytest.approx(12.0)


def test_the_speed_after_a_return_is_that_of_what_came_after_it():
    dashboard = Dashboard(resolve())
    for number, elapsed in ((40, 3.0), (41, 3.1), (11, 3.2), (12, 3.3)):
        dashboard.see(update(number, nats=2.0, elapsed=elapsed))
    assert dashboard.tokens_per_second == pytest.approx(1000)


def test_one_update_alone_has_its_own_speed():
    dashboard = Dashboard(resolve())
    dashboard.see(update(1, nats=3.0, elapsed=0.1, speed=77.0))
    assert dashboard.tokens_per_second == 77.0


@pytest.mark.parametrize(
    ("level", "expected"),
    [("char", "1.000 bits/char"), ("byte", "1.000 bits/byte"), ("word", "perplexity 2.0"), ("bpe", "perplexity 2.0")],
)
def test_a_loss_is_told_in_the_unit_of_its_level(level, expected):
    dashboard = Dashboard(resolve({"tokenizer": {"level": level}}))
    dashboard.see(update(1, nats=math.log(2), elapsed=0.1))
    assert expected in "\n".join(drawn(dashboard))


def test_latest_and_best_estimate_and_the_samples_of_the_newest_update_are_shown():
    dashboard = Dashboard(resolve())
    dashboard.see(update(30, nats=2.0, elapsed=3.0))
    dashboard.see(evaluation(10, math.log(2), best=True))
    dashboard.see(sample(10, "of old"))
    dashboard.see(evaluation(20, 2 * math.log(2), best=False))
    dashboard.see(sample(20, "in the cold", 0.3))
    dashboard.see(sample(20, "in the heat", 1.5))
    text = "\n".join(drawn(dashboard))
    assert "held out 2.000 bits/char at update 20" in text
    assert "best     1.000 bits/char at update 10" in text
    assert "in the cold" in text
    assert "in the heat" in text
    assert "of old" not in text
    assert "0:09 left" in text


def test_an_estimate_that_is_not_finite_is_said_so():
    dashboard = Dashboard(resolve())
    dashboard.see(update(1, nats=2.0, elapsed=1.0))
    dashboard.see(evaluation(1, None, best=False))
    assert "not finite" in "\n".join(drawn(dashboard))


@pytest.mark.parametrize("width", [20, 30, 50, 63, 64, 80, 200])
@pytest.mark.parametrize("height", [8, 15, 24, 60])
def test_every_line_fits_and_the_panel_leaves_the_last_line_free(width, height):
    dashboard = Dashboard(resolve({"data": {"corpus": [HOSTILE]}}))
    for number in range(1, 700):
        dashboard.see(update(number, nats=5.0 + math.sin(number), elapsed=number * 1000.0))
    dashboard.see(evaluation(600, 1.0, best=True))
    for temperature in (0.3, 0.8, 1.5):
        dashboard.see(sample(600, HOSTILE, temperature))
    lines = drawn(dashboard, width, height)
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) < max(height, 12)
    assert lines[0].startswith("╭")
    assert lines[-1].endswith("╯")


def test_a_sample_is_shown_as_it_is_without_what_a_terminal_would_obey():
    dashboard = Dashboard(resolve())
    dashboard.see(update(1, nats=2.0, elapsed=1.0))
    dashboard.see(sample(1, HOSTILE))
    text = "\n".join(drawn(dashboard, 120))
    assert "␛[31m[red]a" in text
    assert "[link=x]" in text
    assert "é漢字🙂" in text
    assert not set(text) & set("\x1b\x00\x07\r\t\u202e\u2028\x85\ud800")


def test_the_curve_falls_from_left_to_right_however_long_the_training():
    for count in (2, 239, 240, 5000):
        dashboard = Dashboard(resolve())
        for number in range(1, count + 1):
            dashboard.see(update(number, nats=5.0 - 4 * number / count, elapsed=number / 10))
        (line,) = (line for line in drawn(dashboard) if set(line) & set("▁█"))
        bars = [bar for bar in line if bar in "▁▂▃▄▅▆▇█"]
        assert bars == sorted(bars, reverse=True)
        assert (bars[0], bars[-1]) == ("█", "▁")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record_of(line: dict[str, Any]) -> Record:
    values = {key: value for key, value in line.items() if key not in ("kind", "measured")}
    return Record(line["kind"], values, line.get("measured", {}))


def test_on_a_terminal_the_panel_is_live_and_seldom_redrawn(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with Display(resolve()) as display:
        display.on_record(Record("notice", {"text": "[bold]so it is"}))
        for number in range(1, 2000):
            display.on_record(record_of(update(number, nats=2.0, elapsed=number / 100)))
        display.on_record(record_of(sample(2000, "a sample")))
    written = terminal.getvalue()
    assert "note: [bold]so it is" in written
    assert "a sample" in written
    assert written.count("loss") < 12
    assert written.endswith("\x1b[?25h")  # the cursor is back


def test_elsewhere_there_are_plain_lines(capsys):
    with Display(resolve()) as display:
        for number in range(1, 2000):
            display.on_record(record_of(update(number, nats=2.0, elapsed=number / 100)))
        display.on_record(record_of(evaluation(1999, math.log(2), best=True)))
        display.on_record(record_of(sample(1999, "a\nsample" + "x" * 500)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "tokens/s" in lines[0]
    assert lines[1] == "held out: 1.000 bits/char at update 1,999, the best"
    assert lines[2].startswith("sample at temperature 0.8: a↵samplexxx")
    assert max(map(len, lines)) < 140


def test_a_log_can_be_drawn_again_as_a_picture(run):
    opened = Run.open(run)
    svg = picture(opened.config(), opened.records())
    text = "".join(ElementTree.fromstring(svg).itertext()).replace("\u00a0", " ")
    assert "seed 7" in text
    assert "done" in text


def test_a_display_that_nobody_reads_any_more_is_given_up(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stderr", Gone())
    display = Display(resolve({}))
    with display:
        for text in ("one", "two"):
            display.on_record(Record("notice", {"text": text}))
    assert display._is_broken
