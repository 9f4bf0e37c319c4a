"""Size is a feature with a gauge: `make size` prints it, and growth past a ceiling is a decision, not an accident."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

from elman.cells import cell_names
from elman.config import Section

MAX_LINES_PER_FILE = 700
MAX_SETTINGS = 150


def test_source_files_stay_readable_in_one_sitting(sources):
    lines = {s.path: len(s.text.splitlines()) for s in sources}
    per_layer = Counter[str]()
    for s in sources:
        per_layer[s.top or "elman"] += lines[s.path]
    for layer, count in per_layer.most_common():
        print(f"{layer:12} {count:6} lines")
    print(f"{'total':12} {sum(lines.values()):6} lines in {len(lines)} files")
    too_long = {str(path): count for path, count in lines.items() if count > MAX_LINES_PER_FILE}
    assert not too_long, f"longer than {MAX_LINES_PER_FILE} lines: {too_long}"


def test_the_number_of_settings_stays_learnable():
    import_module("elman.settings")
    for name in cell_names():
        import_module(f"elman.cells.{name}")
    settings = {
        f"{section.__name__}.{field}"
        for section in _sections(Section)
        if section.__module__.startswith("elman.")
        for field in section.__annotations__
        if field in section.model_fields and _declared_first_by(section, field)
    }
    print(f"{'settings':12} {len(settings):6} fields")
    assert 50 < len(settings) <= MAX_SETTINGS


def _sections(base: type[Section]) -> set[type[Section]]:
    return {base}.union(*(_sections(child) for child in base.__subclasses__()))


def _declared_first_by(section: type[Section], field: str) -> bool:
    return not any(field in parent.model_fields for parent in section.__bases__ if issubclass(parent, Section))
