"""Notebooks without Jupyter: their code cells run in order, in one process of their own.

python -m tests.support.notebooks examples/tour.ipynb writes what the cells print into the notebook. A cell is Python,
or begins with `%%writefile NAME`, or is one command behind `!`, which here has to end with 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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


def write_outputs(path: Path) -> None:
    """Run the notebook and keep what it printed in it."""
    notebook = read(path)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(path), strict=True), start=1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_outputs(Path(name).resolve())
