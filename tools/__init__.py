"""How what ships with localspec was made and measured. Nothing in `localspec` imports this."""
