"""Checkpoints: what training needs to go on, on any number of ranks, written so that nothing is ever half there.

[Note: checkpoint folder]
    DIR/TAG/rank_00000.safetensors   one file a rank: its master shards, optimizer state, random state
    DIR/TAG/manifest.json            all else, and digests of every block of every file; see `format`
    DIR/latest                       the tag saved last
    DIR/.owner-N                     who saves there now; see `folder`

A save writes to DIR/.tmp-*, makes it durable, renames it to DIR/TAG and only then replaces `latest`. So a tag either
holds a whole checkpoint or does not exist. Every byte that is loaded has been compared with its block's digest, the
manifest with its own. No file holds a pickle.
"""

from ds_hydra.zero_hetero.deepspeed_names import handed_on

__getattr__ = handed_on(__name__)
