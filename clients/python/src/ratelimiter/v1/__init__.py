"""Messages and stubs of `ratelimiter.v1`, made by `make proto`; do not edit."""
