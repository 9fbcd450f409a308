"""Two hosts on one machine: network namespaces joined by a cable of a given rate, and jobs on them."""
