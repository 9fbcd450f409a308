"""Command line options in, the links between a job's GPUs out. Pure: no torch."""

from __future__ import annotations

import argparse

from ds_hydra.costs.cost_table import TableFile
from ds_hydra.simulate.links import LinkModel, Speed


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """What `links_of` reads."""
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--inside", type=read_speed, metavar="US,GB/S", help="latency and bandwidth inside a node")
    parser.add_argument("--between", type=read_speed, metavar="US,GB/S", help="the same between nodes")


def read_speed(text: str) -> Speed:
    """ "10,150": microseconds and 10^9 bytes a second."""
    try:
        latency, rate = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MICROSECONDS,GB/S, such as 10,150") from None
    return Speed(latency / 1e6, rate * 1e9)


def links_of(args: argparse.Namespace, found: TableFile) -> LinkModel:
    """The links that the options name; else those of the cost table, or what is assumed where it has none."""
    return LinkModel.of_table(
        found.links, args.gpus_per_node, inside=args.inside, between=args.between, place=f"links of {args.cost_table}"
    )
