"""The JSON API, the dashboard, and the health and metrics routes."""
