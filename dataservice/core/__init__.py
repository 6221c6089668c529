"""Decisions as pure functions: order, packing, balance, plan. No I/O, clock or randomness."""
