"""Record files that are compressed as a whole: gzip, zstandard, zip."""
