"""What `kernels.bench` is made of: cases, checks, peers, timing, report."""
