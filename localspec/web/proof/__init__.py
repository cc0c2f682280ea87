"""That drafting changed nothing: token view, race, replay, report."""
