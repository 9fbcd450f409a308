"""`ds-hydra preview` as a file: what a job would do, before there is one."""

import sys

from ds_hydra.commands.preview import main

if __name__ == "__main__":
    sys.exit(main(name="preview_plan"))
