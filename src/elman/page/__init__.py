"""One offline HTML page: text, tables, pictures and coloured text, readable on a phone and printable.

    page = Page("A run at a glance", "A character LSTM, trained for three minutes on the plays.")
    page.section("How good it is", "Measured on the last tenth of the text.")
    page.numbers({"bits per character": 2.146, "perplexity": 4.43})
    figure, axes = new_figure()
    axes.plot(updates, nats)
    page.figure(figure, "Loss while it trained. Lower is better.")
    page.write(Path("report.html"))

Whatever is shown is escaped, and nothing in it changes the direction of what follows. The page fetches nothing, runs no
script and carries no date, so that the same results give the same file.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elman.errors import UserError
from elman.files import write_atomically
from elman.visible import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3b6fb6", "#d1662c", "#3f8f5b", "#8a5aa8", "#b3415a", "#7a6a4f", "#3a9aa5", "#8c8c8c")
"""Of the lines of a picture, in this order; told apart by lightness too."""
_SHADES = 12
"""Steps on either side of the middle of a scale in coloured text."""
_BREAK = "↵"
_SHORT = 24
"""Characters of a cell that may keep its line to itself."""
_NUMBER = r"[-+]?\d[\d,.]*(?:e[-+]\d+)?%?"
_FIGURE = re.compile(rf"[–-]|infinite|not a number|{_NUMBER}(?: (?:to|of) {_NUMBER})?")


class Piece(NamedTuple):
    """Part of a coloured text."""

    text: str
    value: float
    """Where it stands on the scale: -1 to 1, and 0 has no colour. What lies outside, or is no number, is cut to it."""
    note: str = ""
    """Shown when the pointer rests on it."""


class Page:
    """A page that grows from the top down.

    Args:
        title: of the page.
        lead: what it shows, in a sentence or two.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title, self.lead = title, lead
        self._blocks: list[dict[str, Any]] = []
        self._num_figures = 0

    def section(self, heading: str, text: str = "") -> None:
        """Begin a section; the contents at the top lead to it."""
        self._add("section", heading=heading, anchor=f"section-{len(self._blocks)}")
        if text:
            self.text(text)

    def text(self, paragraph: str) -> None:
        """Add a paragraph."""
        self._add("text", paragraph=paragraph)

    def numbers(self, values: Mapping[str, object]) -> None:
        """Add a row of large figures, each above its name."""
        self._add("numbers", values={name: shown(value) for name, value in values.items()})

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """Add a table, its cells as :func:`shown` writes them.

        The first column names the rows and stays in sight where the table is scrolled sideways, if its names are short.
        Any other that is mostly figures stands right-aligned. Figures and short names are never broken over two lines,
        long text anywhere.
        """
        texts = [[shown(cell) for cell in row] for row in rows]
        first, *others = zip(*texts, strict=True) if texts else [()] * len(columns)
        aligned = [False, *(sum(map(_is_figure, column)) > len(column) / 2 for column in others)]
        self._add(
            "table",
            columns=list(zip(columns, aligned, strict=True)),
            rows=[[(text, _style_of(text, right)) for text, right in zip(row, aligned, strict=True)] for row in texts],
            is_named=len(columns) > 2 and all(len(text) <= _SHORT for text in first),
            caption=caption,
        )

    def code(self, text: str, caption: str = "") -> None:
        """Add text as it is: a sample, a settings file, a command."""
        self._add("code", text=text, caption=caption)

    def fold(self, summary: str, text: str) -> None:
        """Add long text as it is, which opens when it is asked for, and always on paper."""
        self._add("fold", summary=summary, text=text)

    def figure(self, figure: Figure, caption: str) -> None:
        """Add a picture, as SVG within the page."""
        self._num_figures += 1
        self._add("figure", svg=_inline_svg(figure, f"figure-{self._num_figures}"), caption=caption)

    def coloured(self, pieces: Iterable[Piece], low: str, high: str, caption: str = "") -> None:
        """Add a text whose pieces are coloured by their values.

        Args:
            pieces: the text in order. Line breaks are kept; a sign before each shows the colour and note of its piece.
            low: what -1 means, blue; empty where no value is below 0.
            high: what 1 means, orange.
            caption: above the text.
        """
        runs, line_break = [], ""
        # Neighbours that look alike become one element: a page of a long text stays small.
        for (shade, note), group in groupby(pieces, key=lambda piece: (_shade(piece.value), piece.note)):
            text = "".join(piece.text for piece in group)
            if (shade or note) and "\n" in text:
                # A break alone has no surface that a colour could be painted on, or a pointer rest on.
                text, line_break = text.replace("\n", f"{_BREAK}\n"), _BREAK
            runs.append({"shade": shade, "note": note, "text": text})
        self._add("coloured", runs=runs, low=low, high=high, caption=caption, line_break=line_break)

    def columns(self, texts: Mapping[str, str], summary: str = "") -> None:
        """Add several texts side by side, each under its name; one below the other where there is no room.

        Args:
            texts: by name.
            summary: stands in their place until they are asked for; empty: they are shown.
        """
        self._add("columns", texts=dict(texts), summary=summary)

    def _add(self, kind: str, **values: Any) -> None:
        self._blocks.append({"kind": kind, **values})

    def html(self) -> str:
        """The page as one string."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        loader = PackageLoader("elman.page", "")
        environment = Environment(
            loader=loader,
            autoescape=True,
            finalize=_cleaned,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        template = environment.get_template("page.html")
        sections = [block for block in self._blocks if block["kind"] == "section"]
        return template.render(title=self.title, lead=self.lead, blocks=self._blocks, sections=sections, shades=_SHADES)

    def write(self, path: Path) -> None:
        """Write the page to a file. Raises UserError: it cannot be written."""
        try:
            write_atomically(path, self.html().encode())
        except OSError as error:
            raise UserError(f"{path}: the page cannot be written ({error.strerror}); name another file") from None


def is_page(path: Path) -> bool:
    """Whether a file is a page of this kind, by its beginning."""
    template = Path(__file__).with_name("page.html").read_bytes()
    beginning = template[: template.index(b"{{")]
    with path.open("rb") as file:
        return file.read(len(beginning)) == beginning


def _cleaned(value: Any) -> Any:
    """What stands in a page for a value; pictures, which are markup, are clean already."""
    from markupsafe import Markup

    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def shown(value: object) -> str:
    """A value as a page shows it: whole numbers with commas, others to four figures, nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else "not a number"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    decimals = 4 if abs(value) < 1 else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def _is_figure(text: str) -> bool:
    """Whether a cell holds a number, an interval, a count out of a total, or the lack of one."""
    return _FIGURE.fullmatch(text) is not None


