"""Results that were measured, and what ours is compared with: for development, in no wheel."""
