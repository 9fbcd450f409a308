"""`ds-hydra simulate` as a file: what a step would do on every rank, before there is one."""

import sys

from ds_hydra.commands.simulate import main

if __name__ == "__main__":
    sys.exit(main(name="simulate_step"))
