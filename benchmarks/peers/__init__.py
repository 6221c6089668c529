"""What benchmarks/peers.py is made of: the corpus, the work, one module a loader, and the runs."""
