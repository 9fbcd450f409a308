"""Convert checkpoints: a DeepSpeed universal checkpoint into one of ds-hydra, or the other way round.

    python -m tools.convert_checkpoint from-universal RUN/global_step100_universal OUT --tag step_100
    python -m tools.convert_checkpoint to-universal RUN OUT --tag global_step100

Only read universal checkpoints that you trust: they are pickles, though read by torch's restricted loader.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ds_hydra.zero_hetero.errors import CheckpointError


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 when converted, 1 when refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("direction", choices=("from-universal", "to-universal"))
    parser.add_argument("source", type=Path, help="universal: its tag's folder; ds-hydra: the folder with the tags")
    parser.add_argument("target", type=Path, help="folder in which the new tag appears")
    parser.add_argument("--tag", help="ds-hydra's tag; to-universal: the one that latest names by default")
    parser.add_argument("--step", type=int, help="from-universal: the step, where the model states cannot be read")
    options = parser.parse_args(arguments)
    from ds_hydra.checkpoint.universal import from_universal, to_universal

    try:
        if options.direction == "to-universal":
            written = to_universal(options.source, options.tag, options.target)
        else:
            tag = options.tag or options.source.resolve().name
            written = from_universal(options.source, options.target, tag, step=options.step)
    except (CheckpointError, OSError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 1
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
