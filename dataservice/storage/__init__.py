"""The data that people already have: records, archives, index, staged copies, journal."""
