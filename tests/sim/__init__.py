"""The virtual GPU."""
