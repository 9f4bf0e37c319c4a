"""The page: everything escaped, valid, reproducible, and what it shows is what was given."""

from __future__ import annotations

import errno
import os
import shutil
from html.parser import HTMLParser

import pytest

from elman.errors import UserError
from elman.page import Page, Piece, new_figure, shown, write_svg

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


def test_a_browser_shows_it_without_a_sideways_scroll(tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on this machine")
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
