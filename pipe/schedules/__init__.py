"""Schedules: in which order each stage of a pipeline runs its micro-batches. Pure: no torch.

[Note: schedules]
A schedule is a function that lists, for each stage, what the stage computes and in which order. All else follows:

  registry   schedules by name: `SCHEDULES["1f1b"]`, "zb-h1", "list" and "v" (`list_order`, `list_walk`)
  batches    what they are asked for: the micro-batches of a pipeline, and which of them hold slices of one sequence
  actions    the words: `Action`, `Slot`, `Order`, and a text form that reads back
  virtual    stages that hold two ranges of layers
  check      every action at its earliest tick, or a PlanError that shows the grid with the error in it
  lower      orders to slots: sends and receives are added so that two neighbours always meet
  simulate   orders and durations to times, and to the micro-batches that each stage keeps
"""
