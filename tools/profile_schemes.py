"""`ds-hydra profile` as a file: a launcher starts it by `deepspeed tools/profile_schemes.py ...`."""

import sys

from ds_hydra.commands.profile import main

if __name__ == "__main__":
    sys.exit(main(name="profile_schemes"))
