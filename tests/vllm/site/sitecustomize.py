"""Python runs this first in the ranks' processes of ``vllm serve``: they do not spin with yields.

A rank of vLLM 0.32 spins with ``sched_yield`` while it waits for the next step. On two cores and
Linux 6.18 such loops kept all other processes, the store among them, from running for up to 20
seconds. Without yields none of 180 runs had a lookup that took more than 50 ms.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0)
