"""Other engines on the same weights as further arms of `bench`: transformers, llama.cpp, vLLM."""
