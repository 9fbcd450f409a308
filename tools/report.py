"""`ds-hydra report` as a file: figures of a run."""

import sys

from ds_hydra.commands.report import main

if __name__ == "__main__":
    sys.exit(main(name="report"))
