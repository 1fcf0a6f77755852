"""Python runs this first in every process of ``vllm serve``: its ranks do not spin with yields.

A rank spins with ``sched_yield`` while it waits for the next step. On two cores and Linux 6.18
such loops kept other processes, the store among them, from running for up to 20 seconds.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0)
