"""`ds-hydra convert` as a file: checkpoints from DeepSpeed's universal form, and to it."""

import sys

from ds_hydra.commands.convert import main

if __name__ == "__main__":
    sys.exit(main(name="convert_checkpoint"))
