"""Text and pictures to tokens and patches, and both to the arrays of a pack."""
