"""The states of a network along a text: their dimension, their map, and which moments of the text are alike.

The dimension is the participation ratio of the variances along the principal axes, (sum v)^2 / sum v^2: one where all
states lie on a line, as many as units where they spread alike in all directions. Spans are matched as in LSTMVis
(Strobelt et al. 2018, https://arxiv.org/abs/1606.07461): the units that are on throughout a span, and were not before
it, are looked for elsewhere. A unit counts as on where it is half a deviation above its mean.

The state begins at zero and takes a while to get where it stays, far from all that comes later: map and dimension leave
the beginning of the text out.

Shape letters: K tokens that were kept, M moments, U units, P the moments shown against each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from elman.errors import TextError, UserError, nearest
from elman.inspection.intervention import held_parts
from elman.inspection.labels import texts_of
from elman.inspection.predictions import first_tokens, load_plain
from elman.inspection.recording import Ids, Plan, Values, plan_for, record
from elman.inspection.selectivity import BLOCK
from elman.judge import SplitName, find_subject
from elman.models.file import Bundle
from elman.text.tokenizers import Tokenizer, never_seen

Method: TypeAlias = Literal["pca", "tsne", "umap"]

_MAX_MOMENTS = 1000
_WARM_UP = 512
"""Tokens at the beginning of a text that are left out; a quarter of it at most."""
_SIDE_BY_SIDE = 60
_NUM_ALIKE = 8
_APART = 20
_DEFAULT_SPAN = 8
_CONTEXT = 40
_ON_DEVIATIONS = 0.5
_MIN_SHARE = 0.6
"""Of the units of a span that are on in another one."""


@dataclass(frozen=True)
class Moment:
    """One token of the text, on the map."""

    position: int
    text: str
    what: str
    """A letter, a digit, a space, a line end or a sign; a piece where it is several of them."""
    x: float
    y: float


@dataclass(frozen=True)
class Alike:
    """A place of the text whose state, or whose active units, resemble those of the chosen one."""

    start: int
    end: int
    """Of the tokens, the last not included."""
    before: str
    at: str
    after: str
    similarity: float
    """Of moments the cosine of the centred states; of spans the share of the units that are on, in the mean, times the
    ratio of the lengths, the shorter by the longer."""


@dataclass(frozen=True)
class Dimension:
    """How many directions the states of a part use."""

    part: str
    units: int
    effective: float
    """The participation ratio."""
    explained: tuple[float, ...]
    """Shares of the variance along the first ten principal axes."""


@dataclass(frozen=True)
class States:
    """What was found."""

    corpus: str
    split: str
    kind: str
    part: str
    """What the map and the similarities are of; ``all`` for everything that is carried."""
    given: int
    """Tokens of the text, as many as were allowed."""
    tokens: int
    """Read of them: whole blocks."""
    warm_up: int
    """Tokens at the beginning that are in no dimension, and not on the map unless they are side by side."""
    spread: int
    """Moments, evenly spaced over the others, that the dimensions are of."""
    method: Method
    dimensions: tuple[Dimension, ...]
    moments: tuple[Moment, ...]
    """Those, and the tokens side by side."""
    side_by_side_texts: tuple[str, ...]
    side_by_side: tuple[tuple[float, ...], ...]
    """Cosines of the centred states after some tokens in a row, each with each."""
    span: Alike
    """The chosen place itself."""
    alike_moments: tuple[Alike, ...]
    span_units: tuple[int, ...]
    """Those that are on throughout the chosen span and not before it."""
    alike_spans: tuple[Alike, ...]
    notices: tuple[str, ...] = ()
    """What a reader of the figures should know about the text."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self)


def inspect_states(
    where: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    part: str | None = None,
    span: str | None = None,
    method: Method = "pca",
    max_tokens: int = 10_000,
    seed: int = 0,
    cell: str | None = None,
) -> States:
    """Look at the states of a model along a text.

    Args:
        where: a run folder or a model file.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the run.
        split: which part; none: the test part, else the validation part.
        part: of the state, such as ``0.c``; none: all of them together.
        span: some words of the text, whose first occurrence is looked for elsewhere; none: a few tokens of its middle.
        method: of the map: principal axes, or t-SNE or UMAP where scikit-learn or umap-learn is installed.
        max_tokens: read so many tokens of the text at most.
        seed: of t-SNE and UMAP.
        cell: a person's own cell, where the model was trained with one.

    Raises:
        UserError: there is no such part or span, the text is too short, the model has no units, or the method needs a
            library that is not installed.
    """
    bundle = load_plain(where, cell=cell)
    held_parts(bundle.network)  # refuses a model without units before a corpus is read
    subject = find_subject(where, bundle, text, split=split, cell=cell)
    tokens = first_tokens(subject.tokens.tokens, max_tokens)
    found = states_along(bundle, tokens, part=part, span=span, method=method, seed=seed)
    return replace(found, corpus=subject.corpus, split=subject.split, notices=subject.notices)


