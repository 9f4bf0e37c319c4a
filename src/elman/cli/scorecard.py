"""``elman scorecard``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from elman.cli.flags import Json
from elman.errors import UserError

_List = Annotated[str | None, Parameter(show_default=False)]


def scorecard(
    *,
    kinds: _List = None,
    parameters: int = 300_000,
    lengths: _List = None,
    positions: _List = None,
    distances: _List = None,
    window: int | None = None,
    seconds: float = 1.0,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    threads: int = 1,
    out: Path | None = None,
    json: Json = False,
) -> int:
    """Measure recurrence against attention: what a token costs in training and in generation, and what is carried.

    Fewer kinds, lengths, positions and distances take less time. After Ctrl-C what is measured by then is written.

    Args:
        kinds: Of models; none: elman,lstm,gru,mingru,mamba,transformer.
        parameters: Of each model, as near as its widths allow.
        lengths: Of rows in training; none: 16,64,256,1024,4096.
        positions: Of the token that is generated; none: 10,100,1000,10000.
        distances: In tokens, of the gradient's path; none: 16,64,256.
        window: Tokens that a Transformer attends to; none: all of the text.
        seconds: Spent on each figure at least: the longest take four calls, however long these are.
        device: Where to measure; auto takes a GPU where there is one.
        threads: Of PyTorch on the CPU.
        out: A folder for the page and the picture.
    """
    from elman.cli.output import print_json, print_table
    from elman.comparison import scorecard as cards

    measured: list[cards.Scorecard] = []
    code = 0
    try:
        cards.measure(
            kinds.split(",") if kinds else cards.KINDS,
            num_parameters=parameters,
            lengths=_numbers("--lengths", lengths) or cards.LENGTHS,
            positions=_numbers("--positions", positions) or cards.POSITIONS,
            distances=_numbers("--distances", distances) or cards.DISTANCES,
            window=window,
            seconds=seconds,
            device=device,
            threads=threads,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
            keep=measured.append,
        )
    except KeyboardInterrupt:
        if not measured:
            print("stopped before the first model was measured: nothing is written", file=sys.stderr)
            return 128 + signal.SIGINT
        code = 128 + signal.SIGINT
        print("stopped: here is what was measured by then", file=sys.stderr)
    found = measured[-1]
    written = [] if out is None else cards.write_scorecard(found, out)
    if json:
        print_json(found.to_dict() | {"files": [str(path) for path in written]})
        return code
    titles = (
        ("training: microseconds for each token, by the length of the rows", "training", 1e6),
        ("generation: milliseconds for one more token, by its position", "generation", 1e3),
        ("state: bytes carried, by position", "state", 1.0),
        ("gradient path: arithmetic steps, by distance in tokens", "gradient_path", 1.0),
    )
    for title, name, factor in titles:
        growths = {card.way: vars(card)[name] for card in found.cards if vars(card)[name] is not None}
        sizes = next(iter(growths.values())).sizes
        rows = [
            [way, *(f"{cost * factor:,.4g}" for cost in growth.costs), _exponent(growth.exponent)]
            for way, growth in growths.items()
        ]
        print_table(title, ["model", *(f"{size:,}" for size in sizes), "k"], rows)
    rows = [
        [card.way, f"{card.parameters:,}", f"{card.parallelism:.1f}", _share(card.share_of_peak)]
        for card in found.cards
    ]
    headings = ["model", "parameters", "times faster", "share of peak"]
    print_table("a row of 256 read at once, beside token by token; operations beside a matrix product", headings, rows)
    print("k is that of cost = c size^k: 0 is constant, 1 linear, 2 quadratic")
    for path in written:
        print(path)
    return code


def _exponent(value: float | None) -> str:
    return "-" if value is None else f"{value:z.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _numbers(name: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise UserError(f"{name} is {text!r}; accepted: whole numbers such as 16,64,256") from None
