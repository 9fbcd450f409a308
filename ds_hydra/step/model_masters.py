"""A rank's masters of a whole model: FP32 shards of trained parameters, compute-dtype shards of frozen ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.pipe.model_plan import Bucket
from ds_hydra.pipe.stage import ModelSource, dtype_of, from_flat, to_flat
from ds_hydra.step.host_states import HostStates
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.layout import BucketSpec
from ds_hydra.zero_hetero.masters import MasterShards


class ModelMasters:
    """Both kinds of master shards, numbered like the buckets of the model's plan."""

    def __init__(
        self,
        source: ModelSource,
        rank: int,
        num_ranks: int,
        device: torch.device,
        master: torch.dtype,
        frozen: torch.dtype,
        *,
        pinned: bool = False,
        run: int = 0,
    ):
        """`pinned`, and `run` for trained parameters, as `MasterShards` has them."""
        self.buckets = source.plan.buckets
        specs = [BucketSpec(b.name, tuple((p.name, p.numel) for p in b.params), b.owners) for b in self.buckets]
        trained = [spec for spec, b in zip(specs, self.buckets, strict=True) if b.trainable]
        kept = [spec for spec, b in zip(specs, self.buckets, strict=True) if not b.trainable]
        self.trained = MasterShards(trained, rank, num_ranks, device, master, pinned=pinned, run=run)
        frozen = master if source.plan.frozen_wide else frozen
        self.frozen = MasterShards(kept, rank, num_ranks, device, frozen, pinned=pinned)
        self.revision = 0  # how often values came from elsewhere than the optimizer; equal on all ranks
        self.shards = tuple(self._pick(self.trained.shards, self.frozen.shards))
        self.states = HostStates(self.trained) if run else None

    def _pick(self, trained: Sequence[Tensor], frozen: Sequence[Tensor]) -> Iterator[Tensor]:
        """Both lists as one, in the order of the buckets."""
        # Buckets (trained, frozen, trained) with the shards t0 t1 and f0 give t0 f0 t1.
        one, other = iter(trained), iter(frozen)
        return (next(one if bucket.trainable else other) for bucket in self.buckets)

    def load(self, values: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """Take the initial values: each parameter's from the lowest rank of `group` that has it, as DeepSpeed does.

        `group` holds all ranks of the masters; None is a rank alone. Raises ConfigError on every rank when no rank
        has a parameter.
        """
        self.revision += 1
        rank, num_ranks = self.trained.rank, self.trained.num_ranks
        params = [(param, bucket.trainable) for bucket in self.buckets for param in bucket.params]
        device = self.trained.device
        # Each rank may have built the model with other random numbers, or only a part of it. Per parameter, a rank that
        # has it says its own number and the others num_ranks: with 4 ranks, (4 1 4 3) means that rank 1's value counts.
        owners = torch.tensor([rank if param.name in values else num_ranks for param, _ in params], device=device)
        if num_ranks > 1:
            dist.all_reduce(owners, op=dist.ReduceOp.MIN, group=group)
        for (param, trainable), owner in zip(params, owners.tolist(), strict=True):
            if owner == num_ranks:
                raise ConfigError(
                    f"no rank has a value for {param.name!r}: build the whole model on some rank, or name a folder of "
                    'safetensors weights in hydra.initial_weights, or set it to "random"'
                )
            masters = self.trained if trainable else self.frozen
            # One parameter after the other, so that a rank holds one of them and not the whole model on its device.
            if rank == owner:
                flat = to_flat(values[param.name], param.rule.dim, param.rule.parts).to(device, masters.flat.dtype)
            else:
                flat = torch.empty(param.numel, dtype=masters.flat.dtype, device=device)
            if num_ranks > 1:
                dist.broadcast(flat, group_src=owner, group=group)
            masters.load(param.name, flat)

    def take(self, whole: Mapping[str, Tensor]) -> None:
        """Take some parameters' values, which every rank has, by name and in their own shapes."""
        self.revision += 1
        for bucket in self.buckets:
            masters = self.trained if bucket.trainable else self.frozen
            for param in bucket.params:
                if param.name in whole:
                    masters.load(param.name, to_flat(whole[param.name], param.rule.dim, param.rule.parts))

    def draw(self, drawn: Callable[[str], Tensor]) -> None:
        """Take initial values that any rank can make, by name: each makes what it owns a part of, one at a time."""
        self.revision += 1
        rules = {param.name: param.rule for bucket in self.buckets for param in bucket.params}
        for masters in (self.trained, self.frozen):
            for piece in masters.pieces():
                rule = rules[piece.name]
                masters.load(piece.name, to_flat(drawn(piece.name), rule.dim, rule.parts))

    def whole_buckets(
        self,
        group: dist.ProcessGroup | None,
        dtype_in: Callable[[Bucket], torch.dtype],
        ranks: Sequence[int] | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Full parameters by master name, in their own shapes and in their bucket's type, on the device; one bucket at
        a time, in memory that its parameters share.

        All ranks must take all of them, in step; all or some (`ranks`) get the parameters, the others empty ones.
        """
        receivers = range(self.trained.num_ranks) if ranks is None else ranks
        trained = frozen = 0
        for bucket in self.buckets:
            masters, index = (self.trained, trained) if bucket.trainable else (self.frozen, frozen)
            trained, frozen = trained + bucket.trainable, frozen + (not bucket.trainable)
            # Cast before they travel: half the bytes on the wire. Nothing of a bucket is kept here beyond its turn.
            shard = masters.shards[index].detach().to(dtype_in(bucket))
            yield _in_shapes(bucket, masters.gather_bucket(index, shard, group, receivers))

    def gather(
        self,
        group: dist.ProcessGroup | None,
        names: Collection[str] | None = None,
        ranks: Sequence[int] | None = None,
        computed_in: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """Full parameters on CPU by master name, in their own shapes, all or some; all ranks must call it, and all or
        some (`ranks`) get them. In the masters' type, or as a model that is computed in another has them."""
        flat: dict[str, Tensor] = {}
        for masters, trainable in ((self.trained, True), (self.frozen, False)):
            buckets, source = [bucket for bucket in self.buckets if bucket.trainable is trainable], masters.shards
            if computed_in is not None:  # cast before they travel: half the bytes on the wire, and in memory
                pairs = zip(buckets, masters.shards, strict=True)
                source = [shard.detach().to(dtype_of(bucket, computed_in)) for bucket, shard in pairs]
            flat |= masters.gather_full(group, source=source, names=names, ranks=ranks)
        params = [param for bucket in self.buckets for param in bucket.params if param.name in flat]
        found = {p.name: from_flat(flat[p.name], p.shape, p.rule.dim, p.rule.parts).contiguous() for p in params}
        return found if computed_in is not None else {n: one.to(self.trained.flat.dtype) for n, one in found.items()}


def _in_shapes(bucket: Bucket, whole: Tensor) -> dict[str, Tensor]:
    """The parameters of a bucket by name, in their own shapes, as views; none of an empty one."""
    values = whole.split([param.numel for param in bucket.params]) if len(whole) else ()
    return {
        param.name: from_flat(value, param.shape, param.rule.dim, param.rule.parts)
        for param, value in zip(bucket.params, values, strict=False)
    }