def states_along(
    bundle: Bundle,
    tokens: Ids,
    *,
    part: str | None = None,
    span: str | None = None,
    method: Method = "pca",
    seed: int = 0,
) -> States:
    """The same for tokens, the boundary first; see :func:`inspect_states`."""
    sizes = held_parts(bundle.network)
    if part is not None and part not in sizes:
        raise UserError(f"this model carries no {part!r}{nearest(part, sizes)}")
    plan = plan_for(len(tokens) - 1, sum(sizes.values()))
    warm_up = min(_WARM_UP, plan.num_tokens // 4)
    start, end = _find(span, tokens[: plan.num_tokens], bundle.tokenizer, plan, warm_up)
    values = record(bundle.network, tokens, list(sizes), plan).values
    values_KU = np.concatenate(list(values.values()), axis=1) if part is None else values[part]
    first_warm = int(np.searchsorted(plan.positions, warm_up))
    centred_KU = values_KU - values_KU[first_warm:].mean(0)
    first_row, last_row = int(np.searchsorted(plan.positions, start)), int(np.searchsorted(plan.positions, end - 1))
    row_P = first_row + np.arange(min(_SIDE_BY_SIDE, plan.num_kept - first_row))
    spread_M = np.linspace(first_warm, plan.num_kept - 1, min(plan.num_kept - first_warm, _MAX_MOMENTS)).astype(
        np.int64
    )
    rows_M = np.union1d(spread_M, row_P)
    map_M2 = _project(centred_KU[rows_M], method, seed)
    unit_KU = centred_KU / np.maximum(np.linalg.norm(centred_KU, axis=1, keepdims=True), 1e-12)
    texts = list(texts_of(tokens[: plan.num_tokens], bundle.tokenizer))
    place = _Places(bundle.tokenizer, tokens)
    units_on, spans = _match(values_KU, plan, start, end)
    return States(
        corpus="",
        split="text",
        kind=bundle.network.config.kind,
        part=part or "all",
        given=len(tokens) - 1,
        tokens=plan.num_tokens,
        warm_up=warm_up,
        spread=len(spread_M),
        method=method,
        dimensions=tuple(_dimension(name, values[name][spread_M]) for name in sizes),
        moments=tuple(
            Moment(position, texts[position] or "", _what(texts[position]), float(x), float(y))
            for position, (x, y) in zip(plan.positions[rows_M].tolist(), map_M2, strict=True)
        ),
        side_by_side_texts=tuple(texts[position] or "" for position in plan.positions[row_P].tolist()),
        side_by_side=tuple(tuple(row) for row in (unit_KU[row_P] @ unit_KU[row_P].T).round(4).tolist()),
        span=place.alike(start, end, 1.0),
        alike_moments=tuple(
            place.alike(position, position + 1, similarity)
            for position, similarity in _nearest(unit_KU, last_row, plan)
        ),
        span_units=units_on,
        alike_spans=tuple(place.alike(*one) for one in spans),
    )


def participation_ratio(values: NDArray[np.floating[Any]]) -> float:
    """The effective dimension of points, a point a row; 0 where they are all the same."""
    centred = (values - values.mean(0)).astype(np.float64)
    # The smaller of the two Gram matrices has the same eigenvalues as the covariance, times the number of points.
    gram = centred.T @ centred if centred.shape[1] < len(centred) else centred @ centred.T
    squares = float((gram * gram).sum())
    return float(np.trace(gram)) ** 2 / squares if squares else 0.0


def _dimension(part: str, values_MU: Values) -> Dimension:
    variances = torch.linalg.svdvals(torch.from_numpy(values_MU - values_MU.mean(0)).double()).square()
    total = float(variances.sum()) or 1.0
    return Dimension(part, values_MU.shape[1], participation_ratio(values_MU), tuple((variances[:10] / total).tolist()))


def _project(centred_MU: Values, method: Method, seed: int) -> NDArray[Any]:
    """A point of the plane for each state."""
    if method == "pca":
        return principal_axes(centred_MU)
    module, library = {"tsne": ("sklearn.manifold", "scikit-learn"), "umap": ("umap", "umap-learn")}[method]
    try:
        imported = importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"a map by {method} needs {library}, which is not installed: pip install {library}, or take --method pca"
        ) from None
    mapper = imported.TSNE(random_state=seed) if method == "tsne" else imported.UMAP(random_state=seed)
    points: NDArray[Any] = mapper.fit_transform(centred_MU)
    return points


