"""Published training systems as plans, side by side with ours: same batches, costs, memory and simulator.

Each module holds systems of one kind. A system is a function that takes a `Cell` and gives its configurations, all that
it could be set up as; `hindsight` keeps the one that is fastest on the very batches that are then reported.
"""
