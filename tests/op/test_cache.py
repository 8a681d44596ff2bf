"""Caches of prepared calls share one bound; the least recently used entry is dropped first."""

import threading

import pytest
import torch

import sonde
from sonde.op import cache
from sonde.op.cache import CallCache


@pytest.fixture
def bound(monkeypatch) -> int:
    cache.forget_calls()
    monkeypatch.setattr(cache, "MAX_ENTRIES", 64)
    yield 64
    cache.forget_calls()


def entries() -> int:
    return sum(map(len, cache._caches))


def test_all_caches_share_one_bound(bound):
    one, other = CallCache(), CallCache()
    for i in range(1000):
        (one if i % 2 else other).put(i, i)
        assert entries() <= bound
    assert one.get(999) == 999
    assert other.get(998) == 998


def test_what_is_used_stays(bound):
    calls = CallCache()
    calls.put("often", 1)
    for i in range(1000):
        assert calls.get("often") == 1
        calls.put(i, i)
    assert calls.get(0) is None


def test_shapes_that_always_change(bound):
    """With ever-changing shapes, forward and backward, the number of entries stays bounded; a dropped call is prepared again."""
    first = torch.rand(1, 3, 4, 4)
    places = torch.rand(1, 2, 2, 2)
    want = sonde.grid_sample(first, places)
    for n in range(1, 120):
        images = torch.rand(1, 3, 4, 4, requires_grad=True)
        sonde.grid_sample(images, torch.rand(1, n, 2, 2)).sum().backward()
        sonde.sample_sum(images, torch.rand(1, n, 2, 2), torch.rand(1, 1, n, 2)).sum().backward()
        sonde.knn_aggregate(torch.rand(n, 2, requires_grad=True), torch.rand(5, 2), torch.rand(5, 3)).sum().backward()
        sonde.ms_deform_attn(torch.rand(1, n, 1, 2), ((n, 1),), (0,), torch.rand(1, 2, 1, 1, 1, 2), torch.rand(1, 2, 1, 1, 1))
        assert entries() <= bound
    assert torch.equal(sonde.grid_sample(first, places), want)


def test_threads_that_fill_and_empty_one_cache(bound):
    calls, problems = CallCache(), []

    def work(start: int) -> None:
        try:
            for i in range(start, start + 2000):
                calls.put(i % 150, i % 150)
                found = calls.get((i * 7) % 150)
                assert found in (None, (i * 7) % 150)
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(i * 13,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems
    assert entries() <= bound


def test_entries_are_not_counted_at_each_call(bound, monkeypatch):
    """Entries are counted only once the bound may be exceeded; storing an existing key again does not count as a new entry."""
    walks, walk = [], cache._drop_oldest
    monkeypatch.setattr(cache, "_drop_oldest", lambda: walks.append(1) or walk())
    calls = CallCache()
    for _ in range(10):
        for i in range(bound):
            calls.put(i, i)
    assert not walks
    calls.put(bound, bound)
    assert len(walks) == 1
    assert entries() < bound


def test_caches_that_are_gone_take_no_room(bound):
    for _ in range(10):
        gone = CallCache()
        for i in range(bound - 4):
            gone.put(i, i)
        del gone
    calls = CallCache()
    for i in range(bound):
        calls.put(i, i)
    assert len(calls) == bound
