"""One file per `model_type` of config.json: its config, its architectures and their description.

`models.config.registry` finds them by name. They import no torch."""
