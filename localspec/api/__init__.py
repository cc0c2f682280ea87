"""The interfaces of OpenAI and Anthropic, over the queue of turns."""
