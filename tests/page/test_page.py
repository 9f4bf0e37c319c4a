"""The page: everything escaped, valid, reproducible, and what it shows is what was given."""

from __future__ import annotations

import errno
import os
import shutil
from html.parser import HTMLParser

import pytest

from elman.errors import UserError
from elman.page import Page, Piece, is_page, new_figure, shown, write_svg

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Outline(HTMLParser):
    """Reads a page back: that its elements are nested, its ids, its text and what is coloured."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.coloured: list[tuple[str, str]] = []
        self._shade = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.sources += [value for key, value in attributes if key in ("src", "href", "xlink:href")]
        self._shade = found.get("class") or "" if tag == "span" else ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "span" and self._shade[:1] in ("u", "d"):
            self.coloured.append((self._shade, data))


def full_page() -> Page:
    page = Page("<title> & more", "A lead.")
    page.section("First", "A paragraph with <b>.")
    page.numbers({"bits per character": 2.14567, "tokens": 1234567})
    page.table(["name", "n"], [["<i>", 1], ["none", None]], "A table")
    page.code("a < b\n  c", "Code")
    page.fold("More", "long </details> text")
    page.section("Second")
    for _ in range(2):
        figure, axes = new_figure()
        axes.plot([1, 2], [3, 4], label="<line>")
        axes.legend()
        page.figure(figure, "A picture")
    page.coloured([Piece("ab", 1.0), Piece("c", 1.0), Piece("d", 0.0), Piece("<e>", -2.0, "note")], "low", "high")
    page.columns({"0.3": "one", "0.8": "two"})
    return page


def test_a_page_is_nested_escaped_and_fetches_nothing():
    outline = Outline(full_page().html())
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert all(source.startswith("#") for source in outline.sources)
    for text in ("<title> & more", "A paragraph with <b>.", "a < b\n  c", "long </details> text", "1,234,567", "2.146"):
        assert text in outline.text


def test_every_reference_within_a_picture_is_met():
    outline = Outline(full_page().html())
    assert {source[1:] for source in outline.sources} <= set(outline.ids)


def test_colours_follow_the_values():
    outline = Outline(full_page().html())
    assert outline.coloured == [("u12", "abc"), ("d12", "<e>")]


def test_a_line_break_shows_its_colour():
    page = Page("Breaks")
    page.coloured([Piece("a", 0.5), Piece("\n", 1.0, "+5 nats"), Piece("\n", 0.0), Piece("b", 0.0)], "low", "high")
    html = page.html()
    assert Outline(html).coloured == [("u6", "a"), ("u12", "↵\n")]
    assert '<span class="u12" title="+5 nats">↵\n</span><span>\nb</span>' in html
    assert "↵ a line break" in html
    plain = Page("Breaks")
    plain.coloured([Piece("a\n", 0.0), Piece("b", 1.0)], "low", "high")
    assert "↵" not in plain.html()


def test_nothing_shown_is_read_as_a_formula_a_command_or_a_direction():
    page = Page("a\x1b[31m", "b\u202ec")
    page.table(["\x00", "n"], [["d\u2067e", 1]], "f\x07")
    page.coloured([Piece("g\u202e", 1.0, "h\x0c")], "i\x0b", "j\udcff")
    page.code("k\x1b")
    figure, axes = new_figure()
    axes.plot([1, 2], [0.001, 1000], label="a$_$")
    axes.set_xticks([1, 2], ["$x_$\x1b", "\u202ey"])
    axes.set_title("$\\frac$")
    axes.set_yscale("log")
    axes.legend()
    page.figure(figure, "A picture")
    html = page.html()
    assert not set(html) & set("\x00\x07\x0b\x0c\x1b\u202e\u2067\udcff")
    for text in ("a␛[31m", r"b\u202ec", "␀", r"d\u2067e", "f␇", r"g\u202e", "h␌", "i␋", "j\ufffd", "k␛"):
        assert text in html
    for text in ("a$_$", "$x_$␛", r"\u202ey", r"$\frac$"):
        assert text in html
    assert "mathdefault" not in Outline(html).text  # what a logarithmic axis writes is a formula
    assert html.encode()


@pytest.mark.parametrize(("values", "scale"), [([float("nan")] * 2, "linear"), ([float("nan"), 0.1], "log")])
def test_a_logarithmic_axis_on_which_nothing_has_a_place_is_drawn(values, scale):
    figure, axes = new_figure()
    axes.plot([1, 2], values)
    axes.set_xscale("log")
    axes.set_yscale("log")
    page = Page("Nothing")
    page.figure(figure, "A picture")
    assert "<svg" in page.html()
    assert (axes.get_xscale(), axes.get_yscale()) == (scale, scale)


def test_a_page_is_known_by_its_beginning(tmp_path):
    full_page().write(tmp_path / "page.html")
    (tmp_path / "other.html").write_text("<!DOCTYPE html>\n<html></html>", "utf-8")
    (tmp_path / "empty.html").touch()
    assert [is_page(tmp_path / name) for name in ("page.html", "other.html", "empty.html")] == [True, False, False]


def test_the_same_results_give_the_same_file():
    assert full_page().html() == full_page().html()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (True, "yes"), (1234, "1,234"), (1234.5, "1,234"), (2.14567, "2.146"), (0.012345, "0.0123"),
        (1e-7, "1e-07"), (3.2e9, "3.2e+09"), (float("inf"), "infinite"), (float("nan"), "not a number"), ("x", "x"),
        (0.0, "0.0000"),
    ],
)  # fmt: skip
def test_values_are_shown_to_four_figures(value, text):
    assert shown(value) == text


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot be written \(Is a directory\)"):
        full_page().write(tmp_path)


def test_a_picture_of_its_own_is_reproducible(tmp_path):
    for name in ("a.svg", "b.svg"):
        figure, axes = new_figure(1, 2)
        axes[0].plot([1, 2])
        write_svg(figure, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.fixture
def chromium():
    """The browser, which the set-up of the tests installs where it is root on Debian."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed; on Debian: apt install chromium")
    return found


