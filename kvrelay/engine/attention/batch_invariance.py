"""The sizes in which SDPA computes a row to the same bits, whatever is computed beside it.

What has to be computed again, after a preemption or on another worker, is cut into chunks otherwise
than the first time; so a row must not be rounded by how many rows or hidden keys are beside it.
Measured on the CPU with MKL (AVX2 and AVX-512, heads of 16 to 256, one and two threads): a product
of fewer than four rows is added up in another order than a larger one, and so is one over 193 to
383 keys. SDPA takes queries in runs of 32 or a multiple and keys in runs of 512, so it is the last
run that matters; what a mask hides adds zero.
"""

_QUERIES, _FEWEST_QUERIES = 32, 4
_KEYS, _KEYS_ALIKE, _KEYS_ALIKE_AGAIN, _VECTOR = 512, 192, 384, 16


def queries_computed(count: int) -> int:
    """How many query rows to compute for ``count`` that are wanted."""
    last = count % _QUERIES
    return count + _FEWEST_QUERIES - last if 0 < last < _FEWEST_QUERIES else count


def keys_computed(count: int) -> int:
    """How many keys to compute with for ``count`` that are seen; the others are masked."""
    whole = -(-count // _VECTOR) * _VECTOR
    last = whole % _KEYS
    return whole + _KEYS_ALIKE_AGAIN - last if _KEYS_ALIKE < last < _KEYS_ALIKE_AGAIN else whole
