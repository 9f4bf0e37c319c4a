"""Sphinx settings: Markdown pages, and the Python reference from the docstrings."""

from __future__ import annotations

import elman

project = "Elman"
author = "The Elman authors"
project_copyright = author
version = release = elman.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "families-table.md", "training-speed-table.md"]
html_theme = "furo"
html_title = f"Elman {version}"

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
add_module_names = False
