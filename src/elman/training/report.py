"""``report.html``: a run at a glance, for somebody who has never seen one; made of what lies in the run folder.

The log gives curves, estimates and samples, ``run.toml`` the settings, ``environment.json`` the machine. What the model
is worth on the test part stands in ``judged.json`` once somebody has asked for it (``elman report RUN --judge``): the
training itself never looks at that part.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elman.cells import is_own_cell
from elman.errors import ElmanError
from elman.page import COLOURS, Page, new_figure
from elman.settings import resolve
from elman.training.folder import JUDGED_FILE, REPORT_FILE, Run
from elman.training.history import (
    Floats,
    History,
    environment_of,
    in_words,
    read_json,
    settings_of,
    spread_out,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS = 300
_MAX_STAGES = 6
_UNITS = {"char": "character", "byte": "byte", "word": "word", "bpe": "piece of a word"}


def write_report(run: Run) -> Path:
    """Write the report of a run into its folder, in place of an older one."""
    path = run.path / REPORT_FILE
    report_page(run).write(path)
    return path


def report_page(run: Run) -> Page:
    """The report of a run, in whatever state the run is."""
    return _Report(run).page()


def judged_in(run: Run) -> dict[str, Any]:
    """What ``judged.json`` says of the model that the run holds now; empty where it speaks of none, or of another."""
    judged = read_json(run.path / JUDGED_FILE)
    return judged if judged and judged.get("model_sha256") == model_sha256(run) else {}


def model_sha256(run: Run) -> str | None:
    """Of the model file; none where there is none yet."""
    try:
        return hashlib.sha256(run.model.read_bytes()).hexdigest()
    except OSError:
        return None


def in_plain_powers(axes: Axes) -> None:
    """A logarithmic scale upwards, whose numbers are written out, and few of them."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")


