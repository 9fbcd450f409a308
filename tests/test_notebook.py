"""The notebook: its form, how it reads, that pages name it, and its code cells as they stand, run without Jupyter.

python -m tests.test_notebook writes what the cells print into the notebook. Cells run in order, in one process of their
own. A cell is Python, or begins with `%%writefile NAME`, or is one command behind `!`, which here has to end with 0.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tools.count_pages import count, missed

ROOT = Path(__file__).resolve().parents[1]
TOUR = ROOT / "examples" / "tour.ipynb"
_MARK = "\x1e"  # between what two cells print
_BEGIN = """
import subprocess, sys
from pathlib import Path
sys.stdout.reconfigure(line_buffering=True)
def _shell(command):
    subprocess.run(["bash", "-c", command], check=True, stderr=subprocess.STDOUT)
def _write_file(name, text):
    Path(name).write_text(text)
    print(f"Writing {name}")
"""


def read(path: Path) -> dict[str, Any]:
    """The notebook's JSON."""
    return dict(json.loads(path.read_text("utf-8")))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Its code cells, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def as_python(source: str) -> str:
    """A code cell as plain Python."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%writefile "):
        return f"_write_file({first.split()[1]!r}, {rest + chr(10)!r})"
    if first.startswith("!"):
        assert not any(line.startswith("!") for line in rest.splitlines()), "one command a cell"
        return f"_shell({source[1:]!r})"
    assert not first.startswith("%"), f"{first}: this magic is not known here"
    return source


def run(path: Path, timeout: float = 600.0) -> list[str]:
    """What each code cell prints, errors and warnings among it, in the folder of the notebook; AssertionError with all
    of it where a cell fails."""
    cells = ["".join(cell["source"]) for cell in code_cells(read(path))]
    script = _BEGIN + "".join(f"{as_python(cell)}\nprint({_MARK!r}, end='', flush=True)\n" for cell in cells)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        done = subprocess.run(
            [sys.executable, file.name],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, cwd=path.parent,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout.split(_MARK)[:-1]


def write_outputs() -> None:
    """Run the notebook and keep what it printed in it."""
    notebook = read(TOUR)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(TOUR), strict=True), start=1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    TOUR.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def texts(cell: dict[str, Any]) -> str:
    """All that a code cell has printed."""
    return "".join("".join(one["text"]) for one in cell["outputs"])


def steps(printed: str) -> list[tuple[str, float]]:
    """Layout and loss of each step that a cell lists."""
    found = re.findall(r"^\d+  (.+?) +\d+ sequences  loss ([\d.]+)$", printed, re.M)
    return [(layout, float(loss)) for layout, loss in found]


def test_the_notebook_is_of_format_4_and_was_run_in_order() -> None:
    notebook = read(TOUR)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    cells = code_cells(notebook)
    for cell in notebook["cells"]:
        more = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | more
        assert cell["cell_type"] in ("code", "markdown")
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert all(set(one) == {"name", "output_type", "text"} for one in cell["outputs"])
        compile(as_python("".join(cell["source"])), cell["id"], "exec")
        assert not re.search(r"/(?:root|home|tmp|work|Users)\b|Traceback", texts(cell)), (
            "a path of a machine, or an error"
        )


def test_what_it_printed_is_a_run_under_several_layouts() -> None:
    listed = max((steps(texts(cell)) for cell in code_cells(read(TOUR))), key=len)
    assert len({layout for layout, _ in listed}) == 3
    assert listed[-1][1] < listed[0][1] - 0.1
    whole = "".join(map(texts, code_cells(read(TOUR))))
    assert all(
        word in whole for word in ("ds_config_hydra.json is written", "steps that took it", "self-check", "run.html")
    )


def test_its_sentences_are_as_short_as_those_of_pages() -> None:
    prose = [cell for cell in read(TOUR)["cells"] if cell["cell_type"] == "markdown"]
    assert missed(count("examples/tour.ipynb", "\n\n".join("".join(cell["source"]) for cell in prose))) == []


def test_pages_name_it_and_it_names_pages_that_exist() -> None:
    assert "](examples/tour.ipynb)" in (ROOT / "README.md").read_text("utf-8")
    assert "`examples/tour.ipynb`" in (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    prose = json.dumps([cell["source"] for cell in read(TOUR)["cells"]])
    linked = re.findall(r"\]\(([^)]+)\)", prose)
    assert linked
    assert [link for link in linked if not (TOUR.parent / link).is_file()] == []


@pytest.mark.long
def test_its_cells_run_and_train_as_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = [steps(texts(cell)) for cell in code_cells(read(TOUR))]
    again = [steps(printed) for printed in run(TOUR)]
    assert [[layout for layout, _ in cell] for cell in again] == [[layout for layout, _ in cell] for cell in before]
    losses = [loss for cell in again for _, loss in cell]
    assert losses == pytest.approx([loss for cell in before for _, loss in cell], abs=2e-3)


if __name__ == "__main__":
    write_outputs()
