"""``python -m elman`` is the command ``elman``."""

from __future__ import annotations

import sys

from elman.cli import main

if __name__ == "__main__":
    sys.exit(main())
