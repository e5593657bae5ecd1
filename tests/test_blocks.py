"""memory/blocks.py: counts, prefix reuse, eviction order, verification on hit (B035, B037, B039)."""

import random

import pytest

from nano_oasis.memory import blocks
from nano_oasis.memory.blocks import BlockManager, OutOfBlocks


def fill(manager: BlockManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    hit = manager.lookup(tokens, salt)
    table = hit + manager.allocate(manager.blocks_for(len(tokens)) - len(hit))
    manager.publish(tokens, table, len(hit), salt)
    return table


def test_allocate_is_all_or_nothing():
    m = BlockManager(4, 2)
    a = m.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 free of 4"):
        m.allocate(2)
    assert m.num_free == 1
    m.release(a)
    assert m.num_free == 4
    m.check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
def test_B035_last_token_is_always_left_to_compute(length):
    m = BlockManager(8, 4)
    tokens = list(range(length))
    m.release(fill(m, tokens))
    hit = m.lookup(tokens)
    assert len(hit) * 4 < length
    assert len(hit) == (length - 1) // 4
    m.release(hit)
    m.check()


def test_shared_prefix_is_shared_and_counted():
    m = BlockManager(10, 2)
    a = fill(m, [1, 2, 3, 4, 5])
    b = fill(m, [1, 2, 3, 4, 6])
    assert a[:2] == b[:2] and a[2] != b[2]
    m.check([a, b])
    m.release(a)
    m.check([b])
    m.release(b)
    m.check()
    assert m.num_free == 10 and m.num_cached == 2


def test_eviction_takes_the_oldest_and_the_tail_of_a_prefix_first():
    m = BlockManager(4, 1)
    m.release(fill(m, [1, 2, 3]))  # blocks for 1, 2 and 3 cached, 3 first to go
    m.release(m.allocate(2))  # one free, one evicted
    hit = m.lookup([1, 2, 3, 9])
    assert len(hit) == 2
    m.release(hit)
    m.check()


@pytest.mark.parametrize("step", [256, 65536, 2**32])
def test_B037_full_ids_are_compared(step):
    m = BlockManager(8, 2)
    m.release(fill(m, [1, 2, 3]))
    assert m.lookup([1 + step, 2 + step, 3]) == []


def test_B037_constant_hash_costs_hits_not_correctness(monkeypatch):
    monkeypatch.setattr(blocks, "hash_block", lambda *a: b"same")
    m = BlockManager(16, 2)
    first = fill(m, [7, 7, 7, 7, 1])
    assert m.lookup([7, 7, 7, 7, 7, 7, 1])[1:] == []  # repeats of one block are not its children
    assert m.lookup([8, 8, 1]) == []
    assert fill(m, [8, 8, 7, 7, 1])[:2] != first[:2]


def test_B037_salt_separates():
    m = BlockManager(8, 2)
    a = fill(m, [1, 2, 3], b"alice")
    assert m.lookup([1, 2, 3], b"bob") == []
    assert m.lookup([1, 2, 3], b"alice") == a[:1]


def test_parent_decides_a_hit():
    m = BlockManager(8, 2)
    fill(m, [1, 2, 5, 6, 0])
    fill(m, [3, 4, 9, 9, 0])
    assert len(m.lookup([3, 4, 5, 6, 0])) == 1


def test_twin_computed_at_the_same_time_stays_private_and_its_children_chain_on():
    m = BlockManager(8, 2)
    a, b = m.allocate(2), m.allocate(3)
    m.publish([1, 2, 3, 4], a, 0)
    assert m.publish([1, 2, 3, 4], b, 0) == 2  # already published by a
    assert m.publish([1, 2, 3, 4, 5, 6], b, 2) == 3
    m.release(a)
    m.release(b)
    m.check()
    assert m.lookup([1, 2, 3, 4, 5, 6, 7]) == [*a, b[2]]


def test_switched_off_never_hits():
    m = BlockManager(8, 2, enable_prefix_caching=False)
    m.release(fill(m, [1, 2, 3]))
    assert m.lookup([1, 2, 3]) == [] and m.num_cached == 0


def test_releasing_twice_is_caught():
    m = BlockManager(2, 2)
    a = m.allocate(1)
    m.release(a)
    with pytest.raises(AssertionError, match="released more often"):
        m.release(a)


def test_random_traffic_keeps_the_invariants():
    rng = random.Random(0)
    m = BlockManager(12, 2)
    live: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(3000):
        if live and rng.random() < 0.5:
            m.release(live.pop(rng.randrange(len(live))))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            hit = m.lookup(tokens)
            for i, block in enumerate(hit):
                assert content[block] == tuple(tokens[: 2 * i + 2])  # exactly these tokens, from the start
            try:
                table = hit + m.allocate(m.blocks_for(len(tokens)) - len(hit))
            except OutOfBlocks:
                m.release(hit)
                continue
            for i in range(len(hit), len(tokens) // 2):
                content[table[i]] = tuple(tokens[: 2 * i + 2])
            m.publish(tokens, table, len(hit))
            live.append(table)
        m.check(live)
    for table in live:
        m.release(table)
    m.check()
    assert m.num_free == 12
