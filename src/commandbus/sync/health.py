"""How a worker is: `worker.health_status`."""

from commandbus.worker.health import HealthState, HealthStatus

__all__ = ["HealthState", "HealthStatus"]
