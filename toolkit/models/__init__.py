"""Descriptions of models, one file per architecture; models built from them; the hub."""
