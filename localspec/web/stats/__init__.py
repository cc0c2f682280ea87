"""The Stats tab: figures of the log, their plots and their filters."""
