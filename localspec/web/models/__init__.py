"""The Models tab: what fits here, what is on disk, what is loaded."""
