"""The dashboard: a server's Prometheus metrics, read again and again, as one screen."""
