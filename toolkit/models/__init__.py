"""One file per architecture, the registry, the weight loader, and the hub."""
