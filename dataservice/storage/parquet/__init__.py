"""Parquet files whose rows are records with the bytes of their images beside them."""

from dataservice.storage.parquet.reading import read_image, read_row
from dataservice.storage.parquet.table import ParquetTable

__all__ = ["ParquetTable", "read_image", "read_row"]
