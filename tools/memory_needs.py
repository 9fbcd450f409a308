"""`ds-hydra memory` as a file: what each parallel scheme needs on a rank."""

import sys

from ds_hydra.commands.memory import main

if __name__ == "__main__":
    sys.exit(main(name="memory_needs"))
