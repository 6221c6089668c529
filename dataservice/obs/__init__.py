"""What people and monitoring see of a running service: metrics, logs, the status page."""
