"""The Chat tab: the list of conversations, their messages, the settings, one turn at a time."""
