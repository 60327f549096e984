"""GPU kernels in Triton.

With `TRITON_INTERPRET=1` set before the import they run on a CPU, slowly.

Kernels are few and fused: residual sum and norm; head norms, rotation and cache write, for decode
steps of many requests together with attention; gate and activation; products of up to 64 rows with
bias and activation and, in bfloat16, the RMS norm between two of them; sampling in two kernels. A
layer of Llama takes five kernels in decode steps of 17 to 64 requests (8 KV heads, H200)."""
