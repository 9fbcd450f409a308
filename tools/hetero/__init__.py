"""Parts of `tools.bench_hetero` on devices of several classes."""