class _Report:
    """Puts the page together, section by section."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._settings, self._environment = settings_of(run), environment_of(run)
        self._history, self._judged = History.of(run), judged_in(run)
        self._kind = str(self._settings.get("model", {}).get("kind"))
        level = str(self._settings.get("tokenizer", {}).get("level"))
        self._unit = _UNITS.get(level, "token")
        self._corpus = Path(str(self._environment.get("corpus", "an unknown text"))).name

    def page(self) -> Page:
        page = Page(f"{self._kind} on {self._corpus}", self._lead())
        page.numbers(self._figures())
        self._quality(page)
        self._learning(page)
        self._samples(page)
        self._temperatures(page)
        self._settings_and_corpus(page)
        self._again(page)
        return page

    def _lead(self) -> str:
        history, unit = self._history, self._unit
        begin = f"A language model that reads a text {unit} by {unit} and says how probable every next {unit} is. "
        seconds = "" if history.seconds is None else f" in {_duration(history.seconds)}"
        done = f"It was trained on {history.tokens:,} {unit}s{seconds}, in {history.updates:,} updates."
        ways = {
            "finished": "",
            "stopped": " The training was stopped before its budget was used up, and can go on.",
            "unfinished": " The training has not come to its end.",
        }
        return begin + done + ways[history.ending]

    def _figures(self) -> dict[str, object]:
        """The large figures at the top."""
        judgement, best = self._judged.get("judgement"), self._history.best
        figures: dict[str, object] = {}
        source, where = (judgement, judgement.get("split")) if judgement else (best, "valid")
        if source:
            part = {"test": "on the test part", "valid": "on the validation part"}.get(str(where), "on held-out text")
            if source.get("bits_per_char") is not None:
                figures[f"bits per character {part}"] = source["bits_per_char"]
            else:
                figures[f"nats per {self._unit} {part}"] = source.get("nats_per_token")
            figures[f"perplexity per {self._unit}"] = source.get("perplexity")
        figures["parameters"] = self._environment.get("parameters")
        if self._history.seconds is not None:
            figures["of training"] = _duration(self._history.seconds)
        speeds = self._history.curve.tokens_per_second
        if np.isfinite(speeds).any():
            figures[f"{self._unit}s a second in training"] = round(float(np.nanmedian(speeds)))
        return figures

    def _quality(self, page: Page) -> None:
        judgement, best, unit = self._judged.get("judgement"), self._history.best, self._unit
        page.section(
            "How good it is",
            f"A model is judged on text that it was not trained on. It gives every next {unit} a probability p; -ln p "
            "is its surprise, in nats, and the mean over the whole text is the figure. Lower is better. A bit is 0.69 "
            f"nats; a perplexity of k means that it was as unsure as among k equally probable {unit}s.",
        )
        rows: list[tuple[object, ...]] = []
        if judgement:
            part = {"test": "the test part", "valid": "the validation part"}.get(judgement["split"], "the text")
            rows.append((f"this model, {part}", *_quality_row(judgement)))
            for name, score in judgement.get("baselines", {}).items():
                rows.append((_BASELINES.get(name, name), *_quality_row(score)))
            rows.sort(key=lambda row: (row[1] is None, row[1]))
        if best:
            rows.append((f"estimate, validation part, update {best['update']:,}", *_quality_row(best)))
        if not rows:
            page.text("No part of the text was held out, so nothing is known of how good the model is.")
            return
        columns = ["", f"nats per {unit}", f"perplexity per {unit}", "bits per character", "bits per byte"]
        page.table(columns, rows)
        if best and not judgement and "vocabulary" in best:
            known, blind = best["vocabulary"], math.log(best["vocabulary"])
            page.text(f"Guessing blindly among the {known:,} {unit}s that it knows costs {blind:.3f} nats each.")
        for sentence in _further(judgement or {}, unit):
            page.text(sentence)
        if not judgement:
            page.text(
                "The test part, where there is one, has not been looked at: this is the estimate by which the best "
                f"model was kept. `elman report {_quoted(self._run.path)} --judge` looks at it, and at baselines."
            )

    def _learning(self, page: Page) -> None:
        curve, unit = self._history.curve, self._unit
        page.section("How it learned")
        if len(curve) < 2:
            page.text("The text was counted in one pass." if len(curve) else "There was no update yet.")
            return
        names = ("update", "nats", "grad_norm", "learning_rate", "tokens_per_second")
        update, nats, norm, rate, speed = thinned([getattr(curve, name) for name in names], _MAX_POINTS)
        figure, (loss_axes, norm_axes) = new_figure(2, 1, height=5.6)
        loss_axes.plot(update, nats, linewidth=1.2, label="training, each batch before its update")
        known = [one for one in self._history.evaluations if one.get("nats_per_token") is not None]
        if known:
            points = [one["update"] for one in known], [one["nats_per_token"] for one in known]
            loss_axes.plot(*points, "o-", markersize=3.5, linewidth=1.2, label="held out")
        loss_axes.set_ylabel(f"nats per {unit}")
        loss_axes.set_ylim(*_without_beginning(nats, [one["nats_per_token"] for one in known]))
        loss_axes.legend(frameon=False, fontsize=9)
        norm_axes.plot(update, norm, linewidth=1.0, color=COLOURS[2])
        in_plain_powers(norm_axes)
        threshold = self._settings.get("training", {}).get("max_grad_norm")
        if isinstance(threshold, int | float):
            norm_axes.axhline(threshold, color=COLOURS[4], linestyle="--", linewidth=1.0)
        norm_axes.set_ylabel("norm of the gradient")
        norm_axes.set_xlabel("updates")
        clipped = ""
        if isinstance(threshold, int | float):
            share = float(np.mean(curve.grad_norm > threshold))
            clipped = f" The dashed line is where it is clipped, which happened in {share:.1%} of the updates."
        page.figure(
            figure,
            "Above: the loss, lower is better. While the held-out curve still falls, more training would help; where "
            "it rises, the model learns the training text by heart. Below: the norm of the gradient before clipping."
            f"{clipped}",
        )
        figure, (rate_axes, speed_axes) = new_figure(1, 2, height=2.4)
        rate_axes.plot(update, rate)
        rate_axes.set_title("learning rate", fontsize=10)
        speed_axes.plot(update, speed)
        speed_axes.set_title(f"{unit}s a second", fontsize=10)
        speed_axes.set_ylim(bottom=0)
        for axes in (rate_axes, speed_axes):
            axes.set_xlabel("updates")
        page.figure(figure, "The learning rate as it was scheduled, and the speed of training.")

    def _samples(self, page: Page) -> None:
        samples = sorted(self._history.samples, key=lambda one: one.get("update", 0))
        if not samples:
            return
        page.section(
            "What it writes",
            "Drawn while it trained, from the first texts to the last. A low temperature keeps to what is most "
            "probable and repeats itself; a high one takes risks.",
        )
        stages = {update: list(group) for update, group in groupby(samples, key=lambda one: one.get("update", 0))}
        for update in spread_out(list(stages), _MAX_STAGES):
            bits, nats = (stages[update][0].get(name) for name in ("valid_bits_per_char", "valid_nats_per_token"))
            worth = f", {bits:.3f} bits per character held out" if bits is not None else ""
            if not worth and nats is not None:
                worth = f", {nats:.3f} nats per {self._unit} held out"
            page.text(f"After {update:,} updates{worth}:")
            page.columns({_heading(one): one["prompt"] + one["text"] for one in stages[update]})

    def _temperatures(self, page: Page) -> None:
        drawn = self._judged.get("temperatures")
        if not drawn:
            return
        page.section(
            "Order and chance",
            "The finished model at several temperatures. Entropy: how unsure it is of the next token where it writes, "
            "in nats. Distinct: different runs of two, or four, tokens over all of them. Known words: the share of its "
            "words that stand in the training text, too.",
        )
        page.table(
            ["temperature", "entropy", "distinct pairs", "distinct fours", "known words"],
            [
                (
                    one["name"],
                    one["entropy"],
                    one["distinct"][1],
                    one["distinct"][3],
                    None if one["known_words"] is None else f"{one['known_words']:.1%}",
                )
                for one in drawn
            ],
        )
        page.columns({one["name"]: one["text"] for one in drawn if one["text"]})

    def _settings_and_corpus(self, page: Page) -> None:
        environment = self._environment
        page.section("The text")
        counts = environment.get("tokens", {})
        rows: list[tuple[object, object]] = [("corpus", str(environment.get("corpus", "–")))]
        rows += [(f"{self._unit}s, {part} part", f"{count:,}") for part, count in counts.items()]
        rows += [("different tokens", f"{environment['vocabulary']:,}")] if "vocabulary" in environment else []
        sha256 = str(environment.get("corpus_sha256", ""))
        page.table(["", ""], [*rows, ("SHA-256", f"{sha256[:32]} {sha256[32:]}")])
        for message in dict.fromkeys(self._history.messages):
            page.text(f"Note: {message}")
        page.section("Settings", "Those that differ from the defaults of this kind of model.")
        changed = _changed(self._settings)
        if changed:
            page.table(["setting", "value", "default"], changed)
        page.fold("All settings (run.toml)", (self._run.path / "run.toml").read_text("utf-8"))
        page.section("Machine")
        libraries = environment.get("libraries", {})
        known = ("elman", "python", "system", "machine", "cpus", "threads", "cpu_capability", "device")
        rows = [(name.replace("_", " "), str(environment[name])) for name in known if name in environment]
        page.table(["", ""], [*rows, *libraries.items()])

    def _again(self, page: Page) -> None:
        run = _quoted(self._run.path)
        kind = f" --model.kind {_quoted(self._kind)}" if is_own_cell(self._kind) else ""
        cell = f" --cell {_quoted(self._kind)}" if is_own_cell(self._kind) else ""
        page.section("Do it again", self._promise())
        page.code(
            f"elman train --config {_quoted(self._run.path / 'run.toml')}{kind} --out again\n"
            f"elman eval {run} --baselines{cell}\n"
            f"elman sample {run}{cell}\n"
            f"elman resume {run}{cell}"
        )

    def _promise(self) -> str:
        """What the first line of the commands gives."""
        changes = self._history.budget_changes
        if not changes:
            return (
                "The settings hold the seed: on the same machine, with the same versions and a budget in updates or "
                "tokens, the first line gives the same model to the last bit."
            )
        stages = [
            f"{in_words(one['budgets_before']) or 'the default'} until update {one['at_update']:,}" for one in changes
        ]
        return (
            f"The budget of this run was changed when it went on: {', '.join(stages)}, then "
            f"{in_words(changes[-1]['budgets'])}. The first line has the last budget from its first update on, and "
            "with it another schedule of the learning rate where that follows the budget: it need not give the same "
            "model."
        )


_BASELINES = {
    "uniform": "guessing blindly",
    "unigram": "token frequencies alone",
    "gzip": "gzip, the compressor",
    "bzip2": "bzip2, the compressor",
    "xz": "xz, the compressor",
    "zstd": "zstd, the compressor",
}


def _quality_row(score: Mapping[str, Any]) -> list[object]:
    return [score.get(name) for name in ("nats_per_token", "perplexity", "bits_per_char", "bits_per_byte")]


def _further(judgement: Mapping[str, Any], unit: str) -> list[str]:
    """In sentences what a judgement says beside its figures."""
    sentences = []
    if interval := (judgement.get("interval") or {}).get("nats_per_token"):
        low, high = interval
        sentences.append(
            f"On other texts of the same kind and length the figure would lie between {low:.4f} and {high:.4f} nats "
            f"per {unit} in about 95 of 100 cases."
        )
    if (right := judgement.get("accuracy_at_1")) is not None:
        among = judgement["accuracy_at_5"]
        sentences.append(
            f"The {unit} that it holds for the most probable is right in {right:.1%} of all cases; the right one is "
            f"among the first five in {among:.1%}."
        )
    return sentences


def _without_beginning(nats: Floats, held_out: Sequence[float]) -> tuple[float, float]:
    """Limits that give the curve its room: the steep beginning is cut off."""
    finite = np.array([value for value in (*nats, *held_out) if math.isfinite(value)])
    if not finite.size:
        return 0.0, 1.0
    low, high = float(finite.min()), float(np.quantile(finite, 0.98))
    room = 0.05 * max(high - low, 1e-3)
    return low - room, high + room


def _changed(settings: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Settings that are not the default of their kind, with that."""
    try:
        defaults = resolve({"model": _kind_of(settings)}).to_dict()
    except ElmanError:  # a person's own cell, which is not here
        defaults = {}
    rows = []
    for section, values in settings.items():
        for name, value in values.items() if isinstance(values, Mapping) else (("", values),):
            default = defaults.get(section, {}).get(name) if name else defaults.get(section)
            if value != default and name != "kind":
                where = f"{section}.{name}" if name else section
                rows.append((where, _plain(value), "–" if default is None else _plain(default)))
    return rows


def _kind_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    model = settings.get("model", {})
    kind = model.get("kind")
    if not isinstance(kind, str) or is_own_cell(kind):
        raise ElmanError("its kind is not one of Elman's")
    return {"kind": kind} | ({"layers": model["layers"]} if "layers" in model else {})


def _plain(value: object) -> str:
    """A setting as it is typed."""
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def _heading(sample: Mapping[str, Any]) -> str:
    prompt = f", after {sample['prompt'].strip()!r}" if sample["prompt"].strip() else ""
    return f"temperature {sample['temperature']:g}{prompt}"


def _quoted(path: object) -> str:
    return shlex.quote(str(path))


def _duration(seconds: float) -> str:
    """A time for people: ``75 s``, ``12 min``, ``3.4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
