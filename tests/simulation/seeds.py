"""Runs many seeds in chunks, sequentially or in all processes."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain

import pytest


def chunks(seeds, chunk):
    """Return the first seeds of the chunks; the first chunk is a slice."""
    first, *others = range(0, seeds, chunk)
    return [pytest.param(first, marks=pytest.mark.slice), *others]


def found(seeds, problems_of, **parts):
    """Return {seed: violated invariants}; ``problems_of`` runs one seed."""
    for seed in seeds:
        if problems := problems_of(seed, **parts):
            yield seed, problems


def found_in_processes(firsts, problems_of):
    """Return the violated invariants in the consecutive chunks with these first seeds."""
    with ProcessPoolExecutor() as pool:
        in_chunks = pool.map(partial(_found_in_chunk, problems_of, firsts.step), firsts)
        return dict(chain.from_iterable(in_chunks))


def _found_in_chunk(problems_of, chunk, first):
    return list(found(range(first, first + chunk), problems_of))
