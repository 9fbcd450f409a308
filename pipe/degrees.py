"""Degrees of a stage and numbers of a model in, PlanError where they do not fit out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hydra.zero_hetero.errors import PlanError


def check_heads(heads: int, kv_heads: int, tp: int, sp: int) -> None:
    """Refuse degrees by which attention heads cannot be cut; a `tp` of 1 stands for one that does not cut them."""
    whole = heads
    if heads % tp:
        raise PlanError(
            f"tp={tp} does not divide the model's {heads} attention heads; use strategies with a tp that does"
        )
    heads, kv_heads = heads // tp, max(1, kv_heads // tp)
    left = f" that tp={tp} leaves of {whole}" if tp > 1 else ""
    if heads % sp:
        raise PlanError(
            f"sp={sp} does not divide the {heads} attention heads{left}; use strategies with an sp that does"
        )
    if kv_heads % sp and sp % kv_heads:
        raise PlanError(
            f"sp={sp} and the {kv_heads} key/value heads{left} do not divide each other; use strategies with an sp "
            "that divides them or that they divide"
        )


def check_experts(counts: Sequence[int], no_ep: str, tp: int, sp: int, ep: int) -> None:
    """Refuse degrees by which experts cannot be spread.

    `counts` are the numbers of experts of a model whose experts are spread as whole ones (none: they are cut by width),
    and `no_ep` says why they cannot be.
    """
    if ep > 1 and no_ep:
        raise PlanError(f"ep={ep}: {no_ep}")
    for count in counts if ep > 1 else ():
        if count % ep:
            fit = ", ".join(str(n) for n in range(2, count + 1) if count % n == 0)
            raise PlanError(
                f"ep={ep} does not divide the model's {count} experts, of which each rank holds as many; use an ep of "
                f"{fit}"
            )
    if counts and tp > 1 and ep == 1:
        shape = f"tp{tp}" + f"sp{sp}" * (sp > 1)
        raise PlanError(
            f"{shape} cuts experts by width, but other strategies of the job spread whole ones, and masters have one "
            f"order: write {shape}ep{tp} in its place, or take ep out of all strategies"
        )
