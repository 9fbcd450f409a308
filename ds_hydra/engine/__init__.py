"""The engine that `ds_hydra.initialize` returns, and what it is assembled from; start at `engine.py`."""
