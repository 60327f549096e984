"""`tk verify`: compares the ways in which a model can be computed, on this machine.

Models are loaded one after the other. Each comparison differs from another one in one thing alone,
so that the one that fails names the cause."""
