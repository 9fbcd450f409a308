"""Parts of check_elastic: what copies cost, and elastic jobs on several hosts."""
