"""Parts of `tools.check_emulation`, each a function that returns its table, its figures and what was missed."""
