"""Tensors on ranks: layouts, mutual slices, the LNK operator, FP32 master shards.

Two layouts of one flat tensor say who holds what before and after; a transfer plan says which rank sends which elements
to which; a link does it. `transfer_plan` has an example with three ranks. Parameters are pulled from the master shards
to a strategy's layout, gradients are pushed back by the transposed plan and added up by their owners.

Read in this order; the first six, `twin_plan`, `bucket` and `errors` import no torch.

  intervals        arithmetic on integer intervals, as columns
  layout           which rank holds which intervals of a flat tensor
  sender_choice    which of several holders sends
  transfer_plan    two layouts -> messages between ranks; a push is the transposed pull
  contributions    in which order contributions are written and added
  scratch_plan     how much scratch memory transfers take, and which of them share it
  transport        start sends and receives, wait for them (torch.distributed, or in one process)
  clock            how long work took on the device that did it; laps of a rank's activities
  scratch          the memory that `scratch_plan` planned
  envelope         one rank's side of a message: in place, or through scratch memory
  mover            what `link` and `twin_link` both are; all that their users know of them
  link             LNK: runs one rank's part of a transfer plan
  twin_plan        ranks that hold the same share the work: a part of a bucket each, then gathers and trades
  collectives      gathers and trades of a team of ranks, by messages or by a process group
  lane             where the later steps of a transfer are begun
  twin_link        LNK with twins, step by step
  checksum         does what a rank holds equal what was sent to it
  bucket           parameters that travel together
  errors           the errors that users see
  masters          FP32 parameters and gradients, sharded over all ranks for good
  grad_norm        gradient norm and clipping over owned elements
  pulls            all pulls of a step, waited for one by one
  pushes           gradient hooks that start each push when its bucket is complete
"""

if __name__ != "ds_hydra.zero_hetero":
    raise ImportError(f"import this package as 'ds_hydra.zero_hetero', not as {__name__!r}")
