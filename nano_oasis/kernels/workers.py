"""The threads of the compiled CPU kernels.

Owns: the thread pool. Must not know: what it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="kernel")


def run_shares(shares: int, work: Callable[[int], None]) -> None:
    """work(0) .. work(shares - 1), the first on this thread; returns when all are done.

    Plain threads: a second OpenMP pool would spin against torch's.
    """
    futures = [_pool(torch.get_num_threads()).submit(work, i) for i in range(1, shares)]
    work(0)
    for future in futures:
        future.result()
