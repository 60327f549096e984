"""The machine: cores, control groups, devices, memory, ports and child processes."""
