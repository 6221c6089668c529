"""Trainers to copy from."""