def test_a_browser_shows_it_without_a_sideways_scroll(tmp_path, chromium):
    from playwright.sync_api import sync_playwright

    full_page().write(tmp_path / "page.html")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 390, "height": 800})
        complaints: list[str] = []
        view.on("console", lambda message: complaints.append(message.text))
        view.goto((tmp_path / "page.html").as_uri())
        assert view.evaluate("document.documentElement.scrollWidth") <= 390
        assert view.locator("svg").count() == 2
        assert view.locator("h2").all_inner_texts() == ["First", "Second"]
        browser.close()
    assert complaints == []


WIDE_COLUMNS = ["a unit follows", "unit", "score", "95 %", "effect", "95 %", "clipped", "stuck", "before", "holds"]
WIDE_ROWS = [
    ["indentation-width", "0.c:296", 0.8711, "0.8360 to 0.9003", -0.6411, "-0.5655 to 1.2e-05", "20.2%", "11 of 32",
     "self._nodeTypes_with_children=(xml.dom.Node.ELEMENT_NODE", True],
    ["line-position", "0.h:234", None, "–", float("inf"), "no other units", "8.5%", "0 of 32",
     "a text of short words that may be broken between them", False],
]  # fmt: skip
HEIGHTS = """cells => cells.map(cell => {
    const inside = document.createRange();
    inside.selectNodeContents(cell);
    return [cell.textContent, new Set([...inside.getClientRects()].map(line => Math.round(line.top))).size];
})"""
"""The text of cells, and over how many lines it goes."""


def test_a_column_of_figures_stands_to_the_right_with_its_heading():
    page = Page("Tables")
    page.table(
        ["state", "kind", "size", "what"],
        [["8", "grows", 192, 1], ["16", "lstm", None, "one"], ["9", "gru", "3 of 9", "two"]],
    )
    html = page.html()
    assert '<th>state</th><th>kind</th><th class="n">size</th><th>what</th>' in html
    assert '<td class="w">8</td><td class="w">grows</td><td class="n w">192</td><td class="w">1</td>' in html
    assert '<td class="n w">–</td>' in html
    assert '<td class="n w">3 of 9</td>' in html


@pytest.mark.parametrize("width", [400, 790])
def test_a_wide_table_is_scrolled_by_itself_and_breaks_no_figure(tmp_path, width, chromium):
    from playwright.sync_api import sync_playwright

    page = Page("Tables")
    page.table(WIDE_COLUMNS, WIDE_ROWS)
    page.table(["before", "value"], [["x" * 100, 1.5]])
    page.write(tmp_path / "page.html")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": width, "height": 800})
        view.goto((tmp_path / "page.html").as_uri())
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        heights = dict(view.locator("tbody").first.locator("td").evaluate_all(HEIGHTS))
        figures = ["0.8360 to 0.9003", "-0.5655 to 1.2e-05", "11 of 32", "20.2%", "-0.6411"]
        names = ["indentation-width", "0.c:296", "yes"]
        assert {text: heights[text] for text in figures + names} == dict.fromkeys(figures + names, 1)
        assert heights[WIDE_ROWS[0][8]] > 1
        rooms = view.locator(".wide").evaluate_all("rooms => rooms.map(room => [room.clientWidth, room.scrollWidth])")
        assert rooms[0][1] > rooms[0][0]
        assert rooms[1][1] == rooms[1][0]
        name = view.get_by_text("indentation-width", exact=True)
        before = name.bounding_box()
        view.locator(".wide").first.evaluate("room => { room.scrollLeft = room.scrollWidth }")
        assert view.get_by_text("yes", exact=True).bounding_box()["x"] < width
        assert name.bounding_box() == before
        browser.close()


def test_a_disk_that_fails_leaves_the_page_before(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "report.html"
    Page("Before").write(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"report\.html: the page cannot be written \(No space left on device\)"):
        full_page().write(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
