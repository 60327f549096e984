"""GGUF, llama.cpp's format of one file with weights, configuration and tokenizer: everything but
the weights' values. Imports no torch."""
