"""Tests of the feature cache: eviction order, and cached errors."""

from dataclasses import dataclass

import pytest

from dualrc.errors import ImageError
from dualrc.matcher.cache import LruCache


@dataclass
class Kept:
    bytes: int


def filled(cache: LruCache, names: str, size: int = 10) -> list[str]:
    """Return the names that were not cached."""
    made = []
    for name in names:
        cache.get(name, lambda name=name: made.append(name) or Kept(size))
    return made


def test_the_least_recently_used_goes_first():
    cache = LruCache(30)
    assert filled(cache, "abcab") == ["a", "b", "c"]
    assert filled(cache, "d") == ["d"] and "c" not in cache and len(cache) == 3
    assert filled(cache, "abdc") == ["c"]


def test_some_stay_whatever_they_take():
    cache = LruCache(0)
    assert filled(cache, "abab") == ["a", "b"] and len(cache) == 2
    alone = LruCache(0, keep=1)
    assert filled(alone, "aba") == ["a", "b", "a"]
    assert filled(LruCache(), "abcdefgh" * 2) == list("abcdefgh")  # without a limit


def test_values_that_grow_count_as_they_are_now():
    cache = LruCache()
    filled(cache, "abc")
    cache.get("a", lambda: Kept(0)).bytes = 100
    cache.shrink(110)
    assert "b" not in cache and "c" in cache and "a" in cache
    cache.shrink(0)
    assert len(cache) == 2


def test_an_error_is_raised_again_without_another_look():
    cache, looks = LruCache(0), []

    def broken():
        looks.append(1)
        raise ImageError("a.jpg is not an image.")

    caught = []
    for _ in range(3):
        with pytest.raises(ImageError, match="is not an image") as info:
            cache.get("a", broken)
        caught.append(info.value)
        filled(cache, "bcd")
    assert len(looks) == 1 and "a" in cache and len(cache) == 2
    assert len(set(map(id, caught))) == 3  # each with its own traceback


def test_other_exceptions_are_not_kept():
    cache = LruCache()
    with pytest.raises(KeyError):
        cache.get("a", lambda: {}["a"])
    assert "a" not in cache and filled(cache, "a") == ["a"]
