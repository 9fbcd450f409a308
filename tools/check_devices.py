"""What a job takes on devices, shown without one: its memory beside ZeRO's, predicted against measured; times.

  python -m tools.check_devices [--fast] [--quick] [--only NAME ...] [--without NAME ...] [--json FILE]

  count      memory of 7B and 28B models on 64 ranks by count, beside ZeRO-1 and ZeRO-2
  states     memory of a 7B model on 8 ranks by count, and what pushing every micro-batch would give and cost
  messages   CPU time of a step that hands out memory for messages
  times      to whom time is charged on a device with a queue
  layouts    predicted memory of small models in drawn layouts against the allocator's most
  peak       predicted memory of small models against the most that the allocator gave out in a run
  head       the gradient of a large head in many blocks: its error, CPU time and memory, beside autograd's

with --fast, what makes large models and many devices possible:

  plain_head  time and peak memory of a head of 128K words and its loss, beside a plain head's
  loading     resident memory of each rank while a model on the meta device gets its first values
  launches    operators that a layer launches, with functions in place of the model's chains and without
  max_len     the longest sequences of a 32B model on 64 GPUs, by the memory model, beside published ones
  aligned     where matrices of a 7B model begin in each rank's memory under drawn strategies
  operations  messages and collectives of a step's pulls and pushes, and how long their links take to build
  order       drawn jobs under a transport with NCCL's rules, all that a rank starts in one queue
  overlap     what is exposed of pulls and pushes between nodes, by the simulation of steps
  emulated    the same steps on emulated clusters of 16 and 32 ranks, beside the simulation
  groups      communicators, the meetings that make them, connections and sockets of a rank
  sockets     sockets of a rank while a job of 12 starts, counted in its process
  two_hosts   bytes between two hosts and times of steps there, counted and simulated against measured
  heartbeats  what rank 0's watchdog takes of a core
  between     what passes between two steps, and small messages of a step

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ds_hydra.commands.figures import figures_parser, finish, print_table
from tools.devices.aligned import aligned
from tools.devices.between import between_steps
from tools.devices.count import by_count
from tools.devices.emulated import emulated
from tools.devices.groups import groups
from tools.devices.head import heads, plain_head
from tools.devices.heartbeats import heartbeats
from tools.devices.launches import launches
from tools.devices.layouts import drawn_layouts
from tools.devices.loading import memory_of_loading
from tools.devices.max_len import longest_sequences
from tools.devices.messages import handing_out
from tools.devices.operations import operations
from tools.devices.order import order
from tools.devices.overlap import overlap
from tools.devices.peak import predicted_and_measured
from tools.devices.sockets import sockets
from tools.devices.states import states
from tools.devices.table import Table
from tools.devices.times import time_attribution
from tools.devices.two_hosts import two_hosts

# Each makes one table, told whether it should be quick. They run in this order.
TABLES: dict[str, Callable[[bool], Table]] = {
    "count": by_count,
    "states": states,
    "messages": handing_out,
    "times": time_attribution,
    "peak": predicted_and_measured,
    "layouts": drawn_layouts,
    "head": heads,
}
FAST: dict[str, Callable[[bool], Table]] = {
    "plain_head": plain_head,
    "loading": memory_of_loading,
    "launches": launches,
    "max_len": longest_sequences,
    "aligned": aligned,
    "operations": operations,
    "order": order,
    "overlap": overlap,
    "emulated": emulated,
    "groups": groups,
    "sockets": sockets,
    "two_hosts": two_hosts,
    "heartbeats": heartbeats,
    "between": between_steps,
}


def main(arguments: list[str] | None = None) -> int:
    parser = figures_parser(__doc__)
    both = TABLES | FAST
    parser.add_argument("--fast", action="store_true", help=f"the tables {', '.join(FAST)}")
    parser.add_argument("--only", nargs="+", choices=both, metavar="NAME", help=f"of {', '.join(both)}")
    parser.add_argument("--without", nargs="+", choices=both, default=(), metavar="NAME", help="of the same")
    options = parser.parse_args(arguments)
    figures: dict[str, object] = {}
    missed: list[str] = []
    for name in options.only or (FAST if options.fast else TABLES):
        if name in options.without:
            continue
        began = time.perf_counter()
        table = both[name](options.quick)
        print(f"{table.title} ({time.perf_counter() - began:.0f} s)")
        print_table(table.headers, table.rows)
        print()
        figures[name] = table.figures
        missed += [f"{name}: {line}" for line in table.missed]
    return finish("check_devices", f"{len(figures)} tables", {"tables": figures}, missed, options.json)


if __name__ == "__main__":
    sys.exit(main())
