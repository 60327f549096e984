"""The machine: cores, control groups, devices, memory, and the processes that depend on each other."""
