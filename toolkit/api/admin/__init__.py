"""Routes for operators: health, metrics, live requests, settings."""
