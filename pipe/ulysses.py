"""Ulysses sequence parallelism: tokens spread over ranks outside attention, heads spread inside it.

[Note: exchange of heads]
Attention needs all tokens of a sequence but treats each head alone. Two ranks, a row of 5 tokens, heads a b c d:

            outside attention            inside attention
  rank 0    tokens 0 1,   a b c d        tokens 0 1 2 3 4,   a b
  rank 1    tokens 2 3 4, a b c d        tokens 0 1 2 3 4,   c d

To get there rank 0 sends its two tokens' heads c and d to rank 1, and receives the heads a and b of three tokens. One
all-to-all carries q, k and v; a second brings the outputs back. Shares may be uneven and are known on the host. If
there are fewer key/value heads than ranks, they are repeated, so that each rank has those that its queries need.

[Note: exchange in groups]
Nothing can be computed until that message has come, nor beside the second one. So a long row is exchanged in groups of
heads. What comes in of all groups is started at once; a group is computed when its own has come, and what it makes goes
out while the next one is computed. With four groups, messages in (i) and out (o) above what is computed:

  messages    i0 i1 i2 i3  o0     o1     o2     o3
  computed       |---0---||---1---||---2---||---3---|

Only i0 and o3 are waited for with nothing to compute. So where it can be these groups are small: of 16 heads in eight
groups the first and the last have one head each, and a sixteenth of all bytes is waited for, not an eighth. The
backward does the same from group 3 down to group 0. Of 8 query heads and 2 key/value heads on a rank:

  group           0      1      2      3
  query heads     0 1    2 3    4 5    6 7
  key head        0      0      1      1         it comes with the first group that needs it

Jacobs et al. 2023, "DeepSpeed Ulysses".

[Note: order of started messages]
The ranks of a group must start its collectives in one order. In the forward that is the order of the program. In the
backward autograd runs whatever has its gradients, and of two branches that do not depend on each other either may come
first. So branches are made to depend on each other, by tokens without elements. Of two groups of heads, with `start`
and `wait` for what comes in (i) and what goes out (o):

  start i0 i1 ── wait i0 ── attention 0 ── start o0 ┬─────────────────────────────────── wait o0 o1
              │                                     └ token ┐                                 │
              └───────────────────────────────────────── wait i1 ── attention 1 ── start o1 ──┘

The backward of a wait starts the message back, and the backward of a start waits for it. Read from right to left: the
gradients of o1 and o0 are started, that of o1 is waited for, attention 1 is differentiated, its message i1 is started.
The token has `start o0` wait for that. Only then is the gradient of o0 waited for, and so on, down to `start i0 i1`,
which waits for both messages back.

[Note: shared queries]
Of sp = u * g ranks u share the heads, and the g ranks that compute the same ones share the tokens whose queries they
compute. A rank needs the keys and values of all tokens that these see, so keys and values go to g ranks, and their
gradients are added up. A token sees those before it, so later queries cost more: each rank gets an interval of the row
with an equal part of the work. Two heads over sp = 4, a row with one sequence of 12 tokens:

  rank          0          1          2          3
  outside       0..3       3..6       6..9       9..12     tokens
  computes      0..8 of a  0..8 of b  8..12 of a 8..12 of b
  with keys     0..8       0..8       0..12      0..12

The queries 0..8 see 36 keys, and 8..12 see 42. The ranks' own tokens are as ever. Each u neighbours exchange heads as
Ulysses does, for the 6 tokens that they hold together. Then each rank sends the ranks with the same heads what they
need of these: to each of them one message that lies together. So it is on the way back.

[Note: two hops]
Where neighbours are the ranks of a node, messages of the second hop (x) are slow, and of the first (i) quick. Group by
group the second hop starts when the first has come, one group ahead of attention; what goes out takes both back (o, h),
one group behind it:

  messages    i0 i1 x0 i2 x1     o0 x2      o1 h0      o2 h1 h2
  computed            |---0---|  |---1---|  |---2---|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.pipe.head_sharing import RowPart, head_parts, row_parts
from ds_hydra.pipe.rows import ALL, Pack, Reach, cut_heads


class AllToAll:
    """One all-to-all of a flat tensor: `send[i]` elements go to rank i, `receive[i]` come from it; and the way back."""

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None):
        self._send, self._receive, self._group = list(send), list(receive), group
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None  # with the memory that must live until its end

    def start(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Begin to send `x`; what is returned may be read after `wait`. `back` takes gradients where they belong."""
        # Every element went to exactly one place, so its gradient goes back the same way: the sizes change roles.
        send, receive = (self._receive, self._send) if back else (self._send, self._receive)
        x = x.contiguous()
        out = x.new_empty(sum(receive))
        work = dist.all_to_all_single(out, x, receive, send, group=self._group, async_op=True)
        self._under_way = work, x, out
        return out

    def wait(self) -> Tensor:
        """What has come, there for all that is computed from now on."""
        assert self._under_way is not None, "an all-to-all is started before it is waited for"
        work, _, out = self._under_way
        work.wait()
        self._under_way = None
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Sequence[AllToAll], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.messages = messages
        started = [message.start(x) for message, x in zip(messages, xs, strict=True)]
        return *started, xs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # What `_Wait` hands on has the shape that autograd asks for; what it has sent comes in this rank's own.
        return None, *(message.wait() for message in ctx.messages)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Sequence[AllToAll], after: Tensor, *started: Tensor) -> tuple[Tensor, ...]:
        ctx.messages = messages
        for message in messages:
            message.wait()
        return tuple(x.view_as(x) for x in started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The last one first: its backward is the first that can go on.
        for message, grad, needed in reversed(list(zip(ctx.messages, grads, ctx.needs_input_grad[2:], strict=True))):
            if needed:
                message.start(grad, back=True)
        return None, None, *grads


def start(messages: Sequence[AllToAll], xs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Begin all-to-alls of flat tensors; what `wait` is to be given, and the token of what must wait for later.

    The backward waits for the gradients' messages back.
    """
    *started, token = _Start.apply(tuple(messages), *xs)
    return started, token


def wait(messages: Sequence[AllToAll], started: Sequence[Tensor], after: Tensor) -> tuple[Tensor, ...]:
    """What has come of all-to-alls that were started. The backward starts the gradients' messages back, last one first.

    `after` is the token of the `start` that came before, whose backward is then behind this one's
    [Note: order of started messages].
    """
    received: tuple[Tensor, ...] = _Wait.apply(tuple(messages), after, *started)
    return received


class HeadGroup(NamedTuple):
    """Some heads, of all tokens of a row, or of a part of it [Note: shared queries]."""

    q: Tensor  # (T, heads, d)
    k: Tensor  # (T, kv_heads, d)
    v: Tensor  # (T, kv_heads, d_v)
    first_head: int = 0  # of the query heads, among those of all sequence parallel ranks
    keys: int = 0  # number of its key/value heads among the rank's groups of them, which several groups may share
    part: RowPart | None = None  # whose queries these are, and from which token on there are keys


Part = Sequence[Tensor]
"""Some heads of each rank: queries, and keys and values or none."""


class Hop(Protocol):
    """How ranks exchange some of what attention computes with."""

    def incoming(self, part: Part) -> AllToAll:
        """The message in."""

    def packed(self, part: Part) -> Tensor:
        """What it takes, flat: what goes to one rank lies together."""

    def rows(self, flat: Tensor, part: Part) -> list[Tensor]:
        """What it brings, of own heads: (tokens, heads, d) for each tensor of the part."""

    def outgoing(self, width: int) -> AllToAll:
        """The message back, of so many numbers a token."""

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        """What it brings, of own tokens."""


@dataclass(frozen=True)
class Team:
    """Some ranks of a sequence parallel group, and the tokens of each, or of it and its neighbours."""

    pack: Pack
    ranks: range
    tokens: tuple[int, ...]

    @property
    def index(self) -> int:
        """Which of them this rank is."""
        return self.ranks.index(self.pack.sp_rank)

    def all_to_all(self, send: Sequence[int], receive: Sequence[int]) -> AllToAll:
        """A message among them, of so many elements to and from each."""
        # Nothing goes to the group's others, which have one of their own meanwhile, so no other group has to be made.
        return AllToAll(self._of_group(send), self._of_group(receive), self.pack.sp_group)

    def _of_group(self, sizes: Sequence[int]) -> list[int]:
        found = [0] * self.pack.sp
        found[self.ranks.start : self.ranks.stop : self.ranks.step] = sizes
        return found


def over_heads(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, attend: Callable[[HeadGroup], Tensor], reach: Reach = ALL
) -> Tensor:
    """All heads of some tokens, q (T_local, heads, d), k (T_local, kv_heads, d) and v, in; what `attend` makes of them,
    (T_local, heads, d_v).

    `attend` computes (T, heads, d_v) for one group of heads, in order [Note: exchange in groups]. Where ranks share the
    queries besides, these see as far as `reach` says [Note: shared queries].
    """
    sharers = head_parts(pack.sp, q.shape[1], k.shape[1], near=pack.near, sliced=pack.frugal or pack.chunk is not None)
    # 8 query heads and 2 key/value heads over sp = 4: rank 1 computes the query heads 2 and 3, which use key head 0.
    # Repeated, the key heads are 0 0 1 1, one for each rank; autograd adds the gradients of the two copies.
    if k.shape[1] < sharers:
        k, v = (x.repeat_interleave(sharers // k.shape[1], dim=1) for x in (k, v))
    heads, kv_heads = q.shape[1] // sharers, k.shape[1] // sharers
    of_groups = cut_heads(pack.head_groups, heads, kv_heads)
    groups, firsts = len(of_groups), [0, *accumulate(of_groups)]
    sharing = groups // min(groups, kv_heads)  # groups with the same keys
    queries = _cut(q, sharers, of_groups)
    of_keys = [n * sharing * kv_heads // heads for n in of_groups[::sharing]]
    keys, values = (_cut(x, sharers, of_keys) for x in (k, v))
    parts = [
        (queries[i],) if i % sharing else (queries[i], keys[i // sharing], values[i // sharing]) for i in range(groups)
    ]
    exchange, block, row_part = _exchange(pack, sharers, reach, parts)
    shared: list[Tensor] = []  # keys and values
    for i in range(groups):
        own_q, *fresh = exchange.come()
        shared = fresh or shared
        own_k, own_v = shared
        first = block * heads + firsts[i]
        exchange.leave(attend(HeadGroup(own_q, own_k, own_v, first_head=first, keys=i // sharing, part=row_part)))
    return torch.cat(exchange.back(), dim=-2).flatten(1, -2)


def _cut(x: Tensor, parts: int, of_groups: Sequence[int]) -> tuple[Tensor, ...]:
    """(T_local, heads, d) -> for each group of every rank's heads (T_local, parts, its heads, d)."""
    return x.unflatten(1, (parts, -1)).split(list(of_groups), dim=2)


def _exchange(
    pack: Pack, sharers: int, reach: Reach, parts: Sequence[Part]
) -> tuple[OneHop | TwoHops, int, RowPart | None]:
    """The messages of these parts; which of so many equal blocks of heads this rank computes, and the part of the row
    whose queries it does; None: all of it."""
    near = pack.near if sharers == pack.sp and 1 < pack.near < sharers else sharers  # ranks of the first hop
    first, block = pack.sp_rank - pack.sp_rank % near, pack.sp_rank % near
    inside = ByHeads(Team(pack, range(first, first + near), pack.tokens[first : first + near]))
    if near == pack.sp:
        return OneHop(inside, parts), block, None

    of_each = tuple(sum(pack.tokens[start : start + near]) for start in range(0, pack.sp, near))
    team = Team(pack, range(block, pack.sp, near), of_each)
    if sharers == pack.sp:  # [Note: heads over nodes]
        of_nodes = [[x.unflatten(1, (near, -1)) for x in part] for part in parts]
        return TwoHops(inside, ByHeads(team), of_nodes), block * len(of_each) + team.index, None
    far = BySharedQueries(team, pack, reach)
    if sharers == 1:
        return OneHop(far, [[x.squeeze(1) for x in part] for part in parts]), block, far.part
    return TwoHops(inside, far, parts), block, far.part


class OneHop:
    """The exchange of heads, group by group [Note: exchange in groups]."""

    def __init__(self, hop: Hop, parts: Sequence[Part]):
        self._hop, self._parts = hop, parts
        self._coming = [hop.incoming(part) for part in parts]
        self._started, self._token = start(self._coming, [hop.packed(part) for part in parts])
        self._going: list[tuple[AllToAll, Tensor, int]] = []  # with how many heads
        self._came = self._size = 0

    def come(self) -> list[Tensor]:
        """The next group's queries, and keys and values if it has its own."""
        i, self._came = self._came, self._came + 1
        (flat,) = wait([self._coming[i]], [self._started[i]], self._token)
        return self._hop.rows(flat, self._parts[i])

    def leave(self, out: Tensor) -> None:
        """Send what was made of them."""
        message, self._size = self._hop.outgoing(out.shape[1:].numel()), out.shape[2]
        (started,), self._token = start([message], [out.reshape(-1)])
        self._going.append((message, started, out.shape[1]))

    def back(self) -> list[Tensor]:
        """What has come back of all groups: own tokens, (T_local, ranks, heads, size) each."""
        messages, started, heads = zip(*self._going, strict=True)
        came = wait(messages, started, self._token)
        return [self._hop.returned(x, n, self._size) for x, n in zip(came, heads, strict=True)]


class ByHeads:
    """All tokens of own heads [Note: exchange of heads]. Parts have (T_local, ranks, heads, d), or in place of a rank's
    heads those of each of several that share them further."""

    def __init__(self, team: Team):
        self._team, self._mine = team, team.tokens[team.index]

    def incoming(self, part: Part) -> AllToAll:
        width = sum(x.shape[2:].numel() for x in part)
        tokens = self._team.tokens
        return self._team.all_to_all([self._mine * width] * len(tokens), [n * width for n in tokens])

    def packed(self, part: Part) -> Tensor:
        # The receiving rank becomes the outermost dimension.
        return torch.cat([x.transpose(0, 1).flatten(2) for x in part], dim=-1).view(-1)

    def rows(self, flat: Tensor, part: Part) -> list[Tensor]:
        # It is ordered by sending rank, and ranks hold consecutive intervals of the row: it is the row's order already.
        columns = [x.shape[2:].numel() for x in part]
        found = flat.view(sum(self._team.tokens), sum(columns)).split(columns, dim=-1)
        return [rows.unflatten(-1, x.shape[2:]) for rows, x in zip(found, part, strict=True)]

    def outgoing(self, width: int) -> AllToAll:
        tokens = self._team.tokens
        return self._team.all_to_all([n * width for n in tokens], [self._mine * width] * len(tokens))

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        return flat.view(len(self._team.tokens), self._mine, heads, size).transpose(0, 1)


class BySharedQueries:
    """What ranks with the same heads send each other [Note: shared queries]. Parts have queries (tokens of the rank and
    its neighbours, heads, d), and keys and values likewise, or none; what comes back is in the order of the tokens."""

    def __init__(self, team: Team, pack: Pack, reach: Reach):
        self._team = team
        found = row_parts(pack.lengths, pack.past, reach, len(team.tokens))
        if pack.chunk is not None:  # slices behind this one may have any of its keys
            found = tuple(part._replace(first=0, last=pack.num_tokens) for part in found)
        tokens = list(pairwise([0, *accumulate(team.tokens)]))
        self._of, self._tokens = found, tokens
        self.part, self._mine = found[team.index], tokens[team.index]

    def incoming(self, part: Part) -> AllToAll:
        send = [self._numel(part, to, self._mine) for to in self._of]
        return self._team.all_to_all(send, [self._numel(part, self.part, tokens) for tokens in self._tokens])

    def packed(self, part: Part) -> Tensor:
        pieces = (x[_rows(i, to, self._mine)].reshape(-1) for to in self._of for i, x in enumerate(part))
        return torch.cat(list(pieces))

    def rows(self, flat: Tensor, part: Part) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in part]
        sizes = [
            _size(i, self.part, tokens) * x.shape[1:].numel() for tokens in self._tokens for i, x in enumerate(part)
        ]
        for number, piece in enumerate(flat.split(sizes)):
            index = number % len(part)
            found[index].append(piece.view(-1, *part[index].shape[1:]))
        return [torch.cat(pieces) for pieces in found]

    def outgoing(self, width: int) -> AllToAll:
        send = [width * _size(0, self.part, tokens) for tokens in self._tokens]
        return self._team.all_to_all(send, [width * _size(0, to, self._mine) for to in self._of])

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        return flat.view(-1, 1, heads, size)

    @staticmethod
    def _numel(part: Part, to: RowPart, tokens: tuple[int, int]) -> int:
        return sum(_size(i, to, tokens) * x.shape[1:].numel() for i, x in enumerate(part))


def _rows(index: int, to: RowPart, tokens: tuple[int, int]) -> slice:
    """Which of some tokens' queries, the first tensor of a part, or keys and values a rank is sent."""
    return to.overlap(tokens, keys=index > 0)


def _size(index: int, to: RowPart, tokens: tuple[int, int]) -> int:
    rows = _rows(index, to, tokens)
    return int(rows.stop - rows.start)


class TwoHops:
    """The exchange of heads among neighbours and then of queries, keys and values [Note: two hops]."""

    def __init__(self, near: ByHeads, far: Hop, parts: Sequence[Part]):
        self._near, self._far = near, far
        self._left = list(parts)
        self._coming: list[tuple[AllToAll, Tensor, Part]] = []  # on the first hop
        self._ahead: list[tuple[AllToAll, Tensor, Part]] = []  # on the second hop
        self._behind: list[tuple[AllToAll, Tensor, int]] = []  # on the first hop back, with how many heads
        self._going: list[tuple[AllToAll, Tensor, torch.Size]] = []  # on the second, with the shape that a token has
        self._size = 0
        self._start([], min(2, len(parts)))
        self._hop()

    def _start(self, far: Sequence[tuple[AllToAll, Tensor, Part]], near: int) -> None:
        """Begin messages of the second hop, given with what they take, and then some more of the first."""
        begun, self._left = self._left[:near], self._left[near:]
        messages = [*far, *((self._near.incoming(part), self._near.packed(part), part) for part in begun)]
        started, self._token = start([one for one, _, _ in messages], [x for _, x, _ in messages])
        under_way = [(one, x, part) for (one, _, part), x in zip(messages, started, strict=True)]
        self._ahead += under_way[: len(far)]
        self._coming += under_way[len(far) :]

    def _hop(self) -> None:
        """Send the next group of heads on, if there is one."""
        if self._coming:
            message, started, part = self._coming.pop(0)
            (flat,) = wait([message], [started], self._token)
            rows = self._near.rows(flat, part)
            self._start([(self._far.incoming(rows), self._far.packed(rows), rows)], 1)

    def come(self) -> list[Tensor]:
        """The next group's queries, and keys and values if it has its own."""
        self._hop()
        message, started, rows = self._ahead.pop(0)
        (flat,) = wait([message], [started], self._token)
        return self._far.rows(flat, rows)

    def leave(self, out: Tensor) -> None:
        """Send what was made of them."""
        message, self._size = self._far.outgoing(out.shape[1:].numel()), out.shape[2]
        (started,), self._token = start([message], [out.reshape(-1)])
        self._behind.append((message, started, out.shape[1]))
        if len(self._behind) > 1:
            self._hop_back()

    def _hop_back(self) -> None:
        message, started, heads = self._behind.pop(0)
        (flat,) = wait([message], [started], self._token)
        rows = self._far.returned(flat, heads, self._size)
        message, shape = self._near.outgoing(rows.shape[1:].numel()), rows.shape[1:]
        (started,), self._token = start([message], [rows.reshape(-1)])
        self._going.append((message, started, shape))

    def back(self) -> list[Tensor]:
        """What has come back of all groups: own tokens, (T_local, neighbours, their blocks, heads, size) each."""
        self._hop_back()
        messages, started, shapes = zip(*self._going, strict=True)
        came = wait(messages, started, self._token)
        return [
            self._near.returned(x, blocks * heads, size).unflatten(2, (blocks, heads))
            for x, (blocks, heads, size) in zip(came, shapes, strict=True)
        ]
