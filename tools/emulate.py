"""`ds-hydra emulate` as a file: a job on a cluster that is not there."""

import sys

from ds_hydra.commands.emulate import main

if __name__ == "__main__":
    sys.exit(main(name="emulate"))
