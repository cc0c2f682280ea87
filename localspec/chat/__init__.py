"""Conversations: the chat format, the turn, and the backend of this process."""
