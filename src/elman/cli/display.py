"""How a training looks while it goes on: a panel on a terminal, plain lines elsewhere.

Everything shown is computed from the records of the run, so that a log can be drawn again later.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elman.metrics import perplexity
from elman.settings import Config
from elman.training.loop import Callback, Record
from elman.visible import clean

_MESSAGES = ("notice", "skipped", "returned")
"""Kinds of records that are a text to be shown."""
_SECONDS_BETWEEN_REFRESHES = 0.25
_SHARE_OF_TIME = 0.005
_SECONDS_BETWEEN_LINES = 5.0
_SPEED_WINDOW_SECONDS = 1.0
_BARS = "▁▂▃▄▅▆▇█"
_MAX_CURVE = 240
_NARROW = 64
_SAMPLES_SHOWN = 3


class Dashboard:
    """What is known of a training, brought up to date record by record, and drawn as a panel.

    Args:
        config: the settings of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.latest: dict[str, Mapping[str, Any]] = {}
        """The newest record of each kind, in the form of a line of ``metrics.jsonl``."""
        self.best: Mapping[str, Any] | None = None
        """The best estimate."""
        self._samples: list[Mapping[str, Any]] = []
        self._window: deque[tuple[float, int, float]] = deque()
        self._curve: list[float] = []
        self._bucket: list[float] = []
        self._bucket_size = 1

    def see(self, record: Mapping[str, Any]) -> None:
        """Take in a record, in the form of a line of ``metrics.jsonl``."""
        self.latest[record["kind"]] = record
        if record["kind"] == "update":
            self._see_update(record)
        elif record["kind"] == "evaluation" and record["best"]:
            self.best = record
        elif record["kind"] == "sample":
            if self._samples and self._samples[-1]["update"] != record["update"]:
                self._samples.clear()
            self._samples.append(record)

    def _see_update(self, record: Mapping[str, Any]) -> None:
        elapsed = record["measured"]["elapsed_seconds"]
        if self._window and record["tokens"] < self._window[-1][1]:  # the training has gone back
            self._window.clear()
        self._window.append((elapsed, record["tokens"], record["nats"]))
        while len(self._window) > 2 and elapsed - self._window[1][0] >= _SPEED_WINDOW_SECONDS:
            self._window.popleft()
        self._bucket.append(record["nats"])
        if len(self._bucket) == self._bucket_size:
            self._curve.append(math.fsum(self._bucket) / self._bucket_size)
            self._bucket.clear()
        if len(self._curve) == _MAX_CURVE:  # a point now stands for twice as many updates
            self._curve = [(a + b) / 2 for a, b in zip(self._curve[::2], self._curve[1::2], strict=True)]
            self._bucket_size *= 2

    @property
    def nats(self) -> float:
        """The mean loss of the updates of the last second."""
        return math.fsum(nats for _, _, nats in self._window) / len(self._window)

    @property
    def tokens_per_second(self) -> float:
        """The speed over the last second of training."""
        (start, before, _), (end, after, _) = self._window[0], self._window[-1]
        if end > start:
            return (after - before) / (end - start)
        return float(self.latest["update"]["measured"]["tokens_per_second"])

    @property
    def seconds_left(self) -> float:
        """An estimate from the part of the budget that is used up."""
        measured = self.latest["update"]["measured"]
        progress = max(measured["progress"], 1e-9)
        return measured["elapsed_seconds"] * (1 - progress) / progress

    def worth(self, nats: float | None) -> str:
        """A loss in nats per token in the unit that people compare: bits per character or byte, or perplexity."""
        if nats is None:
            return "not finite"
        level = self.config.tokenizer.level
        if level in ("char", "byte"):
            return f"{nats / math.log(2):.3f} bits/{level}"
        return f"perplexity {perplexity(nats):,.1f}"

    def update_line(self) -> str:
        """The newest update in one line."""
        record = self.latest["update"]
        figures = [f"{self.nats:.3f} nats", self.worth(self.nats), f"{self.tokens_per_second:,.0f} tokens/s"]
        if "grad_norm" in record:  # a counted model has neither
            figures += [f"gradient {record['grad_norm']:#.3g}", f"rate {record['learning_rate']:#.3g}"]
        figures.append(f"{_clock(self.seconds_left)} left")
        return f"update {record['update']:,}, epoch {record['epoch']}: {', '.join(figures)}"

    def estimate(self, nats: float | None, update: int | None) -> str:
        """What an estimate on the validation part says."""
        return "no estimate" if update is None else f"{self.worth(nats)} at update {update:,}"

    def _newest(self, record: Mapping[str, Any] | None) -> str:
        record = record or {"nats_per_token": None, "update": None}
        return self.estimate(record["nats_per_token"], record["update"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 4
        body: list[RenderableType] = []
        if "update" in self.latest:
            body += [self._figures(width), self._sparkline(width), self._progress(width)]
        else:
            body.append(Text("the first update is on its way", style="dim"))
        used = 2 + (9 if width < _NARROW else 5)
        body += self._sample_lines(console, width, max_lines=console.height - used - 2)
        data = ", ".join(Path(name).name for name in self.config.data.corpus)
        title = clean(f"elman · {self.config.model.kind} · {data} · seed {self.config.seed}")
        yield Panel(
            Group(*body),
            title=Text(title, style="bold", overflow="ellipsis", no_wrap=True),
            title_align="left",
            border_style="blue",
        )

    def _figures(self, width: int) -> Table:
        record = self.latest["update"]
        left = [
            ("loss", Text(f"{self.nats:.3f} nats  {self.worth(self.nats)}", style="bold cyan")),
            ("held out", Text(self._newest(self.latest.get("evaluation")))),
            ("best", Text(self._newest(self.best), style="green")),
        ]
        right = [
            ("speed", Text(f"{self.tokens_per_second:,.0f} tokens/s")),
            ("gradient", Text(f"{record['grad_norm']:#.3g} before clip" if "grad_norm" in record else "none")),
            ("rate", Text(f"{record['learning_rate']:#.3g}" if "learning_rate" in record else "none")),
        ]
        table = Table.grid(padding=(0, 1, 0, 0), expand=True)
        rows = [(*a, *b) for a, b in zip(left, right, strict=True)] if width >= _NARROW else [*left, *right]
        for column in range(0, len(rows[0]), 2):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(no_wrap=True, ratio=None if column else 1)
        for row in rows:
            table.add_row(*row)
        return table

    def _sparkline(self, width: int) -> Text:
        curve = self._curve or [self.nats]
        low, high = min(curve), max(curve)
        head, tail = f"{high:.2f} ", f" {low:.2f} nats"
        points = max(1, min(len(curve), width - len(head) - len(tail)))
        means = (curve[len(curve) * i // points : len(curve) * (i + 1) // points] for i in range(points))
        scale = (len(_BARS) - 1) / ((high - low) or 1.0)
        bars = "".join(_BARS[round((math.fsum(part) / len(part) - low) * scale)] for part in means)
        return Text.assemble((head, "dim"), (bars, "cyan"), (tail, "dim"), no_wrap=True, overflow="crop")

    def _progress(self, width: int) -> RenderableType:
        record = self.latest["update"]
        progress = record["measured"]["progress"]
        left = "done" if "end" in self.latest else f"{_clock(self.seconds_left)} left"
        where = Text(f"{progress:4.0%}  update {record['update']:,}  epoch {record['epoch']}  {left}", no_wrap=True)
        bar = ProgressBar(total=1.0, completed=progress)
        table = Table.grid(padding=(0, 1, 0, 0), expand=True)
        table.add_column(ratio=1)
        if width < _NARROW:
            table.add_row(bar)
            table.add_row(where)
        else:
            table.add_column(no_wrap=True)
            table.add_row(bar, where)
        return table

    def _sample_lines(self, console: Console, width: int, max_lines: int) -> Iterable[RenderableType]:
        """The newest samples, each as many lines as there is room for."""
        samples = self._samples[:_SAMPLES_SHOWN]
        lines_each = min(4, max_lines // len(samples) - 1) if samples else 0
        if lines_each < 1:
            return
        for sample in samples:
            heading = f"temperature {sample['temperature']:g}, update {sample['update']:,}"
            yield Text(f"── {heading} ".ljust(width, "─"), style="dim", no_wrap=True, overflow="crop")
            # Only what can be seen is wrapped: a sample may be long.
            text = clean(sample["prompt"] + sample["text"]).expandtabs(4)[: lines_each * width]
            yield from Text(text, overflow="fold").wrap(console, width)[:lines_each]


class Display(Callback):
    """Shows a training on standard error while it goes on; a context manager around it.

    Args:
        config: the settings of the run.
    """

    def __init__(self, config: Config) -> None:
        self.dashboard = Dashboard(config)
        self.status = ""
        """A word below the panel."""
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        # Refreshed by hand: a thread of its own would take turns with the training.
        self._live = Live(
            get_renderable=self._frame,
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            vertical_overflow="crop",
        )
        self._due = 0.0
        self._is_broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live.is_started and not self._is_broken:
            with suppress(OSError):
                self._live.refresh()
                self._live.stop()

    def _frame(self) -> Group:
        # The line below the panel is where a terminal echoes ^C.
        return Group(self.dashboard, Text(self.status, style="yellow"))

    def on_record(self, record: Record) -> None:
        """Show what a record says, or put it off where the last refresh was only now."""
        self.dashboard.see(record.to_dict())
        try:
            if self._is_broken:
                return
            if self._is_live:
                self._refresh(record)
            else:
                self._print(record)
        except OSError:
            self._is_broken = True  # whoever watched has gone; the training goes on

    def _refresh(self, record: Record) -> None:
        if not self._live.is_started:
            self._live.start()
        if record.kind in _MESSAGES:
            self._live.console.print(Text(f"note: {clean(record.values['text'])}", style="yellow"))
        started = time.monotonic()
        if record.kind != "update" or started >= self._due:
            self._live.refresh()
            now = time.monotonic()
            # Where drawing is slow, it is done less often.
            self._due = now + max(_SECONDS_BETWEEN_REFRESHES, (now - started) / _SHARE_OF_TIME)

    def _print(self, record: Record) -> None:
        values, dashboard = record.values, self.dashboard
        line = None
        if record.kind in _MESSAGES:
            line = f"note: {clean(values['text'])}"
        elif record.kind == "update":
            now = time.monotonic()
            if now >= self._due:
                line, self._due = dashboard.update_line(), now + _SECONDS_BETWEEN_LINES
        elif record.kind == "evaluation":
            best = ", the best" if values["best"] else ""
            line = f"held out: {dashboard.estimate(values['nats_per_token'], values['update'])}{best}"
        elif record.kind == "sample":
            text = clean(values["prompt"] + values["text"]).replace("\n", "↵")
            shown = text if len(text) <= 100 else text[:100] + " ..."
            line = f"sample at temperature {values['temperature']:g}: {shown}"
        elif record.kind == "checkpoint" and values["update"]:
            line = f"saving at update {values['update']:,}"
        if line is not None:
            print(line, file=sys.stderr, flush=True)


def picture(config: Config, records: Iterable[Mapping[str, Any]], width: int = 80, height: int = 30) -> str:
    """The panel as it stands after some records, as an SVG.

    Args:
        config: the settings of the run.
        records: the lines of its ``metrics.jsonl``.
        width: columns.
        height: rows at most.
    """
    dashboard = Dashboard(config)
    for record in records:
        dashboard.see(record)
    console = Console(
        record=True, width=width, height=height, force_terminal=True, color_system="truecolor", file=io.StringIO()
    )
    console.print(dashboard)
    return console.export_svg(title="elman train")


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
