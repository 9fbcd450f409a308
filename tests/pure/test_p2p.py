"""Edges between stages: whatever tp and sp the two sides have, every receiver gets every row it holds, once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.pipe.p2p import edge
from ds_hydra.pipe.placement import Stage
from ds_hydra.pipe.rows import split_tokens

DEGREES = st.integers(1, 5)


def first_rows(num_tokens: int, sp: int) -> list[int]:
    return [sum(split_tokens(num_tokens, sp)[:rank]) for rank in range(sp)]


@given(DEGREES, DEGREES, DEGREES, DEGREES, st.integers(1, 60), st.booleans())
def test_every_row_arrives_once(
    src_tp: int, src_sp: int, dst_tp: int, dst_sp: int, num_tokens: int, backwards: bool
) -> None:
    width = src_tp * src_sp
    src = Stage(tuple(range(width)), 0, 1, src_tp, src_sp)
    dst = Stage(tuple(range(width, width + dst_tp * dst_sp)), 1, 2, dst_tp, dst_sp)
    if backwards:
        src, dst = dst, src
    sends, receives = edge(src, dst, num_tokens)
    src_first, dst_first = first_rows(num_tokens, src.sp), first_rows(num_tokens, dst.sp)
    sent: Counter[tuple[int, int, int, int]] = Counter()
    for sender, rows in sends.items():
        base = src_first[src.coordinates(sender)[1]]
        local = split_tokens(num_tokens, src.sp)[src.coordinates(sender)[1]]
        for peer, start, stop in rows:
            assert 0 <= start < stop <= local
            sent[sender, peer, base + start, base + stop] += 1
    arrived: Counter[tuple[int, int, int, int]] = Counter()
    for receiver, rows in receives.items():
        sp_rank = dst.coordinates(receiver)[1]
        filled: list[int] = []
        for peer, start, stop in rows:
            filled += range(start, stop)
            arrived[peer, receiver, dst_first[sp_rank] + start, dst_first[sp_rank] + stop] += 1
        assert filled == list(range(split_tokens(num_tokens, dst.sp)[sp_rank]))
    assert sent == arrived
    assert set(sent.values()) <= {1}


@given(DEGREES, DEGREES, st.integers(1, 60))
def test_equal_stages_exchange_with_their_twins_only(tp: int, sp: int, num_tokens: int) -> None:
    src = Stage(tuple(range(tp * sp)), 0, 1, tp, sp)
    dst = Stage(tuple(range(100, 100 + tp * sp)), 1, 2, tp, sp)
    sends, _ = edge(src, dst, num_tokens)
    for sender, rows in sends.items():
        held = split_tokens(num_tokens, sp)[src.coordinates(sender)[1]]
        assert rows == ([(sender + 100, 0, held)] if held else [])


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 60))
def test_tensor_parallel_senders_share_the_work(src_tp: int, dst_tp: int, num_tokens: int) -> None:
    src = Stage(tuple(range(src_tp)), 0, 1, src_tp)
    dst = Stage(tuple(range(10, 10 + dst_tp)), 1, 2, dst_tp)
    loads = [sum(stop - start for _, start, stop in rows) for rows in edge(src, dst, num_tokens)[0].values()]
    assert sum(loads) == dst_tp * num_tokens
    if src_tp >= dst_tp:  # each sender has one receiver at most, whose rows are cut among its senders
        assert max(loads) == -(-num_tokens // (src_tp // dst_tp))
    else:
        assert max(loads) <= -(-dst_tp // src_tp) * num_tokens


@given(DEGREES, DEGREES, DEGREES, DEGREES, st.integers(1, 60))
def test_ranks_that_share_tokens_send_each_row_once(
    src_tp: int, src_sp: int, dst_tp: int, dst_sp: int, num_tokens: int
) -> None:
    src = Stage(tuple(range(src_tp * src_sp)), 0, 1, src_tp, src_sp)
    dst = Stage(tuple(range(100, 100 + dst_tp * dst_sp)), 1, 2, dst_tp, dst_sp)
    sends, receives = edge(src, dst, num_tokens, token_sharding=True)
    firsts = [first_rows(num_tokens, len(stage.ranks)) for stage in (src, dst)]
    sent = Counter(
        (rank, rows.peer, firsts[0][index] + row)
        for index, rank in enumerate(src.ranks)
        for rows in sends[rank]
        for row in range(rows.start, rows.stop)
    )
    arrived = Counter(
        (rows.peer, rank, firsts[1][index] + row)
        for index, rank in enumerate(dst.ranks)
        for rows in receives[rank]
        for row in range(rows.start, rows.stop)
    )
    assert sent == arrived
    assert sorted(row for _, _, row in sent.elements()) == list(range(num_tokens))
