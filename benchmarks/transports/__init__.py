"""Ways to bring a block from one process to another: ours, and those it is compared with."""
