"""`python -m nano_oasis.bench`: throughput, serve, kernels, step. Floors stand beside the figures."""
