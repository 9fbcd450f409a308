"""All settings of the block "hydra": a page with a sentence each, or a JSON Schema for editors.

  ds-hydra settings [--schema]

`ds-hydra settings --schema > ds_hydra.schema.json` makes the file that an editor checks a config by.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hydra.commands.figures import CommandParser
from ds_hydra.config.describe import page, schema


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra settings") -> int:
    """Print them; the exit code is 0."""
    parser = CommandParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schema", action="store_true", help="as a JSON Schema")
    print(schema() if parser.parse_args(arguments).schema else page(), end="")
    return 0
