"""Products of up to 64 rows, and of more with quantized weights and adapters."""
