"""What tests and measuring tools share: ranks, training cases, the reference, small jobs."""
