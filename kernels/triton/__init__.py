"""GPU kernels in Triton. With `TRITON_INTERPRET=1` set before the import they run, slowly, on a CPU."""
