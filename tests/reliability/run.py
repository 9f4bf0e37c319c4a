"""Put every fault into real runs and print what came of it, as the table of docs/reliability.md.

    python tests/reliability/run.py [--share X] [--json FILE] [CAMPAIGN ...]

It ends with 0 if every promise was kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from faults.campaigns import CAMPAIGNS
from faults.lab import Lab, Result


def main() -> int:
    """Run the campaigns that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="*", choices=[*CAMPAIGNS, []], metavar="CAMPAIGN", help=", ".join(CAMPAIGNS))
    parser.add_argument("--share", type=float, default=1.0, help="of the trials of each, above 0 and up to 1")
    parser.add_argument("--seed", type=int, default=1, help="of all that is chosen at random")
    parser.add_argument("--json", type=Path, help="also write all figures there")
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="elman-reliability-") as folder, Lab(Path(folder), given.seed) as lab:
        for name in given.campaigns or CAMPAIGNS:
            started = time.monotonic()
            result = CAMPAIGNS[name](lab, given.share)
            result.seconds = round(time.monotonic() - started, 1)
            results.append(result)
            print(_line(result), flush=True)
            for fault in result.broken:
                print(f"    broken: {fault}", file=sys.stderr, flush=True)
            if given.json:
                given.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1) + "\n")
    print(table(results))
    return int(any(result.broken for result in results))


def _line(result: Result) -> str:
    if result.skipped:
        return f"{result.name}: skipped, {result.skipped}"
    beside = "".join(f", {name} {value}" for name, value in result.figures.items())
    counts = f"{result.injected} injected, {result.fired} fired, {result.held} held"
    return f"{result.name}: {counts} in {result.seconds:.0f} s{beside}"


def table(results: list[Result]) -> str:
    """The results in Markdown."""
    rows = ["| fault | how it is injected | what must hold | injected | fired | held |", "|---|---|---|--:|--:|--:|"]
    rows += [
        f"| {r.name} | {r.fault} | {r.promise} | {r.skipped or r.injected} | {r.fired} | {r.held} |" for r in results
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
