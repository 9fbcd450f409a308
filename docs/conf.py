"""How Sphinx builds the documentation: `make docs`, in which every warning is an error."""

from __future__ import annotations

import re
from pathlib import Path

from pygments.lexers.javascript import JavascriptLexer
from sphinx.highlighting import lexers

(version,) = re.findall(r'^version = "(.+)"', (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.M)
project = html_title = "ds-hydra"
release = version
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
html_theme = "furo"
exclude_patterns = ["build"]
lexers["jsonc"] = JavascriptLexer()  # JSON with comments
