from .api import weighted_sum

__all__ = ["weighted_sum"]
