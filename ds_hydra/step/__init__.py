"""One step on one rank: micro-batches, the runtime of a strategy, masters and their update."""
