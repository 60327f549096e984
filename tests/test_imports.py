"""Imports without garbage collection."""

from __future__ import annotations

import gc

import pytest

from toolkit.imports import without_collection


def test_imports_are_exempt_and_later_garbage_is_collected() -> None:
    made = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_garbage_is_collected_after_a_failed_import() -> None:
    with pytest.raises(ImportError, match="no such thing"), without_collection():
        raise ImportError("no such thing")
    assert gc.isenabled()
