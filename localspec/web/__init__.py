"""The page: a FastAPI server with one Gradio page, guarded, on this machine only."""
