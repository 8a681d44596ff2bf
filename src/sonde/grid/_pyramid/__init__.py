"""Feature pyramids: levels and samples in them, which ``ms_deform_attn`` and ``deformable_aggregation`` share."""
