"""``elman check``."""

from __future__ import annotations

from elman.cli.flags import Switch


def check(cell: str, /, *, json: Switch = False) -> int:
    """Hold a cell against the contract of all models.

    Args:
        cell: A name, or a cell of your own: ./file.py:Class or package.module:Class.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import print_json
    from elman.models.laws import check_cell

    findings = check_cell(cell)
    if json:
        print_json({"cell": cell, "findings": [vars(finding) for finding in findings]})
    else:
        for finding in findings:
            print(finding)
        if not findings:
            print(f"{cell} keeps every law")
    return 1 if findings else 0
