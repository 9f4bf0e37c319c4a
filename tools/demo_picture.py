"""Draw the panel of a run as it stood at its end: python tools/demo_picture.py RUN OUT.svg"""

from __future__ import annotations

import sys
from pathlib import Path

from elman.cli.display import picture
from elman.training.folder import Run


def main() -> None:
    """Read the log of a run and write the picture."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} RUN OUT.svg")
    run = Run.open(sys.argv[1])
    Path(sys.argv[2]).write_text(picture(run.config(), run.records()), encoding="utf-8")


if __name__ == "__main__":
    main()
