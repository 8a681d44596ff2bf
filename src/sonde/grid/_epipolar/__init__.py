"""The epipolar form, which ``sample_sum`` and ``sample_dot`` share."""
