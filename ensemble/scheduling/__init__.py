"""Which worker starts where, which chunk it gets, and what becomes of its faults."""
