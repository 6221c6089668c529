"""What is wrong with data, said before anybody trains on it; the same rules as in a served run.

Invariants: nothing is written; besides what is linted, only the image roots of its records are
opened.
"""
