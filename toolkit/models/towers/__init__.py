"""One file per `model_type` of config.json with a tower: its config and its description.

`models.config.towers` finds them by name. They import no torch."""
