"""What serving and RL cost, computed: FLOPs, bytes, GPU-hours, dollars. Pure, no torch."""
