"""`ds-hydra check` as a file: whether a model trains under strategies as in one process."""

import sys

from ds_hydra.commands.check import main

if __name__ == "__main__":
    sys.exit(main(name="check_model"))
