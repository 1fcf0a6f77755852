"""The store's bookkeeping of blocks: leases, reservations, eviction, events. Pure, no I/O."""
