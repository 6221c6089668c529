"""The running service: coordinator, stagers and workers, and the one place that knows Ray."""
