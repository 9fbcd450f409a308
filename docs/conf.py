"""How Sphinx builds the documentation: `make docs`, in which every warning is an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pygments.lexers.javascript import JavascriptLexer
from sphinx.application import Sphinx
from sphinx.highlighting import lexers

(version,) = re.findall(r'^version = "(.+)"', (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.M)
project = html_title = "ds-hydra"
release = version
extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_member_order, autodoc_typehints = "bysource", "description"
autodoc_typehints_description_target = "documented_params"
default_role, highlight_language = "code", "none"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
html_theme = "furo"
pygments_style = "default"  # lines of a diff are red and green on white too
html_show_copyright = False  # LICENSE says whose it is
exclude_patterns = ["build"]
lexers["jsonc"] = JavascriptLexer()  # JSON with comments


def setup(app: Sphinx) -> None:
    """Pictures are drawn before pages are read; llms.txt, which tells language models what there is, follows them."""
    sys.path.insert(0, str(Path(__file__).parent))
    from pictures import draw

    draw(Path(__file__).parent / "pictures")
    app.connect("autodoc-process-docstring", without_notes)
    app.connect("build-finished", write_llms)


def without_notes(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Take out pointers such as [Note: streams], which readers of the code follow, in place."""
    lines[:] = re.sub(r"\s*\[Note: [^\]]*\]", "", "\n".join(lines)).split("\n")


def write_llms(app: Sphinx, failed: Exception | None) -> None:
    """One line for each page: its title, its source beside it, and its first sentence."""
    lines = ["# ds-hydra", "", "> A DeepSpeed engine for Transformers on sequences of very different lengths.", ""]
    for name in sorted(app.env.found_docs):
        text = (Path(app.srcdir) / f"{name}.md").read_text("utf-8")
        first = next((line for line in text.splitlines() if line[:1].isalpha() or line[:2] == "**"), "")
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", first)
        lines.append(
            f"- [{app.env.titles[name].astext()}](_sources/{name}.md.txt): {plain.split('. ')[0].rstrip('.:')}."
        )
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")