def principal_axes(centred: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Centred points, a point a row, along their first two principal axes; the farthest point is right, and above."""
    u, s, _ = torch.linalg.svd(torch.from_numpy(np.ascontiguousarray(centred)).double(), full_matrices=False)
    points = torch.zeros(len(centred), 2, dtype=torch.float64)
    points[:, : min(2, len(s))] = u[:, :2] * s[:2]
    farthest = points.gather(0, points.abs().argmax(0, keepdim=True))
    return (points * torch.where(farthest < 0, -1.0, 1.0)).numpy()


def _what(text: str | None) -> str:
    if text is None or not text or text.isspace():
        return "line end" if text is None or "\n" in text else "space"
    stripped = text.strip()
    if stripped.isalpha():
        return "letter"
    if stripped.isdigit():
        return "digit"
    return "piece" if any(map(str.isalnum, stripped)) else "sign"


def _find(span: str | None, tokens: Ids, tokenizer: Tokenizer, plan: Plan, warm_up: int) -> tuple[int, int]:
    """The tokens of the first occurrence of a span in what is kept, after the beginning if there is one."""
    if span is None:
        start = int(plan.kept_blocks[len(plan.kept_blocks) // 2]) * BLOCK
        return start, start + _DEFAULT_SPAN
    if missing := tokenizer.unknown_characters(span):
        raise TextError(f"the span holds {never_seen(missing)}: give some words of the text without")
    wanted = tokenizer.encode(span)
    if not len(wanted):
        raise TextError("the span is empty: give some words of the text")
    is_kept = np.zeros(len(tokens), bool)
    is_kept[plan.positions] = True
    starts = np.flatnonzero(tokens == wanted[0])
    for start in (*starts[starts >= warm_up].tolist(), *starts[starts < warm_up].tolist()):
        place = slice(start, start + len(wanted))
        if is_kept[place].all() and np.array_equal(tokens[place], wanted):
            return start, place.stop
    raise TextError(
        f"the span {span!r} does not occur in the {len(tokens):,} tokens of the text that are looked at; give words "
        "that do, as they stand there"
    )


class _Places:
    def __init__(self, tokenizer: Tokenizer, tokens: Ids) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens

    def alike(self, start: int, end: int, similarity: float) -> Alike:
        cuts = (max(0, start - _CONTEXT), start, end, end + _CONTEXT // 2)
        before, at, after = (self._tokenizer.decode(self._tokens[left:right]) for left, right in pairwise(cuts))
        return Alike(start, end, before, at, after, float(similarity))


def _nearest(unit_KU: Values, row: int, plan: Plan) -> list[tuple[int, float]]:
    """The moments whose states are most like that of a row, no two close together, with their cosines."""
    similarity_K = unit_KU @ unit_KU[row]
    rows = [row]
    for other in np.argsort(-similarity_K, kind="stable").tolist():
        if len(rows) > _NUM_ALIKE:
            break
        if all(abs(other - one) > _APART for one in rows):
            rows.append(other)
    return [(int(plan.positions[one]), float(similarity_K[one])) for one in rows[1:]]


def _match(values_KU: Values, plan: Plan, start: int, end: int) -> tuple[tuple[int, ...], list[tuple[int, int, float]]]:
    """The units that tell a span, and the other spans in which most of them are on: start, end, likeness."""
    first = int(np.searchsorted(plan.positions, start))
    length = end - start
    is_on_KU = values_KU > values_KU.mean(0) + _ON_DEVIATIONS * values_KU.std(0)
    throughout_U = is_on_KU[first : first + length].all(0)
    units = np.flatnonzero(throughout_U & ~is_on_KU[first - 1]) if first else np.flatnonzero(throughout_U)
    if not len(units):
        units = np.flatnonzero(throughout_U)
    if not len(units):
        return (), []
    share_K = is_on_KU[:, units].mean(1)
    is_match_K = share_K >= _MIN_SHARE
    follows_K = np.append(False, np.diff(plan.positions) == 1)
    run_K = np.cumsum(~(is_match_K & np.append(False, is_match_K[:-1]) & follows_K)) * is_match_K
    spans = []
    for run in np.unique(run_K[run_K > 0]).tolist():
        rows = np.flatnonzero(run_K == run)
        if first <= rows[-1] and rows[0] < first + length:
            continue  # the chosen span itself
        fit = min(len(rows), length) / max(len(rows), length)
        spans.append((fit * float(share_K[rows].mean()), int(plan.positions[rows[0]]), len(rows)))
    best = sorted(spans, reverse=True)[:_NUM_ALIKE]
    return tuple(units.tolist()), [(position, position + size, alike) for alike, position, size in best]