def _style_of(text: str, is_aligned: bool) -> str:
    """The classes of a cell: ``n`` to the right; ``l`` long; ``w`` unbroken, a figure with its unit or a name."""
    names = ["n"] if is_aligned else []
    if len(text) > _SHORT:
        names.append("l")
    elif " " not in text or re.match(_NUMBER, text):
        names.append("w")
    return " ".join(names)


def new_figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 3.4) -> tuple[Figure, Any]:
    """A picture in the page's style: the figure, and its axes as ``Figure.subplots`` gives them.

    Args:
        rows: of axes.
        columns: of axes.
        width: of the whole, in inches; 8 fills a page.
        height: the same.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.subplots(rows, columns)
    for one in np.ravel(axes):
        _style(one)
    return figure, axes


def _style(axes: Axes) -> None:
    """Quiet frame, faint grid, the page's colours."""
    axes.set_prop_cycle(color=list(COLOURS))
    axes.set_axisbelow(True)
    axes.patch.set_alpha(0.0)
    axes.grid(True, color="#88888833", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(colors="#666666", labelcolor="#444444", labelsize=9)


def write_svg(figure: Figure, path: Path) -> None:
    """Write a picture to a file of its own, on white."""
    figure.patch.set(alpha=1.0, facecolor="white")
    write_atomically(path, _svg(figure).encode())


def _svg(figure: Figure) -> str:
    import matplotlib

    out = io.StringIO()
    _scale_what_there_is(figure)
    _read_no_formulas(figure)
    # Text stays text: small, searchable, in the reader's font. A fixed salt, no date: the same picture, the same file.
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "elman", "font.family": "sans-serif"}),
        warnings.catch_warnings(),
    ):
        # Letters that the fonts of this machine lack are drawn by the reader's browser.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+$", "", clean(out.getvalue()), flags=re.MULTILINE)


def _scale_what_there_is(figure: Figure) -> None:
    """Make a logarithmic axis on which nothing has a place, zeros and gaps alone, a plain one."""
    for axes in figure.axes:
        for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
            if axis.get_scale() == "log" and not math.isfinite(axis.get_minpos()):
                set_scale("linear")


def _read_no_formulas(figure: Figure) -> None:
    """Take names as they are, dollar signs too: only the powers of ten on a logarithmic axis are formulas."""
    from matplotlib.text import Text

    logarithmic = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() != "linear"]
    ticks = [tick for axis in logarithmic for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    powers = {label for tick in ticks for label in (tick.label1, tick.label2)}
    for text in figure.findobj(Text):
        text.set_parse_math(text in powers)


def _inline_svg(figure: Figure, name: str) -> Any:
    from markupsafe import Markup

    svg = _svg(figure)
    svg = svg[svg.index("<svg") :]
    # Every picture numbers its parts from one; within a page an id may stand only once.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return Markup(re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', svg, count=1))


def _shade(value: float) -> int:
    return 0 if math.isnan(value) else round(max(-1.0, min(1.0, value)) * _SHADES)
