"""Parts of tools.check_post_training."""
