"""Parts of `tools.check_simulator`, each a function that returns its table, its figures and what was missed."""
