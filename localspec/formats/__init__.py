"""What model files are: their headers and settings, read without torch and without weights."""
