"""LoRA adapters (Hu et al., arXiv:2106.09685): several in one batch, next to the base model."""
